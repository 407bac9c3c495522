"""Creates or reuses the Python environment of a checkout and prints what a shell must export.

Runs on the system's Python with the standard library alone. The environment holds the pinned
requirements, not the project: it is shared by every checkout with the same pins. The project comes
in through PYTHONPATH together with a small metadata folder inside the checkout, from which SGLang
reads our entry points; so two checkouts never overwrite each other's installation.

    eval "$(PYTHONPATH=. python3 -m launch.environment)"      # what launch/env.sh does
"""

import contextlib
import fcntl
import os
import shlex
import shutil
import signal
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import NoReturn, TextIO

from launch.install import SetupError, build, check_foreign, check_python, check_space, say
from launch.pins import MARKER, Pins, State, find_state, location, read_pins, write_whole

ROOT = Path(__file__).resolve().parent.parent


def prepare(path: Path, pins: Pins) -> None:
    """Makes sure that a complete environment with these pins is at `path`.

    Raises:
        SetupError: it is not, and cannot be made.
    """
    state = find_state(path, pins.key)
    if state is State.FOREIGN:
        check_foreign(path, pins)
        return
    if state is not State.READY:
        with open_lock(path) as lock:
            wait_for(lock.fileno(), path)
            # Looked at again: who held the lock may have made it.
            if find_state(path, pins.key) is not State.READY:
                make(path, pins, lock.fileno())
    with contextlib.suppress(PermissionError):  # an environment of another user
        os.utime(path / MARKER)  # "last used" of report_others()


def open_lock(path: Path) -> TextIO:
    """Opens the lock file beside `path`; it stays there, empty."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return (path.parent / f".{path.name}.lock").open("w")
    except OSError as error:
        raise SetupError(
            f"cannot write to {path.parent}: {error.strerror}; "
            "set DFLASH_SGLANG_VENV to a folder that can be written"
        ) from error


def wait_for(lock: int, path: Path) -> None:
    """Takes the lock."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say(f"another process is preparing {path}; waiting for it")
        fcntl.flock(lock, fcntl.LOCK_EX)


def make(path: Path, pins: Pins, lock: int) -> None:
    """Removes what is left of an older environment of ours, and builds a new one."""
    check_python()
    state = find_state(path, pins.key)
    if state in (State.HALF_MADE, State.OUTDATED):
        say(f"removing the {state.value} environment {path}")
        shutil.rmtree(path)
    check_space(path)
    build(path, pins, lock)


def write_metadata(root: Path) -> Path:
    """Writes the checkout's own metadata folder, where SGLang finds our entry points.

    Returns:
        The folder to put on PYTHONPATH.
    """
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    name, version = project["name"].replace("-", "_"), project["version"]
    folder = root / "build" / "metadata" / f"{name}-{version}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    header = {"Metadata-Version": "2.1", "Name": project["name"], "Version": version}
    sections = "".join(
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in points.items())
        for group, points in project["entry-points"].items()
    )
    write_whole(folder / "METADATA", "".join(f"{key}: {text}\n" for key, text in header.items()))
    write_whole(folder / "entry_points.txt", sections)
    return folder.parent


def exports(root: Path, path: Path, environ: Mapping[str, str]) -> Iterator[str]:
    """Shell lines that put the environment and this checkout in front."""
    ours = [str(root), str(root / "kernels"), str(write_metadata(root))]
    theirs = [part for part in environ.get("PYTHONPATH", "").split(":") if part not in ["", *ours]]
    search = [str(path / "bin"), *environ.get("PATH", "").split(":")]
    yield f"export PYTHONPATH={shlex.quote(':'.join(ours + theirs))}"
    yield f"export PATH={shlex.quote(':'.join(dict.fromkeys(search)))}"
    yield f"export VIRTUAL_ENV={shlex.quote(str(path))}"


def _stop(signum: int, frame: FrameType | None) -> NoReturn:
    # As an exception, so that the running step is ended too.
    raise KeyboardInterrupt


def main() -> int:
    """Prepares the environment of this checkout; prints the shell lines."""
    signal.signal(signal.SIGTERM, _stop)
    pins = read_pins(ROOT)
    path = location(pins, os.environ)
    try:
        prepare(path, pins)
    except SetupError as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        say("interrupted; the next start makes the environment anew")
        return 130
    print(*exports(ROOT, path, os.environ), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
