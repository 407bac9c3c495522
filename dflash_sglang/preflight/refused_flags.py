"""Server flags that DFLASH does not serve, and every SGLang field the checks at start read.

A flag is here only with evidence from the wheel or from our worker; docs/check.md gives it.
"""

from __future__ import annotations

from typing import NamedTuple

from dflash_sglang.preflight.accept_rule_flags import SPECULATIVE_STEP
from dflash_sglang.preflight.source import Name

# The first resolution step that touches models; everything before it only normalises flags.
START_STEP = "handle_model_source_paths"
_FIELDS = "sglang.srt.arg_groups.fields"


class Flag(NamedTuple):
    """A server flag that is refused with DFLASH unless it has its neutral value."""

    field: str  # of SGLang's ServerArgs, "namespace.Class.name" below arg_groups/fields
    flag: str
    neutral: object
    why: str
    instead: str
    any_worker: bool  # SGLang's own worker cannot serve it either


REFUSED: tuple[Flag, ...] = (
    Flag(
        "parallel.Parallel.pp_size",
        "--pp-size",
        1,
        "DFLASH cannot run over pipeline stages: the taps of all layers are needed in one process",
        "Use --tp-size.",
        any_worker=True,
    ),
    Flag(
        "exec_.ExecOverlap.enable_two_batch_overlap",
        "--enable-two-batch-overlap",
        False,
        "SGLang captures no hidden states while two batches overlap, and the drafter needs them",
        "Leave the flag out.",
        any_worker=False,
    ),
    Flag(
        "disagg.Disagg.enable_pdmux",
        "--enable-pdmux",
        False,
        "prefill multiplexing runs the verifier around the speculative worker, so the drafter "
        "never sees the prompt",
        "Leave the flag out.",
        any_worker=False,
    ),
    Flag(
        "parallel.Parallel.attn_dp_size",
        "--attn-dp-size (or --dp-size with --enable-dp-attention)",
        1,
        "this worker does not draft over data-parallel attention ranks",
        "Use --dp-size for whole replicas, or DFLASH_SGLANG_WORKER=builtin for SGLang's own "
        "worker.",
        any_worker=False,
    ),
    Flag(
        "parallel.Parallel.attn_cp_size",
        "--attn-cp-size",
        1,
        "this worker does not draft over context-parallel ranks",
        "Use --tp-size, or DFLASH_SGLANG_WORKER=builtin for SGLang's own worker.",
        any_worker=False,
    ),
    Flag(
        "parallel.Parallel.dcp_size",
        "--dcp-size",
        1,
        "this worker does not write draft KV over context-parallel decode ranks",
        "Use --tp-size, or DFLASH_SGLANG_WORKER=builtin for SGLang's own worker.",
        any_worker=False,
    ),
    Flag(
        "disagg.Disagg.disaggregation_mode",
        "--disaggregation-mode",
        "null",
        "the decode server would continue with SGLang's draft state, which is not this worker's",
        "Serve prefill and decode in one server, or use DFLASH_SGLANG_WORKER=builtin on both.",
        any_worker=False,
    ),
    Flag(
        "exec_.ExecMamba.enable_linear_replayssm",
        "--enable-linear-replayssm",
        False,
        "it speeds up plain decode steps, of which DFLASH runs none, and keeps committed tokens "
        "out of the states that a verify starts from",
        "Leave the flag out; rollback in the settings file is for speculation.",
        any_worker=False,
    ),
)

# Flags SGLang accepts with DFLASH although nothing reads them for it.
WITHOUT_EFFECT: tuple[Flag, ...] = tuple(
    Flag(f"spec.Spec.{field}", f"--{field.replace('_', '-')}", neutral, "", "", any_worker=True)
    for field, neutral in (
        ("speculative_token_map", None),
        ("speculative_draft_sink_size", None),
        ("enable_multi_layer_eagle", False),
    )
)

_READ_FIELDS = (
    "spec.Spec.speculative_accept_threshold_single",
    "spec.Spec.speculative_accept_threshold_acc",
    "spec.Spec.speculative_use_rejection_sampling",
    "spec.Spec.speculative_use_block_verification",
    "spec.Spec.speculative_adaptive_config",
    "exec_.ExecDeterministic.enable_deterministic_inference",
    "spec.Spec.speculative_algorithm",
    "spec.Spec.speculative_draft_model_path",
    "spec.Spec.speculative_draft_model_revision",
    "spec.Spec.speculative_dflash_block_size",
    "spec.Spec.speculative_num_draft_tokens",
    "spec.Spec.speculative_draft_window_size",
    "model.Model.model_path",
    "model.Model.revision",
    "model.Model.load_format",
    "model.Model.json_model_override_args",
    "parallel.Parallel.tp_size",
)

# What this module takes from SGLang, for the contract table.
START_NAMES: tuple[Name, ...] = (
    Name(
        "sglang.srt.arg_groups.resolution_hooks:register_resolution_hook",
        ("name",),
        "refusals at start",
    ),
    Name(
        f"sglang.srt.arg_groups.model_path_hook:{START_STEP}", ("server_args",), "refusals at start"
    ),
    Name(
        f"sglang.srt.arg_groups.speculative_hook:{SPECULATIVE_STEP}",
        ("server_args",),
        "block verification outside CUDA",
    ),
    Name(
        "sglang.srt.arg_groups.overrides:declare_resolution",
        ("server_args", "source"),
        "block verification outside CUDA",
    ),
    Name(
        "sglang.srt.arg_groups.model_override_base:resolving_view",
        ("server_args",),
        "reading flags",
    ),
    *(
        Name(_FIELDS + "." + field.replace(".", ":", 1), None, "reading flags")
        for field in (*(flag.field for flag in REFUSED + WITHOUT_EFFECT), *_READ_FIELDS)
    ),
)
