"""Hooks are applied, and a hook that SGLang did not apply is refused."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from dflash_sglang.cpu import hooks
from dflash_sglang.cpu.gated_delta.hooks import RECURRENT_HOOKS
from dflash_sglang.cpu.hooks import HOOKS, Hook, apply_hooks, keep_embedding_dtype
from dflash_sglang.errors import PlatformError
from dflash_sglang.preflight.sglang_names import listed_names
from dflash_sglang.preflight.sglang_table import CPU

TARGET = f"{__name__}.Target.method"


class Target:
    def method(self, value: int) -> int:
        return value


def negated(_: Target, value: int) -> int:
    return -value


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry of the test's own."""
    monkeypatch.setattr(HookRegistry, "_hooks", type(HookRegistry._hooks)(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    monkeypatch.setattr(Target, "method", Target.method)


def test_a_hook_is_applied() -> None:
    apply_hooks((Hook(TARGET, negated, HookType.REPLACE, "test"),))
    assert Target().method(3) == -3


def test_a_hook_that_sglang_only_logs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HookRegistry, "apply_hooks", lambda: None)
    with pytest.raises(PlatformError, match=r"Target\.method"):
        apply_hooks((Hook(TARGET, negated, HookType.REPLACE, "test"),))


def test_another_plugins_hook_on_the_same_target_is_no_failure() -> None:
    def around(original: Callable[[Target, int], int], target: Target, value: int) -> int:
        return 10 * original(target, value)

    HookRegistry.register(TARGET, around, HookType.AROUND)
    apply_hooks((Hook(TARGET, negated, HookType.REPLACE, "test"),))
    assert Target().method(3) == -30


def test_every_hook_is_in_the_contract() -> None:
    listed = {name.path.replace(":", ".") for name in listed_names(CPU)}
    assert {hook.target for hook in HOOKS + RECURRENT_HOOKS} <= listed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embeddings_keep_the_models_dtype(dtype: torch.dtype) -> None:
    """SGLang hands over bfloat16; the value must come from the untouched embeddings."""
    embeds = torch.tensor([[1.0001, 2.0]])
    batch = SimpleNamespace(input_embeds=embeds, replace_embeds=None)
    kwargs = {"input_embeds": embeds.bfloat16()}
    out = keep_embedding_dtype(kwargs, SimpleNamespace(dtype=dtype), batch, None)
    assert torch.equal(out["input_embeds"], embeds.to(dtype))


def test_no_embeddings_no_change() -> None:
    batch = SimpleNamespace(input_embeds=None, replace_embeds=None)
    assert keep_embedding_dtype({}, SimpleNamespace(dtype=torch.float32), batch, None) == {}


def test_the_target_resolves_to_the_attribute_not_a_module() -> None:
    assert hooks._colon(TARGET) == f"{__name__}:Target.method"
    assert hooks._colon("a.b.function") == "a.b:function"
