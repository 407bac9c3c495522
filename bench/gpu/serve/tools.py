"""NVIDIA's tools around a server, where a flag asks for them: memcheck, and a trace of steps."""

import os
import re
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.gpu.serve.options import Options
from bench.gpu.serve.pairs import GREEDY, Pair, limits
from bench.gpu.serve.results import Results, as_file_name
from bench.gpu.serve.streams import send_all, stream
from bench.harness.servers import settings
from launch.comparison import say
from launch.serving import Server

SLOWDOWN = 10  # of a start under a tool: how much longer a server may take
WRITTEN_WITHIN = 120  # seconds, of a trace after its last step
TRACED_STEPS = 50
TRACED_TOKENS = 1024
# SGLang's own checks on the device, which memcheck cannot make.
CHECKS = {
    "SGLANG_ENABLE_ASYNC_ASSERT": "1",
    "SGLANG_VALIDATE_MAMBA_REPLAY_STATE_INDICES": "1",
}
_ERRORS = re.compile(r"ERROR SUMMARY: (\d+) error")


class Tool(NamedTuple):
    """A program and what it says of a server."""

    program: str
    options: Callable[[Path], Sequence[str]]  # of the file that it writes
    file: str
    use: Callable[[Server, Pair, Path], str]  # sends requests; returns the finding


def run_tools(pair: Pair, options: Options, results: Results) -> None:
    """Those that are asked for: memcheck of an embedded pair, a trace of any."""
    if options.sanitizer and not pair.private:
        _run(MEMCHECK, pair, "fixed", options, results)
    if options.trace:
        for width in ("fixed", "adaptive"):
            _run(TRACE, pair, width, options, results)


def _run(tool: Tool, pair: Pair, width: str, options: Options, results: Results) -> None:
    row = {"pair": pair.name, "tool": tool.program, "width": width}
    if results.has_tool(row):
        return
    program = find(tool.program)
    if program is None:
        say(f"{tool.program} is not found: put it on PATH, or set CUDA_HOME to its CUDA toolkit")
        return
    folder = options.out / "tools" / as_file_name(f"{pair.name}-{tool.program}-{width}")
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / tool.file
    server = Server(
        pair.verifier,
        pair.drafter,
        args=[*limits(pair, 1), *settings(folder / "settings.json", width=width)],
        env=CHECKS,
        log_dir=folder,
        device=pair.device,
    )
    server.command = (program, *tool.options(file), *server.command)
    say(f"{pair.name}, {width}: under {tool.program}")
    try:
        server.start()
        server.wait_ready(SLOWDOWN * options.start_timeout)
        found = tool.use(server, pair, file)
    except Exception as error:  # whatever it is, the next one runs
        found = f"the server failed under it ({str(error).splitlines()[0]}); its log: {folder}"
    finally:
        server.stop()
    results.add_tool({**row, "found": found})


def find(program: str) -> str | None:
    """The program on PATH or in the CUDA toolkit."""
    toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / program
    return shutil.which(program) or shutil.which(str(toolkit))


def _two_requests(server: Server, pair: Pair, file: Path) -> str:
    for sampling in (GREEDY, pair.sampling):
        send_all(server, pair.prompts[:2], 2, sampling, 16)
    server.stop()  # the tool sums up at the end
    text = file.read_text(errors="replace") if file.exists() else ""
    counts = [int(number) for number in _ERRORS.findall(text)]
    if not counts:
        return f"no summary in {file.name}; look at {file}"
    return f"{sum(counts)} errors" + (f"; please send {file}" if sum(counts) else "")


def _trace(server: Server, pair: Pair, file: Path) -> str:
    send_all(server, pair.prompts[:2], 1, GREEDY, 64)  # nothing compiles in the trace
    profile = {"activities": ["CUDA_PROFILER"], "num_steps": TRACED_STEPS}
    server.open("/start_profile", profile).close()
    params = {**GREEDY, "max_new_tokens": TRACED_TOKENS, "ignore_eos": True}
    stream(server, {"input_ids": list(pair.prompts[0]), "sampling_params": params})
    deadline = time.monotonic() + WRITTEN_WITHIN
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(1)
    if not file.exists():
        return f"{file.name} was not written in {WRITTEN_WITHIN} s; the log is beside it"
    return f"{TRACED_STEPS} steps in {file}; not in report.zip, because it names paths"


MEMCHECK = Tool(
    "compute-sanitizer",
    lambda file: (
        *("--tool", "memcheck", "--target-processes", "all"),
        *("--log-file", str(file)),
    ),
    "memcheck.txt",
    _two_requests,
)
TRACE = Tool(
    "nsys",
    lambda file: (
        *("profile", "--trace=cuda,nvtx", "--sample=none", "--cpuctxsw=none"),
        *("--capture-range=cudaProfilerApi", "--capture-range-end=stop"),
        *("--force-overwrite=true", f"--output={file}"),
    ),
    "steps.nsys-rep",
    _trace,
)
