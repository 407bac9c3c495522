"""Where servers run: on the CPU with every accelerator hidden, or on the GPU.

    device = devices.choose(gpu=False)      # what this machine is to be: CPU, or GPU
    Server(model, device=device)            # flags and environment of a server there

Hiding is the default. The embedded pairs are compared token by token in float32, which a GPU's
attention kernels do not take, and the CPU platform stays inactive where SGLang finds an accelerator
(`dflash_sglang/cpu/activation.py`).
"""

import os
from collections.abc import Mapping, MutableMapping
from typing import NamedTuple

from dflash_sglang.cpu.activation import find_accelerator

# Hides each kind of accelerator that SGLang looks for and that a variable can hide. They act on a
# process that has not yet asked for its devices, and on all that it starts.
HIDDEN = {
    "CUDA_VISIBLE_DEVICES": "",  # ROCm reads it as well, after its own
    "HIP_VISIBLE_DEVICES": "-1",
    "ROCR_VISIBLE_DEVICES": "-1",
    "ONEAPI_DEVICE_SELECTOR": "!*:gpu",  # XPU
    "ASCEND_RT_VISIBLE_DEVICES": "",  # NPU
}

# What a tiny model needs; a flag given again overrides it.
_TINY_ARGS = (
    *("--max-total-tokens", "8192"),
    *("--max-running-requests", "32"),
)
LAPTOP_ARGS = (
    # Token identity is only defined without the near-ties of bfloat16.
    *("--dtype", "float32"),
    # Only a bound here, the tokens above are what is allocated. A low one fails at start when
    # another program takes memory meanwhile: SGLang books that on the weights.
    *("--mem-fraction-static", "0.8"),
    # An idle SGLang scheduler otherwise spins on a whole core.
    "--sleep-on-idle",
    *_TINY_ARGS,
)
GPU_ARGS = ("--dtype", "bfloat16", *_TINY_ARGS)

SERVED = ("cuda", "rocm")  # what `--gpu` means


class Device(NamedTuple):
    """Where a server runs, and what it needs there."""

    name: str  # cpu or gpu
    args: tuple[str, ...]  # first flags of every server
    env: Mapping[str, str]  # variables of every server


CPU = Device("cpu", LAPTOP_ARGS, HIDDEN)
GPU = Device("gpu", GPU_ARGS, {})  # for an embedded pair
OWN = Device("gpu", (), {})  # for any other model: SGLang's own defaults


class DeviceError(RuntimeError):
    """The machine does not have the device that was asked for."""


def hide(environment: MutableMapping[str, str]) -> None:
    """Hides accelerators from this process, before it asks for its devices, and its children."""
    environment.update(HIDDEN)


def choose(gpu: bool, otherwise: str = "leave --gpu out: the CPU then serves") -> Device:
    """The device of an embedded pair's servers; without `gpu` accelerators are hidden from here on.

    Args:
        gpu: whether the GPU is to serve.
        otherwise: what to do on a machine without one, for the error.

    Raises:
        DeviceError: there is no GPU, or there is an accelerator that no variable hides.
    """
    if not gpu:
        hide(os.environ)
        if (found := find_accelerator()) is not None:
            instead = "--gpu serves on it" if found in SERVED else "use a machine without one"
            raise DeviceError(
                f"this machine has an accelerator ({found}) that no environment variable hides, so "
                f"the CPU platform cannot serve here; {instead}"
            )
        return CPU
    if (found := find_accelerator()) not in SERVED:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
        raise DeviceError(
            f"a GPU with CUDA or ROCm is needed, and torch finds {found or 'no accelerator'} here. "
            f"Look at `nvidia-smi` and at CUDA_VISIBLE_DEVICES ({visible!r}), or {otherwise}."
        )
    return GPU
