"""Where servers run: accelerators hidden unless a GPU is asked for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.harness.servers import TestedServer
from dflash_sglang.cpu.activation import find_accelerator
from launch import devices
from launch.devices import CPU, GPU, HIDDEN, OWN, Device, DeviceError
from launch.serving import Server
from tests.support.fake_gpu import fake_gpu


def test_the_suite_itself_hides_accelerators() -> None:
    # tests/conftest.py: tests run the same on a machine with a GPU.
    assert {name: os.environ.get(name) for name in HIDDEN} == HIDDEN


def test_without_gpu_this_process_and_its_servers_see_none(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu(monkeypatch)
    assert find_accelerator() == "cuda"
    assert devices.choose(gpu=False) is CPU
    assert find_accelerator() is None
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.parametrize("make", [Server, TestedServer])
def test_a_server_sees_no_accelerator_by_default(
    monkeypatch: pytest.MonkeyPatch, make: type[Server]
) -> None:
    # Not even if the process that starts it sees one: every bench and every test relies on it.
    fake_gpu(monkeypatch)
    env = make(Path("m")).env
    assert {name: env.get(name) for name in HIDDEN} == HIDDEN


@pytest.mark.slow
@pytest.mark.parametrize(("device", "platform"), [(CPU, "CpuPlatform"), (GPU, "None")])
def test_the_cpu_platform_serves_on_a_machine_with_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: Device, platform: str
) -> None:
    # In a process of its own, as a server is; Python runs sitecustomize before anything else.
    for name in HIDDEN:
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "sitecustomize.py").write_text(
        "import os, torch\n"
        "torch.cuda.is_available = lambda: os.environ.get('CUDA_VISIBLE_DEVICES') != ''\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ['PYTHONPATH']}")
    done = subprocess.run(
        [sys.executable, "-c", "from dflash_sglang import cpu; print(cpu.activate())"],
        env=Server("m", device=device).env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert platform in done.stdout


def test_with_gpu_nothing_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu(monkeypatch)
    device = devices.choose(gpu=True)
    assert device is GPU
    assert not set(HIDDEN) & set(Server("m", device=device).env)
    assert find_accelerator() == "cuda"


def test_a_model_of_ones_own_gets_no_limits_of_ours() -> None:
    assert Server("m", device=OWN, port=7).command[3:] == (
        *("--model-path", "m", "--host", "127.0.0.1", "--port", "7"),
    )


def test_gpu_without_a_gpu_names_what_hides_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu(monkeypatch)
    devices.hide(os.environ)
    with pytest.raises(DeviceError, match=r"finds no accelerator.*CUDA_VISIBLE_DEVICES \(''\)"):
        devices.choose(gpu=True)


def test_gpu_is_not_another_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "find_accelerator", lambda: "mps")
    with pytest.raises(DeviceError, match="torch finds mps here"):
        devices.choose(gpu=True)


@pytest.mark.parametrize(
    ("found", "instead"), [("cuda", "--gpu serves on it"), ("mps", "use a machine without one")]
)
def test_an_accelerator_that_cannot_be_hidden_is_an_error(
    monkeypatch: pytest.MonkeyPatch, found: str, instead: str
) -> None:
    # Else the servers would run float32 on it, and answers would be called wrong.
    fake_gpu(monkeypatch, cannot_be_hidden=True)
    monkeypatch.setattr(devices, "find_accelerator", lambda: found)
    with pytest.raises(DeviceError, match=instead):
        devices.choose(gpu=False)


def test_rocm_reads_the_variables_of_cuda_after_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu(monkeypatch)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert devices.choose(gpu=True) is GPU
    assert devices.choose(gpu=False) is CPU
    assert {"HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"} <= set(HIDDEN)
