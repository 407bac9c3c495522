"""The pair check: every fault by its own sentence, and no fault where there is none."""

from __future__ import annotations

import ast
import json
import struct
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dflash_sglang.errors import PairError
from dflash_sglang.preflight import pair as pair_package
from dflash_sglang.preflight.pair import HeadFamily, PairReport, Severity, check_pair
from tests.support import public_pairs
from tests.support.pair_builder import PairFiles, small_pair, write_safetensors

ERROR, WARNING = Severity.ERROR, Severity.WARNING


class Fault(NamedTuple):
    """One way to break the small pair, and what the finding must contain."""

    name: str
    change: Callable[[PairFiles], object]
    code: str
    text: str  # part of the message or of what was given
    severity: Severity = ERROR
    block_size: int | None = None
    tp_size: int = 1


def _drop(section: dict[str, Any], key: str) -> None:
    del section[key]


def _sliding(pair: PairFiles, **fields: object) -> None:
    pair.draft.update(
        {
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 32,
            "use_sliding_window": True,
            **fields,
        }
    )


FAULTS = (
    # Taps. sglang 37475: a missing list is filled by a formula wrong for 14 of 20 checkpoints.
    Fault("no taps", lambda p: _drop(p.dflash, "target_layer_ids"), "taps_missing", "formula"),
    Fault(
        "taps not a list",
        lambda p: p.dflash.update(target_layer_ids="1,3,4"),
        "taps_malformed",
        "'1,3,4'",
    ),
    Fault("empty taps", lambda p: p.dflash.update(target_layer_ids=[]), "taps_malformed", "[]"),
    Fault(
        "negative tap",
        lambda p: p.dflash.update(target_layer_ids=[-1, 3, 4]),
        "taps_malformed",
        "-1",
    ),
    Fault(
        "truth value tap",
        lambda p: p.dflash.update(target_layer_ids=[True, 3, 4]),
        "taps_malformed",
        "True",
    ),
    Fault(
        "unsorted taps",
        lambda p: p.dflash.update(target_layer_ids=[3, 1, 4]),
        "taps_order",
        "[3, 1, 4]",
    ),
    Fault(
        "tap twice", lambda p: p.dflash.update(target_layer_ids=[1, 3, 3]), "taps_order", "repeats"
    ),
    Fault(
        "last layer",
        lambda p: p.dflash.update(target_layer_ids=[1, 3, 5]),
        "taps_last",
        "last one 5",
    ),
    Fault(
        "tap past the end",
        lambda p: p.dflash.update(target_layer_ids=[1, 3, 6]),
        "taps_range",
        "6 layers",
    ),
    # Another verifier.
    Fault("deeper verifier", lambda p: p.draft.update(num_target_layers=36), "target_depth", "36"),
    Fault(
        "depth off by one",
        lambda p: p.draft.update(num_target_layers=7),
        "target_depth",
        "one layer more",
        WARNING,
    ),
    Fault(
        "narrower verifier",
        lambda p: p.verifier.update(hidden_size=128),
        "hidden_size",
        "verifier 128",
    ),
    Fault(
        "other vocabulary",
        lambda p: p.verifier.update(vocab_size=2048),
        "vocab_size",
        "verifier 2048",
    ),
    Fault(
        "cannot be tapped",
        lambda p: p.verifier.update(architectures=["Qwen2MoeForCausalLM"]),
        "architecture",
        "Qwen2Moe",
    ),
    Fault(
        "no architecture",
        lambda p: _drop(p.verifier, "architectures"),
        "architecture",
        "names no architecture",
    ),
    # Heads of the verifier: Qwen3-MoE in SGLang 0.5.23 never ties, and serves token 0 for ever.
    Fault(
        "tied without a head",
        lambda p: (
            p.verifier.update(tie_word_embeddings=True),
            _drop(p.verifier_tensors, "lm_head.weight"),
        ),
        "verifier_head",
        "token 0",
    ),
    Fault(
        "untied without a head",
        lambda p: _drop(p.verifier_tensors, "lm_head.weight"),
        "verifier_head",
        "false",
    ),
    # Blocks.
    Fault(
        "no block size", lambda p: _drop(p.dflash, "block_size"), "block_size_missing", "assume 16"
    ),
    Fault(
        "block of one", lambda p: p.dflash.update(block_size=1), "block_size_small", "block_size 1"
    ),
    Fault("wider than trained", lambda p: None, "run_block_large", "17, trained 16", ERROR, 17),
    Fault(
        "run block of one",
        lambda p: None,
        "run_block_small",
        "--speculative-dflash-block-size 1",
        ERROR,
        1,
    ),
    Fault(
        "run block of zero",
        lambda p: None,
        "run_block_small",
        "--speculative-dflash-block-size 0",
        ERROR,
        0,
    ),
    # Mask token. z-lab/dflash 73: a mask among the stop ids ends a request after one block.
    Fault("no mask", lambda p: _drop(p.dflash, "mask_token_id"), "mask_missing", "None"),
    Fault(
        "mask by name",
        lambda p: p.dflash.update(mask_token_id="<|mask|>"),
        "mask_missing",
        "<|mask|>",
    ),
    Fault(
        "mask outside",
        lambda p: p.dflash.update(mask_token_id=1024),
        "mask_range",
        "vocabulary of 1024",
    ),
    Fault("ordinary mask", lambda p: p.dflash.update(mask_token_id=4), "mask_ordinary", "4 is 'a'"),
    Fault("mask stops", lambda p: p.dflash.update(mask_token_id=2), "mask_stop", "stop ids [2]"),
    Fault(
        "mask in generation_config",
        lambda p: p.generation.update(eos_token_id=[2, 3]),
        "mask_stop",
        "[2, 3]",
    ),
    Fault(
        "mask of another name",
        lambda p: p.dflash.update(mask_token="<|im_start|>"),
        "mask_name",
        "is 1 there",
    ),
    Fault(
        "mask in the template",
        lambda p: p.dflash.update(mask_token_id=1),
        "mask_in_template",
        "<|im_start|>",
        WARNING,
    ),
    # Attention.
    Fault("no head_dim", lambda p: _drop(p.draft, "head_dim"), "heads_missing", "head_dim None"),
    Fault(
        "heads do not divide",
        lambda p: p.draft.update(num_key_value_heads=3),
        "heads",
        "num_key_value_heads 3",
    ),
    Fault("heads over ranks", lambda p: None, "heads_tp", "--tp-size 3", ERROR, None, 3),
    # speculators 613: trained over the whole head, served over a quarter of it.
    Fault(
        "partial rotary", lambda p: p.draft.update(partial_rotary_factor=0.25), "rotary_dim", "0.25"
    ),
    Fault(
        "partial rotary, nested",
        lambda p: p.draft.update(
            rope_parameters={
                "rope_theta": 10000.0,
                "rope_type": "default",
                "partial_rotary_factor": 0.25,
            }
        ),
        "rotary_dim",
        "0.25",
    ),
    Fault(
        "rope_dim past the head",
        lambda p: p.draft.update(
            rope_parameters={"rope_theta": 10000.0, "rope_type": "default", "rope_dim": 128}
        ),
        "rotary_dim",
        "rope_dim 128",
    ),
    Fault(
        "rope_dim in words",
        lambda p: p.draft.update(rope_parameters={"rope_theta": 1e4, "rope_dim": "64"}),
        "rotary_dim",
        "'64'",
    ),
    Fault(
        "rotary settings a list",
        lambda p: p.draft.update(rope_parameters=[64]),
        "rope_parameters",
        "[64]",
    ),
    Fault("no rope_theta", lambda p: _drop(p.draft, "rope_theta"), "rope_theta", "assume 10000"),
    Fault(
        "other rope_theta",
        lambda p: p.draft.update(rope_theta=5e5),
        "rope_theta",
        "500000",
        WARNING,
    ),
    Fault(
        "multimodal rotary",
        lambda p: p.draft.update(
            rope_parameters={
                "rope_theta": 10000.0,
                "rope_type": "default",
                "mrope_section": [8, 12, 12],
            }
        ),
        "mrope",
        "[8, 12, 12]",
        WARNING,
    ),
    # Layer kinds. z-lab/dflash 126: forcing sliding layers to full attention costs acceptance.
    Fault(
        "too few layer types",
        lambda p: p.draft.update(layer_types=["full_attention"]),
        "layer_types",
        "num_hidden_layers 2",
    ),
    Fault(
        "unknown layer type",
        lambda p: p.draft.update(layer_types=["full_attention", "chunked"]),
        "layer_types",
        "chunked",
    ),
    Fault(
        "no window",
        lambda p: _sliding(p, sliding_window=None),
        "window_missing",
        "1 sliding layers",
    ),
    Fault(
        "window switched off",
        lambda p: _sliding(p, use_sliding_window=False),
        "window_unused",
        "use_sliding_window False",
    ),
    Fault(
        "window below the block",
        lambda p: _sliding(p, sliding_window=8),
        "window_small",
        "block size 16",
    ),
    Fault(
        "window without layers",
        lambda p: (
            _drop(p.draft, "layer_types"),
            p.draft.update(use_sliding_window=True, sliding_window=32),
        ),
        "layer_types_missing",
        "max_window_layers",
        WARNING,
    ),
    Fault(
        "short drafter",
        lambda p: p.draft.update(max_position_embeddings=1024),
        "context_range",
        "1024",
        WARNING,
    ),
    Fault(
        "float16 verifier",
        lambda p: p.verifier.update(dtype="float16"),
        "dtype",
        "float16",
        WARNING,
    ),
    # Families that neither worker serves. sglang 40144; vllm-ascend 11374.
    Fault("anchor first", lambda p: p.dflash.update(sample_from_anchor=True), "layout", "one off"),
    Fault(
        "anchor first, top level",
        lambda p: p.draft.update(sample_from_anchor=True),
        "layout",
        "one off",
    ),
    Fault(
        "reduced vocabulary",
        lambda p: p.draft.update(draft_vocab_size=512),
        "layout",
        "reduced vocabulary",
    ),
    Fault("d2t table", lambda p: p.draft_tensors.update(d2t=(512,)), "layout", "d2t"),
    Fault("DSpark head", lambda p: p.draft.update(markov_rank=256), "layout", "DSPARK"),
    Fault(
        "EAGLE head",
        lambda p: p.draft.update(architectures=["LlamaForCausalLMEagle3"]),
        "layout",
        "EAGLE",
    ),
    Fault(
        "speculators format",
        lambda p: p.draft.update(speculators_model_type="dflash"),
        "layout",
        "speculators",
    ),
    Fault(
        "not a head",
        lambda p: p.draft.update(architectures=["Qwen3ForCausalLM"]),
        "layout",
        "Qwen3ForCausalLM",
    ),
    # Tensors.
    Fault(
        "missing tensor", lambda p: _drop(p.draft_tensors, "norm.weight"), "tensors", "norm.weight"
    ),
    Fault(
        "extra tensor",
        lambda p: p.draft_tensors.update({"layers.2.norm.weight": (1,)}),
        "tensors",
        "layers.2",
    ),
    Fault(
        "tap count differs",
        lambda p: p.draft_tensors.update({"fc.weight": (256, 512)}),
        "tensors",
        "(256, 512)",
    ),
    Fault(
        "own head",
        lambda p: p.draft_tensors.update({"lm_head.weight": (1024, 256)}),
        "own_head",
        "lm_head.weight",
    ),
    Fault("integer weights", lambda p: p.dtypes.update({"fc.weight": "I8"}), "tensor_dtype", "I8"),
)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_each_fault_has_its_own_sentence(fault: Fault, tmp_path: Path) -> None:
    pair = small_pair()
    fault.change(pair)
    report = _check(pair, tmp_path, fault.block_size, tp_size=fault.tp_size)
    found = [finding for finding in report.findings if finding.code == fault.code]
    assert len(found) == 1, report
    assert found[0].severity is fault.severity
    assert fault.text in str(found[0])
    assert report.ok == (fault.severity is WARNING)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_finding_has_what_was_given_and_what_to_do(fault: Fault, tmp_path: Path) -> None:
    pair = small_pair()
    fault.change(pair)
    for finding in _check(pair, tmp_path, fault.block_size, tp_size=fault.tp_size).findings:
        assert finding.message.strip()
        assert finding.given.strip()
        assert finding.fix.strip().endswith(".")


