"""What recurrent layers take from SGLang, for the contract table: on the host and on a CPU."""

from __future__ import annotations

from dflash_sglang.preflight.source import Name

_S = "sglang.srt"
_LINEAR = "sglang.kernels.ops.attention.linear"
_CONV = "sglang.kernels.ops.mamba.causal_conv1d_triton"
_STATES = "sglang.kernels.ops.mamba.mamba_state_scatter_triton"
_RING = f"{_LINEAR}.gdn_replayssm_spec_decode"
_POOL = f"{_S}.mem_cache.memory_pool:MambaPool"
_BACKEND = f"{_S}.layers.attention.hybrid_linear_attn_backend"

# Called with these keywords by step/recurrent_state.py, and replaced by cpu/gated_delta/replay.py.
_COMMIT_CURSORS = Name(
    f"{_RING}:commit_gdn_replayssm_spec",
    (
        "write_pos",
        "cache_base",
        "is_flush",
        "num_accepted",
        "replay_indices",
        "max_cache_len",
        "max_spec_len",
        "fold_every_commit",
        "cache_buf_len",
        "null_block_id",
    ),
    "committing a replay",
)
_COMMIT_STATES = Name(
    f"{_RING}:commit_gdn_replayssm_circular",
    (
        "checkpoint_state",
        "d_cache",
        "k_cache",
        "g_cache",
        "d_residual_cache",
        "k_residual_cache",
        "state_batch_indices",
        "replay_indices",
        "write_pos",
        "cache_base",
        "is_flush",
        "accept_lens",
        "mamba_track_indices",
        "mamba_steps_to_track",
        "null_block_id",
    ),
    "committing a replay",
)
_SCATTER_WINDOWS = Name(
    f"{_STATES}:fused_conv_window_scatter_with_mask",
    ("dst", "src", "dst_indices_raw", "step_indices_raw", "src_indices_raw"),
    "committing the convolutions' windows",
)

RECURRENT_NAMES: tuple[Name, ...] = (
    _COMMIT_CURSORS,
    _COMMIT_STATES,
    _SCATTER_WINDOWS,
    Name(f"{_S}.configs.hybrid_arch:mambaish_config", ("model_config",), "recurrent layers"),
    Name(f"{_S}.configs.hybrid_arch:hybrid_gdn_config", ("model_config",), "recurrent layers"),
    Name(
        f"{_S}.speculative.spec_utils:_verify_commit_step_indices",
        ("batch", "accept_index", "accept_lens", "draft_token_num"),
        "tokens whose states are committed or tracked",
    ),
    Name(
        f"{_BACKEND}:HybridLinearAttnBackend.update_mamba_state_after_mtp_verify",
        (
            "last_correct_step_indices",
            "mamba_track_indices",
            "mamba_steps_to_track",
            "model",
            "req_pool_indices",
        ),
        "committing snapshots",
    ),
    Name(f"{_BACKEND}:HybridLinearAttnBackend.linear_attn_backend", None, "committing a replay"),
    Name(f"{_BACKEND}:MambaAttnBackendBase.forward_metadata", None, "committing a replay"),
    Name(
        f"{_S}.mem_cache.memory_pool:HybridReqToTokenPool.get_speculative_mamba2_params_all_layers",
        (),
        "committing a replay",
    ),
    *(
        Name(f"{_POOL}.{field}", None, "committing a replay")
        for field in (
            "replayssm_spec_write_pos",
            "replayssm_cache_base",
            "replayssm_is_flush",
            "State.temporal",
            "State.replayssm_d",
            "State.replayssm_k",
            "State.replayssm_g",
            "State.replayssm_rawv",
            "State.replayssm_rawk",
        )
    ),
    Name(f"{_S}.runtime_context:mamba_track_grid", ("tree_page",), "where a run of tokens ends"),
    Name(
        f"{_S}.managers.schedule_batch:ScheduleBatch.mamba_track_indices",
        None,
        "slots for the states of the prefix cache",
    ),
    # Whether the prefix cache takes over the state of a finished request.
    Name(f"{_S}.runtime_context:get_memory", (), "where a run of tokens ends"),
    *(
        Name(f"{_S}.arg_groups.fields.{field}", None, "where a run of tokens ends")
        for field in (
            "exec_:ExecMamba.enable_mamba_extra_buffer",
            "memory:Memory.disable_radix_cache",
        )
    ),
    # At start.
    Name(
        f"{_S}.mem_cache.kv_cache_configurator:KVCacheConfigurator._build_hybrid_req_pool",
        ("max_num_reqs", "extra_max_context_len"),
        "lifting the refusal of replay with DFLASH (AROUND)",
    ),
    Name(
        f"{_S}.arg_groups.attention_hook:handle_linear_attn_backend",
        ("server_args",),
        "choosing replay or snapshots",
    ),
    Name(
        f"{_S}.arg_groups.model_override_base:model_config_of",
        ("server_args",),
        "choosing replay or snapshots",
    ),
    *(
        Name(f"{_S}.arg_groups.fields.{field}", None, "choosing replay or snapshots")
        for field in (
            "exec_:ExecMamba.enable_linear_replayssm_spec",
            "exec_:ExecMamba.linear_replayssm_cache_len",
            "memory:Memory.enable_unified_memory",
        )
    ),
)

