"""Record what the embedded pair drafts for its held-out prompts, for the width simulator.

    python bench/width/record.py docs/data/accept_traces.json

The drafter drafts blocks of 16 on transformers' own verifier (`pair_decode.py`); of every step, by
family and request, the accept length and the drafter's probability of each draft are written.
"""

import json
import sys
from pathlib import Path

from tokenizers import Tokenizer
from tqdm import tqdm

from bench.train import decode as pair_decode
from bench.train.data import chat
from dflash_sglang import zoo
from dflash_sglang.drafter.reference import load_draft

BLOCK_SIZE = 16
REQUESTS = 30  # of each family
MAX_NEW_TOKENS = 320


def main() -> None:
    """Decode speculatively and write what came of it."""
    pair = zoo.path("moe")
    model, drafter = pair_decode.load_verifier(pair.verifier), load_draft(pair.drafter)
    tokenizer = Tokenizer.from_file(str(pair.verifier / "tokenizer.json"))
    families, confidences = {}, {}
    for name, prompts in tqdm(zoo.prompts("moe").items(), unit=" families"):
        asked = [tokenizer.encode(chat(prompt.question)).ids for prompt in prompts[:REQUESTS]]
        done = [
            pair_decode.speculate(model, drafter, ids, BLOCK_SIZE, MAX_NEW_TOKENS) for ids in asked
        ]
        families[name] = [one.accept_lens for one in done]
        confidences[name] = [
            [[round(value, 4) for value in step] for step in one.confidences] for one in done
        ]
    result = {"pair": "moe", "block_size": BLOCK_SIZE, "families": families}
    result["confidences"] = confidences
    Path(sys.argv[1]).write_text(json.dumps(result) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
