"""This package's DFLASH worker, made on a fake server as it is on CUDA."""

from types import SimpleNamespace
from unittest import mock

from bench.harness.fake_gpu.fakes import FakeServer
from dflash_sglang.step.setup import worker_base
from dflash_sglang.step.setup.draft_model import DraftModel
from dflash_sglang.step.worker import DFlashWorker


def make_worker(server: FakeServer) -> DFlashWorker:
    """The worker when it is ready to serve, its widths without costs."""
    draft_model = DraftModel(  # that comes from no checkpoint
        worker=SimpleNamespace(alloc_memory_pool=lambda **_: None),
        runner=server.draft_runner,
        layout=SimpleNamespace(tp_group=None),
        mask_token_id=3,
        window=None,
        range=None,
    )
    with (
        mock.patch.object(worker_base, "prepare_ops"),  # nothing here can test them
        mock.patch.object(worker_base, "build_draft_model", return_value=draft_model),
    ):
        worker = DFlashWorker(None, 0, 0, server.target_worker)
    worker.alloc_memory_pool()
    worker._drafter.capture_tail()
    worker._drafter._runners.build(capture=False)
    worker._width_runners.build(capture=False)
    return worker
