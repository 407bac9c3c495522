"""The drafter's own flags: each value is served or refused, with the wheel's reason."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.arg_groups.choices import LOAD_FORMAT_CHOICES, QUANTIZATION_CHOICES
from sglang.srt.layers.quantization import QUANTIZATION_METHODS
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.model_loader import loader
from sglang.srt.models.dflash import DFlashDraftModel

from dflash_sglang.errors import PairError, UnsupportedFlagError
from dflash_sglang.preflight import server_flags as start
from dflash_sglang.preflight.draft_flags import (
    _KV_DTYPES,
    _ONLINE,
    _ONLINE_EXPERTS,
    _REFUSED_FORMATS,
    _SERVED_FORMATS,
    DraftFlag,
    draft_flag_problems,
    draft_flags,
    has_draft_weights,
)
from tests.support.server_flags import DRAFTER, server_flags


def found(**changed: Any) -> list[DraftFlag]:
    return list(draft_flags(server_flags(**{"device": "cuda", **changed})))


def test_no_flag_no_answer() -> None:
    assert found() == []
    assert found(quantization="unquant") == []
    assert found(speculative_draft_load_format=None, load_format="pt") == []


# ---- KV cache --------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("dtype", _KV_DTYPES)
def test_every_kv_dtype_has_an_answer(dtype: str, device: str) -> None:
    (answer,) = found(device=device, speculative_draft_kv_cache_dtype=dtype)
    assert answer.served == ((dtype, device) != ("fp8_e5m2", "cpu"))
    one_by_one = "layer by layer" in answer.reason
    assert one_by_one == (answer.served and dtype == "fp8_e5m2")


def test_sglang_takes_no_other_kv_dtype() -> None:
    from sglang.srt.arg_groups.fields.spec import Spec

    hints = inspect.get_annotations(Spec, eval_str=True)
    argument = hints["speculative_draft_kv_cache_dtype"].__metadata__[0]
    assert set(argument.choices) == set(_KV_DTYPES)


# ---- load format -----------------------------------------------------------------------------


@pytest.mark.parametrize("load_format", LOAD_FORMAT_CHOICES)
def test_every_load_format_has_an_answer(load_format: str) -> None:
    (answer,) = found(speculative_draft_load_format=load_format)
    assert answer.served == (load_format not in _REFUSED_FORMATS)
    assert answer.given == load_format


def test_the_formats_are_sglangs() -> None:
    assert {*_SERVED_FORMATS, *_REFUSED_FORMATS} == set(LOAD_FORMAT_CHOICES)


@pytest.mark.parametrize(
    ("load_format", "reader", "attribute"),
    [
        ("bitsandbytes", loader.BitsAndBytesModelLoader, "bitsandbytes_stacked_params_mapping"),
        ("layered", loader.LayeredModelLoader, "load_weights_to_module"),
        ("flash_rl", loader.QuantizedRLModelLoader, "_supports_quantized_rl_reload"),
    ],
)
def test_a_refused_format_needs_what_the_drafter_has_not(
    load_format: str, reader: type, attribute: str
) -> None:
    assert load_format in _REFUSED_FORMATS
    assert f'"{attribute}"' in inspect.getsource(reader)
    assert not hasattr(DFlashDraftModel, attribute)
    assert not hasattr(DFlashDraftModel.load_weights, attribute)


def test_a_refused_format_may_come_from_the_verifier() -> None:
    (answer,) = found(load_format="gguf")
    assert not answer.served
    assert answer.given == "gguf, from --load-format"
    assert found(load_format="gguf", speculative_draft_load_format="auto")[0].served


def test_a_drafter_of_random_weights_needs_no_file(tmp_path: Path) -> None:
    """`dummy`, for profiling; the verifier's files are still looked at."""
    (tmp_path / "config.json").write_bytes((Path(DRAFTER) / "config.json").read_bytes())
    given = {"speculative_draft_model_path": str(tmp_path)}
    with pytest.raises(PairError, match="drafter has no weight files"):
        start.check_start(server_flags(**given), {})
    start.check_start(server_flags(**given, speculative_draft_load_format="dummy"), {})


