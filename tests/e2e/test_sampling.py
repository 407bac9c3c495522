"""Sampling, penalties and seeds: what plain decoding gives, from batches that mix them all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from scipy.stats import chi2_contingency

from dflash_sglang import zoo
from tests.e2e.asking import ask, ask_all, essence, greedy
from tests.e2e.conftest import Reference
from tests.e2e.servers import TestedServer

# Strong enough to change most answers, each alone: SGLang without overlap applies several at once
# in the order of a Python set, so only one at a time has a defined answer.
PENALTIES: tuple[dict[str, Any], ...] = (
    {"frequency_penalty": 1.8},
    {"presence_penalty": 1.9},
    {"repetition_penalty": 1.8},
    {"min_new_tokens": 70},
    {"min_new_tokens": 70, "stop_token_ids": [12, 30]},
    {},
)
SEED_ARGS = ("--enable-deterministic-inference",)
DRAWS, BATCH = 900, 60
HOT = 3.0  # the verifier is sure of itself: below, it hardly branches
REJECT = 1e-6  # a correct sampler is rejected once in a million runs


@pytest.fixture(scope="module")
def plain_sync(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestedServer]:
    """Plain decoding without overlap: with it, SGLang's penalties lag a token behind."""
    folder = tmp_path_factory.mktemp("sync")
    verifier = zoo.path("moe").verifier
    with TestedServer(verifier, args=("--disable-overlap-schedule",), log_dir=folder) as server:
        yield server


def test_penalties_count_along_the_block(
    plain_sync: TestedServer, dflash: TestedServer, reference: Reference
) -> None:
    asked = [
        greedy(prompt, 80, **penalty) for prompt in reference.prompts[:12] for penalty in PENALTIES
    ]
    expected = [essence(ask(plain_sync, payload)) for payload in asked]  # one at a time
    got = [essence(answer) for answer in ask_all(dflash, asked, concurrency=24)]  # all mixed
    assert got == expected
    unpenalised = [answer for answer, payload in zip(expected, asked, strict=True)][5::6]
    changed = [answer != unpenalised[i // 6] for i, answer in enumerate(expected)]
    assert sum(changed) > 12  # else the penalties prove nothing; the verifier is sure of itself


def draws(server: TestedServer, prompt: str, **sampling: object) -> Counter[str]:
    """Texts of many sampled answers to one prompt, drawn in batches."""
    payload = greedy(prompt, 8, n=BATCH, **{"temperature": HOT, **sampling})
    answers = [ask(server, payload) for _ in range(DRAWS // BATCH)]
    return Counter(answer["text"] for batch in answers for answer in batch)


def same_law(left: Counter[str], right: Counter[str]) -> float:
    """p-value of the hypothesis that two samples come from one distribution."""
    texts = [text for text in left | right if left[text] + right[text] >= 20]
    rest = [DRAWS - sum(sample[text] for text in texts) for sample in (left, right)]
    table = [
        [*(left[text] for text in texts), rest[0]],
        [*(right[text] for text in texts), rest[1]],
    ]
    columns = [column for column in zip(*table, strict=True) if sum(column) > 0]
    return float(chi2_contingency(list(zip(*columns, strict=True))).pvalue)


@pytest.mark.parametrize(
    "sampling",
    [{}, {"top_p": 0.95, "top_k": 12}, {"min_p": 0.01}],
    ids=["temperature", "top-p and top-k", "min-p"],
)
def test_sampled_answers_follow_the_verifiers_law(
    plain: TestedServer, dflash: TestedServer, sampling: dict[str, Any]
) -> None:
    # A story branches within its first tokens, and its drafts are often accepted.
    prompt = zoo.prompts("moe")["story"][0].text
    expected = draws(plain, prompt, **sampling)
    got = draws(dflash, prompt, **sampling)
    assert len(expected) > 5
    assert same_law(expected, got) > REJECT
    # The test can tell: another temperature is another law.
    assert same_law(expected, draws(dflash, prompt, **{**sampling, "temperature": 1.0})) < REJECT


@pytest.fixture(scope="module")
def seeded(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[TestedServer, TestedServer]]:
    """Plain and DFLASH with position-keyed seeds."""
    pair, logs = zoo.path("moe"), tmp_path_factory.mktemp("seeded")
    with (
        TestedServer(pair.verifier, args=SEED_ARGS, log_dir=logs / "plain") as plain,
        TestedServer(pair.verifier, pair.drafter, args=SEED_ARGS, log_dir=logs / "dflash") as ours,
    ):
        yield plain, ours


def test_a_seed_gives_the_same_text_with_speculation(
    seeded: tuple[TestedServer, TestedServer], reference: Reference
) -> None:
    plain, ours = seeded
    # One kind of filter a batch: SGLang's sampler hashes over sorted tokens as soon as one request
    # of the batch has a filter, so that with a mixed batch plain decoding differs from itself.
    asked = [
        greedy(prompt, 64, temperature=2.0, sampling_seed=seed)
        for seed, prompt in enumerate(reference.prompts)
    ]
    expected = [essence(ask(plain, payload)) for payload in asked]
    got = [essence(answer) for answer in ask_all(ours, asked, concurrency=16)]
    ours.check_rest()
    assert got == expected
    other = [{**p, "sampling_params": {**p["sampling_params"], "sampling_seed": 77}} for p in asked]
    changed = [essence(answer) for answer in ask_all(plain, other)]
    assert sum(a != b for a, b in zip(changed, expected, strict=True)) > len(asked) / 2


def test_min_p_with_a_seed_is_refused_and_the_server_lives(
    seeded: tuple[TestedServer, TestedServer], reference: Reference
) -> None:
    _, ours = seeded
    sampled = {"temperature": 1.0, "min_p": 0.1, "sampling_seed": 3}
    status, body = ask(ours, greedy(reference.prompts[0], 8, **sampled))
    assert status == 400
    assert "min_p=0.1" in body
    assert essence(ask(ours, greedy(reference.prompts[1], 8)))["completion_tokens"] > 0
