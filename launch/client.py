"""The requests we send to an SGLang server; standard library only."""

import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from http.client import HTTPException, HTTPResponse
from typing import Any, NamedTuple, Self, cast

REQUEST_TIMEOUT_S = 600.0


class RequestError(RuntimeError):
    """The server answered with an HTTP error status."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"HTTP {status}: {body}")
        self.status = status
        self.body = body


class Answer(NamedTuple):
    """One answer of `/generate`."""

    text: str
    output_ids: tuple[int, ...]
    meta: Mapping[str, Any]  # SGLang's meta_info

    @property
    def completion_tokens(self) -> int:
        """Generated tokens; the first one comes from prefill, not from a verify."""
        return int(self.meta["completion_tokens"])

    @property
    def verify_count(self) -> int:
        """Verify steps of this request; SGLang leaves the key out when there were none."""
        return int(self.meta.get("spec_verify_ct", 0))

    @classmethod
    def parse(cls, payload: Mapping[str, Any]) -> Self:
        """Reads one element of a `/generate` response."""
        return cls(payload["text"], tuple(payload["output_ids"]), payload["meta_info"])


class Client:
    """The requests we send to a server, whoever started it."""

    def __init__(self, url: str) -> None:
        self.url = url

    def open(
        self, path: str, payload: object = None, timeout: float = REQUEST_TIMEOUT_S
    ) -> HTTPResponse:
        """Sends one request (GET without a payload, else POST JSON) and returns the raw response.

        Raises:
            RequestError: the server answered with an error status.
            OSError: there is no connection.
        """
        body = None if payload is None else json.dumps(payload).encode()
        request = urllib.request.Request(
            self.url + path, body, {"Content-Type": "application/json"}
        )
        try:
            response = urllib.request.urlopen(request, timeout=timeout)
        except urllib.error.HTTPError as error:
            with error:
                text = error.read().decode(errors="replace")
            raise RequestError(error.code, text) from None
        return cast(HTTPResponse, response)

    def get(self, path: str) -> Any:
        """JSON answer of a GET."""
        with self.open(path) as response:
            return json.load(response)

    def post(self, path: str, payload: object) -> Any:
        """JSON answer of a POST."""
        with self.open(path, payload) as response:
            return json.load(response)

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        **sampling: object,
    ) -> Answer:
        """Completes one prompt, given as text or as token ids; greedy by default."""
        params = {"max_new_tokens": max_new_tokens, "temperature": temperature, **sampling}
        source = {"text": prompt} if isinstance(prompt, str) else {"input_ids": list(prompt)}
        return Answer.parse(self.post("/generate", {**source, "sampling_params": params}))

    def flush(self) -> None:
        """Empties the prefix cache; waits for running requests first."""
        self.open("/flush_cache?timeout=60", {}).close()

    def server_info(self) -> dict[str, Any]:
        """SGLang's resolved arguments and internal states."""
        return cast(dict[str, Any], self.get("/server_info"))

    def healthy(self) -> bool:
        """Whether the server is up and generates; an answer takes SGLang at least a second."""
        try:
            self.open("/health", timeout=30).close()
        except (RequestError, OSError, HTTPException):
            return False
        return True