def test_every_code_has_a_case() -> None:
    """A rule without a fault that triggers it is not tested."""
    package = Path(pair_package.__file__).parent
    trees = [ast.parse(file.read_text()) for file in package.glob("*.py")]
    codes = {
        node.args[0].value
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("error", "warning")
        and isinstance(node.args[0], ast.Constant)
    }
    elsewhere = {"swapped", "verifier_unreadable", "draft_config"}  # tests of their own below
    assert codes - elsewhere == {fault.code for fault in FAULTS}


def test_what_no_rule_knows_the_strict_reader_refuses(tmp_path: Path) -> None:
    """The reader of checkpoints knows every key of a plain head; a new one may change it."""
    pair = small_pair()
    pair.dflash["block_stride"] = 2
    report = _check(pair, tmp_path)
    assert [finding.code for finding in report.errors] == ["draft_config"]
    assert "block_stride" in str(report.errors[0])


@pytest.mark.parametrize("make", public_pairs.PLAIN, ids=lambda make: make.__name__)
@pytest.mark.parametrize("block_size", [None, 2, 8, 16])
def test_published_pairs_fit(
    make: Callable[[], PairFiles], block_size: int | None, tmp_path: Path
) -> None:
    """A false refusal of a pair that serves would be as bad as a missed fault."""
    report = _check(make(), tmp_path, block_size)
    assert report.head_family is HeadFamily.PLAIN
    assert report.findings == ()
    assert report.unchecked == ()


