"""Recurrent layers (gated delta nets) in torch: the parts SGLang has as GPU kernels only.

``delta_rule`` and ``convolution`` hold the mathematics, on padded blocks of tokens. ``kernels``,
``replay``, ``states`` and ``layers`` give them the signatures of the functions they stand in for,
which ``hooks`` lists. Nothing here imports SGLang but ``hooks``.
"""
