"""The checks of `bench.gpu`, each a stream of results."""

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType

import torch
from dflash_kernels.case import OPS, Case, Trial, difference, part_of
from torch import Tensor

from bench.gpu import attention, speed
from bench.gpu.results import Result, version_of

ROOT = Path(__file__).resolve().parents[2]
PINS = ROOT / "constraints.txt"
NEEDED = ("torch", "triton")
SANITIZED = 60  # seconds for one run under compute-sanitizer
COMPILED = 180  # seconds for FlashInfer, which compiles its kernels first
BATCHES = (1, 8, 64)
VOCABULARY = 248_320


def check_versions() -> Iterator[Result]:
    """Versions older than the pinned ones fail here, by name, and not somewhere in a kernel."""
    for name in NEEDED:
        found, needed = version_of(name), pinned(name)
        new_enough = found[0].isdigit() and minor(found) >= minor(needed)
        note = "" if new_enough else f"install {name}=={needed}, as in {PINS.name}"
        yield Result("versions", f"{name} {found}", new_enough, note)


def pinned(package: str) -> str:
    """Its version in constraints.txt, with which everything here was tested."""
    pins = dict(line.split("==") for line in PINS.read_text().splitlines() if "==" in line)
    return pins[package]


def minor(version: str) -> tuple[int, ...]:
    """Its first two numbers."""
    return tuple(map(int, version.split(".")[:2]))


def check_ops(small: bool) -> Iterator[Result]:
    """Every op against its reference."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    form = "kernel" if device.type == "cuda" or interpreted else "reference"
    if form == "reference":
        small = True
        yield Result("ops", "kernels", None, "no GPU: references compared with themselves")
    for op in OPS:
        for case in part_of(op, "cases").CASES:
            if not (small and case.large):
                yield compare(op, case, part_of(op, form), device)


def compare(op: str, case: Case, subject: ModuleType, device: torch.device) -> Result:
    """One case: equal shapes and dtypes, equal integers, floats within the case's tolerance."""
    name = f"{op}: {case.name}"
    try:
        trial: Trial = case.on(device)
        with poisoned_memory():
            got = trial.run(subject)
        synchronize()
        holds = trial.holds(got)
    except Exception as problem:
        return Result("ops", name, False, repr(problem)[:300])
    error = max(map(difference, got, trial.run(part_of(op, "reference"))))
    note = "" if holds else "the result is not in the regime that the case is named after"
    return Result("ops", name, holds and error <= case.tolerance, note, {"error": error})


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """`torch.empty` gives NaN or the largest integer: what a kernel leaves out shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def synchronize() -> None:
    """Wait for the device: a fault shows with the case that caused it."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def check_graphs() -> Iterator[Result]:
    """Every public op inside a captured graph, replayed after an input changed, against eager."""
    if not torch.cuda.is_available():
        yield Result("graphs", "capture and replay", None, "no GPU")
        return
    for call in speed.serving_calls(torch.device("cuda"), 4, 5000):
        graph, got = capture(call.run)
        call.given.copy_(call.given.flip(0))
        for tensor in got:
            tensor.zero_()
        graph.replay()
        replayed = [tensor.clone() for tensor in got]
        synchronize()
        pairs = zip(replayed, call.run(), strict=True)
        yield Result(
            "graphs", call.op, all(difference(a.float(), b.float()) == 0 for a, b in pairs)
        )


def capture(
    run: Callable[[], Sequence[Tensor]],
) -> tuple[torch.cuda.CUDAGraph, Sequence[Tensor]]:
    """A graph of one call, and the tensors that its replays write."""
    got: list[Sequence[Tensor]] = []
    graph = speed.captured([lambda: got.append(run())])
    return graph, got[-1]


def check_speed() -> Iterator[Result]:
    """Time per launch, and bandwidth against a measured copy."""
    if not torch.cuda.is_available():
        names = speed.smallest(torch.device("cpu"))
        yield Result("speed", f"{len(names)} calls", None, "no GPU: run once, not timed")
        return
    copy = speed.copy_bandwidth()
    yield Result("speed", "copy", True, numbers={"gb_per_s": round(copy, 1)})
    for bs in BATCHES:
        for call in speed.serving_calls(torch.device("cuda"), bs, VOCABULARY):
            timed = speed.time_call(call, bs, copy)._asdict()
            name = f"{timed.pop('op')}, batch {timed.pop('batch')}"
            yield Result("speed", name, True, numbers=timed)


def check_sanitizer() -> Iterator[Result]:
    """Bounds and races of the small cases, in processes of their own."""
    cuda = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    program = shutil.which("compute-sanitizer") or shutil.which(str(cuda / "bin/compute-sanitizer"))
    for tool in ("memcheck", "racecheck"):
        if program is None or not torch.cuda.is_available():
            missing = "no compute-sanitizer" if torch.cuda.is_available() else "no GPU"
            yield Result("sanitizer", tool, None, missing)
            continue
        command = [program, "--tool", tool, "--error-exitcode", "9"]
        command += [sys.executable, "-P", "-m", "bench.gpu", "--only", "ops", "--small"]
        # Without torch's cache a tensor ends where its memory ends.
        environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        yield in_process("sanitizer", tool, command, SANITIZED, environment)


def check_attention_apart() -> Iterator[Result]:
    """FlashInfer in a process of its own, because it may compile for minutes."""
    if not torch.cuda.is_available() or importlib.util.find_spec("flashinfer") is None:
        missing = "no FlashInfer" if torch.cuda.is_available() else "no GPU"
        yield Result("attention", "FlashInfer", None, missing)
        return
    command = [sys.executable, "-P", "-m", "bench.gpu", "--only", "attention-here"]
    yield in_process("attention", "FlashInfer", command, COMPILED, dict(os.environ))


def in_process(
    check: str, case: str, command: Sequence[str], seconds: float, environment: dict[str, str]
) -> Result:
    """Run a command; one that does not end in time is reported as skipped."""
    begin = time.perf_counter()
    # In a session of its own, to be ended with everything that it started, such as compilers.
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return Result(check, case, None, f"not done in {seconds:.0f} s")
    numbers = {"seconds": round(time.perf_counter() - begin, 1), "ok": output.count("\nok ")}
    note = output[-2000:] if process.returncode else ""
    return Result(check, case, process.returncode == 0, note, numbers)


def check_attention_here() -> Iterator[Result]:
    """Blocks through FlashInfer, eager and replayed, against torch."""
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    def capture(call: Callable[[], Tensor]) -> Callable[[], Tensor]:
        got: list[Tensor] = []
        graph = speed.captured([lambda: got.append(call())])

        def replay() -> Tensor:
            graph.replay()
            return got[-1]

        return replay

    device = torch.device("cuda")
    yield from judge_attention(
        attention.compare_all(device, BatchPrefillWithPagedKVCacheWrapper, capture)
    )


def judge_attention(attended: Iterator[attention.Attended]) -> Iterator[Result]:
    """Which of them are close to torch; NaN is not."""
    for one in attended:
        passed = one.error <= attention.TOLERANCE
        yield Result("attention", one.case, passed, numbers={"error": one.error})
