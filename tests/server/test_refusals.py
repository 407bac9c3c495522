"""What the worker cannot serve exactly is refused with the reason, and disturbs nobody."""

from __future__ import annotations

from bench.harness.requests import ask, greedy
from bench.harness.servers import TestedServer
from tests.server.conftest import Reference
from tests.server.disturbing import others_running


def test_a_refusal_names_the_parameter_and_the_way_out(
    dflash: TestedServer, reference: Reference
) -> None:
    # The other parameters that the worker refuses, SGLang refuses first unless a flag allows them.
    with others_running(dflash, reference):
        refused = {**greedy(reference.prompts[0]), "return_sampling_mask": True}
        status, body = ask(dflash, refused)
    assert status == 400
    assert "return_sampling_mask" in body
    assert "without --speculative-algorithm DFLASH" in body
