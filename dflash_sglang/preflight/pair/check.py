"""Does this drafter fit this verifier? Answered from two config.json files and safetensors headers.

No weight is read and only the standard library is used, so the answer comes in a fraction of a
second, before a server has loaded anything. What is not on this machine (a hub name that was never
fetched) is reported as unchecked.
"""

from __future__ import annotations

import os
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
        "the drafter is anchor-first (sample_from_anchor): its first slot predicts, so DFLASH "
        "would read every position one off",
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
    revision: str | None = None,
    draft_revision: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
) -> PairReport:
    """Check a draft head against the verifier it is to serve.

    Args:
        verifier: local folder or hub name, as `--model-path`.
        drafter: local folder or hub name, as `--speculative-draft-model-path`.
        block_size: `--speculative-dflash-block-size`; None for the trained one.
        tp_size: `--tp-size`.
        with_weights: look at the weight files; False for `--load-format dummy`.
        revision: hub revision of the verifier.
        draft_revision: hub revision of the drafter.
        overrides: `--json-model-override-args`, which SGLang lays over both configurations.
        environment: process environment, for the place of the hub cache.

    Returns:
        Every finding at once. Nothing is raised for a bad pair: see `PairReport.raise_if_bad`.
    """
    environment = os.environ if environment is None else environment
    verifier_at = locate(str(verifier), environment, revision)
    drafter_at = locate(str(drafter), environment, draft_revision)
    overrides = overrides or {}
    target = read_side(verifier_at, "verifier", "--model-path", overrides, with_weights)
    draft = read_side(
        drafter_at, "drafter", "--speculative-draft-model-path", overrides, with_weights
    )
    findings, unchecked = target.findings + draft.findings, target.unchecked + draft.unchecked
    family = None
    if draft.config is not None:
        family = head_family(draft.config, draft.tensors or ())
        if family.served_by is ServedBy.UNSUPPORTED:
            findings.append(_refused(family, draft, target))
        else:
            facts = _facts(target, findings, unchecked)
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


def _refused(family: HeadFamily, draft: Side, target: Side) -> Finding:
    if target.config is not None and PLAIN_ARCHITECTURE in architectures(target.config):
        return error(
            "swapped",
            "verifier and drafter are swapped",
            f"--model-path {target.place.given} is a draft head",
            "Exchange --model-path and --speculative-draft-model-path.",
        )
    message, fix = _REFUSED_HEADS[family]
    names = list(architectures(draft.config or {}))
    return error("layout", message, f"architectures {names}", fix)


def _facts(target: Side, findings: list[Finding], unchecked: list[str]) -> VerifierFacts:
    if target.config is None or target.place.folder is None:
        return UNKNOWN_VERIFIER
    names = None if target.tensors is None else frozenset(target.tensors)
    try:
        facts = read_facts(target.place.folder, target.config, names)
    except CheckpointError as problem:
        findings.append(
            error(
                "verifier_unreadable",
                f"a file beside the verifier's weights is damaged: {problem}",
                f"--model-path {target.place.given}",
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
