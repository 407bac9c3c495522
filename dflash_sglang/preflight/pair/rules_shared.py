"""Rules for every head that is served under the name DFLASH, by us or by SGLang's own worker."""

from __future__ import annotations

from collections.abc import Iterator

from dflash_sglang.json_values import as_int
from dflash_sglang.preflight.pair.architectures import (
    CAPTURING_ARCHITECTURES,
    OWN_HEAD_ARCHITECTURES,
)
from dflash_sglang.preflight.pair.head_family import setting
from dflash_sglang.preflight.pair.report import Finding, error, warning
from dflash_sglang.preflight.pair.rule import Pair, Rule
from dflash_sglang.preflight.pair.rules_mask import mask_token

_OTHER_DRAFTER = "Use a drafter trained for this verifier."


def architecture(pair: Pair) -> Iterator[Finding]:
    """SGLang must be able to hand out hidden states of the verifier's layers."""
    names = pair.verifier.architectures
    if names is None:
        return
    if not names:
        yield error(
            "architecture",
            "the verifier's config.json names no architecture",
            f"architectures {list(names)}",
            "Give the folder of a served language model.",
        )
    elif not CAPTURING_ARCHITECTURES.intersection(names):
        yield error(
            "architecture",
            "SGLang 0.5.23 cannot capture hidden states of this architecture, which DFLASH needs",
            f"architectures {list(names)}",
            "Serve it without --speculative-algorithm DFLASH.",
        )


def verifier_head(pair: Pair) -> Iterator[Finding]:
    """The verifier's LM head must come from somewhere: the drafter uses it as well."""
    facts = pair.verifier
    if facts.weight_names is None or any("lm_head." in name for name in facts.weight_names):
        return
    if not any("embed_tokens." in name for name in facts.weight_names):
        return  # another naming scheme: unknown
    names = list(facts.architectures or ())
    own_head = OWN_HEAD_ARCHITECTURES.intersection(names)
    if not facts.tied or own_head:
        yield error(
            "verifier_head",
            "the verifier's checkpoint has no lm_head.weight and SGLang will not take the "
            "embedding for it, so every answer would be token 0",
            f"tie_word_embeddings {str(facts.tied).lower()} with architectures {names}",
            "Store the embedding once more as lm_head.weight and set tie_word_embeddings to false.",
        )


def taps(pair: Pair) -> Iterator[Finding]:
    """Tapped layers: named, in order, inside the verifier, and never its last."""
    ids, layers = setting(pair.draft, "target_layer_ids"), pair.verifier.num_layers
    if ids is None:
        yield error(
            "taps_missing",
            "config.json of the drafter does not say which verifier layers it reads, and SGLang "
            "would guess them by a formula that is wrong for most published heads",
            "no target_layer_ids",
            "Add dflash_config.target_layer_ids as the head was trained.",
        )
        return
    if (
        not isinstance(ids, list)
        or not ids
        or any((as_int(i) or 0) < 0 or as_int(i) is None for i in ids)
    ):
        yield error(
            "taps_malformed",
            "target_layer_ids must be a list of layer indices",
            f"target_layer_ids {ids!r}",
            "Write them as 0-based integers.",
        )
        return
    if sorted(set(ids)) != ids:
        yield error(
            "taps_order",
            "target_layer_ids must increase without repeats: SGLang concatenates the taps in the "
            "order of the layers, whatever the list says",
            f"target_layer_ids {ids}",
            "Sort them, and the columns of fc.weight with them.",
        )
    if layers is not None and max(ids) >= layers:
        yield error(
            "taps_range",
            "the drafter reads a layer the verifier does not have",
            f"target_layer_ids {ids}, verifier of {layers} layers",
            _OTHER_DRAFTER,
        )
    elif layers is not None and max(ids) == layers - 1:
        yield error(
            "taps_last",
            "the drafter reads the verifier's last layer, which SGLang cannot capture: it "
            "captures before the next layer, and there is none",
            f"target_layer_ids {ids}, verifier of {layers} layers (last one {layers - 1})",
            "Train the head with taps below the last layer.",
        )


def target_depth(pair: Pair) -> Iterator[Finding]:
    """`num_target_layers` tells which verifier a head was trained for."""
    stated, layers = setting(pair.draft, "num_target_layers"), pair.verifier.num_layers
    trained = as_int(stated)
    if stated is not None and trained is None:
        yield error(
            "target_depth",
            "num_target_layers must be a number of layers",
            f"num_target_layers {stated!r}",
            "Correct the drafter's config.json.",
        )
    if trained is None or layers is None:
        return
    # Some heads count the prediction layers behind the stack, which not every verifier declares.
    if trained in (layers, layers + pair.verifier.num_mtp_layers):
        return
    given = f"num_target_layers {trained}, verifier of {layers} layers"
    if trained == layers + 1:
        yield warning(
            "target_depth",
            "the drafter was trained for one layer more than the verifier has",
            given,
            "Nothing to do when the verifier has a multi-token-prediction layer; otherwise check "
            "that the pair belongs together.",
        )
    else:
        yield error(
            "target_depth",
            "the drafter was trained for a verifier of another depth",
            given,
            _OTHER_DRAFTER,
        )


def hidden_size(pair: Pair) -> Iterator[Finding]:
    """Taps and embeddings enter the drafter unprojected, so the widths must agree."""
    own, verifier = pair.draft_int("hidden_size"), pair.verifier.hidden_size
    if own is not None and verifier is not None and own != verifier:
        yield error(
            "hidden_size",
            "drafter and verifier differ in hidden_size",
            f"drafter {own}, verifier {verifier}",
            _OTHER_DRAFTER,
        )


def vocabulary(pair: Pair) -> Iterator[Finding]:
    """The drafter uses the verifier's LM head, so the vocabularies must be one."""
    own, verifier = pair.draft_int("vocab_size"), pair.verifier.vocab_size
    if own is not None and verifier is not None and own != verifier:
        yield error(
            "vocab_size",
            "drafter and verifier differ in vocab_size",
            f"drafter {own}, verifier {verifier}",
            "Use a drafter trained for this verifier; where only padding rows were added or cut, "
            "set the drafter's vocab_size to the verifier's.",
        )


def block_size(pair: Pair) -> Iterator[Finding]:
    """A block has an anchor and at least one draft, and is never wider than the trained one."""
    trained, given = pair.draft_int("block_size"), pair.block_size
    if trained is None:
        yield error(
            "block_size_missing",
            "config.json of the drafter does not say its block size, and SGLang would assume 16",
            f"block_size {setting(pair.draft, 'block_size')!r}",
            "Add dflash_config.block_size as the head was trained.",
        )
    elif trained < 2:
        yield error(
            "block_size_small",
            "a block needs an anchor and at least one draft",
            f"block_size {trained}",
            "Use a drafter with a block_size of 2 or more.",
        )
    if given is not None and given < 2:
        yield error(
            "run_block_small",
            "a block needs an anchor and at least one draft",
            f"--speculative-dflash-block-size {given}",
            "Give 2 or more, or leave the flag out for the trained size.",
        )
    elif given is not None and trained is not None and given > trained >= 2:
        yield error(
            "run_block_large",
            "the drafter has never seen a block this wide",
            f"--speculative-dflash-block-size {given}, trained {trained}",
            f"Ask for 2 to {trained}, or leave the flag out.",
        )


SHARED_RULES: tuple[Rule, ...] = (
    architecture,
    verifier_head,
    taps,
    target_depth,
    hidden_size,
    vocabulary,
    block_size,
    mask_token,
)
