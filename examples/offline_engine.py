"""Generates without a server, through `sglang.Engine`; the embedded pair unless told otherwise.

python examples/offline_engine.py --model-path VERIFIER --speculative-draft-model-path DRAFTER
"""

import argparse
from pathlib import Path
from typing import Any

from dflash_sglang import cpu, zoo


def main() -> None:
    """Prints each answer, and how many tokens a verify step committed on average."""
    pair, prompts = zoo.path("moe"), [prompt.text for prompt in zoo.prompts("moe")["sql"][:2]]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-path", default=pair.verifier, type=Path)
    parser.add_argument("--speculative-draft-model-path", default=pair.drafter, type=Path)
    parser.add_argument("--prompt", default=prompts, nargs="+")
    arguments = parser.parse_args()

    import sglang  # takes seconds

    options: dict[str, Any] = {}
    if cpu.activate() is not None:  # no accelerator: the embedded pair needs little
        options = {"dtype": "float32", "max_total_tokens": 8192, "disable_overlap_schedule": True}
    engine = sglang.Engine(
        model_path=str(arguments.model_path),
        speculative_algorithm="DFLASH",
        speculative_draft_model_path=str(arguments.speculative_draft_model_path),
        **options,
    )
    try:
        for answer in engine.generate(arguments.prompt, {"temperature": 0, "max_new_tokens": 64}):
            meta = answer["meta_info"]
            print(f"{answer['text']}\n  {meta['spec_accept_length']:.1f} tokens a verify step\n")
    finally:
        engine.shutdown()


if __name__ == "__main__":  # the engine starts processes that import this file again
    main()