CPU_RECURRENT_NAMES: tuple[Name, ...] = (
    _COMMIT_CURSORS,
    _COMMIT_STATES,
    _SCATTER_WINDOWS,
    Name(
        f"{_S}.platforms.interface:SRTPlatform.support_mamba_cache_extra_buffer",
        (),
        "states for the prefix cache",
    ),
    Name(f"{_S}.layers.radix_linear_attention:RadixLinearAttention", None, "recurrent layers"),
    Name(
        f"{_S}.mem_cache.memory_pool:HybridLinearKVPool.full_attention_layer_id_mapping",
        None,
        "attention layers between recurrent ones",
    ),
    Name(
        f"{_S}.mem_cache.memory_pool:MHATokenToKVPool.set_kv_buffer",
        ("layer", "loc_info", "cache_k", "cache_v", "k_scale", "v_scale", "layer_id_override"),
        "attention layers between recurrent ones",
    ),
    Name(f"{_S}.configs.hybrid_arch:hybrid_gdn_config", ("model_config",), "size of the pools"),
    Name(
        f"{_S}.managers.schedule_batch:ScheduleBatch.prepare_for_decode",
        (),
        "plain decoding without pinned memory (AROUND)",
    ),
    # Triton kernels (REPLACE).
    Name(
        f"{_CONV}:causal_conv1d_fn",
        (
            "x",
            "weight",
            "bias",
            "conv_states",
            "query_start_loc",
            "seq_lens_cpu",
            "cache_indices",
            "has_initial_state",
            "activation",
        ),
        "convolution: prefill",
    ),
    Name(
        f"{_CONV}:causal_conv1d_update",
        (
            "x",
            "conv_state",
            "weight",
            "bias",
            "activation",
            "cache_seqlens",
            "conv_state_indices",
            "num_accept_tokens",
            "intermediate_conv_window",
            "intermediate_state_indices",
        ),
        "convolution: decode and verify",
    ),
    Name(
        f"{_LINEAR}.fused_gdn_gating:fused_gdn_gating",
        ("A_log", "a", "b", "dt_bias", "beta", "threshold"),
        "gates",
    ),
    Name(
        "sglang.kernels.ops.attention.fla.chunk:chunk_gated_delta_rule",
        (
            "q",
            "k",
            "v",
            "g",
            "beta",
            "scale",
            "initial_state",
            "initial_state_indices",
            "cu_seqlens",
            "head_first",
            "use_qk_l2norm_in_kernel",
            "inplace_update",
        ),
        "recurrence: prefill",
    ),
    Name(
        "sglang.kernels.ops.attention.fla.fused_recurrent"
        ":fused_recurrent_gated_delta_rule_packed_decode",
        (
            "mixed_qkv",
            "a",
            "b",
            "A_log",
            "dt_bias",
            "scale",
            "initial_state",
            "out",
            "ssm_state_indices",
            "use_qk_l2norm_in_kernel",
        ),
        "recurrence: decode",
    ),
    Name(
        f"{_LINEAR}.fused_sigmoid_gating_recurrent:fused_sigmoid_gating_delta_rule_update",
        (
            "A_log",
            "a",
            "dt_bias",
            "softplus_beta",
            "softplus_threshold",
            "q",
            "k",
            "v",
            "b",
            "initial_state_source",
            "initial_state_indices",
            "scale",
            "use_qk_l2norm_in_kernel",
            "cu_seqlens",
            "is_kda",
            "lower_bound",
            "disable_state_update",
            "intermediate_states_buffer",
            "intermediate_state_indices",
        ),
        "recurrence: verify with snapshots",
    ),
    Name(
        f"{_RING}:gdn_replayssm_spec_decode",
        (
            "q",
            "k",
            "v",
            "a",
            "b",
            "A_log",
            "dt_bias",
            "checkpoint_state",
            "d_cache",
            "k_cache",
            "g_cache",
            "rawv_cache",
            "rawk_cache",
            "beta_cache",
            "out",
            "query_start_loc",
            "ssm_state_indices",
            "replay_indices",
        ),
        "recurrence: verify with a record",
    ),
    Name(
        f"{_STATES}:scatter_mamba_states_after_mtp_verify",
        (
            "mamba_caches",
            "state_indices_tensor",
            "last_correct_step_indices",
            "mamba_track_indices",
            "mamba_steps_to_track",
            "src_indices_raw",
        ),
        "committing snapshots",
    ),
    Name(
        f"{_STATES}:track_mamba_states_all_layers",
        (
            "conv_states_pool",
            "ssm_states_pool",
            "cache_indices",
            "mamba_track_mask",
            "mamba_track_indices",
            "batch_size",
            "check_freed_slots",
        ),
        "states for the prefix cache",
    ),
    Name(
        f"{_STATES}:track_mamba_states_if_needed",
        (
            "conv_states",
            "ssm_states",
            "cache_indices",
            "mamba_track_mask",
            "mamba_track_indices",
            "batch_size",
            "check_freed_slots",
        ),
        "states for the prefix cache",
    ),
    Name(
        "sglang.kernels.ops.attention.triton_gdn_fused_proj"
        ":fused_qkvzba_split_reshape_cat_contiguous",
        ("mixed_qkvz", "mixed_ba", "num_heads_qk", "num_heads_v", "head_qk", "head_v"),
        "projections",
    ),
    Name("sglang.kernels.ops.attention.fla.layernorm_gated:RMSNorm.forward", ("x", "z"), "norm"),
    Name(
        "sglang.kernels.ops.elementwise.elementwise:fused_sigmoid_mul",
        ("attn_output", "gate", "inplace", "quant"),
        "gate of the attention layers",
    ),
    Name(
        "sglang.kernels.ops.elementwise.elementwise:fused_gate_sigmoid_mul",
        ("hidden_states", "gate_weight", "shared_output"),
        "shared expert",
    ),
    Name(
        "sglang.kernels.ops.elementwise.elementwise:fused_gate_sigmoid_mul_add",
        ("hidden_states", "gate_weight", "shared_output", "final_hidden_states"),
        "shared expert",
    ),
)
