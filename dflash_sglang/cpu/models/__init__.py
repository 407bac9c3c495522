"""A leaner forward for Qwen3-MoE verifiers and DFlash drafters.

Replaces the ``forward`` of SGLang's model classes, in which a small model on a CPU spends most of a
step in Python: ``decoder`` is the forward, ``layers`` its norms, rotary embedding and MLP,
``supported`` decides whether SGLang's modules compute the same formulas, ``fusion`` installs the
forward in the models that qualify.
"""
