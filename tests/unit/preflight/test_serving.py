"""Which worker serves: everything that is decided before a start goes by the same answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from sglang.srt.arg_groups import model_override_base
from sglang.srt.arg_groups.model_override_base import resolving_view
from sglang.srt.configs.qwen3_5 import Qwen3_5MoeTextConfig
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from dflash_sglang import check, hooks
from dflash_sglang.config import WORKER_VARIABLE
from dflash_sglang.errors import ConfigError, DFlashError, PairError, UnsupportedFlagError
from dflash_sglang.preflight.pair import HeadFamily, ServedBy, check_pair
from dflash_sglang.preflight.rollback import choose_rollback
from dflash_sglang.preflight.server_flags import allow_block_verification, check_start
from dflash_sglang.preflight.serving import serving_with, serving_worker
from tests.support.pair_builder import small_pair
from tests.support.server_flags import server_flags

BUILTIN = {WORKER_VARIABLE: "builtin"}
FAMILIES: dict[HeadFamily, dict[str, Any]] = {
    HeadFamily.PLAIN: {},
    HeadFamily.DFLASH2: {"selector_rank": 2, "selector_top_k": 2},
    HeadFamily.DOMINO: {"projector_type": "domino"},
    HeadFamily.LILICORR: {"lilicorr_candidate_topk": 16},
    HeadFamily.VARIANT: {"conv_kernel_size": 2},
    HeadFamily.NEMOTRON: {
        "has_embed_tokens": True,
        "quantization_config": {"quant_algo": "W4A16_NVFP4"},
    },
    HeadFamily.LAGUNA: {"architectures": ["DFlashLagunaForCausalLM"]},
    HeadFamily.MUSE: {"architectures": ["MuseGlimmerAssistantModel"]},
    HeadFamily.QUANTIZED: {"quantization_config": {"quant_method": "fp8"}},
    HeadFamily.ANCHOR_FIRST: {"sample_from_anchor": True},
    HeadFamily.DSPARK: {"architectures": ["Qwen3DSparkModel"]},
    HeadFamily.EAGLE: {"architectures": ["LlamaForCausalLMEagle3"]},
    HeadFamily.REDUCED_VOCABULARY: {"draft_vocab_size": 512},
    HeadFamily.SPECULATORS: {"transformer_layer_config": {}},
    HeadFamily.UNKNOWN: {"architectures": ["Qwen3ForCausalLM"]},
}
# Settings of dflash_config; the others stand at the top level.
NESTED = {
    "selector_rank",
    "selector_top_k",
    "projector_type",
    "lilicorr_candidate_topk",
    "conv_kernel_size",
    "sample_from_anchor",
}


class Case(NamedTuple):
    """A pair on disk, and the environment that a server is started in."""

    family: HeadFamily
    environment: dict[str, str]
    paths: dict[str, str]

    def checkpoints(self) -> tuple[str, str]:
        """Verifier and drafter."""
        return self.paths["model_path"], self.paths["speculative_draft_model_path"]

    @property
    def worker(self) -> ServedBy:
        """Who is to serve."""
        if self.family.served_by is ServedBy.OURS and self.environment:
            return ServedBy.SGLANG
        return self.family.served_by

    def flags(self, **changed: Any) -> SimpleNamespace:
        return server_flags(**self.paths, **changed)


@pytest.fixture(params=[{}, BUILTIN], ids=["default", "builtin"])
def environment(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.delenv(WORKER_VARIABLE, raising=False)
    for name, value in request.param.items():
        monkeypatch.setenv(name, value)
    return dict(request.param)


@pytest.fixture(params=FAMILIES, ids=str)
def case(
    request: pytest.FixtureRequest,
    environment: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Case:
    changes = FAMILIES[request.param]
    pair = small_pair()
    pair.dflash.update({key: value for key, value in changes.items() if key in NESTED})
    pair.draft.update({key: value for key, value in changes.items() if key not in NESTED})
    verifier, drafter = pair.write(tmp_path)
    config = SimpleNamespace(hf_config=Qwen3_5MoeTextConfig())  # a hybrid, for the rollback
    monkeypatch.setattr(model_override_base, "model_config_of", lambda _: config)
    paths = {"model_path": str(verifier), "speculative_draft_model_path": str(drafter)}
    return Case(request.param, environment, paths)


@pytest.fixture(autouse=True)
def applied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Targets of the hooks that would be put in place."""
    targets: list[str] = []

    def apply(wanted: tuple[hooks.Hook, ...]) -> None:
        targets.extend(hook.target for hook in wanted)

    monkeypatch.setattr(hooks, "apply", apply)
    monkeypatch.setattr(hooks, "resolving_view", lambda server_args: server_args)
    return targets


