"""Servers under test: SGLang's own memory checks at their strictest, and a proof of idleness."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

from bench.harness.configurations import Configuration
from dflash_sglang import zoo
from launch import devices
from launch.devices import Device
from launch.serving import Server

# SGLang checks at every idle moment that free + cached slots are all slots, and ends the server
# if not. These two add: the same sum, with the slots of running requests, after every step; and
# that no slot is owned and free at once.
STRICT = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
}
# As many running requests as SGLang and the pools give a server that names no number.
ANY_NUMBER = devices.CPU._replace(
    args=tuple(
        arg
        for before, arg in pairwise(("", *devices.CPU.args))
        if "--max-running-requests" not in (before, arg)
    )
)
IDLE_TIMEOUT_S = 60.0
COMPLAINT = re.compile(
    r"Traceback|memory leak|Mem Leak|use-after-free|double free|Failed to apply hooks"
    r"|Failed to load plugin|Scheduler hit an exception",
)


def serve(
    configuration: Configuration, folder: Path, env: Mapping[str, str] | None = None
) -> TestedServer:
    """The server of a configuration; its drafter and its log go under `folder`.

    Args:
        configuration: how to serve.
        folder: for this server alone.
        env: variables beside the configuration's own, such as those of scripted drafts.
    """
    width = "adaptive" if configuration.adaptive else "fixed"
    return TestedServer(
        zoo.path(configuration.model).verifier,
        configuration.checkpoint(folder),
        args=[
            *configuration.args(),
            *settings(folder / "settings.json", width=width, rollback=configuration.rollback),
        ],
        env={**configuration.env(), **(env or {})},
        log_dir=folder,
    )


def settings(file: Path, **values: object) -> list[str]:
    """The flag that gives a server its settings, written to `file`."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(values))
    return ["--speculative-adaptive-config", str(file)]


class NotIdleError(AssertionError):
    """A server still holds something that it should have released."""


class TestedServer(Server):
    """A server with strict memory checks."""

    __test__ = False  # not a test case, whatever its name
    starts: ClassVar[int] = 0  # of this process so far

    def __init__(
        self,
        model: Path,
        drafter: Path | None = None,
        *,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        log_dir: Path | None = None,
        device: Device = devices.CPU,
    ) -> None:
        env = {**STRICT, **(env or {})}
        super().__init__(model, drafter, args=args, env=env, log_dir=log_dir, device=device)

    def start(self) -> None:
        """As every server's, and counts."""
        TestedServer.starts += 1
        super().start()

    def stop(self) -> None:
        """Kills it: SGLang notices a request to end only once in five seconds."""
        if self.is_running():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        super().stop()

    def load(self) -> dict[str, Any]:
        """Requests and slots in use, as the scheduler last published them."""
        (load,) = self.get("/v1/loads")["loads"]
        return dict(load)

    def check_idle(self) -> None:
        """Waits until nothing runs, then counts the slots: each must be free or in the prefix tree.

        Must come before a flush, which resets the pools and with them the evidence.

        Raises:
            NotIdleError: requests or slots are left, or the server's own checks complained.
        """
        begin = time.time()
        deadline = time.monotonic() + IDLE_TIMEOUT_S
        try:
            while not self._is_idle(since=begin):
                if time.monotonic() > deadline:
                    raise NotIdleError(
                        f"still busy {IDLE_TIMEOUT_S:.0f} s after the last request: {self.load()}"
                    )
                time.sleep(0.05)
        except (OSError, HTTPException) as error:
            raise NotIdleError(f"the server went down\n{self.log_tail()}") from error
        complaints = self.complaints()
        if complaints:
            raise NotIdleError("the server's log complains:\n" + "\n".join(complaints[:10]))

    def _is_idle(self, since: float) -> bool:
        self.server_info()  # answered by the scheduler, which then takes a turn and publishes
        load = self.load()
        held = ("num_running_reqs", "num_waiting_reqs", "num_used_tokens")
        return load["timestamp"] > since and not any(load[name] for name in held)

    def complaints(self) -> list[str]:
        """Lines of the log that report an exception, or memory that does not add up."""
        lines = self.log_path.read_text(errors="replace").splitlines()
        return [line for line in lines if COMPLAINT.search(line)]

    def log_values(self, key: str) -> list[int]:
        """Every value of `key: <int>` in the batch lines of the log, such as `#new-token`."""
        text = self.log_path.read_text(errors="replace")
        return [int(value) for value in re.findall(re.escape(key) + r": (\d+)", text)]


def measured_batches(server: TestedServer) -> list[int]:
    """Batch sizes at which a server has measured forwards, as its log says."""
    text = server.log_path.read_text(errors="replace")
    (line,) = [line for line in text.splitlines() if "DFLASH measured forwards" in line]
    return [int(number) for number in re.findall(r"batch (\d+):", line)]