@pytest.mark.parametrize("name", ["moe", "hybrid"])
def test_the_embedded_pairs_fit(name: str) -> None:
    zoo = resources.files("dflash_sglang") / "zoo" / name
    report = check_pair(str(zoo / "verifier"), str(zoo / "drafter"))
    assert report.findings == ()
    assert report.unchecked == ()


def test_drafters_of_other_verifiers_are_refused(tmp_path: Path) -> None:
    """Every published drafter beside every verifier but its own."""
    makers = public_pairs.PLAIN
    for i, make_verifier in enumerate(makers):
        for j, make_drafter in enumerate(makers):
            pair, other = make_verifier(), make_drafter()
            pair.draft, pair.draft_tensors = other.draft, other.draft_tensors
            report = _check(pair, tmp_path / f"{i}-{j}")
            assert report.ok == (i == j), (make_verifier.__name__, make_drafter.__name__)


def test_all_faults_are_told_at_once(tmp_path: Path) -> None:
    pair = small_pair()
    pair.dflash.update(target_layer_ids=[1, 3, 5], mask_token_id=2)
    pair.draft["rope_theta"] = 5e5
    report = _check(pair, tmp_path, 32)
    assert [finding.code for finding in report.errors] == [
        "taps_last",
        "run_block_large",
        "mask_stop",
    ]
    assert [finding.code for finding in report.warnings] == ["mask_in_template", "rope_theta"]
    with pytest.raises(PairError) as refusal:
        report.raise_if_bad()
    assert "\n" not in str(refusal.value)
    assert "[3]" in str(refusal.value)


