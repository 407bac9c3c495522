"""The recipe of the embedded pairs: training blocks, training verifiers, the evaluation loop."""

from pathlib import Path

import pytest
import torch

from bench.train.data import Batch
from bench.train.drafter import ANCHORS, BLOCK_SIZE, cut_blocks, draft_config
from bench.train.fit import Recipe, fit, orthogonalise
from bench.train.verifier.experts import Combine, Dispatch, assign_rows
from dflash_sglang.drafter.checkpoint import load_config, read_headers, tensor_problems
from tests.support.training import pack, tiny_verifier

TAPS = {"moe": (1, 3, 4), "hybrid": (0, 1, 2)}


@pytest.fixture(scope="module", params=TAPS)
def packed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random pair, written as the real ones are."""
    verifier = tiny_verifier(request.param, top_k=4)
    return pack(tmp_path_factory.mktemp("pair"), verifier, TAPS[request.param])


@pytest.mark.parametrize("kind", TAPS)
def test_training_model_is_the_public_architecture(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strictly loaded by transformers, and the same function once products are not rounded."""
    from transformers import AutoModelForCausalLM

    trained = tiny_verifier(kind)
    pack(tmp_path, trained, TAPS[kind])
    loaded, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "verifier", dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), info
    ids = torch.randint(0, 1024, (3, 53), generator=torch.Generator().manual_seed(2))
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(torch.Tensor, "bfloat16", torch.Tensor.float)
        out = trained(ids)
        logits = trained.logits(out.hidden)
        reference = loaded.eval()(input_ids=ids, output_hidden_states=True)
    # float32, in another order of summation.
    torch.testing.assert_close(logits, reference.logits, atol=1e-4, rtol=1e-4)
    for layer, states in enumerate(out.layers[:-1]):  # transformers gives the last after the norm
        torch.testing.assert_close(states, reference.hidden_states[layer + 1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", TAPS)
def test_rounded_products_stay_close(kind: str) -> None:
    """What training computes in bfloat16 (8 bits) is a per cent or two of the spread away."""
    # Every expert takes part: a rounding difference cannot change the choice of experts.
    trained = tiny_verifier(kind, top_k=4)
    ids = torch.randint(0, 1024, (3, 29), generator=torch.Generator().manual_seed(2))
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        rounded = trained(ids)
        patch.setattr(torch.Tensor, "bfloat16", torch.Tensor.float)
        exact = trained(ids)
    for got, expected in zip(rounded.layers, exact.layers, strict=True):
        assert (got - expected).abs().mean() < 0.02 * expected.std()


def test_grouped_experts_equal_a_loop_over_tokens() -> None:
    """Dispatch, spare rows and combination: every token gets its own experts' outputs."""
    layer = next(tiny_verifier().decoder_layers()).experts
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(70, 64, generator=generator).bfloat16()
    probs = torch.randn(70, 4, generator=generator).softmax(-1)
    with torch.no_grad():
        mixed, _ = layer(x, probs)
        for token in range(70):
            weights, chosen = probs[token].topk(2)
            expected = torch.zeros(64)
            for weight, expert in zip(weights / weights.sum(), chosen, strict=True):
                gate, up = (layer.gate_up[expert] @ x[token].float()).chunk(2)
                inner = torch.nn.functional.silu(gate) * up
                expected += weight * (layer.down[expert] @ inner)
            # bfloat16 products and sums of two choices
            torch.testing.assert_close(mixed[token].float(), expected, atol=0.02, rtol=0.05)


def test_expert_gradients_equal_those_of_plain_indexing() -> None:
    """The two hand-written gradients, against autograd on the same index arithmetic."""
    chosen = torch.tensor([[0, 2], [2, 1], [0, 1], [3, 0]])
    rows = assign_rows(chosen, experts=4)
    assert rows.load.tolist() == [3, 2, 2, 1]
    for custom in (True, False):
        x = torch.arange(8.0).view(4, 2).requires_grad_()
        if custom:
            inputs = Dispatch.apply(x, rows.token_of_row, rows.row_of_choice)
            choices = Combine.apply(inputs**2, rows.row_of_choice)
        else:
            inputs = x[rows.token_of_row]
            choices = (inputs**2)[rows.row_of_choice]
        (choices * torch.arange(1.0, 17.0).view(8, 2)).sum().backward()
        if custom:
            ours = x.grad
    torch.testing.assert_close(ours, x.grad, atol=0, rtol=0)


def test_blocks_end_with_the_answer_and_after_the_first_disagreement() -> None:
    length, block = 40, BLOCK_SIZE
    ids = torch.arange(100, 100 + length)[None]
    answer = torch.zeros(1, length, dtype=torch.bool)
    answer[0, 10:30] = True
    agrees = torch.ones(1, length, dtype=torch.bool)
    agrees[0, 20] = False
    batch = Batch(ids, answer, torch.ones_like(answer))
    blocks = cut_blocks(batch, agrees, 3, torch.Generator().manual_seed(0))
    anchors = blocks.positions[:, 0]
    assert sorted(anchors.tolist())[0] >= 10
    assert len(set(anchors.tolist())) == ANCHORS
    assert torch.equal(blocks.ids[:, 0], 100 + anchors)
    assert (blocks.ids[:, 1:] == 3).all()
    for row, anchor in enumerate(anchors.tolist()):
        # The disagreeing token itself is still learnt: what the verifier wants there is known.
        last = 20 if anchor < 20 else 29
        expected = min(last - anchor, block - 1)
        weights = blocks.weights[row]
        assert int((weights > 0).sum()) == expected
        assert (weights[:expected] > 0).all()
        # The verifier's row that predicts draft i is the one before it.
        assert blocks.targets[row, :expected].tolist() == [anchor + i for i in range(expected)]


def test_an_answer_shorter_than_the_anchors_gives_idle_blocks() -> None:
    answer = torch.zeros(1, 24, dtype=torch.bool)
    answer[0, 5:8] = True  # two anchors at most
    batch = Batch(torch.zeros(1, 24, dtype=torch.int64), answer, ~answer)
    agrees = torch.ones_like(answer)
    blocks = cut_blocks(batch, agrees, 3, torch.Generator().manual_seed(0))
    assert int((blocks.weights.sum(1) > 0).sum()) == 2


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [2, 5, 16])
def test_speculative_decoding_equals_plain(packed: Path, block_size: int) -> None:
    """Prompts of different lengths in one padded batch, a drafter that is always wrong."""
    from bench.train.decode import decode_batch, load_verifier, speculate
    from dflash_sglang.drafter.reference import load_draft

    model, drafter = load_verifier(packed / "verifier"), load_draft(packed / "drafter")
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(4, 1024, (n,), generator=generator).tolist() for n in (3, 11, 20)]
    plain = decode_batch(model, prompts, max_new_tokens=24)
    for prompt, expected in zip(prompts, plain, strict=True):
        answer = speculate(model, drafter, prompt, block_size, max_new_tokens=24)
        assert answer.ids == expected
        assert 1 + sum(answer.commit_lens) == len(answer.ids)


