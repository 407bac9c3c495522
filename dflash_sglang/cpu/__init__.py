"""An out-of-tree SGLang platform for machines without an accelerator.

SGLang 0.5.23 serves on a CPU only through kernels that its wheel does not contain. This package
replaces the missing parts in torch, so that the scheduler, the caches and the workers of a GPU
server also run on a laptop. It uses SGLang's platform interface, and hooks where that has no
extension point; no file of SGLang is edited.

* ``attention``: the attention backend, the KV pool and the KV slot look-ups;
* ``matmul``: linear layers and experts;
* ``models``: a leaner forward for Qwen3-MoE verifiers and DFlash drafters;
* ``gated_delta``: the Triton kernels of gated delta net layers (Qwen3.5, Qwen3.6);
* ``ops``: norms, rotary embeddings and experts for every other model.

``activate`` is the entry point in the group ``sglang.srt.platforms``. ``register_choices`` is
called by the plugin. Both run in every process of a server and import neither SGLang nor anything
heavy before they have found that the platform applies.
"""

from dflash_sglang.cpu.activation import activate, register_choices

__all__ = ["activate", "register_choices"]