def test_explicit_rope_dim_settles_a_copied_partial_factor(tmp_path: Path) -> None:
    """SGLang takes rope_dim as the trained width whatever the copied factor says."""
    pair = small_pair()
    pair.draft["rope_parameters"] = {"rope_theta": 10000.0, "rope_type": "default", "rope_dim": 64}
    assert _check(pair, tmp_path).findings == ()


def test_settings_at_the_top_level_count(tmp_path: Path) -> None:
    """SGLang reads them there as well when dflash_config has none."""
    pair = small_pair()
    pair.draft |= pair.draft.pop("dflash_config")
    assert _check(pair, tmp_path).findings == ()


def test_prefixed_and_aliased_names_are_those_of_the_loader(tmp_path: Path) -> None:
    pair = small_pair()
    renamed = {
        "fc.weight": "encoder.fc.weight",
        "hidden_norm.weight": "encoder.output_norm_enc.weight",
    }
    pair.draft_tensors = {
        renamed.get(name, f"model.{name}"): shape for name, shape in pair.draft_tensors.items()
    }
    pair.draft_tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = (32,)
    assert _check(pair, tmp_path).findings == ()


def test_overrides_lie_over_both_configurations(tmp_path: Path) -> None:
    verifier, draft = small_pair().write(tmp_path)
    report = check_pair(verifier, draft, overrides={"vocab_size": 2048})
    assert "tensors" not in {finding.code for finding in report.findings}
    assert report.ok


