"""Commit verifies of a hybrid verifier and compare its states with plain decoding's.

Runs the real model runner with pools and backends as a server has them, without scheduler and
drafter. Prints a JSON object, see `test_states`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from torch import Tensor

from bench.harness.servers import settings
from dflash_sglang.cpu import register_choices
from dflash_sglang.hooks import REQUEST_POOL
from dflash_sglang.preflight import server_flags
from dflash_sglang.preflight.rollback import allow_replay

BLOCK = 16
WIDTHS = (BLOCK, 4, 1)  # of the verifies, one after the other
INTERVAL = 64  # tokens between states for the prefix cache
# 16 requests: each accepted length once. Lengths so that a boundary falls before, into and behind
# what the first verify commits, and next to its ends.
PROMPT_LENS = (50, 63, 62, 61, 64, 48, 3, 120, 127, 1, 60, 128, 59, 58, 57, 49)


class States(NamedTuple):
    """What the recurrent layers hold of some requests."""

    temporal: Tensor  # [layers, requests, heads, V, K]
    conv: Tensor  # [layers, requests, channels, width - 1]


def load_runner(verifier: str, drafter: str, rollback: str, folder: Path) -> Any:
    from sglang.benchmark import one_batch
    from sglang.srt.server_args import PortArgs, prepare_server_args

    register_choices()
    server_flags.install()
    HookRegistry.register(REQUEST_POOL, allow_replay, HookType.AROUND)
    HookRegistry.apply_hooks()
    given = {
        "--model-path": verifier,
        "--speculative-algorithm": "DFLASH",
        "--speculative-draft-model-path": drafter,
        "--dtype": "float32",
        "--max-total-tokens": "4096",
        "--mem-fraction-static": "0.3",
        "--mamba-track-interval": str(INTERVAL),
    }
    choice = settings(folder / "settings.json", rollback=rollback)
    args = prepare_server_args([*(word for pair in given.items() for word in pair), *choice])
    args.resolve_once()
    rank = one_batch.spawn_world_rank(args, tp_rank=0, pp_rank=0)
    one_batch.publish(args, role="scheduler", ranks=one_batch.SpawnRanks(world_rank=rank, gpu_id=0))
    one_batch._init_process_global_configs()
    return one_batch.load_model(args, PortArgs.init_new(args), 0, 0)[0].torch_runner


def prefill(runner: Any) -> tuple[Tensor, Any]:
    """The first tokens [requests] and the batch of all prompts, in emptied pools."""
    from sglang.benchmark import one_batch

    runner.req_to_token_pool.clear()
    runner.token_to_kv_pool_allocator.clear()
    random = torch.Generator().manual_seed(0)
    prompts = [torch.randint(10, 1000, (n,), generator=random).tolist() for n in PROMPT_LENS]
    requests = one_batch.prepare_synthetic_inputs_for_latency_test(len(prompts), 0, prompts)
    tokens, _, batch = one_batch.extend(requests, runner)
    return tokens.long(), batch


def states_at(runner: Any, slots: Tensor) -> States:
    pool = runner.req_to_token_pool.get_speculative_mamba2_params_all_layers()
    return States(pool.temporal[:, slots], pool.conv[0][:, slots])


def state_slots(runner: Any, batch: Any) -> Tensor:
    slots: Tensor = runner.req_to_token_pool.get_mamba_indices(batch.req_pool_indices).long()
    return slots


def plain(runner: Any, steps: int) -> tuple[Tensor, list[States]]:
    """What plain decoding says, [requests, steps + 1], and its states after each token of it."""
    from sglang.benchmark import one_batch

    tokens, batch = prefill(runner)
    said, states = [tokens], [states_at(runner, state_slots(runner, batch))]
    for _ in range(steps):
        tokens, _ = one_batch.decode(tokens, batch, runner)
        said.append(tokens.long())
        states.append(states_at(runner, state_slots(runner, batch)))
    return torch.stack(said, dim=1), states


def verify(runner: Any, runners: Any, batch: Any, draft_ids: Tensor) -> None:
    """One verify of a block of each request, as `host.verify` runs it."""
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
    from sglang.srt.speculative.dflash_info import DFlashVerifyInput

    requests, width = draft_ids.shape
    positions = batch.seq_lens[:, None] + torch.arange(width)
    slots = runner.token_to_kv_pool_allocator.alloc(requests * width)
    table = runner.req_to_token_pool.req_to_token
    table[batch.req_pool_indices[:, None], positions] = slots.view(requests, width).to(table.dtype)
    plan = runner.kv_index_translator.plan(
        req_pool_indices=batch.req_pool_indices,
        seq_lens=batch.seq_lens,
        seq_lens_cpu=batch.seq_lens_cpu,
        write_virtual=slots,
        read_extent=width,
    )
    block = DFlashVerifyInput(
        draft_token=draft_ids.flatten(),
        positions=positions.flatten(),
        draft_token_num=width,
        capture_hidden_mode=CaptureHiddenMode.FULL,
        kv_loc_plan=plan,
        kv_loc_cols=slice(0, width),
    )
    batch.out_cache_loc = slots
    runners.activate(width)
    forward, _ = block.prepare_for_verify(
        batch, SimpleNamespace(model_runner=runner), defer_metadata_init=True
    )
    runner.forward(forward)
    runners.restore()


def distance(a: States, b: States) -> Tensor:
    """Largest difference of each request's states, in every layer, relative to their size.

    Returns:
        [2, layers, requests], of the recurrence and of the convolution.
    """
    return torch.stack(
        [
            (x - y).flatten(2).abs().amax(-1) / y.flatten(2).abs().amax(-1)
            for x, y in zip(a, b, strict=True)
        ]
    )


def picked(states: list[States], lengths: Tensor) -> States:
    """Each request's states after so many tokens."""
    request = torch.arange(len(lengths))
    parts = [torch.stack(part)[lengths, :, request] for part in zip(*states, strict=True)]
    return States(*(part.transpose(0, 1) for part in parts))


