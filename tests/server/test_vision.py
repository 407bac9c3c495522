"""A verifier with a vision tower: images change the answer, speculation does not.

A wrong position behind an image, or features of another request's image, would show as another
token: the tower's weights are random, so answers to images follow no habit that would hide it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest
from PIL import Image

from bench.harness.requests import greedy, send_all
from bench.harness.servers import TestedServer, settings
from dflash_sglang import zoo
from launch.client import Answer, Client
from launch.comparison import choose_prompts
from tests.support.vision_pair import (
    END,
    IMAGE,
    START,
    answers_of_transformers,
    data_url,
    picture,
    vision_pair,
)

TOKENS = 64
# Tokens between states that the prefix cache can start from: several in every conversation.
TRACKING = ("--mamba-track-interval", "64", "--enable-cache-report")
QUESTIONS = ("Add 12 and 30.", "Count from 3 to 9.", "What is 7 times 8?")
LARGE = (8, 8)  # tokens across and down; its 64 tokens take 8 positions


class Seen(NamedTuple):
    """A question about pictures."""

    prompt: str
    pictures: tuple[Image.Image, ...]

    def payload(self) -> dict[str, Any]:
        """The request for its answer, past the end of text: random features end anywhere."""
        urls = [data_url(one) for one in self.pictures]
        return {**greedy(self.prompt, TOKENS, ignore_eos=True), "image_data": urls}


def seen(question: str, *pictures: tuple[int, int, int]) -> Seen:
    """A question about pictures, each given as seed, tokens across and tokens down."""
    images = (START + IMAGE + END) * len(pictures)
    prompt = f"<|im_start|>user\n{images}{question}<|im_end|>\n<|im_start|>assistant\n"
    return Seen(prompt, tuple(picture(*one) for one in pictures))


SEEN = (
    seen(QUESTIONS[0], (0, 3, 2)),
    seen(QUESTIONS[0], (1, 3, 2)),  # the same tokens, another picture
    seen(QUESTIONS[1], (0, 3, 2)),
    seen(QUESTIONS[2], (2, *LARGE)),
    seen(QUESTIONS[0], (3, *LARGE)),
    seen(QUESTIONS[1], (0, 3, 2), (3, *LARGE)),
    seen(QUESTIONS[1], (1, 2, 5), (0, 3, 2)),
)


class Turn(NamedTuple):
    """An answer in a conversation."""

    content: str
    cached: int  # tokens of the conversation that were found in the prefix cache
    prompt: int


class Plain(NamedTuple):
    """Plain decoding's answers."""

    pair: zoo.Pair
    prompts: list[str]
    texts: list[tuple[int, ...]]
    images: list[tuple[int, ...]]
    talks: list[list[Turn]]


