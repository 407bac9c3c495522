"""What the states of recurrent layers take on a GPU, by the two ways to roll them back; computed.

    python -m bench.memory

Prints the bytes of a request slot and how many running requests fit, for Qwen3.6-35B-A3B on one
141 GB GPU with bfloat16 weights. Nothing is measured: docs/recurrent-state.md has the assumptions.
"""

from __future__ import annotations

from typing import NamedTuple

FLOAT32, BFLOAT16 = 4, 2
# A running request owns one state, and two that take turns for the prefix cache.
STATES_A_REQUEST = 3
MAMBA_RATIO = 0.9  # --mamba-full-memory-ratio by default


class Layers(NamedTuple):
    """The recurrent layers of a model."""

    count: int
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    window: int  # inputs that the convolution's state holds

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim

    def recurrence(self) -> int:
        """Bytes of the matrices of one state, float32."""
        return self.count * self.heads * self.key_dim * self.value_dim * FLOAT32

    def state(self) -> int:
        """Bytes of one state, its convolutions' with it."""
        return self.recurrence() + self.count * self.channels * self.window * BFLOAT16

    def windows(self, block_size: int) -> int:
        """Bytes of the convolutions' windows of a block, which overlap: kept either way."""
        return self.count * self.channels * (block_size + self.window - 1) * BFLOAT16

    def snapshots(self, block_size: int) -> int:
        """Bytes that a request slot takes to keep the state after every token of a block."""
        return self.recurrence() * block_size + self.windows(block_size)

    def record(self, block_size: int, length: int) -> int:
        """Bytes that a request slot takes to keep what every token of a block changes.

        Args:
            block_size: tokens of a block.
            length: tokens there is room for, `host.recurrent_flags.record_length`.
        """
        # Updates and keys in two bfloat16 parts each, decays in float32.
        token = 2 * BFLOAT16 * (self.heads * self.value_dim + self.key_heads * self.key_dim)
        return self.count * length * (token + self.heads * FLOAT32) + self.windows(block_size)


class Budget(NamedTuple):
    """Memory of a GPU and what else lives there."""

    memory: float  # bytes
    fraction: float  # of it for weights and pools: --mem-fraction-static
    weights: float  # bytes, of verifier and drafter
    context: int  # tokens of a request
    token: int  # bytes of a token's keys and values, in the attention layers and in the drafter

    def requests(self, layers: Layers, scratch: int) -> int:
        """Running requests that fit beside the weights, with no prefix kept."""
        request = STATES_A_REQUEST * layers.state() + scratch + self.context * self.token
        return int(self.pools() // request)

    def requests_by_default(self, layers: Layers, scratch: int) -> int:
        """Running requests that have a state as SGLang divides what is left beside the weights.

        States and scratch get `MAMBA_RATIO` times what keys and values get; nothing else limits.

        Source: `KVCacheConfigurator._handle_max_mamba_cache` in
            sglang/srt/mem_cache/kv_cache_configurator.py, whose bytes of a snapshot also count
            the convolution's state.
        """
        states = self.pools() * MAMBA_RATIO / (1 + MAMBA_RATIO)
        return int(states // (STATES_A_REQUEST * layers.state() + scratch))

    def pools(self) -> float:
        """Bytes that are left for states, keys and values."""
        return self.memory * self.fraction - self.weights


QWEN36 = Layers(count=30, key_heads=16, heads=32, key_dim=128, value_dim=128, window=3)
# 35.0e9 parameters and a drafter of 0.47e9; 10 attention layers of 2 heads of 256, 8 of 4 of 128.
H200 = Budget(
    memory=141e9,
    fraction=0.88,
    weights=(35.0e9 + 0.47e9) * BFLOAT16,
    context=4096,
    token=2 * BFLOAT16 * (10 * 2 * 256 + 8 * 4 * 128),
)
BLOCK, LENGTH = 16, 16


def main() -> None:
    """Print the table."""
    print(f"one state: {QWEN36.state() / 1e6:.1f} MB; computed, block {BLOCK}, {H200}")
    print("| scheme | MB a request slot | of snapshots | running requests | SGLang's division |")
    print("|---|---|---|---|---|")
    snapshots = QWEN36.snapshots(BLOCK)
    for name, scratch in (("snapshot", snapshots), ("replay", QWEN36.record(BLOCK, LENGTH))):
        print(
            f"| {name} | {scratch / 1e6:.1f} | {scratch / snapshots:.1%} | "
            f"{H200.requests(QWEN36, scratch)} | {H200.requests_by_default(QWEN36, scratch)} |"
        )


if __name__ == "__main__":
    main()
