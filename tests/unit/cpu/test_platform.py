"""The platform class: the members that SGLang uses, and the default server arguments."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.configs.qwen3_5 import Qwen3_5MoeTextConfig
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.platforms.interface import SRTPlatform
from sglang.srt.utils.hf_transformers import config as hf_config

from dflash_sglang.cpu.activation import BACKEND, PLATFORM_CLASS
from dflash_sglang.cpu.platform import CpuPlatform
from dflash_sglang.cpu.server_args import CONV_DTYPE


@pytest.fixture
def platform() -> CpuPlatform:
    return CpuPlatform()


def test_sglang_accepts_the_class(platform: CpuPlatform) -> None:
    from sglang.srt.platforms import _load_platform_class

    assert _load_platform_class(PLATFORM_CLASS) is CpuPlatform
    assert isinstance(platform, SRTPlatform)
    assert platform.is_out_of_tree()
    assert platform.get_device() == "cpu"  # SGLang splits the string
    assert not platform.capabilities.supports_triton


def test_dflash_is_the_one_algorithm(platform: CpuPlatform) -> None:
    assert platform.supports_speculative_algorithm("DFLASH")
    assert not platform.supports_speculative_algorithm("EAGLE")
    assert platform.get_speculative_worker_cls("EAGLE") is None
    assert platform.supports_speculative_draft_attention_backend("DFLASH", BACKEND)
    assert not platform.supports_speculative_draft_attention_backend("DFLASH", "torch_native")


def test_pool_of_multi_head_attention_only(platform: CpuPlatform) -> None:
    pool = platform.get_kv_pool_cls(kind="mha")
    assert pool is not None
    assert issubclass(pool, MHATokenToKVPool)
    assert platform.get_kv_pool_cls(kind="mla") is None


def arguments(**given: object) -> SimpleNamespace:
    defaults = {
        "attention_backend": None,
        "dtype": "float32",
        "lora_backend": "csgmv",
        "max_mamba_cache_size": None,
        "max_running_requests": None,
        "model_path": "folder",
        "revision": None,
        "trust_remote_code": False,
    }
    return SimpleNamespace(**{**defaults, **given})


class Checkpoint(SimpleNamespace):
    """A configuration without recurrent layers."""

    def get_text_config(self) -> Checkpoint:
        return self


@pytest.fixture(autouse=True)
def stored(monkeypatch: pytest.MonkeyPatch) -> Checkpoint:
    """What SGLang reads of any checkpoint."""
    checkpoint = Checkpoint(dtype=torch.float32)
    monkeypatch.setattr(hf_config, "get_config", lambda *_, **__: checkpoint)
    return checkpoint


@pytest.mark.parametrize(
    ("given", "chosen"), [(None, BACKEND), ("intel_amx", BACKEND), ("triton", "triton")]
)
def test_attention_backend_default(platform: CpuPlatform, given: str | None, chosen: str) -> None:
    """`intel_amx` is what SGLang itself resolves to here; a user's own choice stays."""
    server_args = arguments(attention_backend=given)
    platform.apply_server_args_defaults(server_args)
    assert server_args.attention_backend == chosen


@pytest.mark.parametrize(
    ("requested", "stored_dtype", "served"),
    [
        ("auto", torch.float32, "float32"),  # SGLang would serve float16
        ("auto", torch.float16, "float32"),
        ("auto", None, "float32"),
        ("auto", torch.bfloat16, "auto"),
        ("auto", "bfloat16", "auto"),
        ("float16", torch.float32, "float16"),
        ("bfloat16", torch.float32, "bfloat16"),
    ],
)
def test_dtype_default(
    platform: CpuPlatform,
    stored: Checkpoint,
    requested: str,
    stored_dtype: torch.dtype | str | None,
    served: str,
) -> None:
    stored.dtype = stored_dtype
    server_args = arguments(dtype=requested)
    platform.apply_server_args_defaults(server_args)
    assert server_args.dtype == served


def test_recurrent_states_have_a_pool_of_a_sane_size(
    platform: CpuPlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang would give them most of the machine's memory, and round the convolutions' states."""
    monkeypatch.setattr(hf_config, "get_config", lambda *_, **__: Qwen3_5MoeTextConfig())
    monkeypatch.delenv(CONV_DTYPE, raising=False)
    server_args = arguments()
    platform.apply_server_args_defaults(server_args)
    assert (server_args.max_running_requests, server_args.max_mamba_cache_size) == (24, 128)
    assert os.environ[CONV_DTYPE] == "float32"
    server_args = arguments(max_running_requests=2)
    platform.apply_server_args_defaults(server_args)
    assert (server_args.max_running_requests, server_args.max_mamba_cache_size) == (2, 18)
    server_args = arguments(max_mamba_cache_size=7)
    platform.apply_server_args_defaults(server_args)
    assert server_args.max_mamba_cache_size == 7


def test_other_models_keep_sglangs_defaults(platform: CpuPlatform) -> None:
    server_args = arguments()
    platform.apply_server_args_defaults(server_args)
    assert server_args.max_running_requests is server_args.max_mamba_cache_size is None


@pytest.mark.parametrize(("given", "chosen"), [("csgmv", "torch_native"), ("triton", "triton")])
def test_sglangs_default_for_adapters_becomes_its_torch_backend(
    platform: CpuPlatform, given: str, chosen: str
) -> None:
    server_args = arguments(lora_backend=given)
    platform.apply_server_args_defaults(server_args)  # type: ignore[arg-type]
    assert server_args.lora_backend == chosen
