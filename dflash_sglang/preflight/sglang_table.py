"""The table of `sglang_names.py`: names of SGLang that our own import statements do not show.

An entry is a class ("module:Class") or a module ("module:") below the package sglang, what we rely
on it for, and, below that, the members that we rely on. A member has its leading parameters where
their order matters. Where a third column names a class of ours, or a folder of ours with "/", its
functions have the members' names, and the members must have their parameters.
"""

# For the worker.
WORKER = """
# At start.
srt.arg_groups.model_path_hook: | resolution step, wrapped
    handle_model_source_paths(server_args)
srt.arg_groups.attention_hook: | resolution step, wrapped
    handle_linear_attn_backend(server_args)
srt.arg_groups.speculative_hook: | resolution step, wrapped
    handle_speculative_decoding(server_args)
srt.arg_groups.overrides: | flags set at start
    declare_resolution(server_args, source)
srt.arg_groups.fields: | flags read from SGLang's namespaces or set at start
    disable_radix_cache linear_replayssm_cache_len enable_linear_replayssm_spec
    max_mamba_cache_size linear_attn_decode_backend linear_attn_backend enable_unified_memory
srt.environ:Envs | drafters of a shorter context
    SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN
# Hooks.
srt.plugins.hook_registry:HookRegistry | hooks
    register(target, hook, hook_type, source)
srt.speculative.spec_info:SpeculativeAlgorithm | hook: which worker serves
    create_worker(server_args) is_dflash
srt.speculative.dflash_utils: | hook: requests are refused
    validate_dflash_request(req, enable_overlap)
srt.mem_cache.allocation_sizing: | hook: room for two blocks past the context
    get_req_to_token_extra_context_len
srt.managers.schedule_batch:Req | hook: the first stop among accepted tokens
    update_finish_state(new_accepted_len)
srt.layers.sampler: | hook: seeded draws that do not depend on the batch
    top_k_top_p_min_p_sampling_from_probs_torch(probs, top_ks, top_ps, min_ps, need_min_p_sampling,
    sampling_seed, positions, return_filtered_probs)
srt.model_executor.forward_batch_info:ForwardBatch | hook: drafts that read no experts
    moe_num_token_non_padded
srt.managers.scheduler_components.internal_state:SchedulerInternalStateController | hook: counters
    _add_speculative(state)
srt.mem_cache.kv_cache_configurator:KVCacheConfigurator | hook: replay with DFLASH
    _build_hybrid_req_pool(max_num_reqs, extra_max_context_len)
srt.mem_cache.kv_cache_configurator:KVCacheConfigurator | hook: replay where snapshots hold too few
    _handle_max_mamba_cache(total_rest_memory) _calculate_mamba_ratio mambaish_config
    hybrid_gdn_config hybrid_kda_config attn_dp_size
srt.configs.mamba_utils:BaseLinearStateParams | bytes of snapshots and of a record
    mamba_cache_per_req replayssm_ring_bytes_per_req(record_len)
# The worker interface.
srt.speculative.base_spec_worker:BaseSpecWorker | overridden, at start | WorkerBase
    alloc_memory_pool init_attention_backends init_cuda_graphs spec_v2_attn_backends
    weight_update_runners
srt.speculative.base_spec_worker:BaseSpecWorker | overridden, outcomes of a step | DFlashWorker
    on_verify_complete_cpu note_request_finished
srt.speculative.base_spec_worker:BaseSpecWorker | prefill
    _wait_for_fused_hicache_load(batch)
srt.managers.utils:GenerationBatchResult | what a step returns
    accept_lens kv_loc_plan new_seq_lens next_draft_input speculative_num_draft_tokens
srt.managers.schedule_batch:ScheduleBatch | what a step is given
    maybe_evict_swa decoding_reqs mamba_track_indices
# KV slots.
srt.mem_cache.allocation: | slots are reserved
    alloc_for_spec_decode(tree_cache, req_to_token_pool, reqs, req_pool_indices, cur_kv_lens,
    cur_kv_lens_cpu, nxt_kv_lens, nxt_kv_lens_cpu, num_needed_tokens, batch)
srt.mem_cache.kv_loc_plan:KVLocPlan | slot ids of a step
    bind(batch, reader) reads_from write_ids(reader)
srt.mem_cache.kv_index_translator:KVIndexTranslator | slot ids of a step
    plan(req_pool_indices, seq_lens, seq_lens_cpu, write_virtual, read_extent)
    pack_read_stream(plan, req_pool_indices, seq_lens, indptr, out, kv_start_idx)
srt.mem_cache.memory_pool:KVWriteLoc | a block's keys and values
    for_layer(forward_batch, layer)
srt.mem_cache.memory_pool:KVCache | a block's keys and values
    dtype
srt.mem_cache.memory_pool:MHATokenToKVPool | context KV and a block's keys and values
    set_kv_buffer(layer, loc_info, cache_k, cache_v, k_scale, v_scale) get_kv_buffer(layer_id)
    is_quantized_kv_cache
# Widths.
srt.utils: | memory before each width
    get_available_gpu_memory(device, gpu_id, distributed, empty_cache, cpu_group)
srt.model_executor.cuda_graph_config: | batch sizes that are captured
    with_phase(config, phase)
srt.model_executor.runner.decode_cuda_graph_runner:DecodeCudaGraphRunner | graphs of a width
    __init__(model_runner, attn_backend, speculative_num_steps, speculative_num_draft_tokens)
srt.speculative.base_spec_worker:BaseSpecWorker | memory and time of graphs
    _additional_graph_memory_usage _additional_graph_time_usage
srt.layers.attention.flashattention_backend:FlashAttentionBackend | buffers of all widths
    init_cuda_graph_state(max_bs, max_num_tokens) decode_cuda_graph_metadata target_verify_metadata
    draft_extend_metadata
srt.layers.attention.triton_backend:TritonAttnBackend | buffers of all widths
    init_cuda_graph_state(max_bs, max_num_tokens, kv_indices_buf) max_context_len
    cuda_graph_kv_indices
    cuda_graph_window_kv_indices cuda_graph_attn_logits cuda_graph_swa_attn_logits
    cuda_graph_attn_lse _verify_mask
srt.layers.attention.flashinfer_backend:FlashInferAttnBackend | buffers of all widths
    init_cuda_graph_state(max_bs, max_num_tokens, kv_indices_buf) max_context_len
    _create_prefill_wrappers(bs, use_custom_mask) cuda_graph_kv_indices cuda_graph_custom_mask
    prefill_cuda_graph_metadata
srt.layers.attention.hybrid_linear_attn_backend:HybridLinearAttnBackend | buffers of all widths
    full_attn_backend
srt.layers.attention.hybrid_attn_backend:HybridAttnBackend | buffers of all widths
    decode_backend prefill_backend
# Calibration.
srt.mem_cache.memory_pool:ReqToTokenPool | contexts of dummy requests
    req_to_token
srt.mem_cache.kv_index_translator:KVIndexTranslator | contexts of dummy requests
    is_translating
# Drafting.
srt.model_executor.model_runner:ModelRunner | the runners of verifier and drafter
    _get_attention_backend attn_backend capture_tail_hooks kv_index_translator sampler
    spec_aux_config token_to_kv_pool token_to_kv_pool_allocator max_running_requests
    max_total_num_tokens
srt.models.dflash:DFlashAttention | context KV
    apply_k_norm(k) apply_k_rope(positions, k) kv_proj_only(hidden_states)
srt.models.dflash:DFlashDraftModel | context KV and block size
    prepare_context_hidden_for_kv(layer, ctx_hidden) project_target_hidden(target_hidden)
    set_block_size(block_size)
srt.layers.attention.base_attn_backend:AttentionBackend | overridden: attention of blocks
    forward_extend(q, k, v, layer, forward_batch, save_kv_cache) get_cuda_graph_seq_len_fill_value
    init_cuda_graph_state(max_bs, max_num_tokens) init_forward_metadata(forward_batch)
    init_forward_metadata_out_graph(forward_batch, in_capture) kv_index_translator
    needs_cpu_seq_lens
srt.layers.attention.flashinfer_backend:FlashInferAttnBackend | attention of blocks
    use_sliding_window_kv_pool workspace_buffer
srt.layers.radix_attention:RadixAttention | the shape of an attention layer
    attn_type head_dim k_scale k_scale_float layer_id logit_cap scaling sliding_window_size
    tp_k_head_num tp_q_head_num v_scale v_scale_float
# Verification.
srt.managers.tp_worker:TpModelWorker | forward of the verifier
    forward_batch_generation(batch, forward_batch, pp_proxy_tensors, is_verify,
    skip_attn_backend_init, capture_hidden_mode, return_kv_loc_plan)
srt.speculative.dflash_info:DFlashVerifyInput | forward of the verifier
    prepare_for_verify(batch, target_worker)
srt.layers.logprob_processor: | logprobs of committed tokens
    compute_spec_logprobs(batch, logits_output, predict, accept_index, chain_stride)
srt.constrained.base_grammar_backend:GrammarMask | grammars
    apply(logits)
srt.layers.sampler: | custom logit processors
    apply_custom_logit_processor(logits, sampling_batch_info)
srt.layers.sampler:Sampler | drawing the verifier's tokens
    forward(logits_output, sampling_info, return_logprob, top_logprobs_nums, token_ids_logprobs,
    positions)
srt.sampling.sampling_batch_info:SamplingBatchInfo | how the requests of a batch are sampled
    temperatures top_ps top_ks min_ps is_all_greedy is_any_greedy need_top_p_sampling
    need_top_k_sampling need_min_p_sampling sampling_seed logit_bias grammars grammar_mask
    acc_additive_penalties acc_scaling_penalties has_custom_logit_processor custom_logit_processor
    custom_params
srt.speculative.spec_tp_sync:SpecTpSync | one decision for all ranks
    enabled(site) sync(site, values)
# Recurrent layers.
kernels.ops.mamba.mamba_state_scatter_triton: | committing the windows of convolutions
    fused_conv_window_scatter_with_mask(dst, src, dst_indices_raw, step_indices_raw,
    src_indices_raw)
srt.layers.attention.hybrid_linear_attn_backend:HybridLinearAttnBackend | committing states
    update_mamba_state_after_mtp_verify(last_correct_step_indices, mamba_track_indices,
    mamba_steps_to_track, model, req_pool_indices) linear_attn_backend
srt.layers.attention.hybrid_linear_attn_backend:MambaAttnBackendBase | committing a replay
    forward_metadata
srt.mem_cache.memory_pool:HybridReqToTokenPool | committing a replay
    get_speculative_mamba2_params_all_layers
srt.mem_cache.memory_pool:MambaPool | committing a replay
    replayssm_spec_write_pos replayssm_cache_base replayssm_is_flush State.temporal
    enable_linear_replayssm_spec
    State.replayssm_d State.replayssm_k State.replayssm_g State.replayssm_rawv State.replayssm_rawk
"""

