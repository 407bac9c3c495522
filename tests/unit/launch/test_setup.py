"""Making the environment with stand-ins for Python, pip and uv; nothing is downloaded here."""

import fcntl
import importlib.metadata
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
MARKER = "dflash_sglang.key"
NAME_OF_REQUIREMENT = re.compile(r"[\w.-]+")

# Makes an environment as `python -m venv` does; its Python is the second script.
SYSTEM_PYTHON = """#!/bin/bash
case "$*" in
    *version_info*) exit ${STUB_OLD:-0} ;;
    *ensurepip*) exit ${STUB_NO_VENV:-0} ;;
    "-m venv "*) mkdir -p "$3/bin"; cp "$STUBS/python" "$3/bin/python" ;;
esac
"""
VENV_PYTHON = """#!/bin/bash
echo "python $*" >>"$STUBS/calls"
case "$*" in
    *"--target"*) [ -z "$STUB_NO_UV" ] || exit 1
        mkdir -p "${@: -2:1}/bin"; cp "$STUBS/uv" "${@: -2:1}/bin/uv" ;;
    *"pip install"*) exit ${STUB_PIP_FAILS:-0} ;;
    *"pip config get"*) echo "$STUB_INDEX" ;;
esac
"""
UV = """#!/bin/bash
echo "uv $* index=$UV_DEFAULT_INDEX cache=$UV_CACHE_DIR" >>"$STUBS/calls"
echo "Downloaded torch"
[ ! -e "$STUBS/slow" ] || exec sleep 60
exit ${STUB_UV_FAILS:-0}
"""


