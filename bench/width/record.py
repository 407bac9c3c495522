"""Record what the embedded drafter drafts for held-out prompts, as traces for the simulator.

    python -m bench.width record docs/data/accept_traces.json

The drafter drafts blocks of 16 for transformers' own verifier (bench/train/decode.py). FILE gets,
by family and request, the accept length of every step and the drafter's probability of each draft.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from bench import report
from bench.progress import progress
from bench.train.data import chat
from bench.train.decode import load_verifier, speculate
from dflash_sglang import zoo
from dflash_sglang.drafter.reference import load_draft

BLOCK_SIZE = 16
REQUESTS = 30  # of each family
MAX_NEW_TOKENS = 320


def main(argv: Sequence[str] | None = None) -> int:
    """Decode speculatively and write the traces."""
    parser = report.new_parser("bench.width.record", __doc__, result=None)
    parser.add_argument("file", type=Path, metavar="FILE", help="JSON file for the traces")
    given = parser.parse_args(argv)
    pair = zoo.path("moe")
    model, drafter = load_verifier(pair.verifier), load_draft(pair.drafter)
    tokenizer = Tokenizer.from_file(str(pair.verifier / "tokenizer.json"))
    families, confidences = {}, {}
    for name, prompts in progress(zoo.prompts("moe").items(), unit="families"):
        answers = [
            speculate(
                model,
                drafter,
                tokenizer.encode(chat(prompt.question)).ids,
                BLOCK_SIZE,
                MAX_NEW_TOKENS,
            )
            for prompt in prompts[:REQUESTS]
        ]
        families[name] = [one.accept_lens for one in answers]
        confidences[name] = [
            [[round(value, 4) for value in step] for step in one.confidences] for one in answers
        ]
    traces = {
        "pair": "moe",
        "block_size": BLOCK_SIZE,
        "families": families,
        "confidences": confidences,
    }
    given.file.write_text(json.dumps(traces) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
