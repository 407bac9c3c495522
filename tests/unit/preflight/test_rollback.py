"""How recurrent layers are rolled back: by device and settings, as SGLang's own flag."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.arg_groups.model_override_base import resolving_view
from sglang.srt.configs.qwen3_5 import Qwen3_5MoeTextConfig
from sglang.srt.server_args import ServerArgs

from dflash_sglang.config import WORKER_VARIABLE
from dflash_sglang.preflight.rollback import (
    allow_replay,
    choose_rollback,
    record_length,
    size_record,
)
from tests.support.pair_builder import small_pair


class Model(SimpleNamespace):
    """A configuration without recurrent layers."""

    def get_text_config(self) -> Model:
        return self


def resolved(
    monkeypatch: pytest.MonkeyPatch,
    *,
    settings: str | None = None,
    model: object = None,
    block_size: int = 16,
    **given: Any,
) -> Any:
    """Server arguments after both resolution steps."""
    from sglang.srt.arg_groups import model_override_base

    config = SimpleNamespace(hf_config=Qwen3_5MoeTextConfig() if model is None else model)
    monkeypatch.setattr(model_override_base, "model_config_of", lambda _: config)
    args = ServerArgs(
        model_path="dummy",
        speculative_num_draft_tokens=block_size,
        speculative_adaptive_config=settings,
        **{"speculative_algorithm": "DFLASH", **given},
    )
    seen = []
    choose_rollback(args, lambda a: seen.append(resolving_view(a).enable_linear_replayssm_spec))
    size_record(args, lambda _: None)
    view = resolving_view(args)
    assert seen == [view.enable_linear_replayssm_spec]  # SGLang checks what the flag needs
    return view


def written(folder: Path, rollback: str) -> str:
    file = folder / "settings.json"
    file.write_text(json.dumps({"rollback": rollback}))
    return str(file)


@pytest.mark.parametrize(
    ("device", "rollback", "replay"),
    [
        ("cpu", "auto", True),
        ("cuda", "auto", False),
        ("cuda", "replay", True),
        ("cpu", "snapshot", False),
    ],
)
def test_device_and_settings_choose(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str, rollback: str, replay: bool
) -> None:
    view = resolved(monkeypatch, settings=written(tmp_path, rollback), device=device)
    assert view.enable_linear_replayssm_spec is replay


def test_only_hybrids_of_our_worker_replay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def replays(**given: Any) -> bool:
        view = resolved(monkeypatch, device="cpu", **given)
        return bool(view.enable_linear_replayssm_spec)

    assert replays()
    assert not replays(model=Model())
    assert not replays(speculative_algorithm="EAGLE")
    pair = small_pair()
    pair.dflash.update(selector_rank=2, selector_top_k=2)  # a head that SGLang's own worker serves
    _, other_head = pair.write(tmp_path)
    assert not replays(speculative_draft_model_path=str(other_head))
    monkeypatch.setenv(WORKER_VARIABLE, "builtin")  # SGLang's commits past the record
    assert not replays()


@pytest.mark.parametrize(("block_size", "length"), [(2, 16), (16, 16), (17, 32), (32, 32)])
def test_the_record_holds_a_block(
    monkeypatch: pytest.MonkeyPatch, block_size: int, length: int
) -> None:
    assert record_length(block_size) == length
    view = resolved(monkeypatch, device="cpu", block_size=block_size)
    assert view.linear_replayssm_cache_len == length


def test_the_record_of_other_layers_is_sglangs(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {"enable_linear_replayssm_spec": True, "linear_replayssm_cache_len": 64}
    view = resolved(monkeypatch, device="cuda", model=Model(), **given)
    assert view.enable_linear_replayssm_spec is True
    assert view.linear_replayssm_cache_len == 64


def test_without_replay_the_ring_is_sglangs(monkeypatch: pytest.MonkeyPatch) -> None:
    view = resolved(monkeypatch, device="cuda", linear_replayssm_cache_len=128)
    assert view.linear_replayssm_cache_len == 128


def test_sglangs_refusal_is_lifted_while_the_pool_is_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from sglang.srt import runtime_context

    bag = runtime_context._ConfigBag("spec")
    bag._set("speculative_algorithm", "DFLASH")
    monkeypatch.setattr(runtime_context, "get_spec", lambda: bag)

    def build(configurator: object, *, max_num_reqs: int) -> tuple[object, int, object]:
        return configurator, max_num_reqs, bag.speculative_algorithm

    assert allow_replay(build, "configurator", max_num_reqs=3) == ("configurator", 3, None)
    assert bag.speculative_algorithm == "DFLASH"
