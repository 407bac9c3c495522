"""A plugin for tests: accept rules with a mistake, in the scheduler of a real server."""

from __future__ import annotations

import os
from typing import Any

RULE = "DFLASH_TEST_WRONG_RULE"


def register() -> None:
    """Entry point: waits for our worker to be chosen, which happens in the scheduler only."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("dflash_sglang.hooks._install_worker_hooks", spoil, HookType.BEFORE)


def spoil(*args: Any, **kwargs: Any) -> None:
    """Put the mistake in."""
    from dflash_kernels.block_verify import reference

    from dflash_sglang.step import accept

    if os.environ[RULE] == "bonus":  # drawn from p, not from what is left of it
        reference.bonus_weights = _whole_law
    elif os.environ[RULE] == "always":  # every draft is accepted
        accept.accept_match = _accept_all  # type: ignore[attr-defined]


def _whole_law(proposal: Any, verifier_probs: Any, accept_len: Any, ratio: Any, last: Any) -> Any:
    import torch

    return verifier_probs[torch.arange(len(accept_len)), accept_len]


def _accept_all(draft_ids: Any, verifier_ids: Any, prefix_lens: Any, **_: Any) -> Any:
    import torch
    from dflash_kernels.accept_match import accept_match

    extra_accept = torch.ones_like(draft_ids[:, 1:], dtype=torch.bool)
    return accept_match(draft_ids, verifier_ids, prefix_lens, extra_accept=extra_accept)
