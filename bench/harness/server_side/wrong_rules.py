"""A plugin for tests: accept rules with a mistake, in the scheduler of a real server.

A request names the mistake in `custom_params["wrong_rule"]`; its whole batch suffers from it.

    bonus   the token behind the accepted drafts is drawn from p, not from what is left of it
    always  every draft is accepted
"""

from __future__ import annotations

from typing import Any

OPTION = "wrong_rule"
_mistakes: set[str] = set()  # of the batch in hand


def register() -> None:
    """Entry point: waits for our worker to be chosen, which happens in the scheduler only."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("dflash_sglang.hooks.apply", spoil, HookType.BEFORE)


def spoil(*args: Any, **kwargs: Any) -> None:
    """Put the mistakes in."""
    import torch
    from dflash_kernels.block_verify import reference
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from dflash_sglang.step import accept

    right_match = accept.accept_match
    right_weights = reference.bonus_weights

    def bonus_weights(proposal: Any, verifier_probs: Any, accept_len: Any, *rest: Any) -> Any:
        if "bonus" in _mistakes:
            return verifier_probs[torch.arange(len(accept_len)), accept_len]
        return right_weights(proposal, verifier_probs, accept_len, *rest)

    def accept_match(draft_ids: Any, *rest: Any, **options: Any) -> Any:
        if "always" in _mistakes:
            options["extra_accept"] = torch.ones_like(draft_ids[:, 1:], dtype=torch.bool)
        return right_match(draft_ids, *rest, **options)

    reference.bonus_weights = bonus_weights  # type: ignore[assignment]
    accept.accept_match = accept_match
    HookRegistry.register(
        "dflash_sglang.step.accept.Acceptor.accept", note_mistakes, HookType.BEFORE
    )
    HookRegistry.apply_hooks()


def note_mistakes(acceptor: Any, batch: Any, *rest: Any, **options: Any) -> None:
    """BEFORE hook: which mistakes the requests of a batch name."""
    _mistakes.clear()
    for req in batch.reqs:
        params = req.sampling_params.custom_params or {}
        if OPTION in params:
            _mistakes.add(params[OPTION])
