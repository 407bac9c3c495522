"""What is read from logs, models and differences."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bench.gpu.serve import differences, server_log
from bench.gpu.serve.configurations import ADAPTIVE, BASIC, VARIANTS, choose_configurations
from bench.gpu.serve.options import parse
from bench.gpu.serve.pairs import SAMPLING, PairError, is_hybrid, own_pair, read_sampling
from bench.gpu.serve.questions import QUESTIONS
from bench.gpu.serve.streams import Streamed
from dflash_sglang import zoo
from dflash_sglang.config import read_settings
from dflash_sglang.step.setup import op_self_test, width_capture
from launch.client import Answer
from tests.unit.bench.gpu_serve.stub import Script, StubServer

LOG = """\
[2026-01-01 00:00:00] Load weight begin. avail mem=138.50 GB
[2026-01-01 00:00:09] Load weight end. elapsed=8.10 s, type=X, avail mem=71.20 GB, mem usage=67 GB.
[2026-01-01 00:00:20] max_total_num_tokens=9, context_len=8, available_gpu_mem=14.10 GB
[2026-01-01 00:00:30] DFLASH width 8: 0.41 GB and 9.5 s for graphs of 1, 2; 12.50 GB are free.
[2026-01-01 00:00:39] DFLASH width 1: 0.10 GB and 2.5 s; 12.40 GB are free.
[2026-01-01 00:00:40] DFLASH op compiled at start
[2026-01-01 00:00:41] The server is fired up and ready to roll!
[2026-01-01 00:01:00] DFLASH compiled a kernel of op accept_filtered while serving, and requests \
waited 2.10 s: _scan_tile, a new form.
"""


def test_memory_by_stage_and_width() -> None:
    memory = server_log.memory(LOG)
    assert [stage["free_gb"] for stage in memory["stages"]] == [138.5, 71.2, 14.1]
    assert [(one["width"], one["took_gb"]) for one in memory["widths"]] == [(8, 0.41), (1, 0.1)]
    assert memory["before_widths_gb"] == 12.91
    assert memory["free_gb"] == 12.4


def test_the_line_of_a_width_is_the_one_that_is_read() -> None:
    # Its words are in the worker: if they change there, the memory of widths goes missing here.
    source = Path(width_capture.__file__).read_text()
    (form,) = re.findall(r'"(DFLASH width %[^"]*)"', source)
    line = form % (8, 0.41, 9.5, " for graphs of batch sizes 1, 2", 12.5)
    assert server_log.memory(line)["widths"] == [{"width": 8, "took_gb": 0.41, "free_gb": 12.5}]


def test_the_line_of_a_late_compile_is_the_one_that_is_read() -> None:
    source = Path(op_self_test.__file__).read_text()
    (form,) = re.findall(r'"(DFLASH compiled %?[^"]*)"', source)
    line = form % ("accept_match", 0.3, "kernel", "reason")
    assert server_log.compiles_while_serving(f"The server is fired up\n{line}") == [line]
    assert server_log.compiles_while_serving(f"{line}\nThe server is fired up") == []


def test_a_log_without_widths_has_the_memory_of_sglang() -> None:
    memory = server_log.memory(LOG.partition("[2026-01-01 00:00:30]")[0])
    assert (memory["before_widths_gb"], memory["free_gb"]) == (None, 14.1)
    assert server_log.memory("")["free_gb"] is None


def test_only_compiles_after_the_start_are_counted() -> None:
    (line,) = server_log.compiles_while_serving(LOG)
    assert "accept_filtered" in line


# ---- pairs -------------------------------------------------------------------------------------


def test_a_models_own_sampling_is_its_default(tmp_path: Path) -> None:
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"temperature": 0.7, "top_k": 20, "eos_token_id": 2}))
    assert read_sampling(tmp_path) == {"temperature": 0.7, "top_k": 20}
    file.write_text(json.dumps({"eos_token_id": 2}))
    assert read_sampling(tmp_path) == SAMPLING


@pytest.mark.parametrize(
    ("config", "hybrid"),
    [
        ({"layer_types": ["linear_attention", "full_attention"]}, True),
        ({"text_config": {"full_attention_interval": 4}}, True),
        ({"layer_types": ["full_attention", "sliding_attention"]}, False),
        ({}, False),
    ],
)
def test_verifiers_with_recurrent_layers(config: dict[str, object], hybrid: bool) -> None:
    assert is_hybrid(config) is hybrid


def test_questions_are_distinct_and_enough() -> None:
    assert len(set(QUESTIONS)) == len(QUESTIONS) == 96


def own(tmp_path: Path, *arguments: str) -> list[str]:
    verifier, drafter = zoo.path("moe")
    return [str(verifier), str(drafter), *arguments, "--out", str(tmp_path / "out")]


def test_a_model_of_ones_own_has_its_chat_template_and_no_limits_of_ours(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("One?\n\nTwo?\n")
    options = parse(own(tmp_path, "--tp", "2", "--prompts", str(file)), None)
    pair = own_pair(options)
    assert pair.private
    assert pair.args == ("--tp-size", "2")
    assert pair.device.args == ()
    assert len(pair.prompts) == 2
    assert pair.prompts[0] != pair.prompts[1]
    assert pair.facts["verifier"]["num_experts"] == 8
    assert "One?" not in json.dumps(pair.facts)


@pytest.mark.parametrize("place", [0, 1])
def test_a_model_that_is_not_there_is_named_before_a_server_starts(
    tmp_path: Path, place: int
) -> None:
    words = own(tmp_path)
    words[place] = str(tmp_path / "nothing")
    with pytest.raises(PairError, match=f"{('MODEL', 'DRAFTER')[place]} .*no such folder"):
        own_pair(parse(words, None))


# ---- configurations ----------------------------------------------------------------------------


def test_plain_decoding_is_always_measured_first(tmp_path: Path) -> None:
    options = parse(own(tmp_path, "--configurations", "fixed", "draft-triton"), None)
    names = [one.name for one in choose_configurations(own_pair(options), options)]
    assert names == ["plain", "fixed", "draft-triton"]


def test_variants_come_by_flag(tmp_path: Path) -> None:
    options = parse(own(tmp_path), None)
    pair = own_pair(options)
    few = {one.name for one in choose_configurations(pair, options)}
    more = {one.name for one in choose_configurations(pair, options._replace(variants=True))}
    assert ADAPTIVE in few
    assert {"draft-fa3", "page-64", "fp8-kv", "no-overlap"} <= more - few


def test_every_setting_of_a_configuration_exists(tmp_path: Path) -> None:
    # Else its server would stop at start, on a machine that somebody rented for it.
    for number, one in enumerate((*BASIC, *VARIANTS)):
        file = tmp_path / f"{number}.json"
        file.write_text(json.dumps(one.settings or {}))
        read_settings(str(file), lora=False)


def test_narrowing_is_switched_off_only_where_there_is_some(tmp_path: Path) -> None:
    options = parse(own(tmp_path), None)
    pair = own_pair(options)
    assert pair.experts
    names = [
        {one.name for one in choose_configurations(pair._replace(experts=experts), options)}
        for experts in (True, False)
    ]
    assert names[0] - names[1] == {"no-narrowing"}


# ---- differences -------------------------------------------------------------------------------


def answers(*outputs: list[int]) -> list[Streamed]:
    meta = {"completion_tokens": 3}
    return [Streamed(Answer("", tuple(ids), meta), 0.0, ((1.0, 3),)) for ids in outputs]


def test_gaps_are_asked_at_the_first_difference(server: StubServer, script: Script) -> None:
    script.gap = 0.02
    found = differences.compare(
        server, [[7], [8]], [[1, 2, 3], [4, 5, 6]], answers([1, 2, 3], [4, 9, 9])
    )
    assert found == (1, 2, {"prompt": 1, "token": 1, "gap": 0.02}, 0.02)


def test_an_answer_that_ends_early_differs_without_a_gap(server: StubServer) -> None:
    found = differences.compare(server, [[7]], [[1, 2, 3]], answers([1, 2]))
    assert found == (0, 1, {"prompt": 0, "token": 2, "gap": None}, None)


def test_a_server_without_log_probabilities_has_no_gap(
    server: StubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "post", lambda *_: {"meta_info": {}})
    found = differences.compare(server, [[7]], [[1, 2]], answers([1, 3]))
    assert found.first == {"prompt": 0, "token": 1, "gap": None}
