"""A server that answers like SGLang's `/generate`, with canned answers."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from launch.client import Client


class Canned(NamedTuple):
    """What the stub answers to one prompt."""

    output_ids: list[int]
    verify_count: int = 0


class Stub(NamedTuple):
    """A running stub and what it saw."""

    client: Client
    requests: list[tuple[str, Any]]  # path and JSON body, in order of arrival
    most_in_flight: Callable[[], int]


@contextmanager
def serve(answer: Callable[[str], Canned | None]) -> Iterator[Stub]:
    """Serves `answer(prompt)`; None is answered with status 400."""
    requests: list[tuple[str, Any]] = []
    lock = threading.Lock()
    in_flight = [0, 0]  # now, at most

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                requests.append((self.path, body))
                in_flight[0] += 1
                in_flight[1] = max(in_flight)
            status, payload = self.reply(body)
            with lock:
                in_flight[0] -= 1
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(payload).encode())

        def reply(self, body: Any) -> tuple[int, Any]:
            if self.path != "/generate":
                return 200, {}
            canned = answer(body["text"])
            if canned is None:
                return 400, {"error": "refused"}
            meta = {"completion_tokens": len(canned.output_ids)}
            if canned.verify_count:
                meta["spec_verify_ct"] = canned.verify_count
            return 200, {"text": "", "output_ids": canned.output_ids, "meta_info": meta}

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield Stub(Client(f"http://127.0.0.1:{server.server_port}"), requests, lambda: in_flight[1])
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
