"""Start and stop `python -m sglang.launch_server`.

    with Server(model=pair.verifier, drafter=pair.drafter, args=["--page-size", "16"]) as server:
        answer = server.generate("1 + 1 =", max_new_tokens=8)

The demo, the benches and the end-to-end tests share this module.
"""

import contextlib
import ctypes
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from launch import devices
from launch.client import Answer, Client, RequestError
from launch.devices import Device

__all__ = ["Answer", "Client", "RequestError", "Server", "ServerError", "free_port"]

HOST = "127.0.0.1"
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 20.0
_PORTS = range(20000, 32768)
_CANNOT_BIND = "error while attempting to bind on address"  # uvicorn


class ServerError(RuntimeError):
    """A server did not start, or died; the message ends with the last lines of its log."""


class Server(Client):
    """One SGLang server process on 127.0.0.1, in a session of its own; a context manager.

    Args:
        model: folder of the verifier.
        drafter: folder of the drafter; given, the server runs `--speculative-algorithm DFLASH`.
        args: further flags of `sglang.launch_server`, after those of the device.
        env: variables on top of this process's environment and the device's.
        port: a free one is chosen when None.
        log_dir: folder for `server.log`, kept; when None a temporary one, removed after a clean
            stop and kept after a failure.
        detached: let the server outlive this process (`demo --serve`).
        device: where it runs; by default on the CPU, accelerators hidden.
    """

    def __init__(
        self,
        model: Path | str,
        drafter: Path | str | None = None,
        *,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        port: int | None = None,
        log_dir: Path | None = None,
        detached: bool = False,
        device: Device = devices.CPU,
    ) -> None:
        self.port = free_port() if port is None else port
        super().__init__(f"http://{HOST}:{self.port}")
        speculative: tuple[str, ...] = ()
        if drafter is not None:
            speculative = (
                *("--speculative-algorithm", "DFLASH"),
                *("--speculative-draft-model-path", str(drafter)),
            )
        self.command = (
            *(sys.executable, "-m", "sglang.launch_server"),
            *("--model-path", str(model), "--host", HOST, "--port", str(self.port)),
            *device.args,
            *speculative,
            *args,
        )
        # Models are local folders: never wait for a model hub.
        self.env = {**os.environ, "HF_HUB_OFFLINE": "1", **device.env, **(env or {})}
        self.detached = detached
        self._keeps_log = log_dir is not None
        self.log_dir = log_dir
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def log_path(self) -> Path:
        """Standard output and error of the server and its children."""
        assert self.log_dir is not None, "the server was not started"
        return self.log_dir / "server.log"

    @property
    def pid(self) -> int:
        """Process id of the launcher, which is also its process group and session."""
        assert self._process is not None, "the server was not started"
        return self._process.pid

    def start(self) -> None:
        """Starts the process and returns at once."""
        if self.log_dir is None:
            self.log_dir = Path(tempfile.mkdtemp(prefix="dflash-server-"))
        self.log_dir.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                self.command,
                # Not the caller's folder: `-m` puts it first on sys.path.
                cwd=self.log_dir,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=None if self.detached else _die_with_parent,
            )

    def wait_ready(
        self, timeout: float = START_TIMEOUT_S, on_wait: Callable[[float], None] | None = None
    ) -> None:
        """Waits until the server generates; `on_wait` gets the seconds waited so far.

        Raises:
            ServerError: the process ended, or `timeout` seconds passed.
        """
        assert self._process is not None, "the server was not started"
        begin = time.monotonic()
        while not self.healthy():
            waited = time.monotonic() - begin
            if (code := self._process.poll()) is not None:
                raise ServerError(self._failure(f"the server exited with status {code}"))
            if _CANNOT_BIND in self.log_path.read_text(errors="replace"):
                # SGLang stays alive then, without ever answering.
                raise ServerError(self._failure(f"port {self.port} is taken"))
            if waited > timeout:
                raise ServerError(self._failure(f"the server was not ready in {timeout:.0f} s"))
            if on_wait is not None:
                on_wait(waited)
            time.sleep(0.5)

    def is_running(self) -> bool:
        """Whether the launcher process is alive."""
        return self._process is not None and self._process.poll() is None

    def stop(self) -> None:
        """Ends the server and every process it started; safe to call twice."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        _kill_group(self._process.pid)

    def log_tail(self, lines: int = 30) -> str:
        """The last lines of the log."""
        text = self.log_path.read_text(errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def __enter__(self) -> Self:
        self.start()
        try:
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        died = not self.is_running()
        self.stop()
        if kind in (None, KeyboardInterrupt) and not died:
            self.discard_log()

    def discard_log(self) -> None:
        """Removes the temporary log folder; does nothing to one the caller chose."""
        if self.log_dir is not None and not self._keeps_log:
            shutil.rmtree(self.log_dir, ignore_errors=True)

    def _failure(self, what: str) -> str:
        command = " ".join(self.command)
        return f"{what}\ncommand: {command}\nlog: {self.log_path}\n{self.log_tail()}"


def free_port() -> int:
    """A TCP port of the loopback interface that was free a moment ago.

    Below the range from which the kernel takes the ports of outgoing connections (32768 and up on
    Linux): one of those may be gone by the time a server has imported everything.
    """
    for port in random.sample(_PORTS, k=100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((HOST, port))
            return port
    raise ServerError(f"no free port between {_PORTS.start} and {_PORTS.stop}")


_PR_SET_PDEATHSIG = 1  # linux/prctl.h
# Loaded here: between fork and exec nothing may allocate or take the import lock.
_LIBC = ctypes.CDLL(None)


def _die_with_parent() -> None:
    """Ends the server should this process be killed without a chance to clean up.

    SGLang's own children do the same towards the launcher.
    """
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _kill_group(group: int) -> None:
    """Kills what is left of a process group and waits until it is gone."""
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while _is_alive(group):
        if time.monotonic() > deadline:
            raise ServerError(f"processes of group {group} survived {STOP_TIMEOUT_S:.0f} s")
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        time.sleep(0.1)


def _is_alive(group: int) -> bool:
    """Whether a process of the group runs; a dead one that init has yet to collect does not."""
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False