def converse(server: Client, seed: int) -> list[Turn]:
    """Three turns about one large picture, through the chat route."""
    url = data_url(picture(seed, *LARGE))
    messages: list[dict[str, Any]] = []
    turns = []
    for number, question in enumerate(QUESTIONS):
        content: Any = [{"type": "text", "text": question}]
        if number == 0:
            content.insert(0, {"type": "image_url", "image_url": {"url": url}})
        messages.append({"role": "user", "content": content})
        payload = {"model": "default", "messages": messages, "temperature": 0}
        answer = server.post(
            "/v1/chat/completions", {**payload, "max_tokens": TOKENS, "ignore_eos": True}
        )
        content = answer["choices"][0]["message"]["content"]
        usage = answer["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        turns.append(Turn(content, cached, usage["prompt_tokens"]))
        messages.append({"role": "assistant", "content": content})
    return turns


def outputs(answers: Sequence[Any]) -> list[tuple[int, ...]]:
    return [tuple(answer["output_ids"]) for answer in answers]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Plain:
    folder = tmp_path_factory.mktemp("vision")
    pair = vision_pair(folder)
    prompts = [prompt.text for prompt in choose_prompts("hybrid", 18)]
    with TestedServer(pair.verifier, args=TRACKING, log_dir=folder / "plain") as server:
        texts = outputs(send_all(server, [greedy(prompt) for prompt in prompts]))
        images = outputs(send_all(server, [one.payload() for one in SEEN]))
        server.flush()
        talks = [converse(server, seed) for seed in (0, 1)]
        server.check_idle()
    return Plain(pair, prompts, texts, images, talks)


# Chunks that end inside an image, and stand in one batch with decoding requests.
CHUNKED = ("--page-size", "16", "--chunked-prefill-size", "64", "--enable-mixed-chunk")
RETRACT = "SGLANG_TEST_RETRACT"  # requests start over, every few steps
# Whole blocks, always; and the policy's widths with runs of plain tokens.
SERVERS: dict[str, tuple[str, tuple[str, ...], dict[str, str]]] = {
    "overlap": ("fixed", (), {}),
    "no overlap": (
        "adaptive",
        ("--disable-overlap-schedule", *CHUNKED),
        {RETRACT: "1", f"{RETRACT}_INTERVAL": "5"},
    ),
}


@pytest.fixture(scope="module", params=list(SERVERS))
def server(
    request: pytest.FixtureRequest, plain: Plain, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TestedServer]:
    folder = tmp_path_factory.mktemp("dflash")
    width, args, env = SERVERS[request.param]
    with TestedServer(
        plain.pair.verifier,
        plain.pair.drafter,
        args=[*TRACKING, *args, *settings(folder / "settings.json", width=width)],
        env=env,
        log_dir=folder,
    ) as running:
        yield running


def test_pictures_matter(plain: Plain) -> None:
    """Else nothing below would be of images."""
    assert len(set(plain.images)) == len(plain.images)
    one, other = plain.talks
    assert all(a.content != b.content for a, b in zip(one, other, strict=True))


def test_another_implementation_answers_the_same(plain: Plain) -> None:
    """Of the tower, the places of its features, and the positions in and behind an image."""
    assert answers_of_transformers(plain.pair.verifier, SEEN, TOKENS) == plain.images


def test_texts_are_drafted_for(server: TestedServer, plain: Plain) -> None:
    answers = send_all(server, [greedy(prompt) for prompt in plain.prompts])
    server.check_idle()
    assert outputs(answers) == plain.texts
    assert_drafted_for(answers)


def test_an_image_alone(server: TestedServer, plain: Plain) -> None:
    server.flush()
    answers = [server.post("/generate", one.payload()) for one in SEEN]
    server.check_idle()
    assert outputs(answers) == plain.images
    assert any(answer["meta_info"]["spec_num_correct_drafts"] for answer in answers)


def test_images_together(server: TestedServer, plain: Plain) -> None:
    """Each row's own image; where requests start over, the positions of what they answered."""
    server.flush()
    answers = send_all(server, [one.payload() for one in SEEN])
    server.check_idle()
    assert outputs(answers) == plain.images
    if RETRACT in server.env:
        assert any(answer["meta_info"]["num_retractions"] for answer in answers)


def test_images_beside_texts(server: TestedServer, plain: Plain) -> None:
    """Rows of one verify whose positions count tokens, and such whose positions do not."""
    server.flush()
    payloads = [greedy(prompt) for prompt in plain.prompts]
    places = [3 * place for place in range(len(SEEN))]
    for place, one in zip(places, SEEN, strict=True):
        payloads.insert(place, one.payload())
    answers = send_all(server, payloads)
    server.check_idle()
    images = [answers.pop(place) for place in reversed(places)][::-1]
    assert outputs(images) == plain.images
    assert outputs(answers) == plain.texts
    assert any(answer["meta_info"]["spec_num_correct_drafts"] for answer in images)
    assert_drafted_for(answers)


def test_a_conversation_about_an_image(server: TestedServer, plain: Plain) -> None:
    """Later turns start from what the cache holds of the image, and of answers to it."""
    server.flush()
    talks = [converse(server, seed) for seed in (0, 1)]
    server.check_idle()
    for turns, expected in zip(talks, plain.talks, strict=True):
        assert [turn.content for turn in turns] == [turn.content for turn in expected]
        assert [turn.prompt for turn in turns] == [turn.prompt for turn in expected]
        assert turns[0].cached < LARGE[0] * LARGE[1]  # another picture's tokens are others
        assert turns[2].cached > turns[0].prompt  # a state that the first answer has left
        assert all(a.cached >= b.cached for a, b in zip(turns, expected, strict=True))


def assert_drafted_for(answers: Sequence[Any]) -> None:
    tokens = sum(answer["meta_info"]["completion_tokens"] for answer in answers)
    verifies = sum(Answer.parse(answer).verify_count for answer in answers)
    assert verifies < tokens / 2
