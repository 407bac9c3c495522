"""Record accept lengths of the embedded pair on its held-out prompts, for the width simulator.

    python bench/width_record.py docs/data/accept_traces.json

The drafter drafts blocks of 16 on transformers' own verifier (`pair_decode.py`); every step's
accept length is written, by family and request.
"""

import json
import sys
from pathlib import Path

import pair_decode
from pair_data import chat
from tokenizers import Tokenizer
from tqdm import tqdm

from dflash_sglang import zoo
from dflash_sglang.model.reference import load_draft

BLOCK_SIZE = 16
REQUESTS = 30  # of each family
MAX_NEW_TOKENS = 320


def main() -> None:
    """Decode speculatively and write the accept lengths."""
    pair = zoo.path("moe")
    model, drafter = pair_decode.load_verifier(pair.verifier), load_draft(pair.drafter)
    tokenizer = Tokenizer.from_file(str(pair.verifier / "tokenizer.json"))
    families = {}
    for name, prompts in tqdm(zoo.prompts("moe").items(), unit=" families"):
        asked = [tokenizer.encode(chat(prompt.question)).ids for prompt in prompts[:REQUESTS]]
        families[name] = [
            pair_decode.speculate(model, drafter, ids, BLOCK_SIZE, MAX_NEW_TOKENS).accept_lens
            for ids in asked
        ]
    result = {"pair": "moe", "block_size": BLOCK_SIZE, "families": families}
    Path(sys.argv[1]).write_text(json.dumps(result) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
