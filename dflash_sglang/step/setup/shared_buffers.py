"""Buffers of a narrower width's attention backend that the block's backend lends.

A captured backend keeps what its kernels read in buffers as large as batch size times context: page
tables, slot lists, masks. All of it is written anew before every forward, in the order of the
stream, and one model runs one forward at a time; so one set of buffers serves all widths of a
model. What a backend keeps constant between forwards, such as offsets of a width's queries, stays
its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from sglang.srt.layers.attention.verify_mask import VerifyMask
from torch import Tensor

# By SGLang's class: attributes with such buffers, or entries of dicts of them. Another class
# shares nothing; the check of free memory before each width is there for it.
LENT: Mapping[str, tuple[str, ...]] = {
    "FlashAttentionBackend": tuple(
        f"{metadata}.{table}"
        for metadata in (
            "decode_cuda_graph_metadata",
            "target_verify_metadata",
            "draft_extend_metadata",
        )
        for table in ("page_table", "swa_page_table", "page_table_draft_decode")
    ),
    "TritonAttnBackend": (
        "cuda_graph_kv_indices",
        "cuda_graph_window_kv_indices",
        "cuda_graph_attn_logits",
        "cuda_graph_swa_attn_logits",
        "cuda_graph_attn_lse",
        "_verify_mask",
    ),
    "FlashInferAttnBackend": ("cuda_graph_kv_indices", "cuda_graph_custom_mask"),
}
# Backends that a backend of backends is made of.
PARTS = ("full_attn_backend", "decode_backend", "prefill_backend")


def borrow_buffers(narrow: Any, whole: Any) -> None:
    """Let a width's backend use the block's buffers as soon as it has allocated its own.

    Its own are dropped before anything is captured with them. The largest, the slot lists, are not
    allocated at all, because SGLang's backends take one; the others are there for a moment.

    Args:
        narrow: SGLang's backend of a narrower width, before its graphs are captured.
        whole: that of the block, of the same model, after its graphs were captured.
    """
    for ours, theirs in pairs(narrow, whole):
        ours.init_cuda_graph_state = partial(
            _allocate_and_borrow, ours, theirs, ours.init_cuda_graph_state
        )
        if type(ours).__name__ == "FlashInferAttnBackend":
            _borrow_plans(ours, theirs)


def _allocate_and_borrow(
    narrow: Any,
    whole: Any,
    allocate: Callable[..., None],
    max_bs: int,
    max_num_tokens: int,
) -> None:
    """In place of a narrower width's `init_cuda_graph_state`."""
    slots = getattr(whole, "cuda_graph_kv_indices", None)
    if isinstance(slots, list):
        slots = slots[0]
    given = {}
    if slots is not None and len(slots) >= max_num_tokens * narrow.max_context_len:
        given["kv_indices_buf"] = slots[:0]  # the block's comes in its place
    allocate(max_bs, max_num_tokens, **given)
    for path in LENT[type(narrow).__name__]:
        _replace(narrow, whole, path)


def pairs(narrow: Any, whole: Any) -> Iterator[tuple[Any, Any]]:
    """Backends that lend, each beside that of the block, through backends of backends."""
    if type(narrow) is not type(whole):
        return
    if type(narrow).__name__ in LENT:
        yield narrow, whole
    for part in PARTS:
        if hasattr(narrow, part):
            yield from pairs(getattr(narrow, part), getattr(whole, part))


def borrow_plan(wrapper: Any, whole: Any) -> None:
    """Let a FlashInfer wrapper put its plans where another one puts them.

    A wrapper has 16 MiB for them, half on the device, half pinned on the host, whatever it plans.
    A plan is copied before every forward; a step plans a model once.

    Args:
        wrapper: that has not planned yet.
        whole: the block's, of the same batch size.
    """
    wrapper._int_workspace_buffer = whole._int_workspace_buffer
    wrapper._pin_memory_int_workspace_buffer = whole._pin_memory_int_workspace_buffer


def _borrow_plans(narrow: Any, whole: Any) -> None:
    create = narrow._create_prefill_wrappers

    def create_and_borrow(bs: int, use_custom_mask: bool = False) -> list[Any]:
        wrappers: list[Any] = create(bs, use_custom_mask)
        # None where the block has no graph of this batch size.
        for wrapper, theirs in zip(
            wrappers, whole.prefill_cuda_graph_metadata.get(bs, ()), strict=False
        ):
            borrow_plan(wrapper, theirs)
        return wrappers

    narrow._create_prefill_wrappers = create_and_borrow


def _replace(narrow: Any, whole: Any, path: str) -> None:
    """Put the block's buffer in the place of a width's own."""
    name, _, entry = path.partition(".")
    ours, theirs = getattr(narrow, name, None), getattr(whole, name, None)
    if entry:
        if isinstance(ours, dict) and isinstance(theirs, dict) and entry in ours:
            ours[entry] = _lent(ours[entry], theirs.get(entry))
    elif ours is not None:
        setattr(narrow, name, _lent(ours, theirs))


def _lent(ours: Any, theirs: Any) -> Any:
    """The block's buffer, which may be longer than needed; a width's own where that does not do."""
    if isinstance(ours, list):
        return [_lent(*both) for both in zip(ours, theirs, strict=True)]
    if isinstance(ours, VerifyMask) and isinstance(theirs, VerifyMask):
        return theirs  # may only be swapped whole
    if not isinstance(ours, Tensor) or not isinstance(theirs, Tensor):
        return ours
    fits = (
        ours.dtype == theirs.dtype
        and ours.device == theirs.device
        and ours.shape[1:] == theirs.shape[1:]
        and len(ours) <= len(theirs)
    )
    return theirs if fits else ours
