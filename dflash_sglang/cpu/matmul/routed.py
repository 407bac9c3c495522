"""How many tokens of a forward its router sends to experts."""

from __future__ import annotations

from sglang.srt.model_executor.forward_context import get_forward_context, has_forward_context


def routed_tokens(tokens: int) -> int:
    """Those before the bound of the forward that runs; all without one.

    Args:
        tokens: of the forward.

    Source: `resolve_routing_inputs` in sglang/srt/layers/moe/topk.py.
    """
    bound_of = get_forward_context().moe_num_token_non_padded if has_forward_context() else None
    bound = None if bound_of is None else bound_of()
    return tokens if bound is None else min(int(bound), tokens)
