"""Making the environment: refusals, interruption, two at once; nothing is downloaded here."""

import fcntl
import importlib.metadata
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import NamedTuple

import pytest

from launch import environment, install
from launch.install import SetupError
from launch.pins import Pins, State, find_state, write_marker

ROOT = Path(__file__).resolve().parents[3]
KEY = "0123456789ab"


class Disk(NamedTuple):
    total: int
    used: int
    free: int


@pytest.fixture
def pins(tmp_path: Path) -> Pins:
    constraints = tmp_path / "constraints.txt"
    constraints.write_text("pytest==0\n")
    # Nothing to install: pip is run for real, and needs no network.
    return Pins((), constraints, KEY)


@pytest.fixture(autouse=True)
def no_pip_install(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Replaces the two steps of an installation, which take minutes, by what they leave behind."""
    steps: list[list[str]] = []

    def follow(command: list[str], *_: object) -> None:
        steps.append(command)
        if "venv" in command:
            (Path(command[-1]) / "bin").mkdir()
            (Path(command[-1]) / "bin" / "python").touch()

    monkeypatch.setattr(install, "follow", follow)
    return steps


def test_makes_it_once(tmp_path: Path, pins: Pins, no_pip_install: list[list[str]]) -> None:
    venv = tmp_path / "cache" / KEY
    environment.prepare(venv, pins)
    assert find_state(venv, KEY) is State.READY
    assert not (venv / "tmp").exists(), "the wheels take 4 GB"
    environment.prepare(venv, pins)
    assert [step[2] for step in no_pip_install] == ["venv", "pip"]
    assert str(pins.constraints) in no_pip_install[1]


def test_rebuilds_an_interrupted_one(
    tmp_path: Path, pins: Pins, no_pip_install: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    venv = tmp_path / KEY
    works = install.follow

    def interrupted(command: list[str], *rest: object) -> None:
        works(command, *rest)  # type: ignore[arg-type]
        if "pip" in command:
            (venv / "left over").touch()
            raise KeyboardInterrupt

    monkeypatch.setattr(install, "follow", interrupted)
    with pytest.raises(KeyboardInterrupt):
        environment.prepare(venv, pins)
    assert find_state(venv, KEY) is State.HALF_MADE

    monkeypatch.setattr(install, "follow", works)
    environment.prepare(venv, pins)
    assert find_state(venv, KEY) is State.READY
    assert not (venv / "left over").exists()


def test_rebuilds_its_own_when_pins_changed(tmp_path: Path, pins: Pins) -> None:
    venv = tmp_path / "chosen"
    environment.prepare(venv, pins)
    environment.prepare(venv, pins._replace(key="new"))
    assert find_state(venv, "new") is State.READY


def test_leaves_a_folder_of_somebody_else_alone(tmp_path: Path, pins: Pins) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(SetupError, match="left alone"):
        environment.prepare(tmp_path, pins)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_uses_a_complete_environment_of_somebody_else(pins: Pins) -> None:
    here = Path(sys.prefix)
    version = importlib.metadata.version("pytest")
    install.check_foreign(here, pins._replace(requirements=(f"pytest=={version}", "setuptools>=1")))
    with pytest.raises(SetupError, match=r"lacks: pytest==0\.1 no_such_package\."):
        install.check_foreign(
            here, pins._replace(requirements=("pytest==0.1", "no_such_package", "setuptools>=1"))
        )


def test_refuses_when_the_disk_is_too_small(
    tmp_path: Path, pins: Pins, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Disk(100, 0, 3 * 10**9))
    with pytest.raises(SetupError, match=r"needs 16 GB in .*, 3\.0 GB are free"):
        environment.prepare(tmp_path / KEY, pins)
    assert not (tmp_path / KEY).exists()


def test_refuses_without_ensurepip(
    tmp_path: Path, pins: Pins, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Debian ships it in a package of its own; `python -m venv` then fails half-way.
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if "pip" in name else name)
    with pytest.raises(SetupError, match=r"no module ensurepip.*apt install python3\.\d+-venv"):
        environment.prepare(tmp_path / KEY, pins)


def test_refuses_a_place_that_cannot_be_written(tmp_path: Path, pins: Pins) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SetupError, match="DFLASH_SGLANG_VENV"):
        environment.prepare(tmp_path / "file" / KEY, pins)


def test_second_process_waits_and_uses_what_the_first_made(
    tmp_path: Path, pins: Pins, no_pip_install: list[list[str]]
) -> None:
    venv = tmp_path / KEY
    with (tmp_path / f".{KEY}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = threading.Thread(target=environment.prepare, args=(venv, pins))
        second.start()
        second.join(0.3)
        assert second.is_alive(), "it did not wait for the lock"
        (venv / "bin").mkdir(parents=True)
        (venv / "bin" / "python").touch()
        write_marker(venv, KEY, complete=True)
    second.join(10)
    assert not second.is_alive()
    assert no_pip_install == []


def test_names_old_environments_and_keeps_them(
    tmp_path: Path, pins: Pins, capsys: pytest.CaptureFixture[str]
) -> None:
    environment.prepare(tmp_path / "old", pins._replace(key="old"))
    environment.prepare(tmp_path / KEY, pins)
    assert f"may be deleted: {tmp_path / 'old'}" in capsys.readouterr().err
    assert find_state(tmp_path / "old", "old") is State.READY


def test_checkout_brings_its_entry_points(tmp_path: Path) -> None:
    # Through PYTHONPATH alone: two checkouts share one environment without touching it.
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    lines = list(environment.exports(tmp_path, tmp_path / "venv", {"PATH": "/bin"}))
    program = (
        "import importlib.metadata as m\n"
        "for group in ('sglang.srt.plugins', 'sglang.srt.platforms'):\n"
        "    print(*[e.value for e in m.entry_points(group=group) if e.dist.name[:6] == 'dflash'])"
    )
    script = "\n".join([*lines, f'"{sys.executable}" -P -c "{program}"'])
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["dflash_sglang.plugin:register", "dflash_sglang.cpu:activate"]


def test_exports_do_not_grow(tmp_path: Path) -> None:
    # `. launch/env.sh` twice, or a script started from another one.
    shutil.copy(ROOT / "pyproject.toml", tmp_path)

    def activate(environ: dict[str, str]) -> dict[str, str]:
        lines = environment.exports(tmp_path, tmp_path / "venv", environ)
        return dict(line.removeprefix("export ").split("=", 1) for line in lines)

    once = activate({"PATH": "/usr/bin:/bin", "PYTHONPATH": "/mine"})
    assert once["PYTHONPATH"].endswith(":/mine")
    assert activate(once) == once


@pytest.mark.parametrize("script", ["launch/demo", "tests/run", ".ci/run"])
def test_scripts_stop_without_a_fitting_python(script: str, tmp_path: Path) -> None:
    for tool in ("bash", "dirname"):
        (tmp_path / tool).symlink_to(shutil.which(tool) or "")
    old = tmp_path / "python3"
    old.write_text("#!/bin/bash\nexit 1\n")  # what `sys.exit(sys.version_info < ...)` answers
    old.chmod(0o755)
    done = subprocess.run(
        [tmp_path / "bash", ROOT / script],
        env={"PATH": str(tmp_path), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert "Python 3.11 or newer is needed" in done.stderr


def test_script_stops_with_the_message_of_the_set_up(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    environ = {**os.environ, "DFLASH_SGLANG_VENV": str(tmp_path)}
    done = subprocess.run([ROOT / "launch/demo"], env=environ, capture_output=True, text=True)
    assert done.returncode == 1
    assert "left alone" in done.stderr
