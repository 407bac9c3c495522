"""The drafter's own flags: its KV cache's dtype, its weights' format, its quantisation.

Each value is served or refused, with a reason: the one answer for a start and for
`python -m dflash_sglang.check`. They change drafts, never an answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

_KV_CACHE_DTYPE = "--speculative-draft-kv-cache-dtype"
_LOAD_FORMAT = "--speculative-draft-load-format"
_QUANTIZATION = "--speculative-draft-model-quantization"

# How the context KV is written (`step/setup/layer_stack.py`).
_TOGETHER = "context KV is written in all layers at once"
_ONE_BY_ONE = "context KV is written layer by layer"
_KV_DTYPES = {
    "auto": f"the drafter's own dtype, whatever --kv-cache-dtype is; {_TOGETHER}",
    "bf16": _TOGETHER,
    "bfloat16": _TOGETHER,
    "fp8_e4m3": f"half the memory of bfloat16; {_TOGETHER}",
    "fp8_e5m2": f"half the memory of bfloat16; {_ONE_BY_ONE}, by SGLang's pool",
}
_KV_CACHE_DTYPE_NOTE = "SGLang's fa4 keeps to the drafter's own dtype"

# Loaders that need something of a model class that DFlashDraftModel does not have, or that read
# another kind of file: srt/model_loader/loader.py.
_REFUSED_FORMATS = {
    "bitsandbytes": "its loader needs bitsandbytes_stacked_params_mapping, which SGLang's drafter "
    "class does not define",
    "expert_pack": "it is for two verifiers' experts, and a plain head has none",
    "flash_rl": "its loader takes classes that declare how they reload, and SGLang's drafter class "
    "does not",
    "gguf": "it reads one .gguf file, and a plain head is a folder with a config.json",
    "layered": "its loader needs load_weights_to_module, which SGLang's drafter class does not "
    "define",
}

_SERVED_FORMATS = (
    *("auto", "pt", "safetensors", "instanttensor", "npcache", "dummy", "sharded_state"),
    *("presharded", "mistral", "remote", "remote_instance", "fastsafetensors", "private"),
    "runai_streamer",
)

# Methods that quantise floating-point linear layers while they are loaded.
_ONLINE = ("fp8", "mxfp8", "w8a8_fp8")
# Methods that quantise experts while they are loaded, and nothing else.
_ONLINE_EXPERTS = ("modelopt_fp4", "nvfp4_online")

# By field of SGLang's ServerArgs: the flag, and its values where we have an answer for each. Any
# other quantisation is refused.
DRAFT_FLAGS: dict[str, tuple[str, tuple[str, ...] | None]] = {
    "speculative_draft_kv_cache_dtype": (_KV_CACHE_DTYPE, tuple(_KV_DTYPES)),
    "speculative_draft_load_format": (_LOAD_FORMAT, (*_SERVED_FORMATS, *_REFUSED_FORMATS)),
    "speculative_draft_model_quantization": (_QUANTIZATION, None),
}


class DraftFlag(NamedTuple):
    """What a value of one of the drafter's flags means for a plain head."""

    flag: str
    given: str
    served: bool
    reason: str

    def __str__(self) -> str:
        return f"{self.flag} (given: {self.given}): {self.reason}"


def draft_flags(flags: Any) -> Iterator[DraftFlag]:
    """Every flag of the drafter that has a value, its own or the verifier's.

    Args:
        flags: a view with SGLang's flags as attributes, resolved or not.
    """
    on_cpu = flags.device == "cpu"  # without --device known in the scheduler, which checks again
    dtype = flags.speculative_draft_kv_cache_dtype
    if dtype is not None:
        if on_cpu and dtype == "fp8_e5m2":
            yield DraftFlag(
                _KV_CACHE_DTYPE, dtype, False, "SGLang refuses it on a CPU. Give fp8_e4m3."
            )
        else:
            reason = _KV_DTYPES[dtype]
            if not on_cpu and dtype != "auto":
                reason = f"{reason}; {_KV_CACHE_DTYPE_NOTE}"
            yield DraftFlag(_KV_CACHE_DTYPE, dtype, True, reason)
    yield from _load_format(flags)
    yield from _quantization(flags, on_cpu=on_cpu)


def draft_flag_problems(flags: Any) -> Iterator[str]:
    """What a plain head is not served with, a sentence each; argument as in `draft_flags`."""
    yield from (str(found) for found in draft_flags(flags) if not found.served)


def has_draft_weights(flags: Any) -> bool:
    """Whether the drafter's weights are read at all; argument as in `draft_flags`."""
    return _effective_format(flags) != "dummy"


def _effective_format(flags: Any) -> str:
    given: str | None = flags.speculative_draft_load_format
    return str(flags.load_format) if given is None else given


def _load_format(flags: Any) -> Iterator[DraftFlag]:
    own: str | None = flags.speculative_draft_load_format
    effective = _effective_format(flags)
    given = effective if own is not None else f"{effective}, from --load-format"
    why = _REFUSED_FORMATS.get(effective)
    if why is not None:
        yield DraftFlag(_LOAD_FORMAT, given, False, f"{why}. Give auto.")
    elif own == "dummy":
        reason = "random weights: next to no draft is accepted; the verifier's are by --load-format"
        yield DraftFlag(_LOAD_FORMAT, given, True, reason)
    elif own is not None:
        reason = "the drafter is loaded so, the verifier by --load-format"
        yield DraftFlag(_LOAD_FORMAT, given, True, reason)


def _quantization(flags: Any, *, on_cpu: bool) -> Iterator[DraftFlag]:
    own: str | None = flags.speculative_draft_model_quantization
    # Not resolved yet: then SGLang gives the drafter the verifier's.
    inherits = own is None and flags._speculative_draft_quantization_explicitly_set is None
    method: str | None = flags.quantization if inherits else own
    if method is None or (method == "unquant" and inherits):
        return
    given = f"{method}, from --quantization" if inherits else method
    if method == "unquant":
        answer = (True, f"weights as they are stored; {_TOGETHER}")
    elif on_cpu:
        answer = (False, "its layers are kernels that a CPU has not. Give unquant.")
    elif method in _ONLINE:
        answer = (True, f"quantised while loading; {_ONE_BY_ONE}, and drafts may get worse")
    elif method in _ONLINE_EXPERTS:
        answer = (True, f"quantises experts, of which a plain head has none; {_TOGETHER}")
    else:
        answer = (
            False,
            "it needs a quantised checkpoint, and a plain head is none. Give unquant to keep the "
            f"drafter as it is stored, or one of {', '.join(_ONLINE)}.",
        )
    yield DraftFlag(_QUANTIZATION, given, *answer)
