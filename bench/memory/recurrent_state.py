"""Bytes of the states of recurrent layers, by the two ways to roll them back, and what fits."""

from typing import NamedTuple

FLOAT32, BFLOAT16 = 4, 2
# A running request owns one state, and two that the prefix cache takes in turns.
STATES_A_REQUEST = 3
MAMBA_RATIO = 0.9  # --mamba-full-memory-ratio by default
# What SGLang counts for it, with overlap and states kept in the middle of requests: two more, of
# prefixes.
SLOTS_A_REQUEST = 5
ASKED = 48  # running requests, SGLang's default with DFLASH


class Layers(NamedTuple):
    """The recurrent layers of a model."""

    num_layers: int
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    window: int  # inputs that the convolution's state holds

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim

    def recurrence(self) -> int:
        """Bytes of the matrices of one state, float32."""
        return self.num_layers * self.heads * self.key_dim * self.value_dim * FLOAT32

    def state(self) -> int:
        """Bytes of one state, including the convolutions' part."""
        return self.recurrence() + self.num_layers * self.channels * self.window * BFLOAT16

    def windows(self, block_size: int) -> int:
        """Bytes of the convolutions' overlapping windows of a block, which both ways keep."""
        return self.num_layers * self.channels * (block_size + self.window - 1) * BFLOAT16

    def snapshots(self, block_size: int) -> int:
        """Bytes a request slot to keep the state after every token of a block."""
        return self.recurrence() * block_size + self.windows(block_size)

    def record(self, block_size: int, length: int) -> int:
        """Bytes a request slot to keep the state update of every token of a block, for replay.

        Args:
            block_size: tokens of a block.
            length: tokens that the record holds, as the preflight's `record_length` sets it.
        """
        # Updates and keys in two bfloat16 parts each, decays in float32.
        token = 2 * BFLOAT16 * (self.heads * self.value_dim + self.key_heads * self.key_dim)
        return self.num_layers * length * (token + self.heads * FLOAT32) + self.windows(block_size)


class Budget(NamedTuple):
    """Memory of a GPU and its other uses."""

    memory: float  # bytes
    fraction: float  # of it for weights and pools: --mem-fraction-static
    weights: float  # bytes, of verifier and drafter
    context: int  # tokens of a request
    token: int  # bytes of a token's keys and values, in the attention layers and in the drafter

    def requests(self, layers: Layers, scratch: int) -> int:
        """Running requests that fit beside the weights, with no prefix kept."""
        request = STATES_A_REQUEST * layers.state() + scratch + self.context * self.token
        return int(self.pools() // request)

    def requests_by_default(
        self, layers: Layers, block_size: int, record_length: int = 0, asked: int = ASKED
    ) -> int:
        """Running requests that have states as SGLang divides what is left beside the weights.

        States and what rolls them back get `MAMBA_RATIO` times what keys and values get; nothing
        else limits.

        Args:
            layers: the model's.
            block_size: tokens of a block.
            record_length: tokens that the record of a replay holds; 0 for snapshots.
            asked: running requests, for which records are set aside.

        Source: `KVCacheConfigurator._handle_max_mamba_cache` in
            sglang/srt/mem_cache/kv_cache_configurator.py. Its bytes of a snapshot count the
            convolution's state, and those of a record leave the windows out. One slot more of each
            is padding.
        """
        budget, state = self.pools() * MAMBA_RATIO / (1 + MAMBA_RATIO), layers.state()
        if record_length:
            record = layers.record(block_size, record_length) - layers.windows(block_size)
            slots = (budget - (asked + 1) * record - state) // state
        else:
            padding = state * (1 + block_size)
            slots = (budget - padding) // (state * (1 + block_size / SLOTS_A_REQUEST))
        return int(slots // SLOTS_A_REQUEST)

    def pools(self) -> float:
        """Bytes that are left for states, keys and values."""
        return self.memory * self.fraction - self.weights


QWEN36 = Layers(num_layers=30, key_heads=16, heads=32, key_dim=128, value_dim=128, window=3)
# 35.0e9 parameters and a drafter of 0.47e9; 10 attention layers of 2 heads of 256, 8 of 4 of 128.
H200 = Budget(
    memory=141e9,
    fraction=0.88,
    weights=(35.0e9 + 0.47e9) * BFLOAT16,
    context=4096,
    token=2 * BFLOAT16 * (10 * 2 * 256 + 8 * 4 * 128),
)
BLOCK, LENGTH = 16, 16  # tokens of a block, and of the replay record
