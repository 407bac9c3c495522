"""`context_kv`: Triton against the reference."""

import pytest
import torch
from dflash_kernels.context_kv import kernel, reference
from dflash_kernels.types import LayerCaches
from torch import Tensor

BF16, FP32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
EPS = 1e-6


class Case:
    """Random projections of `tokens` tokens, and two equal sets of caches, one for each side."""

    def __init__(
        self,
        tokens: int = 7,
        layers: int = 3,
        heads: int = 2,
        head_dim: int = 64,
        rotary_dim: int = 64,
        dtype: torch.dtype = FP32,
        cache_dtype: torch.dtype = FP32,
        scales: Tensor | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(tokens * 1000 + head_dim + rotary_dim)

        def noise(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        self.kv = noise(tokens, layers, 2, heads, head_dim).to(dtype)
        self.norm_weights = 1 + 0.2 * noise(layers, head_dim)
        angles = 6 * torch.rand(100, rotary_dim // 2, generator=generator)
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
        self.positions = torch.randint(0, 100, (tokens,), generator=generator)
        self.slots = torch.randperm(40, generator=generator)[:tokens]

        def caches() -> LayerCaches:
            # Poison where nothing is written.
            shape = (layers, 40, heads, head_dim)
            keys, values = (torch.full(shape, 7.0).to(cache_dtype) for _ in range(2))
            return LayerCaches.of(list(keys), list(values), scales)

        self.ours, self.theirs = caches(), caches()

    def run(self, valid_lens: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Keys and values, ours and then the reference's, as float32."""
        for side, caches in ((kernel, self.ours), (reference, self.theirs)):
            side.context_kv(
                self.kv,
                self.norm_weights,
                self.cos_sin,
                self.positions,
                self.slots,
                caches,
                eps=EPS,
                valid_lens=valid_lens,
            )
        return tuple(
            torch.stack(list(buffers)).float()
            for caches in (self.ours, self.theirs)
            for buffers in (caches.keys, caches.values)
        )

    def compare(self, valid_lens: Tensor | None = None, rtol: float = 2e-6) -> None:
        """Float32 differs by the order of a sum; a rounded dtype by one step, `rtol`."""
        keys, values, expected_keys, expected_values = self.run(valid_lens)
        torch.testing.assert_close(keys, expected_keys, rtol=rtol, atol=2e-6)
        assert torch.equal(values, expected_values)


@pytest.mark.parametrize("tokens", [0, 1, 7, 33])
@pytest.mark.parametrize("heads", [1, 3, 8])
def test_full_rotary(heads: int, tokens: int) -> None:
    Case(tokens, heads=heads).compare()


@pytest.mark.parametrize(
    ("head_dim", "rotary_dim"), [(64, 2), (64, 32), (80, 80), (96, 24), (128, 96), (256, 64)]
)
def test_partial_rotary_and_odd_sizes(head_dim: int, rotary_dim: int) -> None:
    Case(head_dim=head_dim, rotary_dim=rotary_dim).compare()


def test_bfloat16() -> None:
    case = Case(dtype=BF16, cache_dtype=BF16)
    case.norm_weights = case.norm_weights.to(BF16)
    case.cos_sin = case.cos_sin.to(BF16)
    case.compare(rtol=2**-7)  # one step of bfloat16, where the float32 values straddle a tie


def test_fp8_divides_saturates_and_rounds() -> None:
    scales = torch.tensor([[0.5, 0.004], [0.01, 2.0], [1.0, 1.0]])
    case = Case(dtype=BF16, cache_dtype=FP8, scales=scales)
    keys, values, expected_keys, expected_values = case.run()
    assert torch.equal(values, expected_values)
    # Keys differ in float32 by the order of a sum: one step of e4m3, where that straddles a tie.
    torch.testing.assert_close(keys, expected_keys, rtol=2**-3, atol=2**-9)
    assert (keys != expected_keys).float().mean() < 1e-3
    assert values[0].abs().max() == 448  # v_scale 0.004 drives it past the range


def test_fp8_of_every_code_and_between_every_two() -> None:
    """Values, midpoints and their float32 neighbours: torch's own conversion, bit for bit."""
    codes = torch.arange(127, dtype=torch.uint8).view(FP8).float()  # 0 .. 448, ascending
    middle = (codes[1:] + codes[:-1]) / 2
    up = torch.full_like(middle, torch.inf)
    points = torch.cat([codes, middle, middle.nextafter(up), middle.nextafter(-up), 500 * codes])
    points = torch.cat([points, -points])
    case = Case(tokens=11, cache_dtype=FP8)
    case.kv[:, :, 1] = points.repeat(4)[: 11 * 3 * 2 * 64].view(11, 3, 2, 64)
    assert len(points) <= 11 * 3 * 2 * 64
    case.run()
    for ours, theirs in zip(case.ours.values, case.theirs.values, strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


def test_fp8_keeps_nan() -> None:
    # A saturating conversion that hides NaN would hide a broken layer.
    case = Case(tokens=1, cache_dtype=FP8)
    case.kv[0, 0, 1, 0, 3] = torch.nan
    _, values, _, expected = case.run()
    assert values.isnan().sum() == expected.isnan().sum() == 1


def test_negative_slots_are_not_written() -> None:
    case = Case(tokens=9)
    case.slots[[0, 4, 8]] = -1
    # A padded token's position may be anything.
    case.positions[[0, 4, 8]] = 10**15
    case.compare()


def test_only_the_valid_prefix_of_a_block_is_written() -> None:
    Case(tokens=12).compare(torch.tensor([0, 1, 3, 4, 2, 2], dtype=torch.int32)[:3])
    Case(tokens=12).compare(torch.tensor([2, 0, 1, 9], dtype=torch.int32))


def test_tokens_may_lie_apart() -> None:
    # A slice of a wider product, as when the projections are stacked with others.
    case = Case(tokens=5)
    wide = torch.randn(5, 3 * 2 * 2 * 64 + 32)
    case.kv = wide[:, : 3 * 2 * 2 * 64].unflatten(1, (3, 2, 2, 64))
    case.compare()


def test_slots_past_int32() -> None:
    # 2**25 slots of 2 x 64 elements; pages that nobody touches take no memory.
    case = Case(tokens=2, layers=1)
    slots, size = 1 << 25, 1 << 32
    memory = torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage(2 * size))
    keys, values = memory.view(FP8).view(2, slots, 2, 64)
    case.slots = torch.tensor([slots - 1, slots // 2])
    kernel.context_kv(
        case.kv,
        case.norm_weights,
        case.cos_sin,
        case.positions,
        case.slots,
        LayerCaches.of([keys], [values]),
        eps=EPS,
    )
    for slot, token in zip(case.slots.tolist(), case.kv, strict=True):
        assert torch.equal(values[slot].float(), token[0, 1].to(FP8).float())


def test_as_a_custom_op() -> None:
    # The op behind the public function: argument order. `opcheck` would copy the buffers, which
    # the kernel finds by their distances.
    case = Case(tokens=6)
    valid_lens = torch.tensor([2, 3], dtype=torch.int32)
    given = case.kv, case.norm_weights, case.cos_sin, case.positions, case.slots
    arguments = (*given, *case.ours, EPS, valid_lens)
    op = torch.ops.dflash.context_kv.default
    op(*arguments)
    reference.context_kv(*given, case.theirs, eps=EPS, valid_lens=valid_lens)
    for side in ("keys", "values"):
        ours, theirs = (torch.stack(list(getattr(c, side))) for c in (case.ours, case.theirs))
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-6)  # as in `compare`
