"""Recurrent layers (gated delta nets) in torch: the parts SGLang has as GPU kernels only.

``delta_rule`` and ``convolution`` hold the mathematics, on the padded blocks of tokens that
``packing`` makes. ``rule_kernels``, ``conv_kernels``, ``replay``, ``states`` and ``layers`` give it
the signatures of the functions it stands in for, which ``hooks`` lists. Nothing here imports SGLang
but ``hooks`` and ``defaults``.
"""
