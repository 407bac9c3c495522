"""How tokens see each other: attention, or a gated delta net. Both are compiled for training."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.train.verifier.delta_rule import gated_delta_rule
from bench.train.verifier.shape import DeltaShape, VerifierShape, weight


class Attention(nn.Module):
    """Grouped-query attention with normed queries and keys; Qwen3's, or Qwen3.5's with a gate."""

    def __init__(self, shape: VerifierShape) -> None:
        super().__init__()
        self.shape = shape
        hidden, kv = shape.hidden_size, shape.num_kv_heads * shape.head_dim
        q = shape.num_heads * shape.head_dim
        # With a gate, a head's rows are those of its query, then those of its gate.
        self.q_proj = weight(2 * q if shape.output_gate else q, hidden)
        self.k_proj = weight(kv, hidden)
        self.v_proj = weight(kv, hidden)
        self.o_proj = weight(hidden, q)
        self.q_norm = nn.Parameter(torch.ones(shape.head_dim) - shape.norm_offset)
        self.k_norm = nn.Parameter(torch.ones(shape.head_dim) - shape.norm_offset)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[rows, length, hidden] -> same in bf16; tables [length, 1, rotary_dim]."""
        s = self.shape
        rows, length, _ = x.shape
        heads, groups = s.num_kv_heads, s.num_heads // s.num_kv_heads
        qkv_weight = torch.cat([self.q_proj, self.k_proj, self.v_proj]).bfloat16()
        qkv = F.linear(x.bfloat16(), qkv_weight).view(rows, length, -1, s.head_dim)
        q, k, v = qkv.split((qkv.shape[2] - 2 * heads, heads, heads), dim=2)
        q, *gate = q.reshape(rows, length, s.num_heads, -1).split(s.head_dim, dim=-1)
        q = rotate(norm(q.float(), self.q_norm, s), cos, sin) * s.head_dim**-0.5
        k = rotate(norm(k.float(), self.k_norm, s), cos, sin)
        # One product per key head: its query heads lie one after another.
        q = q.bfloat16().view(rows, length, heads, groups, s.head_dim).permute(0, 2, 3, 1, 4)
        q = q.reshape(rows * heads, groups * length, s.head_dim)
        k = k.bfloat16().transpose(1, 2).reshape(rows * heads, length, s.head_dim)
        v = v.transpose(1, 2).reshape(rows * heads, length, s.head_dim)
        scores = torch.bmm(q, k.mT).view(-1, groups, length, length).float()
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        probs = scores.masked_fill(future, float("-inf")).softmax(-1).bfloat16()
        out = torch.bmm(probs.view(rows * heads, -1, length), v).view(
            rows, heads, groups, length, s.head_dim
        )
        out = out.permute(0, 3, 1, 2, 4).reshape(rows, length, -1)
        if gate:
            out = out * gate[0].reshape(rows, length, -1).sigmoid()
        return F.linear(out, self.o_proj.bfloat16())


class DeltaNet(nn.Module):
    """Qwen3.5's gated delta net: short convolution, gated delta rule, gated norm."""

    def __init__(self, shape: VerifierShape, sizes: DeltaShape) -> None:
        super().__init__()
        self.shape, self.sizes = shape, sizes
        hidden, heads = shape.hidden_size, sizes.num_value_heads
        channels = 2 * sizes.key_size + sizes.value_size
        self.qkv = weight(channels, hidden)
        self.z = weight(sizes.value_size, hidden)
        self.out = weight(hidden, sizes.value_size)
        self.beta_gate = weight(heads, hidden)
        self.decay_gate = weight(heads, hidden)
        self.conv = nn.Parameter(torch.randn(channels, sizes.conv_kernel) * 0.3)
        self.log_rate = nn.Parameter(torch.zeros(heads))
        # At first the heads lose from a 500th to a half of their state at a token.
        self.decay_bias = nn.Parameter(torch.logspace(-2.7, -0.15, heads).expm1().log())
        self.norm = nn.Parameter(torch.ones(sizes.value_dim))  # stored as it is, without the offset

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[rows, length, hidden] -> same in bf16; positions are not used."""
        d = self.sizes
        rows, length, _ = x.shape
        mixed = F.linear(x.bfloat16(), self.qkv.bfloat16()).float()
        padded = F.pad(mixed, (0, 0, d.conv_kernel - 1, 0))
        taps = [padded[:, i : i + length] * self.conv[:, i] for i in range(d.conv_kernel)]
        mixed = F.silu(sum(taps[1:], start=taps[0]))
        q, k, v = mixed.split((d.key_size, d.key_size, d.value_size), dim=-1)
        group = d.num_value_heads // d.num_key_heads
        q, k = (
            unit(part.reshape(rows, length, -1, d.key_dim)).repeat_interleave(group, dim=2)
            for part in (q, k)
        )
        out = gated_delta_rule(
            q * d.key_dim**-0.5,
            k,
            v.reshape(rows, length, -1, d.value_dim),
            -self.log_rate.exp() * F.softplus(F.linear(x, self.decay_gate) + self.decay_bias),
            F.linear(x, self.beta_gate).sigmoid(),
        )
        out = F.rms_norm(out, (d.value_dim,), self.norm, self.shape.rms_norm_eps)
        z = F.linear(x.bfloat16(), self.z.bfloat16()).float()
        gated = out.reshape(rows, length, -1) * F.silu(z)
        return F.linear(gated.bfloat16(), self.out.bfloat16())


def norm(x: Tensor, scale: Tensor, shape: VerifierShape) -> Tensor:
    """Root-mean-square norm over the last dimension."""
    return F.rms_norm(x, x.shape[-1:], scale + shape.norm_offset, shape.rms_norm_eps)


def unit(x: Tensor) -> Tensor:
    """Vectors of norm 1 over the last dimension; the constant is that of the public model."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def rotary_tables(positions: int, dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's angles, each [positions, dim] float32."""
    frequency = theta ** (-torch.arange(0, dim, 2).float() / dim)
    angle = torch.outer(torch.arange(positions).float(), frequency).repeat(1, 2)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of the leading dimensions of x [rows, length, heads, dim].

    The tables are [length, 1, rotary_dim].
    """
    dim = cos.shape[-1]
    if dim < x.shape[-1]:
        return torch.cat([rotate(x[..., :dim], cos, sin), x[..., dim:]], dim=-1)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