def test_swapped_folders(tmp_path: Path) -> None:
    verifier, draft = small_pair().write(tmp_path)
    assert [finding.code for finding in check_pair(draft, verifier).errors] == ["swapped"]


@pytest.mark.parametrize("side", ["verifier", "drafter"])
@pytest.mark.parametrize(
    ("spoil", "code", "text"),
    [
        pytest.param(
            lambda d: (d / "config.json").unlink(), "unreadable", "does not exist", id="no config"
        ),
        pytest.param(
            lambda d: (d / "config.json").write_text("{"), "unreadable", "JSON", id="broken config"
        ),
        pytest.param(
            lambda d: (d / "config.json").write_text("[]"),
            "unreadable",
            "list",
            id="config is a list",
        ),
        pytest.param(
            lambda d: (d / "config.json").write_bytes(b"\xff\xfe{"),
            "unreadable",
            "JSON",
            id="not text",
        ),
        pytest.param(
            lambda d: (d / "model.safetensors").unlink(),
            "weights",
            "no weight files",
            id="no weights",
        ),
        pytest.param(
            lambda d: (d / "model.safetensors").write_bytes(b""),
            "weights",
            "safetensors",
            id="empty",
        ),
        pytest.param(lambda d: _cut(d, 6), "weights", "safetensors", id="cut in the length"),
        pytest.param(lambda d: _cut(d, 60), "weights", "malformed", id="cut in the header"),
        pytest.param(lambda d: _cut(d, -1), "weights", "truncated", id="cut in the data"),
        pytest.param(lambda d: _garbage(d), "weights", "malformed", id="garbage header"),
        pytest.param(lambda d: _huge(d), "weights", "safetensors", id="absurd length"),
        pytest.param(
            lambda d: _index(d, "absent.safetensors"),
            "weights",
            "absent.safetensors",
            id="missing shard",
        ),
        pytest.param(lambda d: _index(d, None), "weights", "weight_map", id="index without a map"),
    ],
)
def test_damaged_folders(
    side: str, spoil: Callable[[Path], object], code: str, text: str, tmp_path: Path
) -> None:
    folders = dict(zip(("verifier", "drafter"), small_pair().write(tmp_path), strict=True))
    spoil(folders[side])
    report = check_pair(folders["verifier"], folders["drafter"])
    found = [finding for finding in report.errors if finding.code == f"{side}_{code}"]
    assert len(found) == 1, report
    assert text in str(found[0])
    assert str(folders[side]) in found[0].given


