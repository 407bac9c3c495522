"""Streams an answer through the OpenAI client: DFLASH changes nothing on the client's side.

python examples/openai_client.py --url http://127.0.0.1:30000
"""

import argparse

from openai import OpenAI

QUESTION = "Write a SQL query for the color of cars with price below 16, ordered by price."


def main() -> None:
    """Prints the answer as it comes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="of the server")
    parser.add_argument("--temperature", type=float, default=0.0)
    arguments = parser.parse_args()
    client = OpenAI(base_url=f"{arguments.url}/v1", api_key="none")
    stream = client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": QUESTION}],
        temperature=arguments.temperature,
        max_tokens=96,
        stream=True,
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
