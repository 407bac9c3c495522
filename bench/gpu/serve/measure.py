"""One configuration of one pair: start, first requests with a cold cache, the loads."""

import os
import shutil
import time
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any

from bench.gpu.serve import differences, server_log
from bench.gpu.serve.configurations import PLAIN, Configuration
from bench.gpu.serve.options import Options
from bench.gpu.serve.pairs import GREEDY, Pair, limits
from bench.gpu.serve.results import Results, Run, as_file_name
from bench.gpu.serve.streams import Streamed, StreamError, send_all, summarize
from bench.harness.servers import settings
from dflash_sglang.config import READY
from launch.client import RequestError
from launch.comparison import say
from launch.serving import Server, ServerError

OK, FAILED, INTERRUPTED = "ok", "failed", "interrupted"
LAST_LINES = 15  # of a log, in the row of a server that failed
_ADVICE = {
    "out of memory": "Lower --mem-fraction-static or --max-running-requests after --.",
    "OutOfMemory": "Lower --mem-fraction-static or --max-running-requests after --.",
    "OpsError": 'Please report it: an op differs here. {"ops": "reference"} in the settings file '
    "serves without it.",
    "PairError": "The drafter does not fit this verifier: see the reason above.",
    "UnsupportedFlagError": "Leave out the flag that is named above.",
    "gated repo": "Set HF_TOKEN, or give a folder.",
    "unrecognized arguments": "Correct the flags after --.",
}
_NO_ADVICE = (
    "The whole log is in the report; please send it. DFLASH_SGLANG_WORKER=builtin serves with "
    "SGLang's own worker meanwhile."
)


class NotServedError(RuntimeError):
    """A server runs, but not what was to be measured."""


FAILURES = (ServerError, NotServedError, StreamError, RequestError, OSError, HTTPException)