# For the CPU platform.
CPU = """
# Extension points of a platform.
srt.platforms.interface:SRTPlatform | overridden | CpuPlatform
    apply_server_args_defaults get_compile_backend get_default_attention_backend
    get_default_speculative_draft_attention_backend get_dispatch_key_name get_kv_pool_cls
    get_speculative_cache_locs_fn get_speculative_worker_cls post_load_model
    support_mamba_cache_extra_buffer supports_speculative_algorithm
    supports_speculative_draft_attention_backend
srt.platforms.device_mixin:DeviceMixin | overridden: the profiler | CpuPlatform
    get_torch_profiler_activity get_torch_profiler_activity_str
srt.platforms.cpu:CpuDeviceMixin | overridden | CpuPlatform
    get_device
srt.layers.attention.base_attn_backend:AttentionBackend | overridden: attention on a CPU
    init_forward_metadata(forward_batch) support_triton needs_cpu_seq_lens forward_extend(q, k, v,
    layer, forward_batch, save_kv_cache) forward_decode(q, k, v, layer, forward_batch,
    save_kv_cache)
kernels.fused_op:BaseFusedOp | op forwards
    register_oot_forward(op_cls, fn, platform_key)
srt.model_executor.forward_batch_info:ForwardBatch | lengths and slots of a forward
    extend_seq_lens seq_lens out_cache_loc
# KV pools.
srt.mem_cache.memory_pool:MHATokenToKVPool | overridden | CpuKVPool
    _create_buffers_normal _init_kv_copy_and_warmup _move_kv_cache_impl _store_kv_layer
srt.mem_cache.memory_pool:MHATokenToKVPool | a pool without Triton
    _kv_buffer_shapes set_kv_buffer(layer, loc_info, cache_k, cache_v, k_scale, v_scale,
    layer_id_override)
srt.mem_cache.memory_pool:HybridLinearKVPool | layers of a hybrid
    full_attention_layer_id_mapping
srt.mem_cache.memory_pool: | moving slots
    move_kv_cache_native(k_buffer, v_buffer, tgt_loc, src_loc)
# Hooks.
srt.mem_cache.allocation: | hook: slots without Triton
    assign_req_to_token_pool_func(req_pool_indices, req_to_token, start_offset, end_offset,
    out_cache_loc, batch_size) get_last_loc(req_to_token, req_pool_indices_tensor,
    prefix_lens_tensor) get_last_loc_torch(req_to_token, req_pool_indices_tensor,
    prefix_lens_tensor)
srt.model_executor.model_runner:ModelRunner | hooks: adapters without pinned memory
    init_lora_manager load_lora_adapter(lora_ref) load_lora_adapter_from_tensors(lora_ref, tensors,
    config_dict)
srt.lora.lora_manager:LoRAManager | hook and refusals: adapters without pinned memory
    prepare_lora_batch(forward_batch) base_model lm_head_module lora_backend target_modules
srt.model_executor.model_runner:ModelRunner | hook: embeddings, deterministic inference
    _extend_forward_kwargs(forward_batch, pp_proxy_tensors) maybe_enable_batch_invariant_mode
srt.model_executor.model_runner_components.weight_updater:WeightUpdater | hook: new weights
    update_weights_from_disk update_weights_from_tensor update_weights_from_ipc
    load_weights_from_distributed
kernels.ops.sampling.murmur_hash: | hook: seeds without Triton
    murmur_hash32(seed, positions, col_indices)
srt.managers.schedule_batch:ScheduleBatch | hook: decoding without pinned memory
    prepare_for_decode
# Hooks in place of Triton kernels of recurrent layers.
kernels.ops.mamba.causal_conv1d_triton: | hook | cpu/gated_delta/
    causal_conv1d_fn causal_conv1d_update
kernels.ops.attention.linear.fused_gdn_gating: | hook | cpu/gated_delta/
    fused_gdn_gating
kernels.ops.attention.linear.fused_sigmoid_gating_recurrent: | hook | cpu/gated_delta/
    fused_sigmoid_gating_delta_rule_update
kernels.ops.attention.fla.chunk: | hook | cpu/gated_delta/
    chunk_gated_delta_rule
kernels.ops.attention.fla.fused_recurrent: | hook | cpu/gated_delta/
    fused_recurrent_gated_delta_rule_packed_decode
kernels.ops.attention.linear.gdn_replayssm_spec_decode: | hook | cpu/gated_delta/
    gdn_replayssm_spec_decode commit_gdn_replayssm_spec commit_gdn_replayssm_circular
kernels.ops.mamba.mamba_state_scatter_triton: | hook | cpu/gated_delta/
    fused_conv_window_scatter_with_mask scatter_mamba_states_after_mtp_verify
    track_mamba_states_all_layers track_mamba_states_if_needed
kernels.ops.attention.triton_gdn_fused_proj: | hook | cpu/gated_delta/
    fused_qkvzba_split_reshape_cat_contiguous
kernels.ops.attention.fla.layernorm_gated:RMSNorm | hook
    forward(x, z)
kernels.ops.elementwise.elementwise: | hook | cpu/gated_delta/
    fused_sigmoid_mul fused_gate_sigmoid_mul fused_gate_sigmoid_mul_add
# Forwards that the fused decoder takes over, and the modules that it reads.
srt.models.qwen2_moe:Qwen2MoeModel | fused decoder
    forward(input_ids, positions, forward_batch, input_embeds, pp_proxy_tensors)
srt.models.qwen3_moe:Qwen3MoeAttention | fused decoder
    forward_prepare(positions, hidden_states, forward_batch)
srt.models.qwen3_moe:Qwen3MoeSparseMoeBlock | fused decoder
    forward_normal(hidden_states)
srt.models.dflash:DFlashDraftModel | fused decoder
    forward(input_ids, positions, forward_batch, input_embeds, get_embedding)
srt.layers.radix_attention:RadixAttention | attention layers
    __init__(num_heads, head_dim, scaling, num_kv_heads, layer_id, logit_cap, v_head_dim,
    sliding_window_size, is_cross_attention)
srt.layers.layernorm:RMSNorm | op forward
    forward_native(x, residual, post_residual_addition)
srt.layers.rotary_embedding.base:RotaryEmbedding | op forward
    forward_native(positions, query, key, offsets, fused_set_kv_buffer_arg)
srt.layers.quantization.unquant:UnquantizedLinearMethod | linear layers
    apply(layer, x, bias)
srt.layers.quantization.unquant:UnquantizedEmbeddingMethod | LM head
    apply(layer, x, bias)
srt.layers.quantization.unquant:UnquantizedFusedMoEMethod | op forward
    forward_cpu(layer, dispatch_output)
srt.layers.logits_processor: | LM head, whose class must not be named as SGLang's unquantised ones
    should_apply_lm_head_quant_method(lm_head, quant_method)
srt.layers.moe.topk: | fused decoder: router
    TopKConfig
srt.layers.moe.moe_runner.base: | fused decoder: experts
    MoeRunnerConfig
srt.speculative.dflash_worker_v2:DFlashWorkerV2 | SGLang's own worker without streams
    forward_batch_generation(batch)
"""
