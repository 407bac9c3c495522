"""Attention over a paged KV cache in torch.

Replaces SGLang's attention backends, whose CPU versions need Intel AMX kernels that the wheel lacks
or know neither a verify nor a draft block: ``attend`` computes, ``backend`` implements SGLang's
``AttentionBackend``, ``kv_pool`` its KV pool without Triton, ``slots`` the KV slot look-ups that
are Triton kernels in SGLang.
"""
