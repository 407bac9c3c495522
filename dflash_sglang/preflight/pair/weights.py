"""The tensors of a plain head against those its configuration implies, from the headers alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dflash_sglang.drafter.checkpoint import (
    CheckpointError,
    TensorInfo,
    parse_config,
    tensor_problems,
)
from dflash_sglang.preflight.pair.head_family import architectures, dflash_section
from dflash_sglang.preflight.pair.report import Finding, error, numbered

# Settings SGLang also takes from the top level of a draft configuration; the parser wants them in
# one place.
_DFLASH_SETTINGS = ("target_layer_ids", "mask_token_id", "block_size", "num_target_layers")
# Names SGLang's loader maps onto those of a plain head.
_ALIASES = {
    "encoder.fc.weight": "fc.weight",
    "encoder.output_norm_enc.weight": "hidden_norm.weight",
}
_FLOATING = frozenset({"F64", "F32", "F16", "BF16"})
_SHOWN = 3  # of a list of tensors


def weight_findings(
    draft: Mapping[str, Any], tensors: Mapping[str, TensorInfo] | None
) -> Iterator[Finding]:
    """Compare the tensors of a plain head with those its configuration implies.

    Args:
        draft: config.json of the drafter; the rules have found no error in it.
        tensors: its headers; None where there are none to read.
    """
    try:
        config = parse_config(_normalised(draft))
    except CheckpointError as problem:
        yield error(
            "draft_config",
            f"config.json of the drafter does not describe a plain head: {problem}",
            f"architectures {list(architectures(draft))}",
            "Correct the drafter's config.json.",
        )
        return
    if tensors is None:
        return
    named = {_plain_name(name): info for name, info in tensors.items() if "rotary_emb." not in name}
    own = sorted(n for n in named if n.startswith(("lm_head.", "embed_tokens.")))
    if own:
        yield error(
            "own_head",
            "the drafter's checkpoint has an embedding or an LM head of its own, which SGLang "
            "ignores in favour of the verifier's",
            ", ".join(own),
            "Use a head that shares both; if these are copies of the verifier's, remove them from "
            "the file.",
        )
    problems = tensor_problems(config, {n: info for n, info in named.items() if n not in own})
    if problems:
        rest = f" and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        yield error(
            "tensors",
            "the drafter's tensors are not those its config.json describes",
            numbered(problems[:_SHOWN]) + rest,
            "Use the config.json that belongs to these weights.",
        )
    odd = sorted({info.dtype for info in named.values()} - _FLOATING)
    if odd:
        yield error(
            "tensor_dtype",
            "the drafter's weights are stored in a quantised type without a quantization_config",
            f"dtypes {odd}",
            "Use the unquantised checkpoint.",
        )


def _normalised(draft: Mapping[str, Any]) -> dict[str, Any]:
    """A draft configuration with every DFlash setting inside `dflash_config`."""
    top = {key: draft[key] for key in _DFLASH_SETTINGS if draft.get(key) is not None}
    section = {key: value for key, value in dflash_section(draft).items() if key != "mask_token"}
    return {**draft, "dflash_config": top | section}


def _plain_name(name: str) -> str:
    return _ALIASES.get(name, name.removeprefix("model."))
