"""Answers prompts with `sglang.Engine`, in a process of its own: reads and writes JSON files.

offline_engine.py MODEL DRAFTER PROMPTS.json ANSWERS.json
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any


def main(model: str, drafter: str, prompts: str, answers: str) -> None:
    """Answer prompts through `sglang.Engine`, synchronously and asynchronously."""
    import sglang

    engine = sglang.Engine(
        model_path=model,
        dtype="float32",
        max_total_tokens=8192,
        mem_fraction_static=0.3,
        max_running_requests=32,
        speculative_algorithm="DFLASH",
        speculative_draft_model_path=drafter,
    )
    texts = json.loads(Path(prompts).read_text())
    params = {"temperature": 0, "max_new_tokens": 96}
    result = {
        "batch": engine.generate(texts, params),
        "streamed": [joined(engine.generate(text, params, stream=True)) for text in texts[:4]],
        "asynchronous": asyncio.get_event_loop().run_until_complete(
            engine.async_generate(texts[:8], params)
        ),
    }
    engine.shutdown()
    Path(answers).write_text(json.dumps(result))


def joined(pieces: Any) -> str:
    """Text of a streamed answer."""
    *_, last = pieces
    text: str = last["text"]
    return text


if __name__ == "__main__":  # the engine spawns its scheduler, which imports this file again
    main(*sys.argv[1:])