class Measurement:
    """Measures one configuration and keeps what it found, however far it got."""

    def __init__(
        self, pair: Pair, configuration: Configuration, options: Options, results: Results
    ) -> None:
        self._pair, self._configuration = pair, configuration
        self._options, self._results = options, results
        self._label = f"{pair.name}, {configuration.name}"
        name = as_file_name(f"{pair.name}-{configuration.name}")
        self._log_dir = options.out / "logs" / name
        self._triton = options.out / "triton" / name
        self._start: dict[str, Any] = {}
        self._loads: list[dict[str, Any]] = []
        self._answers: dict[int, list[Sequence[int]]] = {}

    def run(self) -> None:
        """Measures; a server that fails becomes a row with its last lines."""
        status, error, advice = OK, None, None
        shutil.rmtree(self._triton, ignore_errors=True)
        self._triton.mkdir(parents=True)
        try:
            self._first_start()
            if self._configuration.restarts and self._options.restart:
                self._second_start()
        except KeyboardInterrupt:
            status = INTERRUPTED
            raise
        except FAILURES as problem:
            status, error = FAILED, self._error(problem)
            advice = advice_for(error)
            say(f"{self._label}: failed; {advice}\n{error}")
        finally:
            shutil.rmtree(self._triton, ignore_errors=True)
            if status == OK and self._configuration.name == PLAIN:
                self._results.keep_answers(self._pair.name, self._answers)
            self._results.add(
                Run(
                    pair=self._pair.name,
                    configuration=self._configuration.name,
                    says=self._configuration.says,
                    status=status,
                    start=self._start,
                    loads=self._loads,
                    error=error,
                    advice=advice,
                )
            )

    # ---- a server ------------------------------------------------------------------------------

    def _first_start(self) -> None:
        server = self._server(self._log_dir)
        try:
            self._start["seconds"] = self._wait(server)
            self._start |= self._read_start(server)
            self._start["cold"] = self._first_requests(server)
            for sampling in ("greedy", "default"):
                for concurrency in self._options.requests:
                    self._loads.append(self._load(server, sampling, concurrency))
            log = server.log_path.read_text(errors="replace")
            self._start["compiles_while_serving"] = server_log.compiles_while_serving(log)
        finally:
            server.stop()

    def _second_start(self) -> None:
        server = self._server(self._log_dir / "restart")
        try:
            seconds = self._wait(server)
            self._start["restart"] = {"seconds": seconds, **self._first_requests(server)}
        finally:
            server.stop()

    def _server(self, log_dir: Path) -> Server:
        pair, one = self._pair, self._configuration
        args = [*limits(pair, max(self._options.requests)), *one.args]
        if one.settings:
            args += settings(log_dir / "settings.json", **one.settings)
        env = {"TRITON_CACHE_DIR": str(self._triton), **one.env}
        if pair.private:
            env["HF_HUB_OFFLINE"] = os.environ.get("HF_HUB_OFFLINE", "0")
        drafter = pair.drafter if one.speculates else None
        return Server(
            pair.verifier, drafter, args=args, env=env, log_dir=log_dir, device=pair.device
        )

    def _wait(self, server: Server) -> float:
        """Starts the server and returns the seconds that it took."""
        say(f"{self._label}: starting")
        begin = time.monotonic()
        server.start()
        server.wait_ready(self._options.start_timeout)
        seconds = round(time.monotonic() - begin, 1)
        ours = READY in server.log_path.read_text(errors="replace")
        if ours != self._configuration.ours:
            raise NotServedError(
                "SGLang's own worker serves instead of ours; `python -m dflash_sglang.check` with "
                "the same models says why"
                if self._configuration.ours
                else "our worker serves where it was not asked for; please report it"
            )
        return seconds

    def _read_start(self, server: Server) -> dict[str, Any]:
        info = server.server_info()
        names = ("attention_backend", "speculative_draft_attention_backend", "page_size")
        return {
            "memory": server_log.memory(server.log_path.read_text(errors="replace")),
            **{name: info.get(name) for name in (*names, "dtype", "kv_cache_dtype")},
            "max_total_num_tokens": info.get("max_total_num_tokens"),
            "max_running_requests": state_of(info).get("effective_max_running_requests_per_dp"),
            "settings": {
                key: value
                for key, value in (state_of(info).get("dflash") or {}).items()
                if key != "steps_by_width"
            },
        }

    # ---- loads ---------------------------------------------------------------------------------

    def _first_requests(self, server: Server) -> dict[str, float | None]:
        """Longest waits of the first requests after a start, which also warm the server up."""
        most = max(self._options.requests)
        waits = []
        for sampling in (GREEDY, self._pair.sampling):
            prompts = self._prompts(most)
            streamed, seconds = send_all(server, prompts, most, sampling, self._options.new_tokens)
            waits.append(summarize(streamed, seconds))
        gaps = [one.longest_gap_ms for one in waits if one.longest_gap_ms is not None]
        return {
            "longest_gap_ms": max(gaps, default=None),
            "longest_first_token_ms": max(one.longest_first_token_ms for one in waits),
        }

    def _load(self, server: Server, sampling: str, concurrency: int) -> dict[str, Any]:
        params = GREEDY if sampling == "greedy" else self._pair.sampling
        prompts = self._prompts(self._options.requests[concurrency])
        before = steps_by_width(server)
        streamed, seconds = send_all(server, prompts, concurrency, params, self._options.new_tokens)
        after = steps_by_width(server)
        numbers = summarize(streamed, seconds)
        steps = {width: n - before.get(width, 0) for width, n in after.items()}
        row: dict[str, Any] = {
            "sampling": sampling,
            "concurrency": concurrency,
            **numbers._asdict(),
            "steps_by_width": {width: n for width, n in steps.items() if n},
        }
        if sampling == "greedy":
            row |= self._compared(server, prompts, streamed, concurrency)
        say(
            f"{self._label}: {sampling}, concurrency {concurrency}: {numbers.tokens_per_s:.0f} "
            f"tokens/s, tau {numbers.tau:.2f}, p99 {numbers.p99_ms} ms between tokens"
        )
        return row

    def _compared(
        self,
        server: Server,
        prompts: Sequence[Sequence[int]],
        streamed: Sequence[Streamed],
        concurrency: int,
    ) -> dict[str, Any]:
        """How greedy answers differ from plain decoding's at the same concurrency.

        Plain decoding's own are compared with those at its lowest concurrency.
        """
        reference: Mapping[int, Sequence[Sequence[int]]]
        if self._configuration.name == PLAIN:
            self._answers[concurrency] = [one.answer.output_ids for one in streamed]
            lowest = min(self._answers)
            reference = {} if concurrency == lowest else {concurrency: self._answers[lowest]}
        else:
            reference = self._results.answers(self._pair.name)
        if concurrency not in reference:
            return {}
        return differences.compare(server, prompts, reference[concurrency], streamed)._asdict()

    def _prompts(self, count: int) -> list[Sequence[int]]:
        return [self._pair.prompts[i % len(self._pair.prompts)] for i in range(count)]

    def _error(self, error: Exception) -> str:
        """What happened, and the last lines of the log."""
        what = str(error).partition("\n")[0]
        for log in (self._log_dir / "restart" / "server.log", self._log_dir / "server.log"):
            if log.exists():
                tail = log.read_text(errors="replace").splitlines()[-LAST_LINES:]
                return "\n".join([what, *tail])
        return what


def advice_for(error: str) -> str:
    """What to do about a server that failed."""
    return next((advice for mark, advice in _ADVICE.items() if mark in error), _NO_ADVICE)


def state_of(info: Mapping[str, Any]) -> Mapping[str, Any]:
    """The scheduler's part of the server's information."""
    states = info.get("internal_states") or [{}]
    state: Mapping[str, Any] = states[0]
    return state


def steps_by_width(server: Server) -> dict[str, int]:
    """Verifies so far by width; empty unless our worker serves."""
    dflash = state_of(server.server_info()).get("dflash") or {}
    return dict(dflash.get("steps_by_width") or {})
