"""What only a GPU can say of the kernels, in one run of less than eight minutes.

    bench/gpu_check.sh [--json FILE]
    bench/gpu_check.sh --only ops --small      # what it runs under compute-sanitizer

Needs torch 2.11, Triton 3.6 and one CUDA GPU; compute-sanitizer and FlashInfer are used where they
are. Without a GPU it runs to the end, compares the references with themselves, and says what it
skipped. Exit status 1 when a check fails.
"""

import argparse
import contextlib
import importlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from bench.gpu import attention as gpu_attention
from bench.gpu import speed as gpu_speed
from bench.gpu.cases import Case, all_cases
from bench.gpu.report import Report, Result, machine, version_of

ROOT = Path(__file__).resolve().parents[2]
NEEDED = {"torch": (2, 11), "triton": (3, 6)}
LIMIT = 400  # seconds, after which no check is begun
SANITIZED = 60  # seconds for one run under compute-sanitizer
COMPILED = 180  # seconds for FlashInfer, which compiles its kernels first
BATCHES = (1, 8, 64)
VOCABULARY = 248_320


def check_versions() -> Iterator[Result]:
    """Old enough versions fail here and not with a riddle later."""
    for name, needed in NEEDED.items():
        found = version_of(name)
        numbers = tuple(map(int, found.split(".")[:2])) if found[0].isdigit() else (0, 0)
        yield Result("versions", f"{name} {found}", numbers >= needed)


def check_ops(small: bool) -> Iterator[Result]:
    """Every op against its reference."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    form = "kernel" if device.type == "cuda" or interpreted else "reference"
    if form == "reference":
        small = True
        yield Result("ops", "kernels", None, "no GPU: references compared with themselves")
    for case in all_cases(device, small):
        yield compare(case, importlib.import_module(f"dflash_kernels.{case.op}.{form}"))


def compare(case: Case, subject: ModuleType) -> Result:
    """One case: equal shapes and dtypes, equal integers, floats within the case's tolerance."""
    try:
        with poisoned_memory():
            got = list(case.run(subject))
        synchronize()
    except Exception as problem:
        return Result("ops", f"{case.op} {case.name}", False, repr(problem)[:300])
    truth = importlib.import_module(f"dflash_kernels.{case.op}.reference")
    error = max(map(difference, got, case.run(truth)))
    passed = error <= case.tolerance
    return Result("ops", f"{case.op} {case.name}", passed, numbers={"error": error})


