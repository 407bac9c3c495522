"""This package's DFLASH worker, made on a fake server as it is on CUDA."""

from contextlib import ExitStack
from types import SimpleNamespace
from unittest import mock

from bench.harness.fake_gpu.fakes import FakeServer
from dflash_sglang.step.setup import worker_base
from dflash_sglang.step.setup.draft_model import DraftModel
from dflash_sglang.step.worker import DFlashWorker


def make_worker(
    server: FakeServer, *, tests_ops: bool = False, narrows: bool = False
) -> DFlashWorker:
    """The worker when it is ready to serve, its widths without costs.

    Args:
        server: its models.
        tests_ops: whether the ops' self-test runs; what launches their kernels must be replaced.
        narrows: whether a single request's drafts bound its verify.
    """
    draft_model = DraftModel(  # that comes from no checkpoint
        worker=SimpleNamespace(alloc_memory_pool=lambda **_: None),
        runner=server.draft_runner,
        layout=SimpleNamespace(tp_group=None),
        mask_token_id=3,
        window=None,
        range=None,
    )
    with ExitStack() as stack:
        if not tests_ops:
            stack.enter_context(mock.patch.object(worker_base, "prepare_ops"))
        build = mock.patch.object(worker_base, "build_draft_model", return_value=draft_model)
        stack.enter_context(build)
        problem = None if narrows else "the fake verifier has no experts"
        stack.enter_context(mock.patch.object(worker_base, "captures_graphs", return_value=True))
        stack.enter_context(
            mock.patch.object(worker_base, "narrowing_problem", return_value=problem)
        )
        worker = DFlashWorker(None, 0, 0, server.target_worker)
    worker.alloc_memory_pool()
    worker._drafter.capture_tail()
    worker._drafter._runners.adopt_block()
    worker._width_runners.adopt_block()
    for width in worker._widths.ladder:
        if width > 1:
            worker._drafter._runners.build(width, None)
        worker._width_runners.build(width, None)
    return worker
