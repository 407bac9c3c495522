"""The drafter's model runner, built beside the verifier's."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, NamedTuple

from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_schedule, get_spec
from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config
from sglang.srt.speculative.draft_parallel import (
    model_draft_parallel_spec,
    resolve_draft_parallel_layout,
)
from sglang.srt.speculative.draft_worker_common import build_draft_tp_worker
from sglang.srt.speculative.spec_utils import draft_pp_context, draft_tp_context

from dflash_sglang.step.draft.window import DraftWindow
from dflash_sglang.step.request_options import draft_range

if TYPE_CHECKING:
    from sglang.srt.configs.draft_parallel import DraftParallelLayout
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs


class DraftModel(NamedTuple):
    """The loaded drafter and its configuration."""

    worker: TpModelWorker
    runner: ModelRunner
    layout: DraftParallelLayout
    mask_token_id: int
    window: DraftWindow | None  # None: the drafter sees the whole context
    range: int | None  # positions it was made for; None if no request gets past them


def build_draft_model(
    server_args: ServerArgs,
    gpu_id: int,
    nccl_port: int,
    verifier_runner: ModelRunner,
    block_size: int,
) -> DraftModel:
    """Load the draft checkpoint.

    Args:
        server_args: of the server.
        gpu_id: of this rank.
        nccl_port: of the server.
        verifier_runner: the verifier's.
        block_size: tokens of a block, the anchor counted.
    """
    draft_config = verifier_runner.spec_aux_config.draft_model_config
    positions = draft_range(draft_config.hf_config, verifier_runner.model_config)
    layout = resolve_draft_parallel_layout(
        model_draft_parallel_spec(draft_config, spec_algorithm=verifier_runner.spec_algorithm),
        collapse_cp=True,
    )
    # SGLang refuses a drafter with a shorter context than the verifier's; ours drafts nothing past
    # its range.
    longer = envs.SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN.override(True)
    with (
        contextlib.nullcontext() if positions is None else longer,
        draft_pp_context(),
        draft_tp_context(layout),
    ):
        bundle = build_draft_tp_worker(
            server_args=server_args,
            gpu_id=gpu_id,
            nccl_port=nccl_port,
            target_model_config=verifier_runner.model_config,
            algo_label="DFLASH",
        )
    runner = bundle.draft_model_runner
    runner.model.set_block_size(block_size)
    config = parse_dflash_draft_config(draft_hf_config=runner.model_config.hf_config)
    window_size = get_spec().speculative_draft_window_size
    window = None
    if window_size is not None:
        window = DraftWindow(window_size, get_schedule().page_size, block_size)
    return DraftModel(bundle.draft_worker, runner, layout, config.mask_token_id, window, positions)
