"""Linear layers and MoE experts, autotuned when a model is loaded.

Replaces ``F.linear`` in SGLang's unquantised layers, because torch's default library (MKL) is slow
on processors that are not Intel's, and SGLang's fused MoE, which is a Triton or an AMX kernel:
``gemm`` chooses between MKL and oneDNN, ``experts`` has three implementations of the experts,
``autotune`` and ``expert_autotune`` measure which is fastest for how many tokens, and
``linear_methods`` installs ``gemm`` in SGLang's layers.
"""
