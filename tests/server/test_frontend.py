"""SGLang frontend programs through `RuntimeEndpoint`: the same state as with the plain server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sglang as sgl
from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint

from bench.harness.servers import TestedServer
from dflash_sglang import zoo

Run = Callable[[Callable[[RuntimeEndpoint], Any]], Any]


@pytest.fixture
def run(plain: TestedServer, dflash: TestedServer) -> Run:
    """Runs a program on both servers, asserts the same result and returns it."""

    def on_both(program: Callable[[RuntimeEndpoint], Any]) -> Any:
        expected, got = (program(endpoint(server)) for server in (plain, dflash))
        assert got == expected
        return got

    return on_both


def endpoint(server: TestedServer) -> RuntimeEndpoint:
    # The pair's own markers are ChatML's without a system turn.
    return RuntimeEndpoint(server.url, chat_template_name="chatml")


def question(family: str, place: int = 0) -> str:
    return zoo.prompts("moe")[family][place].text


@sgl.function  # type: ignore[untyped-decorator]
def answer(s: Any, prompt: str) -> None:
    s += prompt
    s += sgl.gen("answer", max_tokens=64, temperature=0)


@sgl.function  # type: ignore[untyped-decorator]
def two_answers(s: Any, first: str, second: str) -> None:
    s += first
    s += sgl.gen("one", max_tokens=64, temperature=0)
    s += "<|im_end|>\n" + second
    s += sgl.gen("two", max_tokens=64, temperature=0, stop="\n")


@sgl.function  # type: ignore[untyped-decorator]
def choose(s: Any, prompt: str) -> None:
    s += prompt
    s += "The answer is "
    s += sgl.select("choice", choices=["a number", "a story", "Python code", "SQL"])
    s += ": "
    s += sgl.gen("answer", max_tokens=24, temperature=0)


@sgl.function  # type: ignore[untyped-decorator]
def branches(s: Any, prompt: str) -> None:
    s += prompt
    forks = s.fork(4)
    for place, fork in enumerate(forks):
        fork += f"Step {place + 1}:"
        fork += sgl.gen("step", max_tokens=20 + place, temperature=0)
    forks.join()
    s += "".join(fork["step"] for fork in forks)
    s += "\nAnswer:"
    s += sgl.gen("answer", max_tokens=16, temperature=0)


@sgl.function  # type: ignore[untyped-decorator]
def constrained(s: Any, prompt: str) -> None:
    s += prompt
    s += sgl.gen(
        "sum", max_tokens=24, temperature=0, regex=r"[0-9]{1,3} \+ [0-9]{1,3} = [0-9]{1,4}"
    )
    s += " "
    s += sgl.gen("number", max_tokens=8, temperature=0, dtype=int)


@sgl.function  # type: ignore[untyped-decorator]
def chat(s: Any, words: str) -> None:
    s += sgl.user(words)
    s += sgl.assistant(sgl.gen("answer", max_tokens=64, temperature=0))


def test_gen(run: Run) -> None:
    state = run(lambda backend: answer.run(question("word"), backend=backend)["answer"])
    assert state.startswith("Step 1")


def test_gen_twice_on_one_state(run: Run) -> None:
    def program(backend: RuntimeEndpoint) -> tuple[str, str, str]:
        state = two_answers.run(question("add"), question("sql"), backend=backend)
        return state["one"], state["two"], state.text()

    one, two, _ = run(program)
    assert one
    assert two


@pytest.mark.parametrize("family", ["add", "code", "sql", "story"])
def test_select(run: Run, family: str) -> None:
    def program(backend: RuntimeEndpoint) -> tuple[str, str]:
        state = choose.run(question(family), backend=backend)
        return state["choice"], state["answer"]

    choice, _ = run(program)
    assert choice in ("a number", "a story", "Python code", "SQL")


def test_fork_and_join(run: Run) -> None:
    text = run(lambda backend: branches.run(question("word", 1), backend=backend).text())
    assert "\nAnswer:" in text


def test_regex_and_dtype(run: Run) -> None:
    def program(backend: RuntimeEndpoint) -> tuple[str, str]:
        state = constrained.run(question("add", 1), backend=backend)
        return state["sum"], state["number"]

    total, number = run(program)
    assert "+" in total
    int(number)


def test_chat_roles(run: Run) -> None:
    words = zoo.prompts("moe")["code"][0].question
    assert run(lambda backend: chat.run(words, backend=backend)["answer"])


def test_run_batch(run: Run) -> None:
    arguments = [{"prompt": question("sort", place)} for place in range(16)]

    def program(backend: RuntimeEndpoint) -> list[str]:
        states = answer.run_batch(arguments, backend=backend, num_threads=8, progress_bar=False)
        return [state["answer"] for state in states]

    assert len(set(run(program))) > 8


def test_a_streamed_program(run: Run) -> None:
    def program(backend: RuntimeEndpoint) -> tuple[str, str]:
        state = answer.run(question("json"), backend=backend, stream=True)
        streamed = "".join(state.text_iter("answer"))
        return streamed, state["answer"]

    streamed, whole = run(program)
    assert streamed == whole
    assert len(whole) > 20
