"""State between steps: rows must follow their requests through filter and merge."""

import torch

from dflash_sglang.step.state import DraftState


def relayed(*indices: int) -> DraftState:
    """State under overlap: only the FutureMap rows are kept in step."""
    state = DraftState.empty("cpu")
    state.future_indices = torch.tensor(indices)
    return state


def direct(*tokens: int) -> DraftState:
    ids = torch.tensor(tokens)
    return DraftState(bonus_tokens=ids, new_seq_lens=ids * 10)


def test_filter_keeps_rows_in_the_given_order() -> None:
    state = direct(1, 2, 3)
    state.reserved_lens_cpu = torch.tensor([11, 22, 33], dtype=torch.int32)
    state.filter_batch(torch.tensor([2, 0]), [2, 0])
    assert state.bonus_tokens.tolist() == [3, 1]
    assert state.new_seq_lens.tolist() == [30, 10]
    assert state.reserved_lens_cpu.tolist() == [33, 11]


def test_filter_under_overlap_touches_the_relay_only() -> None:
    state = relayed(5, 6, 7)
    state.filter_batch(torch.tensor([1]))
    assert state.future_indices.tolist() == [6]


def test_merge_appends() -> None:
    state = direct(1)
    state.merge_batch(direct(2, 3))
    assert state.bonus_tokens.tolist() == [1, 2, 3]
    assert state.new_seq_lens.tolist() == [10, 20, 30]
    overlapped = relayed(4)
    overlapped.merge_batch(relayed(9))
    assert overlapped.future_indices.tolist() == [4, 9]


def test_merge_with_a_batch_that_has_no_state() -> None:
    # SGLang's own class raises here: a batch that has not run has spec_info None.
    state = direct(1)
    state.merge_batch(None)
    assert state.bonus_tokens.tolist() == [1]


def test_a_merge_forgets_reserved_lengths() -> None:
    # They are per batch; stale ones would bound attention by another batch's lengths.
    state = direct(1)
    state.reserved_lens_cpu = torch.tensor([40], dtype=torch.int32)
    state.merge_batch(direct(2))
    assert state.reserved_lens_cpu is None
