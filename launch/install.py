"""Makes an environment with venv and pip, or says why it cannot be made."""

import contextlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from launch.pins import MARKER, Pins, write_marker

# Installed 11 GB, plus 4 GB of wheels while pip unpacks them.
NEEDED_BYTES = 16 * 10**9


class SetupError(RuntimeError):
    """The environment cannot be made; the message says what to do."""


def check_python() -> None:
    """Checks what `python -m venv` needs."""
    for module in ("venv", "ensurepip"):
        if importlib.util.find_spec(module) is None:
            package = f"python{sys.version_info.major}.{sys.version_info.minor}-venv"
            raise SetupError(
                f"{sys.executable} has no module {module}; on Debian or Ubuntu: "
                f"sudo apt install {package}"
            )


def check_space(path: Path) -> None:
    """Checks the free space of the file system that will hold `path`."""
    folder = next(parent for parent in path.parents if parent.exists())
    free = shutil.disk_usage(folder).free
    if free < NEEDED_BYTES:
        raise SetupError(
            f"the environment needs {NEEDED_BYTES / 1e9:.0f} GB in {folder}, {free / 1e9:.1f} GB "
            "are free; make room or set DFLASH_SGLANG_VENV to a folder on another disk"
        )


def check_foreign(path: Path, pins: Pins) -> None:
    """Accepts an environment that somebody else made when it holds what we pin."""
    python = path / "bin" / "python"
    wanted = [requirement.split(">=")[0] for requirement in pins.requirements]
    program = (
        "import sys, importlib.metadata as m\n"
        "name = lambda text: text.lower().replace('_', '-')\n"
        "have = {name(d.name) + v for d in m.distributions() for v in ('', '==' + d.version)}\n"
        "print(*[wanted for wanted in sys.argv[1:] if name(wanted) not in have])"
    )
    missing = "a Python"
    if python.exists():
        command = [str(python), "-c", program, *wanted]
        missing = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if missing:
        raise SetupError(
            f"{path} was not made by this script, so it is left alone, and it lacks: {missing}.\n"
            f"Install with: {python} -m pip install -c {pins.constraints} "
            f"{shlex.join(pins.requirements)}\nor set DFLASH_SGLANG_VENV to another folder"
        )
    say(f"using {path} as it is (not made by this script)")


def build(path: Path, pins: Pins, lock: int) -> None:
    """Makes the environment; a marker says that it is unfinished until the last step is done."""
    say(
        f"making the environment {path}\n"
        "  SGLang with its CUDA build of PyTorch: 4 GB to download, 11 GB on disk,\n"
        "  about 3 minutes on two idle cores with a fast network; done once for these pins"
    )
    report_others(path)
    path.mkdir(exist_ok=True)
    write_marker(path, pins.key, complete=False)
    scratch = path / "tmp"  # on the same disk: /tmp may be a small one in memory
    scratch.mkdir()
    log = path / "install.log"
    environ = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    environ |= {"TMPDIR": str(scratch), "PIP_USER": "0"}
    python = str(path / "bin" / "python")
    steps = (
        [sys.executable, "-m", "venv", str(path)],
        [
            *(python, "-m", "pip", "install", "--no-input", "--no-cache-dir"),
            *("--disable-pip-version-check", "--progress-bar", "off"),
            # The constraints are the complete environment: nothing is left to resolve.
            *("--no-deps", "-r", str(pins.constraints)),
        ],
    )
    packages = sum(1 for line in pins.constraints.read_text().splitlines() if "==" in line)
    for command in steps:
        follow(command, log, environ, lock, packages)
    shutil.rmtree(scratch)
    write_marker(path, pins.key, complete=True)
    say(f"the environment is complete: {path}")


def follow(
    command: Sequence[str], log: Path, environ: Mapping[str, str], lock: int, packages: int
) -> None:
    """Runs one step with its output in `log` and one line of progress on the terminal."""
    begin = time.monotonic()
    with log.open("ab") as out:
        # The step holds the lock too: should this script be killed, the next one waits for it.
        process = subprocess.Popen(
            command, env=environ, stdout=out, stderr=subprocess.STDOUT, pass_fds=(lock,)
        )
    interval = 1.0 if sys.stderr.isatty() else 30.0
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(interval)
                break
            show_progress(log.read_text(errors="replace"), time.monotonic() - begin, packages)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
        if sys.stderr.isatty():
            print(file=sys.stderr)
    if process.returncode != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise SetupError(f"{shlex.join(command[:4])} ... failed; log: {log}\n{tail}")


def show_progress(log: str, seconds: float, packages: int) -> None:
    """One line: how far pip has come, by what its log says."""
    found = log.count("\nCollecting ")
    step = f"downloading, {min(found, packages)} of {packages} packages"
    if "\nInstalling collected packages" in log:
        step = "unpacking (the longest step)"
    begin, end = ("\r", "") if sys.stderr.isatty() else ("", "\n")
    print(f"{begin}  {seconds:4.0f} s  {step:<40}", end=end, file=sys.stderr, flush=True)


def report_others(path: Path) -> None:
    """Names complete environments of other pins beside `path`; they are the user's to delete."""
    for marker in sorted(path.parent.glob(f"*/{MARKER}")):
        if marker.parent != path:
            used = time.strftime("%Y-%m-%d", time.localtime(marker.stat().st_mtime))
            say(
                f"an environment with other pins, last used {used}, may be deleted: {marker.parent}"
            )


def say(text: str) -> None:
    """Messages go to standard error; standard output is for the shell."""
    print(f"dflash_sglang: {text}", file=sys.stderr, flush=True)