def refusal(call: Callable[[], object]) -> DFlashError | None:
    """What a call refuses, if anything."""
    try:
        call()
    except DFlashError as error:
        return error
    return None


def created(flags: SimpleNamespace) -> str | DFlashError:
    """Who serves in the scheduler."""
    original = object()
    try:
        worker = hooks.create_worker(lambda *_: original, SpeculativeAlgorithm.DFLASH, flags)
    except DFlashError as error:
        return error
    return "sglang" if worker is original else worker.__name__


def resolved(
    case: Case, step: Callable[[Any, Callable[[Any], None]], None], **changed: Any
) -> tuple[Any, list[Any]]:
    """Flags after a resolution step, and a copy of what SGLang's own step saw of them."""
    given = {"speculative_algorithm": "DFLASH", "device": "cpu", **case.paths, **changed}
    args = ServerArgs(**given)
    seen: list[Any] = []

    def original(server_args: Any) -> None:
        view = resolving_view(server_args)
        seen.append((view.speculative_use_block_verification, view.enable_linear_replayssm_spec))

    step(args, original)
    return resolving_view(args), seen


def settings(folder: Path, **content: Any) -> str:
    file = folder / "settings.json"
    file.write_text(json.dumps(content))
    return str(file)


def test_every_family_is_here() -> None:
    assert set(FAMILIES) == set(HeadFamily)


def test_the_answer(case: Case) -> None:
    assert serving_with(case.flags(), case.environment).worker is case.worker
    report = check_pair(*case.checkpoints())
    assert report.head_family is case.family
    serving = serving_worker(report.head_family, case.environment)
    assert (serving.worker, serving.assumed) == (case.worker, False)


def test_without_further_flags_all_agree(case: Case, applied: list[str]) -> None:
    found = created(case.flags())
    if case.worker is ServedBy.UNSUPPORTED:
        assert isinstance(found, PairError)
        assert isinstance(refusal(lambda: check_start(case.flags(), case.environment)), PairError)
    else:
        assert found == ("DFlashWorker" if case.worker is ServedBy.OURS else "sglang")
        check_start(case.flags(), case.environment)
    assert bool(applied) == (case.worker is ServedBy.OURS)


def test_check_names_the_same_worker(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "relied_on", lambda *, with_cpu: [])
    monkeypatch.setattr(check, "_has_accelerator_device", lambda: False)
    monkeypatch.setattr(check, "_plugin", lambda *_: check.Answer("active", "installed"))
    verdict = check.examine(case.environment, check_pair(*case.checkpoints()))
    wanted = None if case.worker is ServedBy.UNSUPPORTED else case.worker
    assert verdict.worker.name == wanted
    assert verdict.ok is (wanted is not None)


def test_block_verification_passes_where_ours_serves(case: Case) -> None:
    given = {"speculative_use_block_verification": True}
    view, [(seen, _)] = resolved(case, allow_block_verification, **given)
    assert view.speculative_use_block_verification is True
    # SGLang's step refuses it outside CUDA when it sees it.
    assert seen is (case.worker is not ServedBy.OURS)
    found = created(case.flags(**given))
    if case.worker is ServedBy.OURS:
        assert found == "DFlashWorker"
    else:
        assert isinstance(found, DFlashError)


def test_block_verification_on_cuda_is_left_alone(case: Case) -> None:
    given = {"speculative_use_block_verification": True, "device": "cuda"}
    _, [(seen, _)] = resolved(case, allow_block_verification, **given)
    assert seen is True


@pytest.mark.parametrize(
    "changed",
    [
        {"speculative_use_rejection_sampling": True, "speculative_accept_threshold_acc": 0.5},
        {"attn_dp_size": 2},
        {"disaggregation_mode": "decode"},
    ],
    ids=["rejection sampling with a threshold", "ranks", "disaggregation"],
)
def test_our_refusals_are_for_our_worker(case: Case, changed: dict[str, Any]) -> None:
    at_start = refusal(lambda: check_start(case.flags(**changed), case.environment))
    found = created(case.flags(**changed))
    if case.worker is ServedBy.OURS:
        assert isinstance(at_start, UnsupportedFlagError)
        assert isinstance(found, UnsupportedFlagError)
    elif case.worker is ServedBy.SGLANG:
        assert (at_start, found) == (None, "sglang")
    else:
        assert isinstance(at_start, PairError)
        assert isinstance(found, PairError)


