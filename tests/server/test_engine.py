"""`sglang.Engine`, offline: no server, the same answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from bench.harness.scripts import PLUGIN_FOLDER
from bench.harness.servers import STRICT, TestedServer
from dflash_sglang import zoo
from tests.support.reference import Reference

SCRIPT = PLUGIN_FOLDER / "offline_engine.py"


def test_the_engine_answers_as_the_plain_server(reference: Reference, tmp_path: Path) -> None:
    pair = zoo.path("moe")
    prompts, answers = tmp_path / "prompts.json", tmp_path / "answers.json"
    prompts.write_text(json.dumps(reference.prompts))
    log = tmp_path / "engine.log"
    with log.open("wb") as output:
        TestedServer.starts += 1
        done = subprocess.run(
            [sys.executable, SCRIPT, pair.verifier, pair.drafter, prompts, answers],
            cwd=tmp_path,
            env={**os.environ, **STRICT, "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=600,
        )
    assert done.returncode == 0, log.read_text()[-3000:]
    result = json.loads(answers.read_text())
    expected = [answer.output_ids for answer in reference.answers]
    assert [tuple(answer["output_ids"]) for answer in result["batch"]] == expected
    assert [tuple(answer["output_ids"]) for answer in result["asynchronous"]] == expected[:8]
    assert result["streamed"] == [answer.text for answer in reference.answers[:4]]
    assert all(answer["meta_info"]["spec_verify_ct"] > 0 for answer in result["batch"])