class Checkout:
    """A checkout with nothing but what the set-up reads, and a PATH of stand-ins."""

    def __init__(self, root: Path) -> None:
        self.root = root / "checkout"
        self.cache = root / "cache" / "dflash_sglang"
        self.stubs = root / "stubs"
        (self.root / "launch").mkdir(parents=True)
        (self.root / "constraints.txt").write_text("torch==2.0\n")
        shutil.copy(ROOT / "pyproject.toml", self.root)
        for script in ("setup.sh", "env.sh"):
            shutil.copy(ROOT / "launch" / script, self.root / "launch")
        bin_folder = self.stubs / "bin"
        bin_folder.mkdir(parents=True)
        self.write(bin_folder / "python3", SYSTEM_PYTHON)
        self.write(self.stubs / "python", VENV_PYTHON)
        self.write(self.stubs / "uv", UV)
        tools = "awk bash cat cp df dirname flock ls mkdir mv rm sed sha256sum sleep tail touch"
        for tool in tools.split():
            (bin_folder / tool).symlink_to(shutil.which(tool) or "")
        self.environ = {
            "PATH": str(bin_folder),
            "XDG_CACHE_HOME": str(root / "cache"),
            "HOME": str(root),
            "STUBS": str(self.stubs),
        }

    @staticmethod
    def write(path: Path, text: str) -> None:
        path.write_text(text)
        path.chmod(0o755)

    def start(self, **environ: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [self.root / "launch" / "setup.sh"],
            env={**self.environ, **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, status: int = 0, **environ: str) -> tuple[Path, str]:
        """The folder that the set-up printed, and its messages."""
        process = self.start(**environ)
        out, messages = process.communicate(timeout=120)
        assert process.returncode == status, messages
        assert out.count("\n") == (status == 0)
        return Path(out.strip()), messages

    def calls(self) -> list[str]:
        """Calls of pip and uv since the last look."""
        file = self.stubs / "calls"
        lines = file.read_text().splitlines() if file.exists() else []
        file.unlink(missing_ok=True)
        return lines


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_installs_uv_and_then_the_pins(checkout: Checkout) -> None:
    venv, messages = checkout.run(STUB_INDEX="mirror")
    assert venv.parent == checkout.cache
    assert (venv / MARKER).read_text() == venv.name
    get_uv, index, install = checkout.calls()
    assert re.search(r"pip install .*--target \S+ uv==[\d.]+$", get_uv)
    assert "config get global.index-url" in index
    pins = checkout.root / "constraints.txt"
    assert f"--python {venv}/bin/python --no-deps --compile-bytecode -r {pins}" in install
    assert "index=mirror" in install, "pip's settings say where packages come from"
    assert f"cache={venv}/tmp/" in install, "on another disk files would be copied, not linked"
    assert not (venv / "tmp").exists(), "the cache doubles what is on disk"
    assert "complete" in messages


def test_uses_uv_from_path_with_its_own_cache(checkout: Checkout) -> None:
    shutil.copy(checkout.stubs / "uv", checkout.stubs / "bin" / "uv")
    checkout.run(UV_CACHE_DIR="mine")
    calls = checkout.calls()
    assert not any("--target" in call for call in calls)
    assert calls[-1].endswith("cache=mine")


@pytest.mark.parametrize("reason", ["STUB_NO_UV", "STUB_UV_FAILS"])
def test_falls_back_to_pip(checkout: Checkout, reason: str) -> None:
    venv, messages = checkout.run(0, **{reason: "1"})
    install, compile_all = checkout.calls()[-2:]
    assert f"--no-compile --no-deps -r {checkout.root}/constraints.txt" in install
    assert f"-m compileall -q -j 0 {venv}/lib" in compile_all
    assert "trying pip" in messages


def test_stops_with_the_end_of_the_log(checkout: Checkout) -> None:
    _, messages = checkout.run(status=1, STUB_UV_FAILS="1", STUB_PIP_FAILS="1")
    assert "could not be made" in messages
    assert "Downloaded torch" in messages


def test_reuses_what_is_complete(checkout: Checkout) -> None:
    venv, _ = checkout.run()
    checkout.calls()
    again, messages = checkout.run(STUB_OLD="1")
    assert (again, messages) == (venv, "")
    assert checkout.calls() == []


def test_other_pins_are_another_environment(checkout: Checkout) -> None:
    old, _ = checkout.run()
    (old / "pyvenv.cfg").touch()
    (checkout.root / "constraints.txt").write_text("torch==2.1\n")
    new, messages = checkout.run()
    assert new != old
    assert f"may be deleted: {old}" in messages
    assert (old / MARKER).read_text() == old.name


def test_remakes_its_own_in_a_chosen_folder(checkout: Checkout, tmp_path: Path) -> None:
    chosen = tmp_path / "chosen"
    assert checkout.run(DFLASH_SGLANG_VENV=str(chosen))[0] == chosen
    (chosen / "stale").touch()
    (checkout.root / "constraints.txt").write_text("torch==2.1\n")
    checkout.run(DFLASH_SGLANG_VENV=str(chosen))
    assert not (chosen / "stale").exists()


def test_remakes_one_whose_python_was_uninstalled(checkout: Checkout, tmp_path: Path) -> None:
    venv, _ = checkout.run()
    (venv / "bin" / "python").unlink()
    (venv / "bin" / "python").symlink_to(tmp_path / "uninstalled")
    checkout.run()
    assert (venv / "bin" / "python").is_file()


@pytest.fixture
def slow(checkout: Checkout) -> Iterator[subprocess.Popen[str]]:
    """A set-up in the middle of its installation."""
    (checkout.stubs / "slow").touch()
    process = checkout.start()
    deadline = time.monotonic() + 60
    while not any(call.startswith("uv ") for call in checkout.calls()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    yield process
    process.kill()
    process.communicate()


def test_an_interrupted_set_up_is_made_anew(
    checkout: Checkout, slow: subprocess.Popen[str]
) -> None:
    slow.send_signal(signal.SIGTERM)
    _, messages = slow.communicate(timeout=60)
    assert slow.returncode == 130
    assert "interrupted" in messages
    (venv,) = checkout.cache.glob("[!.]*")
    (venv / "left over").touch()
    (checkout.stubs / "slow").unlink()
    assert checkout.run()[0] == venv
    assert not (venv / "left over").exists()


def test_a_second_start_waits_and_uses_what_the_first_made(checkout: Checkout) -> None:
    venv, _ = checkout.run()
    (venv / MARKER).write_text("")
    checkout.calls()
    with (venv.parent / f".{venv.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = checkout.start()
        assert second.stderr is not None
        assert "waiting" in second.stderr.readline()
        (venv / MARKER).write_text(venv.name)
    assert second.communicate(timeout=60)[0].strip() == str(venv)
    assert checkout.calls() == []


def test_leaves_a_folder_of_somebody_else_alone(checkout: Checkout, tmp_path: Path) -> None:
    folder = tmp_path / "thesis"
    folder.mkdir()
    (folder / "thesis.tex").write_text("years of work")
    _, messages = checkout.run(status=1, DFLASH_SGLANG_VENV=str(folder))
    assert "left alone" in messages
    assert [file.name for file in folder.iterdir()] == ["thesis.tex"]


def test_uses_a_complete_environment_of_somebody_else(checkout: Checkout) -> None:
    foreign = checkout.root.parent / "foreign"
    (foreign / "bin").mkdir(parents=True)
    python = f'#!/bin/bash\nexec "{sys.executable}" "$@"\n'  # holds all of it: it runs this test
    Checkout.write(foreign / "bin" / "python", python)
    assert checkout.run(DFLASH_SGLANG_VENV=str(foreign)) == (foreign, "")
    project = checkout.root / "pyproject.toml"
    version = importlib.metadata.version("sglang")
    text = project.read_text().replace(f"sglang=={version}", "sglang==0.1")
    project.write_text(text.replace('"mypy",', '"mypy", "no_such_package",'))
    _, messages = checkout.run(status=1, DFLASH_SGLANG_VENV=str(foreign))
    assert "it lacks:\ndflash_sglang:   sglang==0.1 no_such_package\n" in messages
    assert checkout.calls() == []


def test_refuses_when_the_disk_is_too_small(checkout: Checkout) -> None:
    (checkout.stubs / "bin" / "df").unlink()
    Checkout.write(
        checkout.stubs / "bin" / "df", "#!/bin/bash\necho; echo disk 9 1 3000000 90% /\n"
    )
    _, messages = checkout.run(status=1)
    assert re.search(r"needs 13 GB in .*, 3 GB are free", messages)
    assert "DFLASH_SGLANG_VENV" in messages
    assert list(checkout.cache.glob("[!.]*")) == []


def test_refuses_without_ensurepip(checkout: Checkout) -> None:
    # Debian ships it in a package of its own; `python -m venv` then fails half-way.
    _, messages = checkout.run(status=1, STUB_NO_VENV="1")
    assert "no module venv or ensurepip" in messages
    assert "apt install python3-venv" in messages


def test_refuses_a_folder_that_cannot_be_written(checkout: Checkout, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    _, messages = checkout.run(status=1, DFLASH_SGLANG_VENV=str(tmp_path / "file" / "venv"))
    assert "cannot write to" in messages


@pytest.mark.parametrize("script", ["launch/demo", "tests/run", ".ci/run"])
def test_scripts_stop_without_a_fitting_python(checkout: Checkout, script: str) -> None:
    environ = {**checkout.environ, "STUB_OLD": "1"}
    done = subprocess.run(["bash", ROOT / script], env=environ, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "Python 3.11 or newer is needed" in done.stderr


def activate(checkout: Checkout, command: str, **environ: str) -> str:
    script = f". {checkout.root}/launch/env.sh && {command}"
    environ = {**checkout.environ, **environ}
    return subprocess.run(
        ["bash", "-c", script], env=environ, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_checkout_brings_its_entry_points(checkout: Checkout) -> None:
    # Through PYTHONPATH alone: two checkouts share one environment without touching it.
    program = (
        "import importlib.metadata as m\n"
        "for group in ('sglang.srt.plugins', 'sglang.srt.platforms'):\n"
        "    points = m.entry_points(group=group)\n"
        "    print(*[point.value for point in points if point.dist.name == 'dflash-sglang'])\n"
        "print(m.version('dflash-sglang'))"
    )
    seen = activate(checkout, f'"{sys.executable}" -P -c "{program}"').split()
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert seen == ["dflash_sglang.plugin:register", "dflash_sglang.cpu:activate", version]


def test_metadata_follows_pyproject(checkout: Checkout) -> None:
    checkout.run()
    project = checkout.root / "pyproject.toml"
    project.write_text(re.sub('(?m)^version = ".*"', 'version = "9.8"', project.read_text()))
    os.utime(project, (time.time() + 60, time.time() + 60))
    checkout.run()
    (metadata,) = (checkout.root / "build").rglob("METADATA")
    assert metadata.read_text() == "Name: dflash-sglang\nVersion: 9.8\n"


def test_exports_do_not_grow(checkout: Checkout) -> None:
    # `. launch/env.sh` twice, or a script started from another one.
    show = 'echo "$PYTHONPATH" "$PATH"'
    once = activate(checkout, show, PYTHONPATH="/mine").split()
    assert once[0].startswith(f"{checkout.root}:")
    assert once[0].endswith(":/mine")
    twice = activate(checkout, show, PYTHONPATH=once[0], PATH=once[1]).split()
    assert twice == once


def test_every_requirement_of_the_project_is_pinned() -> None:
    # A requirement added to pyproject.toml alone would not be installed at all.
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in lines if "==" in line}
    requirements = project["dependencies"] + project["optional-dependencies"]["dev"]
    assert {NAME_OF_REQUIREMENT.match(text)[0] for text in requirements} <= pinned  # type: ignore[index]
    assert set(project["dependencies"]) <= set(lines)


def test_constraints_name_releases_only() -> None:
    # A path or an address works on the machine that froze it and nowhere else.
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    release = re.compile(r"[\w.-]+==[\w.+!]+(; python_version .*)?")
    assert [line for line in pins if not release.fullmatch(line)] == []
