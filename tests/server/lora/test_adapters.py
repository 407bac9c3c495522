"""Requests of two LoRA adapters and of none, in one batch: each gets what plain decoding gives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from bench.harness.requests import essence, greedy, send_all
from bench.harness.servers import TestedServer
from dflash_sglang import zoo
from tests.support.adapters import ATTENTION, write_adapter

NEW_TOKENS = 48
PROMPTS = 6
BASE = None
# Two ranks and scales, and one adapter that changes the embedding, which the drafter borrows.
LOADED = {
    "one": (4, 8.0, 1.8, ATTENTION),
    "two": (8, 4.0, 1.2, (*ATTENTION, "embed_tokens")),
}
LATER = "three"
# Flags that change no answer either: adapters copied ahead of their batch, and the drafter's own.
DFLASH_ARGS = (
    *("--enable-lora-overlap-loading", "--max-loaded-loras", "6"),
    *("--speculative-draft-kv-cache-dtype", "fp8_e4m3"),
    *("--speculative-draft-load-format", "safetensors"),
)

Work = list[tuple[str | None, str]]  # adapter and prompt


class Servers(NamedTuple):
    """Plain decoding and DFLASH, with the same adapters; another one to load."""

    plain: TestedServer
    dflash: TestedServer
    later: Path


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    folder, pair = tmp_path_factory.mktemp("lora"), zoo.path("moe")
    paths = [
        f"{name}={write_adapter(folder / name, seed, rank, strength, targets, alpha)}"
        for seed, (name, (rank, alpha, strength, targets)) in enumerate(LOADED.items())
    ]
    later = write_adapter(folder / LATER, seed=7, rank=6, strength=2.0)
    # Room for two adapters and the base: a third evicts one.
    args = ["--lora-paths", *paths, "--max-loras-per-batch", "3"]
    plain = TestedServer(
        pair.verifier, args=[*args, "--disable-overlap-schedule"], log_dir=folder / "plain"
    )
    dflash = TestedServer(
        pair.verifier, pair.drafter, args=[*args, *DFLASH_ARGS], log_dir=folder / "dflash"
    )
    try:
        plain.start()
        dflash.start()
        plain.wait_ready()
        dflash.wait_ready()
        yield Servers(plain, dflash, later)
    finally:
        plain.stop()
        dflash.stop()


def answers(server: TestedServer, work: Work, concurrency: int) -> list[Any]:
    payloads = [
        {**greedy(prompt, NEW_TOKENS), **({"lora_path": adapter} if adapter else {})}
        for adapter, prompt in work
    ]
    return send_all(server, payloads, concurrency)


def mixed(prompts: Sequence[str], adapters: Sequence[str | None]) -> Work:
    """Every prompt with every adapter, neighbours with different ones."""
    return [(adapter, prompt) for prompt in prompts[:PROMPTS] for adapter in adapters]


@pytest.fixture(scope="module")
def work(prompts: list[str]) -> Work:
    return mixed(prompts, [BASE, *LOADED])


@pytest.fixture(scope="module")
def expected(servers: Servers, work: Work) -> list[Any]:
    """Plain decoding, one request at a time."""
    return essence(answers(servers.plain, work, 1))


def test_the_adapters_change_the_text(work: Work, expected: list[Any]) -> None:
    # Else the tests below would pass with adapters ignored, or mixed up.
    texts: dict[str, dict[str | None, str]] = {}
    for (adapter, prompt), answer in zip(work, expected, strict=True):
        texts.setdefault(prompt, {})[adapter] = answer["text"]
    assert all(len(set(by_adapter.values())) == 3 for by_adapter in texts.values())


def test_plain_answers_do_not_depend_on_the_batch(
    servers: Servers, work: Work, expected: list[Any]
) -> None:
    assert essence(answers(servers.plain, work, 12)) == expected


@pytest.mark.parametrize("concurrency", [1, 12])
def test_each_request_of_a_batch_has_its_own_adapter(
    servers: Servers, work: Work, expected: list[Any], concurrency: int
) -> None:
    servers.dflash.flush()
    got = answers(servers.dflash, work, concurrency)
    servers.dflash.check_idle()
    assert essence(got) == expected
    # Drafts were accepted, by FP8 keys and values, and most for the model that the drafter knows.
    tau = {adapter: accept_length(work, got, adapter) for adapter in (BASE, *LOADED)}
    assert tau[BASE] > 4
    assert all(1 <= tau[adapter] < tau[BASE] for adapter in LOADED)
    assert max(tau[adapter] for adapter in LOADED) > 1.1, tau


def accept_length(work: Work, got: list[Any], adapter: str | None) -> float:
    meta = [one["meta_info"] for (name, _), one in zip(work, got, strict=True) if name == adapter]
    tokens = sum(one["completion_tokens"] - 1 for one in meta)
    return float(tokens / sum(one["spec_verify_ct"] for one in meta))


def test_every_step_has_the_width_of_the_block(servers: Servers, work: Work) -> None:
    """With several widths CUDA graphs would read adapters from buffers that were replaced."""
    answers(servers.dflash, work[:3], 3)
    state = servers.dflash.server_info()["internal_states"][0]["dflash"]
    assert state["width"] == "fixed"
    assert {int(width) for width, steps in state["steps_by_width"].items() if steps} == {16}


def test_an_adapter_may_come_and_go(servers: Servers, prompts: list[str]) -> None:
    given = {"lora_name": LATER, "lora_path": str(servers.later)}
    for server in (servers.plain, servers.dflash):
        assert server.post("/load_lora_adapter", given)["success"]
    # Four adapters, the base counted, for three places.
    work = mixed(prompts, [BASE, *LOADED, LATER])
    expected = essence(answers(servers.plain, work, 1))
    assert len({answer["text"] for answer in expected[:4]}) == 4
    for concurrency in (12, 1):
        assert essence(answers(servers.dflash, work, concurrency)) == expected
    servers.dflash.check_idle()


def test_a_name_may_become_another_adapters(
    servers: Servers, work: Work, expected: list[Any]
) -> None:
    """Neither the weights nor the cached prefixes of the first one may be left."""
    name = "changing"
    ones = [answer for (adapter, _), answer in zip(work, expected, strict=True) if adapter == "one"]
    prompts = [prompt for adapter, prompt in work if adapter == BASE]
    for path, is_one in ((servers.later, False), (servers.later.parent / "one", True)):
        given = {"lora_name": name, "lora_path": str(path)}
        assert servers.dflash.post("/load_lora_adapter", given)["success"]
        got = essence(answers(servers.dflash, mixed(prompts, [name]), 4))
        assert (got == ones) == is_one
        assert servers.dflash.post("/unload_lora_adapter", {"lora_name": name})["success"]
    servers.dflash.check_idle()
