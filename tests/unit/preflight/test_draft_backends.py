"""The table of docs/method/kernels.md that says which attention backend SGLang drafts with.

SGLang's own resolution runs here with the facts of each GPU in place of this machine's.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.arg_groups import model_override_base, speculative_hook
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.runtime_context import override_platform

from tests.support.server_flags import server_flags

PAGE = Path(__file__).resolve().parents[3] / "docs/method/kernels.md"
NONE = {
    "is_hopper_with_cuda_12_3": False,
    "is_sm100": False,
    "is_hip": False,
    "is_xpu": False,
    "has_flashinfer": False,
}
GPUS = {
    "H100, H200 (sm_90)": {"is_hopper_with_cuda_12_3": True, "has_flashinfer": True},
    "B200, B300 (sm_100, sm_103)": {"is_sm100": True, "has_flashinfer": True},
    "A100, L40S, RTX (sm_80, sm_89, sm_120)": {"has_flashinfer": True},
    "CUDA without FlashInfer": {"has_flashinfer": False},
    "ROCm": {"is_hip": True},
}
# Class and file of each, below sglang/srt/layers/attention; not imported: some need a driver.
BACKENDS = {
    "fa3": ("FlashAttentionBackend", "flashattention_backend.py"),
    "fa4": ("FlashAttentionBackend", "flashattention_backend.py"),
    "flashinfer": ("FlashInferAttnBackend", "flashinfer_backend.py"),
    "triton": ("TritonAttnBackend", "triton_backend.py"),
    "trtllm_mha": ("TRTLLMHAAttnBackend", "trtllm_mha_backend.py"),
}


def documented() -> dict[str, tuple[str, str, str]]:
    """GPU: the verifier's backend, the drafter's, and whether the host waits once a step."""
    rows = re.findall(r"(?m)^\| (.+?) \| `(\w+)` \| `(\w+)` \| (yes|no) \|", PAGE.read_text())
    return {gpu: (verifier, drafter, waits) for gpu, verifier, drafter, waits in rows}


def resolve(monkeypatch: pytest.MonkeyPatch, facts: dict[str, bool]) -> tuple[str, str]:
    """What SGLang picks with no flag given, for verifier and drafter."""
    stock = SimpleNamespace(is_out_of_tree=lambda: False)
    for module in (model_override_base, speculative_hook):
        monkeypatch.setattr(module, "current_platform", stock)
    flags: Any = server_flags(
        attention_backend=None,
        prefill_attention_backend=None,
        decode_attention_backend=None,
        speculative_draft_attention_backend=None,
        speculative_eagle_topk=None,
        trust_remote_code=False,
        _resolved_overrides=[],
    )
    model = SimpleNamespace(
        hf_config=SimpleNamespace(architectures=["Qwen3MoeForCausalLM"]),
        has_asymmetric_kv=False,
        has_attention_sinks=False,
    )
    with override_platform(**{**NONE, **facts}):
        flags.attention_backend = model_override_base.get_default_attn_backend(flags, False, model)
        speculative_hook._resolve_dflash_draft_attention_backend(flags)
    view = model_override_base.resolved_view(flags)
    return flags.attention_backend, view.speculative_draft_attention_backend


@pytest.mark.parametrize("gpu", GPUS)
def test_the_page_says_what_sglang_picks(monkeypatch: pytest.MonkeyPatch, gpu: str) -> None:
    verifier, drafter, _ = documented()[gpu]
    assert resolve(monkeypatch, GPUS[gpu]) == (verifier, drafter)


def test_the_page_says_for_whom_the_host_waits() -> None:
    rows = documented()
    assert set(rows) == set(GPUS)
    for gpu, (_, drafter, waits) in rows.items():
        assert needs_lengths_on_the_host(drafter) is (waits == "yes"), gpu


def needs_lengths_on_the_host(backend: str) -> bool:
    """The flag in the backend's class; the base class has True."""
    name, file = BACKENDS[backend]
    (sglang,) = importlib.util.find_spec("sglang").submodule_search_locations  # type: ignore[union-attr, misc]
    tree = ast.parse(Path(sglang, "srt/layers/attention", file).read_text())
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    for node in found.body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "needs_cpu_seq_lens":
            return bool(ast.literal_eval(node.value))
    assert [ast.unparse(base) for base in found.bases] == ["AttentionBackend"]
    return AttentionBackend.needs_cpu_seq_lens
