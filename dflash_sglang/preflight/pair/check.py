"""Does this drafter fit this verifier? Answered from two config.json files and safetensors headers.

No weight is read and torch is not imported, so the answer comes in a fraction of a second, before a
server has loaded anything. What is not on this machine (a hub name that was never fetched) is
reported as unchecked.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_sglang.drafter.checkpoint import CheckpointError
from dflash_sglang.preflight.pair.facts import Side, read_side
from dflash_sglang.preflight.pair.head_family import (
    PLAIN_ARCHITECTURE,
    HeadFamily,
    ServedBy,
    architectures,
    head_family,
)
from dflash_sglang.preflight.pair.locate import locate
from dflash_sglang.preflight.pair.report import Finding, PairReport, Severity, error
from dflash_sglang.preflight.pair.rule import Pair
from dflash_sglang.preflight.pair.rules_plain import PLAIN_RULES
from dflash_sglang.preflight.pair.rules_shared import SHARED_RULES
from dflash_sglang.preflight.pair.verifier import UNKNOWN_VERIFIER, VerifierFacts, read_facts
from dflash_sglang.preflight.pair.weights import weight_findings

_REFUSED_HEADS = {
    HeadFamily.ANCHOR_FIRST: (
        "the drafter is anchor-first (sample_from_anchor): its first block position predicts, so "
        "DFLASH would read every position one off",
        "Serve it with a server that knows the head family, or retrain without sample_from_anchor.",
    ),
    HeadFamily.SPECULATORS: (
        "the drafter's config.json is in the speculators format, whose layer ids count from one",
        "Convert it to the plain DFlash format (dflash_config with 0-based target_layer_ids) "
        "first.",
    ),
    HeadFamily.DSPARK: (
        "the drafter is a DSpark head",
        "Serve it with --speculative-algorithm DSPARK.",
    ),
    HeadFamily.EAGLE: (
        "the drafter is an EAGLE head",
        "Serve it with --speculative-algorithm EAGLE3.",
    ),
    HeadFamily.REDUCED_VOCABULARY: (
        "the drafter has a head of its own over a reduced vocabulary (draft_vocab_size, d2t), and "
        "DFLASH would put the verifier's head in its place",
        "Use a drafter that shares the verifier's vocabulary and head.",
    ),
    HeadFamily.UNKNOWN: (
        "the drafter is not a draft head that SGLang 0.5.23 serves as DFLASH",
        f'Give a DFlash draft checkpoint: architectures ["{PLAIN_ARCHITECTURE}"].',
    ),
}


def check_pair(
    verifier: str | Path,
    drafter: str | Path,
    block_size: int | None = None,
    *,
    tp_size: int = 1,
    with_weights: bool = True,
    with_draft_weights: bool = True,
    revision: str | None = None,
    draft_revision: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    hub_cache: Path | None = None,
) -> PairReport:
    """Check a draft head against the verifier it is to serve.

    Args:
        verifier: local folder or hub name, as `--model-path`.
        drafter: local folder or hub name, as `--speculative-draft-model-path`.
        block_size: `--speculative-dflash-block-size`; None for the trained one.
        tp_size: `--tp-size`.
        with_weights: look at the verifier's weight files; False for `--load-format dummy`.
        with_draft_weights: the same for the drafter's, and `--speculative-draft-load-format`.
        revision: hub revision of the verifier.
        draft_revision: hub revision of the drafter.
        overrides: `--json-model-override-args`, which SGLang lays over both configurations.
        hub_cache: where fetched models are; None for the place that huggingface_hub uses.

    Returns:
        Every finding at once. Nothing is raised for a bad pair: see `PairReport.raise_if_bad`.
    """
    overrides = overrides or {}
    model = read_side(
        locate(str(verifier), revision, hub_cache),
        "verifier",
        "--model-path",
        overrides,
        with_weights,
    )
    draft = _read_draft(str(drafter), draft_revision, hub_cache, overrides, with_draft_weights)
    findings, unchecked = model.findings + draft.findings, model.unchecked + draft.unchecked
    family = _family(draft)
    if family is not None and draft.config is not None:
        if family.served_by is ServedBy.UNSUPPORTED:
            findings.append(_refused(family, draft, model))
        else:
            facts = _facts(model, findings, unchecked)
            pair = Pair(draft.config, family, facts, block_size, tp_size)
            findings += _fit(pair, draft)
            if family.served_by is ServedBy.SGLANG:
                unchecked.append(f"tensors of a {family} head: SGLang's own worker serves it")
    return PairReport(
        verifier=str(verifier),
        drafter=str(drafter),
        head_family=family,
        findings=tuple(sorted(findings, key=lambda f: f.severity is not Severity.ERROR)),
        unchecked=tuple(unchecked),
    )


def draft_head_family(
    drafter: str,
    *,
    revision: str | None = None,
    with_weights: bool = True,
    overrides: Mapping[str, Any] | None = None,
    hub_cache: Path | None = None,
) -> HeadFamily | None:
    """The family that `check_pair` finds for a draft head, without looking at the verifier.

    Args:
        drafter: local folder or hub name.
        revision: hub revision.
        with_weights: look at the weight files too.
        overrides: laid over the configuration.
        hub_cache: where fetched models are; None for the place that huggingface_hub uses.

    Returns:
        None where config.json is not on this machine or cannot be read.
    """
    return _family(_read_draft(drafter, revision, hub_cache, overrides or {}, with_weights))


def _read_draft(
    drafter: str,
    revision: str | None,
    hub_cache: Path | None,
    overrides: Mapping[str, Any],
    with_weights: bool,
) -> Side:
    place = locate(drafter, revision, hub_cache)
    return read_side(place, "drafter", "--speculative-draft-model-path", overrides, with_weights)


def _family(draft: Side) -> HeadFamily | None:
    return None if draft.config is None else head_family(draft.config, draft.tensors or ())


def _refused(family: HeadFamily, draft: Side, verifier: Side) -> Finding:
    if verifier.config is not None and PLAIN_ARCHITECTURE in architectures(verifier.config):
        return error(
            "swapped",
            "verifier and drafter are swapped",
            f"--model-path {verifier.place.given} is a draft head",
            "Exchange --model-path and --speculative-draft-model-path.",
        )
    message, fix = _REFUSED_HEADS[family]
    names = list(architectures(draft.config or {}))
    return error("layout", message, f"architectures {names}", fix)


def _facts(verifier: Side, findings: list[Finding], unchecked: list[str]) -> VerifierFacts:
    if verifier.config is None or verifier.place.folder is None:
        return UNKNOWN_VERIFIER
    names = None if verifier.tensors is None else frozenset(verifier.tensors)
    try:
        facts = read_facts(verifier.place.folder, verifier.config, names)
    except CheckpointError as problem:
        findings.append(
            error(
                "verifier_unreadable",
                f"a file beside the verifier's weights is damaged: {problem}",
                f"--model-path {verifier.place.given}",
                "Fetch the model again.",
            )
        )
        return UNKNOWN_VERIFIER
    if facts.tokens is None:
        unchecked.append("whether the mask token is an ordinary token: no tokenizer.json")
    return facts


def _fit(pair: Pair, draft: Side) -> list[Finding]:
    plain = pair.family.served_by is ServedBy.OURS
    rules = SHARED_RULES + (PLAIN_RULES if plain else ())
    found = [finding for rule in rules for finding in rule(pair)]
    if plain and not any(finding.severity is Severity.ERROR for finding in found):
        # Else the shapes to expect are not known, or not worth comparing.
        found += weight_findings(pair.draft, draft.tensors)
    return found
