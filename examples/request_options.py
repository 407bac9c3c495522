"""Compares one request without, with little and with all of speculation: the same answer.

python examples/request_options.py --url http://127.0.0.1:30000
"""

import argparse
import json
import urllib.request
from typing import Any

QUESTION = "Write a SQL query for the color of cars with price below 16, ordered by price."
OPTIONS: tuple[dict[str, Any], ...] = ({"speculative": False}, {"max_width": 4}, {})


def ask(url: str, options: dict[str, Any]) -> dict[str, Any]:
    """The first choice of a chat completion under these options."""
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": 96,
        "return_meta_info": True,
        "custom_params": {"dflash": options},
    }
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), headers
    )
    with urllib.request.urlopen(request) as response:
        choice: dict[str, Any] = json.load(response)["choices"][0]
    return choice


def main() -> None:
    """Prints a line for each choice of options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="of the server")
    url = parser.parse_args().url
    answers = [ask(url, options) for options in OPTIONS]
    for options, answer in zip(OPTIONS, answers, strict=True):
        meta = answer["meta_info"]
        print(
            f"{json.dumps(options):24} {meta['completion_tokens']} tokens in "
            f"{meta.get('spec_verify_ct', 0)} verify steps"
        )
    assert len({answer["message"]["content"] for answer in answers}) == 1, (
        "greedy answers are the same"
    )
    print(answers[0]["message"]["content"])


if __name__ == "__main__":
    main()
