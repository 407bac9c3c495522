"""Starting and stopping a server process, with small programs in the place of SGLang."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.serving import Server, ServerError, free_port

ROOT = Path(__file__).resolve().parents[3]
MODEL = Path("model")

# Answers every request; has a child; both ignore SIGTERM.
STUBBORN = """
import http.server, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def fake(program: str, log_dir: Path | None = None) -> Server:
    server = Server(MODEL, log_dir=log_dir)
    server.command = (sys.executable, "-c", program, str(server.port))
    return server


def is_alive(pid: int) -> bool:
    # A killed orphan may stay a zombie until init reaps it.
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "State:\tZ" not in status.read_text()


def child_of(server: Server) -> int:
    return int(server.log_path.read_text().split()[1])


def test_command_line() -> None:
    command = Server("m", "d", args=["--page-size", "16"], port=7).command
    assert command[1:3] == ("-m", "sglang.launch_server")
    text = " ".join(command[3:])
    assert text.startswith("--model-path m --host 127.0.0.1 --port 7 --dtype float32")
    assert "--speculative-algorithm DFLASH --speculative-draft-model-path d" in text
    assert text.endswith("--page-size 16"), "later flags override earlier ones"
    assert "--device" not in text, "the same command must serve on a GPU"
    assert "speculative" not in " ".join(Server("m").command)


def test_early_exit_is_noticed_at_once_with_the_end_of_the_log(tmp_path: Path) -> None:
    server = fake("print('PairError: block too wide'); raise SystemExit(3)", tmp_path)
    begin = time.monotonic()
    with pytest.raises(ServerError, match="status 3") as caught, server:
        pass
    assert "PairError: block too wide" in str(caught.value)
    assert str(server.log_path) in str(caught.value)
    assert time.monotonic() - begin < 60, "it waited for the start time-out"


def test_taken_port_is_noticed(tmp_path: Path) -> None:
    # SGLang stays alive when it cannot listen.
    program = "print('error while attempting to bind on address', flush=True); input()"
    server = fake(f"import time\n{program.replace('input()', 'time.sleep(600)')}", tmp_path)
    with pytest.raises(ServerError, match="is taken"), server:
        pass
    assert not server.is_running()


def test_time_out(tmp_path: Path) -> None:
    server = fake("import time; time.sleep(600)", tmp_path)
    server.start()
    try:
        with pytest.raises(ServerError, match="not ready in 1 s"):
            server.wait_ready(timeout=1.0)
    finally:
        server.stop()


def test_stop_ends_the_whole_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launch.serving.STOP_TIMEOUT_S", 1.0)
    with fake(STUBBORN, tmp_path) as server:
        assert server.healthy()
        child = child_of(server)
        assert is_alive(child)
    assert not server.is_running()
    assert not is_alive(child)
    server.stop()


def test_error_in_the_body_stops_the_server_and_keeps_its_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("launch.serving.STOP_TIMEOUT_S", 1.0)
    server = fake(STUBBORN)
    with pytest.raises(ZeroDivisionError), server:
        raise ZeroDivisionError
    assert not server.is_running()
    assert server.log_path.exists()
    server.discard_log()
    assert not server.log_path.exists()


@pytest.mark.parametrize("detached", [False, True])
def test_server_of_a_killed_process(detached: bool, tmp_path: Path) -> None:
    # SIGKILL leaves no chance to clean up: only a server meant to stay may stay.
    program = f"""
import sys, time
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from launch.serving import Server
server = Server("m", log_dir=Path({str(tmp_path)!r}), detached={detached})
server.command = (sys.executable, "-c", "import time; time.sleep(600)")
server.start()
print(server.pid, flush=True)
time.sleep(600)
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.kill()
    deadline = time.monotonic() + (1 if detached else 30)
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert is_alive(pid) is detached
    if detached:
        os.killpg(pid, signal.SIGKILL)


def test_free_ports_are_outside_the_range_of_outgoing_connections() -> None:
    # Such a port was taken by a connection while a server was still importing.
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(free_port() < max(first, 32768) for _ in range(20))
