"""A server in this process that streams canned answers, in the place of SGLang's."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

from dflash_sglang.config import READY, WORKER_VARIABLE
from launch.serving import Server, ServerError

WIDTH = 4  # tokens a verify commits
SECRET_PATH = "/".join(["", "ho" + "me", "somebody", "models", "private-model"])


@dataclass
class Script:
    """What the servers do; a test changes it."""

    answer: Callable[[str, Sequence[int]], list[int]] = lambda mode, prompt: [
        1 + (sum(prompt) + i) % 50 for i in range(9)
    ]
    fails: dict[str, str] = field(default_factory=dict)  # mode: last line of its log
    breaks: set[str] = field(default_factory=set)  # modes that drop a connection
    falls_back: bool = False  # SGLang's own worker serves instead of ours
    gap: float = 0.05  # log-probability between two tokens
    interrupts: str | None = None  # the mode at whose start Ctrl-C is pressed
    log: str = ""  # further lines of every log
    started: list[StubServer] = field(default_factory=list)

    @property
    def modes(self) -> list[str]:
        """Modes of the servers, in the order of their starts."""
        return [server.mode for server in self.started]


class StubServer(Server):
    """`launch.serving.Server` with a command that is never run."""

    script: ClassVar[Script]

    @property
    def mode(self) -> str:
        if "--speculative-algorithm" not in self.command:
            return "plain"
        if self.env.get(WORKER_VARIABLE) == "builtin":
            return "builtin"
        return self.settings.get("width", "adaptive")

    @property
    def settings(self) -> dict[str, Any]:
        flag = "--speculative-adaptive-config"
        if flag not in self.command:
            return {}
        return dict(json.loads(Path(self.command[self.command.index(flag) + 1]).read_text()))

    def start(self) -> None:
        self.script.started.append(self)
        self.log_dir.mkdir(parents=True, exist_ok=True)
        ours = self.mode not in ("plain", "builtin") and not self.script.falls_back
        lines = [f"model_path='{SECRET_PATH}'", self.script.log, *([READY] if ours else [])]
        if (line := self.script.fails.get(self.mode)) is not None:
            lines.append(line)
        self.log_path.write_text("\n".join(lines) + "\nThe server is fired up\n")
        self.steps = 0
        self.http = ThreadingHTTPServer(("127.0.0.1", self.port), handler(self))
        threading.Thread(target=self.http.serve_forever, args=(0.02,)).start()

    def wait_ready(
        self, timeout: float = 1.0, on_wait: Callable[[float], None] | None = None
    ) -> None:
        if self.mode == self.script.interrupts:
            raise KeyboardInterrupt
        if self.mode in self.script.fails:
            raise ServerError("the server exited with status 1\nand more")

    def stop(self) -> None:
        if self.http is not None:
            self.http.shutdown()
            self.http.server_close()
            self.http = None  # type: ignore[assignment]


def handler(server: StubServer) -> type[BaseHTTPRequestHandler]:
    script = server.script

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            dflash = {"steps_by_width": {"4": server.steps}, "width": "adaptive"}
            ours = server.mode not in ("plain", "builtin")
            state = {
                "effective_max_running_requests_per_dp": 48,
                **({"dflash": dflash} if ours else {}),
            }
            self.reply(
                {
                    "attention_backend": "fa3",
                    "speculative_draft_attention_backend": "fa3",
                    "internal_states": [state],
                }
            )

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path != "/generate":
                self.reply({})
            elif body.get("stream"):
                self.stream(body)
            else:
                first, second = body["token_ids_logprob"]
                listed = [[-1.0, first, None], [-1.0 - script.gap, second, None]]
                meta = {"output_token_ids_logprobs": [listed], "completion_tokens": 1}
                self.reply({"text": "", "output_ids": [first], "meta_info": meta})

        def stream(self, body: Mapping[str, Any]) -> None:
            self.send_response(200)
            self.end_headers()
            output = script.answer(server.mode, body["input_ids"])
            step = 1 if server.mode == "plain" else WIDTH
            ends = [*range(1, len(output), step), len(output)]
            for verifies, end in enumerate(dict.fromkeys(ends)):
                server.steps += bool(verifies)
                time.sleep(0.001)  # or all parts are read together
                meta: dict[str, Any] = {"completion_tokens": end}
                if server.mode != "plain" and verifies:
                    meta["spec_verify_ct"] = verifies
                self.event({"text": "secret answer", "output_ids": output[:end], "meta_info": meta})
            if server.mode not in script.breaks:
                self.wfile.write(b"data: [DONE]\n\n")

        def event(self, payload: Any) -> None:
            self.wfile.write(b"data: " + json.dumps(payload).encode() + b"\n\n")

        def reply(self, payload: Any) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(payload).encode())

        def log_message(self, *_: object) -> None:
            pass

    return Handler


def parts(lengths: Sequence[int]) -> Iterator[tuple[float, int]]:
    """Arrivals one second apart."""
    return ((float(second), tokens) for second, tokens in enumerate(lengths))
