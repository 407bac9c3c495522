"""Gated delta net layers in torch.

Replaces the Triton kernels of such layers (Qwen3.5, Qwen3.6): a wheel without ``sgl_kernel`` for
CPUs has no other implementation. ``delta_rule`` and ``convolution`` hold the mathematics, on the
padded blocks of tokens that ``kernel_args`` makes. ``rule_kernels``, ``conv_kernels``, ``replay``,
``state_copy`` and ``elementwise`` have the signatures of SGLang's kernels and replace them through
the table in ``hooks``. Only ``hooks`` imports SGLang.
"""