def test_a_verifier_of_random_weights_has_a_drafter_with_files(tmp_path: Path) -> None:
    """The drafter's files are looked at, by its own format or the verifier's."""
    (tmp_path / "config.json").write_bytes((Path(DRAFTER) / "config.json").read_bytes())
    given = {"speculative_draft_model_path": str(tmp_path), "load_format": "dummy"}
    start.check_start(server_flags(**given), {})
    with pytest.raises(PairError, match="drafter has no weight files"):
        start.check_start(server_flags(**given, speculative_draft_load_format="auto"), {})
    assert has_draft_weights(server_flags())
    assert not has_draft_weights(server_flags(load_format="dummy"))


# ---- quantisation ----------------------------------------------------------------------------


@pytest.mark.parametrize("method", QUANTIZATION_CHOICES)
def test_every_quantisation_has_an_answer(method: str) -> None:
    (answer,) = found(speculative_draft_model_quantization=method)
    assert answer.served == (method in ("unquant", *_ONLINE, *_ONLINE_EXPERTS))
    assert ("layer by layer" in answer.reason) == (method in _ONLINE)
    (on_cpu,) = found(speculative_draft_model_quantization=method, device="cpu")
    assert on_cpu.served == (method == "unquant")


@pytest.mark.parametrize("method", _ONLINE)
def test_what_quantises_while_loading_needs_no_file_of_its_own(method: str) -> None:
    config = QUANTIZATION_METHODS[method]
    assert config.get_config_filenames() == []
    assert not config().is_checkpoint_fp8_serialized


def test_what_quantises_experts_leaves_linear_layers() -> None:
    from sglang.srt.layers.linear import LinearBase
    from sglang.srt.layers.quantization.nvfp4_online import make_modelopt_fp4_online_config

    linear = LinearBase.__new__(LinearBase)
    for config in (QUANTIZATION_METHODS["nvfp4_online"](), make_modelopt_fp4_online_config({})):
        assert type(config.get_quant_method(linear, "fc")) is UnquantizedLinearMethod


@pytest.mark.parametrize("method", ["awq", "gptq_marlin", "modelopt_fp8", "auto-round"])
def test_what_is_refused_reads_a_file_that_a_plain_head_has_not(method: str) -> None:
    assert QUANTIZATION_METHODS[method].get_config_filenames()
    (problem,) = draft_flag_problems(
        server_flags(device="cuda", speculative_draft_model_quantization=method)
    )
    assert f"(given: {method}): it needs a quantised checkpoint" in problem
    assert "Give unquant" in problem


def test_the_verifiers_quantisation_is_the_drafters_unless_it_has_its_own() -> None:
    (answer,) = found(quantization="awq")
    assert not answer.served
    assert answer.given == "awq, from --quantization"
    own = {"quantization": "awq", "speculative_draft_model_quantization": "unquant"}
    assert found(**own)[0].served
    # Once SGLang has resolved them: "unquant" is None, and an inherited one stands there.
    resolved = {"_speculative_draft_quantization_explicitly_set": True, "quantization": "awq"}
    assert found(**resolved) == []
    resolved["_speculative_draft_quantization_explicitly_set"] = False
    assert not found(**resolved, speculative_draft_model_quantization="awq")[0].served


# ---- at start --------------------------------------------------------------------------------


def test_a_start_is_refused() -> None:
    given = server_flags(device="cuda", speculative_draft_load_format="layered")
    with pytest.raises(UnsupportedFlagError, match="load_weights_to_module") as refused:
        start.check_start(given, {})
    assert "--speculative-draft-load-format (given: layered)" in str(refused.value)


def test_other_workers_are_left_alone() -> None:
    given = server_flags(device="cuda", speculative_draft_load_format="layered")
    start.check_start(given, {"DFLASH_SGLANG_WORKER": "builtin"})