def difference(got: Tensor, expected: Tensor) -> float:
    """The largest difference, relative above 1; infinite where shape, dtype or integers differ."""
    if (got.shape, got.dtype) != (expected.shape, expected.dtype):
        return float("inf")
    if not got.dtype.is_floating_point:
        return 0.0 if torch.equal(got, expected) else float("inf")
    apart = (got.double() - expected.double()).abs() / expected.double().abs().clamp(min=1)
    apart = apart.masked_fill(got == expected, 0.0)  # infinities of one sign
    return float(apart.nan_to_num(nan=float("inf")).max()) if apart.numel() else 0.0


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """`torch.empty` gives NaN or the largest integer: what a kernel leaves out shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
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
    for call in gpu_speed.serving_calls(torch.device("cuda"), 4, 5000):
        got: list[Sequence[Tensor]] = []
        graph = gpu_speed.captured([lambda run=call.run, kept=got: kept.append(run())])
        call.given.copy_(call.given.flip(0))
        for tensor in got[-1]:
            tensor.zero_()
        graph.replay()
        replayed = [tensor.clone() for tensor in got[-1]]
        synchronize()
        pairs = zip(replayed, call.run(), strict=True)
        yield Result(
            "graphs", call.op, all(difference(a.float(), b.float()) == 0 for a, b in pairs)
        )


def check_speed() -> Iterator[Result]:
    """Time per launch, and bandwidth against a measured copy."""
    if not torch.cuda.is_available():
        names = gpu_speed.smallest(torch.device("cpu"))
        yield Result("speed", f"{len(names)} calls", None, "no GPU: run once, not timed")
        return
    copy = gpu_speed.copy_bandwidth()
    yield Result("speed", "copy", True, numbers={"gb_per_s": round(copy, 1)})
    for bs in BATCHES:
        for call in gpu_speed.serving_calls(torch.device("cuda"), bs, VOCABULARY):
            timed = gpu_speed.time_call(call, bs, copy)._asdict()
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
        command += [sys.executable, "-P", "-m", "bench.gpu.check", "--only", "ops", "--small"]
        # Without torch's cache a tensor ends where its memory ends.
        environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        yield in_process("sanitizer", tool, command, SANITIZED, environment)


def check_attention_apart() -> Iterator[Result]:
    """FlashInfer in a process of its own, because it may compile for minutes."""
    if not torch.cuda.is_available() or importlib.util.find_spec("flashinfer") is None:
        missing = "no FlashInfer" if torch.cuda.is_available() else "no GPU"
        yield Result("attention", "FlashInfer", None, missing)
        return
    command = [sys.executable, "-P", "-m", "bench.gpu.check", "--only", "attention-here"]
    yield in_process("attention", "FlashInfer", command, COMPILED, dict(os.environ))


def in_process(
    check: str, case: str, command: Sequence[str], seconds: float, environment: dict[str, str]
) -> Result:
    """Run a command; what it did not finish in time is no failure, but said."""
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
        said, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return Result(check, case, None, f"not done in {seconds:.0f} s")
    numbers = {"seconds": round(time.perf_counter() - begin, 1), "ok": said.count("\nok ")}
    note = said[-2000:] if process.returncode else ""
    return Result(check, case, process.returncode == 0, note, numbers)


def check_attention_here() -> Iterator[Result]:
    """Blocks through FlashInfer, eager and replayed, against torch."""
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    def capture(call: Callable[[], Tensor]) -> Callable[[], Tensor]:
        got: list[Tensor] = []
        graph = gpu_speed.captured([lambda: got.append(call())])

        def replay() -> Tensor:
            graph.replay()
            return got[-1]

        return replay

    device = torch.device("cuda")
    yield from judge_attention(
        gpu_attention.compare_all(device, BatchPrefillWithPagedKVCacheWrapper, capture)
    )


def judge_attention(attended: Iterator[gpu_attention.Attended]) -> Iterator[Result]:
    """Which of them are close to torch; NaN is not."""
    for one in attended:
        passed = one.error <= gpu_attention.TOLERANCE
        yield Result("attention", one.case, passed, numbers={"error": one.error})


# In this order: first what a wrong result would show, then what takes long.
CHECKS: Mapping[str, Callable[[bool], Iterator[Result]]] = {
    "versions": lambda _: check_versions(),
    "ops": check_ops,
    "graphs": lambda _: check_graphs(),
    "speed": lambda _: check_speed(),
    "sanitizer": lambda _: check_sanitizer(),
    "attention": lambda _: check_attention_apart(),
}
APART = {"attention-here": lambda _: check_attention_here()}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the checks."""
    options = parse_options(argv)
    report = Report(options.json)
    print("  ".join(f"{name} {value}" for name, value in machine().items()))
    chosen = {options.only: {**CHECKS, **APART}[options.only]} if options.only else CHECKS
    for name, check in chosen.items():
        if report.seconds > options.limit:
            report.add(Result(name, "all", None, f"not begun after {options.limit} s"))
            continue
        for result in to_the_end(name, check(options.small)):
            report.add(result)
    counted = [sum(r.passed is verdict for r in report.results) for verdict in (True, False, None)]
    print("{} ok, {} failed, {} skipped".format(*counted), f"in {report.seconds:.0f} s")
    return int(report.failed)


def to_the_end(name: str, results: Iterator[Result]) -> Iterator[Result]:
    """The results of a check; an exception fails it and lets the next one run."""
    try:
        yield from results
    except Exception as problem:
        yield Result(name, "stopped", False, repr(problem)[:300])


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Options of the command line."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="gpu_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument("--only", choices=[*CHECKS, *APART], help="one check")
    parser.add_argument("--small", action="store_true", help="ops: no large vocabularies")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds; default: %(default)s")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