@pytest.mark.parametrize("file", ["tokenizer.json", "generation_config.json"])
def test_a_damaged_side_file_of_the_verifier(file: str, tmp_path: Path) -> None:
    verifier, draft = small_pair().write(tmp_path)
    (verifier / file).write_text("{")
    report = check_pair(verifier, draft)
    assert [finding.code for finding in report.errors] == ["verifier_unreadable"]
    assert file in str(report.errors[0])


def test_sharded_weights(tmp_path: Path) -> None:
    pair = small_pair()
    verifier, draft = pair.write(tmp_path)
    (draft / "model.safetensors").unlink()
    names = sorted(pair.draft_tensors)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, part in halves.items():
        write_safetensors(draft / shard, {name: pair.draft_tensors[name] for name in part})
    weight_map = {name: shard for shard, part in halves.items() for name in part}
    (draft / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert check_pair(verifier, draft).findings == ()


def test_dummy_weights_need_no_files(tmp_path: Path) -> None:
    verifier, draft = small_pair().write(tmp_path)
    for folder in (verifier, draft):
        (folder / "model.safetensors").unlink()
    assert check_pair(verifier, draft, with_weights=False, with_draft_weights=False).ok


def test_without_a_tokenizer_the_mask_is_reported_unchecked(tmp_path: Path) -> None:
    pair = small_pair()
    pair.tokenizer = None
    report = _check(pair, tmp_path)
    assert report.ok
    assert ["mask token" in text for text in report.unchecked] == [True]


def test_report_as_json(tmp_path: Path) -> None:
    report = _check(small_pair(), tmp_path, 17)
    content = json.loads(json.dumps(report.as_dict()))
    assert content["layout"] == "plain"
    assert content["ok"] is False
    assert set(content["findings"][0]) == {"severity", "code", "message", "given", "fix"}
    assert content["findings"][0]["severity"] == "error"


def _check(
    pair: PairFiles, folder: Path, block_size: int | None = None, *, tp_size: int = 1
) -> PairReport:
    return check_pair(*pair.write(folder), block_size, tp_size=tp_size)


def _cut(folder: Path, size: int) -> None:
    file = folder / "model.safetensors"
    with file.open("r+b") as stream:
        stream.truncate(size if size > 0 else file.stat().st_size + size)


def _garbage(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 16) + b"\x00" * 16)


def _huge(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2**60) + b"{}")


def _index(folder: Path, shard: str | None) -> None:
    content = {} if shard is None else {"weight_map": {"norm.weight": shard}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))


_ODD: tuple[Any, ...] = (None, "x", -1, 0, 1.5, True, [], {}, [1, "a"], [{}], [[1]], 10**30)


def _fields() -> Iterator[tuple[str, str]]:
    pair = small_pair()
    extra = ("rope_parameters", "rope_scaling", "partial_rotary_factor", "sliding_window")
    for key in (*pair.draft, *extra, "quantization_config", "use_sliding_window", "is_causal"):
        yield "draft", key
    for key in (*pair.dflash, "mask_token", "selector_rank", "sample_from_anchor"):
        yield "dflash", key
    for key in (*pair.verifier, "text_config", "num_loops"):
        yield "verifier", key
    yield "generation", "eos_token_id"
    yield "tokenizer", "added_tokens"
    yield "tokenizer", "model"


@pytest.mark.parametrize(("part", "key"), list(_fields()), ids=str)
def test_odd_values_are_findings_not_crashes(part: str, key: str, tmp_path: Path) -> None:
    """A crash of the check would take down a server that could have named what is wrong."""
    for i, value in enumerate(_ODD):
        pair = small_pair()
        getattr(pair, part)[key] = value
        report = _check(pair, tmp_path / str(i))
        assert all(finding.given and finding.fix for finding in report.findings)