@torch.inference_mode()
def main(verifier: str, drafter: str, rollback: str, folder: str) -> None:
    runner = load_runner(verifier, drafter, rollback, Path(folder))
    from dflash_sglang.step.recurrent_state import RecurrentStates
    from dflash_sglang.step.setup.width_runners import WidthRunners

    said, states = plain(runner, sum(WIDTHS) + 1)
    runners = WidthRunners(runner)
    runners.adopt_block()
    for width in WIDTHS:
        runners.build(width, None)
    recurrent = RecurrentStates(runner, runners, BLOCK)
    _, batch = prefill(runner)
    requests = len(PROMPT_LENS)
    request, done = torch.arange(requests), torch.zeros(requests, dtype=torch.long)
    found: dict[str, float] = {"neighbour": float("inf"), "tracked": 0.0, "boundaries": 0}
    for width in WIDTHS:
        # Right up to the last token that is to be committed, wrong behind it.
        lengths = 1 + request % width
        step = torch.arange(width)
        right = said[request[:, None], done[:, None] + step]
        draft_ids = torch.where(step < lengths[:, None], right, right ^ 1)
        verify(runner, runners, batch, draft_ids)
        untouched = states_at(runner, state_slots(runner, batch))
        assert float(distance(untouched, picked(states, done)).max()) < 1e-3  # a verify commits not
        recurrent.commit(batch, width, lengths.int())
        before, done = batch.seq_lens, done + lengths
        committed = states_at(runner, state_slots(runner, batch))
        found[f"width {width}"] = float(distance(committed, picked(states, done)).max())
        for other in (done - 1, done + 1):
            closest = distance(committed, picked(states, other)).amax(1).amin()
            found["neighbour"] = min(found["neighbour"], float(closest))
        batch.seq_lens = batch.seq_lens + lengths
        batch.seq_lens_cpu = batch.seq_lens_cpu + lengths
        boundary = batch.seq_lens // INTERVAL * INTERVAL
        crossed = (boundary > before).nonzero().flatten()
        if len(crossed):
            kept = states_at(runner, batch.mamba_track_indices[crossed])
            at = (boundary - torch.tensor(PROMPT_LENS))[crossed]
            expected = picked(states, (boundary - torch.tensor(PROMPT_LENS)).clamp(min=0))
            expected = States(*(part[:, crossed] for part in expected))
            assert int(at.min()) > 0
            found["tracked"] = max(found["tracked"], float(distance(kept, expected).max()))
            found["boundaries"] += len(crossed)
    pool = runner.req_to_token_pool.mamba_pool
    found["replay"] = float(pool.enable_linear_replayssm_spec)
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