@pytest.mark.parametrize("kind", TAPS)
def test_exported_drafter_is_a_plain_head(kind: str, tmp_path: Path) -> None:
    verifier = tiny_verifier(kind)
    drafter = pack(tmp_path, verifier, TAPS[kind]) / "drafter"
    config = load_config(drafter)
    assert config == draft_config(verifier, TAPS[kind])
    assert tensor_problems(config, read_headers(drafter)) == []


def test_rates_follow_the_knots() -> None:
    recipe = Recipe(100, knots=((0, 0.0), (10, 1.0), (50, 1.0), (100, 0.0)))
    assert [recipe.rate(step) for step in (0, 5, 10, 30, 75, 100)] == [0, 0.5, 1, 1, 0.5, 0]


def test_orthogonalised_update_has_singular_values_near_one() -> None:
    matrices = torch.randn(3, 48, 20, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalise(matrices))
    # Five steps of the quintic end between 0.7 and 1.2 by design; bfloat16 adds a little.
    assert values.min() > 0.6
    assert values.max() < 1.3


def test_training_goes_on_exactly_where_it_stopped(tmp_path: Path) -> None:
    inputs = torch.randn(64, 6, generator=torch.Generator().manual_seed(3))

    def train(steps: int, snapshot: Path) -> torch.Tensor:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        recipe = Recipe(steps, knots=((0, 1.0), (20, 1.0)), report_every=5)

        def step_loss(step: int) -> float:
            loss = (model(inputs).squeeze() - inputs[:, step % 6]).square().mean()
            loss.backward()
            value: float = loss.item()
            return value

        fit(model, recipe, step_loss, dict, snapshot)
        return torch.cat([param.detach().flatten() for param in model.parameters()])

    whole = train(20, tmp_path / "whole.pt")
    train(10, tmp_path / "parts.pt")
    torch.testing.assert_close(train(20, tmp_path / "parts.pt"), whole, atol=0, rtol=0)
