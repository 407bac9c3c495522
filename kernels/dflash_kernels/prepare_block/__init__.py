"""Lay out the next draft block of every request: token ids, positions and KV slots."""

from dflash_kernels.prepare_block.reference import Block, prepare_block

__all__ = ["Block", "prepare_block"]