def test_flags_that_no_worker_serves_are_refused_for_every_head(case: Case) -> None:
    at_start = refusal(lambda: check_start(case.flags(pp_size=2), case.environment))
    assert isinstance(at_start, UnsupportedFlagError)


@pytest.mark.parametrize("rollback", ["auto", "replay", "snapshot"])
def test_replay_is_for_our_worker(case: Case, tmp_path: Path, rollback: str) -> None:
    file = settings(tmp_path, rollback=rollback)
    _, [(_, replay)] = resolved(case, choose_rollback, speculative_adaptive_config=file)
    assert replay is (case.worker is ServedBy.OURS and rollback != "snapshot")


def test_the_settings_file_is_read_for_our_worker(case: Case, tmp_path: Path) -> None:
    """SGLang has keys of its own in the file of --speculative-adaptive-config."""
    given = {"speculative_adaptive_config": settings(tmp_path, a_key_of_sglang=1)}
    calls = (
        lambda: check_start(case.flags(**given), case.environment),
        lambda: resolved(case, choose_rollback, **given),
        lambda: hooks.create_worker(
            lambda *_: None, SpeculativeAlgorithm.DFLASH, case.flags(**given)
        ),
    )
    refused = [isinstance(refusal(call), ConfigError) for call in calls]
    assert refused == [case.worker is ServedBy.OURS] * len(calls)


def test_a_head_that_shows_in_its_tensors_only(tmp_path: Path) -> None:
    """Its config.json is a plain head's, so every caller has to look at the tensor names."""
    pair = small_pair()
    pair.draft_tensors["candidate_selector.successor_codebook"] = (4, 4)
    _, drafter = pair.write(tmp_path)
    flags = server_flags(speculative_draft_model_path=str(drafter))
    assert serving_with(flags, {}).worker is ServedBy.SGLANG


# ---- a draft checkpoint that is not here yet -----------------------------------------------------

UNFETCHED = {"speculative_draft_model_path": "no-such-owner/drafter"}


def test_an_unfetched_head_is_assumed_to_be_plain() -> None:
    serving = serving_with(server_flags(**UNFETCHED), {})
    assert (serving.worker, serving.assumed) == (ServedBy.OURS, True)
    assert serving_with(server_flags(**UNFETCHED), BUILTIN).worker is ServedBy.SGLANG


def test_nothing_is_refused_on_an_assumption() -> None:
    check_start(server_flags(**UNFETCHED, attn_dp_size=2), {})


def test_a_wrong_assumption_is_corrected_in_the_scheduler(tmp_path: Path) -> None:
    """Block verification was let through at start; the head turns out to be SGLang's."""
    pair = small_pair()
    pair.dflash.update(FAMILIES[HeadFamily.DFLASH2])
    verifier, drafter = map(str, pair.write(tmp_path))
    fetched = {"model_path": verifier, "speculative_draft_model_path": drafter}
    given = {**fetched, "speculative_use_block_verification": True}
    found = created(server_flags(**given))
    assert isinstance(found, UnsupportedFlagError)
    assert "--speculative-use-block-verification" in str(found)
    assert created(server_flags(**given, device="cuda")) == "sglang"


# ---- other algorithms ----------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["EAGLE", None])
def test_other_algorithms_are_sglangs(algorithm: str | None) -> None:
    flags = server_flags(speculative_algorithm=algorithm, speculative_draft_model_path=None)
    assert serving_with(flags, {}).worker is ServedBy.SGLANG


@pytest.mark.parametrize("algorithm", ["EAGLE", None])
def test_other_algorithms_keep_sglangs_refusal(algorithm: str | None) -> None:
    args = ServerArgs(
        model_path="dummy",
        device="cpu",
        speculative_algorithm=algorithm,
        speculative_use_block_verification=True,
    )
    seen: list[bool] = []
    allow_block_verification(
        args, lambda a: seen.append(resolving_view(a).speculative_use_block_verification)
    )
    assert seen == [True]
