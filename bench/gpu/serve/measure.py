"""One configuration of one pair: start, first requests with a cold cache, the loads."""

import os
import shutil
import time
from pathlib import Path
from typing import Any

from bench.gpu.serve import server_log
from bench.gpu.serve.configurations import PLAIN, Configuration
from bench.gpu.serve.loads import Loader, state_of
from bench.gpu.serve.options import Options
from bench.gpu.serve.pairs import Pair, limits
from bench.gpu.serve.results import Results, Run, as_file_name
from bench.harness.servers import settings
from dflash_sglang.config import READY
from launch.comparison import say
from launch.serving import Server

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
        known = None if configuration.name == PLAIN else results.answers(pair.name)
        self._loader = Loader(pair, options, known)
        self._start: dict[str, Any] = {}
        self._loads: list[dict[str, Any]] = []

    def run(self) -> None:
        """Measures; a server that fails becomes a row with its last lines."""
        status, error, advice = OK, None, None
        for folder in (self._triton, self._log_dir):  # of an earlier run
            shutil.rmtree(folder, ignore_errors=True)
        self._triton.mkdir(parents=True)
        try:
            self._first_start()
            if self._configuration.restarts and self._options.restart:
                self._second_start()
        except KeyboardInterrupt:
            status = INTERRUPTED
            raise
        except Exception as problem:  # whatever it is, the next server is measured
            status, error = FAILED, self._error(problem)
            advice = advice_for(error)
            say(f"{self._label}: failed; {advice}\n{error}")
        finally:
            shutil.rmtree(self._triton, ignore_errors=True)
            if status == OK and self._configuration.name == PLAIN:
                self._results.keep_answers(self._pair.name, self._loader.answers)
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
            self._start["cold"] = self._loader.first_requests(server)
            for sampling in ("greedy", "default"):
                for concurrency in self._options.requests:
                    row = self._loader.load(server, sampling, concurrency)
                    self._loads.append(row)
                    say(
                        f"{self._label}: {sampling}, concurrency {concurrency}: "
                        f"{row['tokens_per_s']:.0f} tokens/s, tau {row['tau']:.2f}"
                    )
            log = server.log_path.read_text(errors="replace")
            self._start["compiles_while_serving"] = server_log.compiles_while_serving(log)
        finally:
            server.stop()

    def _second_start(self) -> None:
        server = self._server(self._log_dir / "restart")
        try:
            seconds = self._wait(server)
            self._start["restart"] = {"seconds": seconds, **self._loader.first_requests(server)}
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
                if key not in ("steps_by_width", "narrowed")
            },
        }

    def _error(self, error: Exception) -> str:
        """What happened, and the last lines of the log."""
        what = f"{type(error).__name__}: {error}".partition("\n")[0]
        for log in (self._log_dir / "restart" / "server.log", self._log_dir / "server.log"):
            if log.exists():
                tail = log.read_text(errors="replace").splitlines()[-LAST_LINES:]
                return "\n".join([what, *tail])
        return what


def advice_for(error: str) -> str:
    """What to do about a server that failed."""
    return next((advice for mark, advice in _ADVICE.items() if mark in error), _NO_ADVICE)
