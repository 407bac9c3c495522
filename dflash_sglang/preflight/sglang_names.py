"""Every SGLang name this package relies on, with the parameters it relies on.

The table is checked when the plugin registers. When an entry does not match, SGLang is left as it
is: its own worker serves, and one line says so.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable

from dflash_sglang.preflight.recurrent_names import CPU_RECURRENT_NAMES, RECURRENT_NAMES
from dflash_sglang.preflight.refused_flags import START_NAMES
from dflash_sglang.preflight.source import Mismatch, Name, problem

SGLANG_VERSION = "0.5.23"

# The worker: what host/ subclasses, calls, reads or hooks. `_S` shortens the common root.
_S = "sglang.srt"
_UPDATER = f"{_S}.model_executor.model_runner_components.weight_updater"
HOST_NAMES: tuple[Name, ...] = (
    *START_NAMES,
    *RECURRENT_NAMES,
    # Hooks.
    Name(
        f"{_S}.plugins.hook_registry:HookRegistry.register",
        ("target", "hook", "hook_type", "source"),
        "hooks",
    ),
    Name(f"{_S}.plugins.hook_registry:HookRegistry.apply_hooks", (), "hooks"),
    Name(f"{_S}.plugins.hook_registry:HookRegistry._patched", None, "proof that a hook was set"),
    Name(f"{_S}.plugins.hook_registry:HookSource", None, "hooks"),
    Name(f"{_S}.plugins.hook_registry:HookType", None, "hooks"),
    Name(
        f"{_S}.speculative.spec_info:SpeculativeAlgorithm.create_worker",
        ("server_args",),
        "the seam (AROUND)",
    ),
    Name(f"{_S}.speculative.spec_info:SpeculativeAlgorithm.is_dflash", (), "the seam"),
    Name(
        f"{_S}.speculative.dflash_utils:validate_dflash_request",
        ("req", "enable_overlap"),
        "refusing requests (AROUND)",
    ),
    Name(
        f"{_S}.mem_cache.allocation_sizing:get_req_to_token_extra_context_len",
        (),
        "room for two blocks past the context (AFTER)",
    ),
    Name(
        f"{_S}.managers.schedule_batch:Req.update_finish_state",
        ("new_accepted_len",),
        "the first stop of an accepted run (AROUND)",
    ),
    Name(
        f"{_S}.layers.sampler:top_k_top_p_min_p_sampling_from_probs_torch",
        (
            "probs",
            "top_ks",
            "top_ps",
            "min_ps",
            "need_min_p_sampling",
            "sampling_seed",
            "positions",
            "return_filtered_probs",
        ),
        "seeded draws that do not depend on the batch (AROUND)",
    ),
    Name(
        f"{_S}.layers.sampler:sampling_from_probs_torch",
        ("probs", "sampling_seed", "positions"),
        "seeded draws that do not depend on the batch",
    ),
    Name(
        f"{_S}.sampling.sampling_params:TOP_K_ALL", None, "seeded draws, whether a request filters"
    ),
    Name(
        f"{_S}.layers.sampler:apply_custom_logit_processor",
        ("logits", "sampling_batch_info"),
        "custom logit processors",
    ),
    Name(
        f"{_S}.managers.scheduler_components.internal_state:SchedulerInternalStateController"
        "._add_speculative",
        ("state",),
        "our settings in /get_server_info (AROUND)",
    ),
    Name(
        f"{_S}.environ:Envs.SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN",
        None,
        "drafters with a shorter context than the verifier's",
    ),
    Name(f"{_S}.environ:envs", None, "drafters with a shorter context than the verifier's"),
    # Several verify widths.
    Name(
        f"{_S}.speculative.base_spec_worker:BaseSpecWorker.on_verify_complete_cpu",
        ("num_correct_drafts_per_req", "batch_size"),
        "overridden",
    ),
    Name(
        f"{_S}.speculative.base_spec_worker:BaseSpecWorker.note_request_finished",
        ("rid", "natural_stop"),
        "overridden",
    ),
    Name(
        f"{_S}.model_executor.model_runner:ModelRunner._get_attention_backend",
        None,
        "a backend for each width",
    ),
    Name(f"{_S}.model_executor.runner:DecodeCudaGraphRunner", None, "graphs for each width"),
    Name(f"{_S}.runtime_context:get_context", (), "the width a backend is built for"),
    Name(f"{_S}.configs.model_config:ModelConfig", None, "the drafter's range"),
    # Configuration and process state.
    Name(f"{_S}.runtime_context:get_exec", (), "graph backend"),
    Name(f"{_S}.runtime_context:get_parallel", (), "tensor-parallel group"),
    Name(f"{_S}.runtime_context:get_schedule", (), "page size, running requests"),
    Name(f"{_S}.runtime_context:get_spec", (), "block size, draft path, draft window"),
    Name(f"{_S}.platforms:current_platform", None, "graph capture"),
    Name(f"{_S}.server_args:ServerArgs", None, "constructor argument"),
    Name(
        f"{_S}.speculative.dflash_utils:parse_dflash_draft_config",
        ("draft_hf_config",),
        "mask token",
    ),
    # The worker interface.
    Name(f"{_S}.speculative.base_spec_worker:BaseSpecWorker", (), "base class"),
    Name(
        f"{_S}.speculative.base_spec_worker:BaseSpecWorker.alloc_memory_pool",
        ("memory_pool_config", "req_to_token_pool", "token_to_kv_pool_allocator"),
        "overridden",
    ),
    Name(
        f"{_S}.speculative.base_spec_worker:BaseSpecWorker.init_attention_backends",
        (),
        "overridden",
    ),
    Name(f"{_S}.speculative.base_spec_worker:BaseSpecWorker.init_cuda_graphs", (), "overridden"),
    Name(
        f"{_S}.speculative.base_spec_worker:BaseSpecWorker.spec_v2_attn_backends", (), "overridden"
    ),
    Name(
        f"{_S}.speculative.base_spec_worker:BaseSpecWorker.weight_update_runners", (), "overridden"
    ),
    Name(
        f"{_S}.speculative.base_spec_worker:BaseSpecWorker._wait_for_fused_hicache_load",
        ("batch",),
        "prefill",
    ),
    Name(f"{_S}.speculative.spec_info:SpecInput", ("spec_input_type",), "state between steps"),
    Name(f"{_S}.speculative.spec_info:SpecInputType.DFLASH_DRAFT", None, "state between steps"),
    Name(
        f"{_S}.managers.overlap_utils:RelayPayload.from_draft_input",
        ("draft_input",),
        "state under overlap",
    ),
    Name(f"{_S}.managers.utils:GenerationBatchResult", None, "what a step returns"),
    Name(f"{_S}.managers.utils:GenerationBatchResult.accept_lens", None, "what a step returns"),
    Name(f"{_S}.managers.utils:GenerationBatchResult.kv_loc_plan", None, "prefill slots"),
    Name(f"{_S}.managers.utils:GenerationBatchResult.new_seq_lens", None, "what a step returns"),
    Name(
        f"{_S}.managers.utils:GenerationBatchResult.next_draft_input", None, "what a step returns"
    ),
    Name(
        f"{_S}.managers.utils:GenerationBatchResult.speculative_num_draft_tokens",
        None,
        "row stride of a step",
    ),
    Name(f"{_S}.managers.schedule_batch:ScheduleBatch", None, "what a step is given"),
    Name(f"{_S}.managers.schedule_batch:ScheduleBatch.maybe_evict_swa", (), "reserving slots"),
    Name(f"{_S}.managers.schedule_batch:Req", None, "requests"),
    Name(
        f"{_S}.managers.schedule_batch:ScheduleBatch.decoding_reqs",
        None,
        "decode rows of a mixed batch",
    ),
    # Slots.
    Name(
        f"{_S}.mem_cache.allocation:alloc_for_spec_decode",
        (
            "tree_cache",
            "req_to_token_pool",
            "reqs",
            "req_pool_indices",
            "cur_kv_lens",
            "cur_kv_lens_cpu",
            "nxt_kv_lens",
            "nxt_kv_lens_cpu",
            "num_needed_tokens",
            "batch",
        ),
        "reserving slots",
    ),
    Name(f"{_S}.mem_cache.allocation_sizing:get_alloc_page_size", (), "reserving slots"),
    Name(f"{_S}.mem_cache.allocation_sizing:get_alloc_reserve_per_decode", (), "reserving slots"),
    Name(
        f"{_S}.mem_cache.allocation_sizing:page_aligned_decode_alloc_lens",
        ("reqs", "reserve", "page_size"),
        "reserving slots",
    ),
    Name(f"{_S}.mem_cache.kv_loc_plan:KVLocPlan.bind", ("batch", "reader"), "slot ids of a step"),
    Name(
        f"{_S}.mem_cache.kv_loc_plan:KVLocPlan.reads_from", None, "slot ids of a windowed drafter"
    ),
    Name(f"{_S}.mem_cache.kv_loc_plan:KVLocPlan.write_ids", ("reader",), "slot ids of a step"),
    Name(
        f"{_S}.mem_cache.kv_index_translator:KVIndexTranslator.plan",
        ("req_pool_indices", "seq_lens", "seq_lens_cpu", "write_virtual", "read_extent"),
        "slot ids of a step",
    ),
    Name(f"{_S}.mem_cache.memory_pool:KVWriteLoc", None, "context KV"),
    Name(
        f"{_S}.mem_cache.memory_pool:MHATokenToKVPool.set_kv_buffer",
        ("layer", "loc_info", "cache_k", "cache_v", "k_scale", "v_scale"),
        "context KV",
    ),
    Name(f"{_S}.mem_cache.memory_pool:MHATokenToKVPool.is_quantized_kv_cache", None, "context KV"),
    Name(f"{_S}.speculative.dflash_utils:can_dflash_slice_qkv_weight", ("qkv_proj",), "context KV"),
    Name(f"{_S}.mem_cache.memory_pool:ReqToTokenPool", None, "request-to-slot table"),
    # Drafting.
    Name(f"{_S}.configs.draft_parallel:DraftParallelLayout", None, "draft placement"),
    Name(
        f"{_S}.speculative.draft_parallel:model_draft_parallel_spec",
        ("model_config", "spec_algorithm"),
        "draft placement",
    ),
    Name(
        f"{_S}.speculative.draft_parallel:resolve_draft_parallel_layout",
        ("model_spec", "collapse_cp"),
        "draft placement",
    ),
    Name(f"{_S}.speculative.spec_utils:draft_pp_context", (), "draft placement"),
    Name(f"{_S}.speculative.spec_utils:draft_tp_context", ("layout",), "draft placement"),
    Name(
        f"{_S}.speculative.draft_worker_common:build_draft_tp_worker",
        ("server_args", "gpu_id", "nccl_port", "target_model_config", "algo_label"),
        "loading the drafter",
    ),
    Name(
        f"{_S}.speculative.draft_worker_common:make_draft_block_spec_info",
        ("draft_token_num", "device"),
        "draft forward",
    ),
    Name(
        f"{_S}.speculative.draft_worker_common:make_draft_sampler_capture_hook",
        ("draft_sampler",),
        "head inside the draft graph",
    ),
    Name(f"{_S}.lora.layers:unwrap_lora_layer", ("module",), "head and embedding under LoRA"),
    Name(f"{_S}.model_executor.cuda_graph_config:Backend.DISABLED", None, "graph capture"),
    Name(
        f"{_S}.model_executor.forward_batch_info:CaptureHiddenMode.FULL",
        None,
        "tapped hidden states",
    ),
    Name(f"{_S}.model_executor.forward_batch_info:ForwardBatch", None, "draft forward"),
    Name(
        f"{_S}.model_executor.forward_batch_info:ForwardMode.TARGET_VERIFY", None, "draft forward"
    ),
    Name(
        f"{_S}.model_executor.forward_batch_info:enable_num_token_non_padded", (), "draft forward"
    ),
    Name(
        f"{_S}.model_executor.model_runner:ModelRunner.capture_tail_hooks",
        None,
        "head inside the draft graph",
    ),
    Name(
        f"{_S}.model_executor.model_runner:ModelRunner.kv_index_translator",
        None,
        "slot ids of a step",
    ),
    Name(f"{_S}.model_executor.model_runner:ModelRunner.spec_aux_config", None, "draft placement"),
    Name(f"{_S}.models.dflash:DFlashAttention.apply_k_norm", ("k",), "context KV"),
    Name(f"{_S}.models.dflash:DFlashAttention.apply_k_rope", ("positions", "k"), "context KV"),
    Name(f"{_S}.models.dflash:DFlashAttention.kv_proj_only", ("hidden_states",), "context KV"),
    Name(
        f"{_S}.models.dflash:DFlashDraftModel.prepare_context_hidden_for_kv",
        ("layer", "ctx_hidden"),
        "context KV",
    ),
    Name(
        f"{_S}.models.dflash:DFlashDraftModel.project_target_hidden",
        ("target_hidden",),
        "context KV",
    ),
    Name(f"{_S}.models.dflash:DFlashDraftModel.set_block_size", ("block_size",), "block size"),
    # The drafter's attention on CUDA.
    *(
        Name(
            f"{_S}.layers.attention.base_attn_backend:AttentionBackend.{member}",
            params,
            "attention of drafted blocks",
        )
        for member, params in (
            ("forward_extend", ("q", "k", "v", "layer", "forward_batch", "save_kv_cache")),
            ("get_cuda_graph_seq_len_fill_value", ()),
            ("init_cuda_graph_state", ("max_bs", "max_num_tokens")),
            ("init_forward_metadata", ("forward_batch",)),
            ("init_forward_metadata_out_graph", ("forward_batch", "in_capture")),
            ("kv_index_translator", None),
            ("needs_cpu_seq_lens", None),
        )
    ),
    *(
        Name(
            f"{_S}.layers.attention.flashinfer_backend:FlashInferAttnBackend.{member}",
            None,
            "whose place ours takes",
        )
        for member in ("use_sliding_window_kv_pool", "workspace_buffer")
    ),
    Name(f"{_S}.layers.radix_attention:AttentionType.ENCODER_ONLY", None, "layers not causal"),
    *(
        Name(f"{_S}.layers.radix_attention:RadixAttention.{member}", None, "a layer's shape")
        for member in (
            "attn_type",
            "head_dim",
            "k_scale",
            "k_scale_float",
            "layer_id",
            "logit_cap",
            "scaling",
            "sliding_window_size",
            "tp_k_head_num",
            "tp_q_head_num",
            "v_scale",
            "v_scale_float",
        )
    ),
    Name(
        f"{_S}.mem_cache.kv_index_translator:KVIndexTranslator.pack_read_stream",
        (
            "plan",
            "req_pool_indices",
            "seq_lens",
            "indptr",
            "out",
            "kv_start_idx",
        ),
        "slots that a block reads",
    ),
    Name(
        f"{_S}.mem_cache.memory_pool:KVWriteLoc.for_layer",
        ("forward_batch", "layer"),
        "writing a block's keys and values",
    ),
    Name(f"{_S}.mem_cache.memory_pool:KVCache.dtype", None, "reading keys and values"),
    Name(
        f"{_S}.mem_cache.memory_pool:MHATokenToKVPool.get_kv_buffer",
        ("layer_id",),
        "reading keys and values",
    ),
    Name(
        f"{_S}.mem_cache.memory_pool:MHATokenToKVPool.set_kv_buffer",
        None,
        "writing a block's keys and values",
    ),
    *(
        Name(f"{_S}.model_executor.model_runner:ModelRunner.{member}", None, "the drafter's runner")
        for member in ("attn_backend", "token_to_kv_pool")
    ),
    Name(f"{_S}.utils.common:async_h2d_stack", ("tensors", "device"), "lengths on the device"),
    # Verification.
    Name(
        f"{_S}.managers.tp_worker:TpModelWorker.forward_batch_generation",
        (
            "batch",
            "forward_batch",
            "pp_proxy_tensors",
            "is_verify",
            "skip_attn_backend_init",
            "capture_hidden_mode",
            "return_kv_loc_plan",
        ),
        "verifier forward",
    ),
    Name(f"{_S}.speculative.dflash_info:DFlashVerifyInput", None, "verifier forward"),
    Name(
        f"{_S}.speculative.dflash_info:DFlashVerifyInput.prepare_for_verify",
        ("batch", "target_worker"),
        "verifier forward",
    ),
    Name(f"{_S}.layers.logits_processor:LogitsProcessorOutput", None, "verifier logits"),
    Name(
        f"{_S}.layers.logprob_processor:compute_spec_logprobs",
        ("batch", "logits_output", "predict", "accept_index", "chain_stride"),
        "logprobs of committed tokens",
    ),
    Name(f"{_S}.constrained.base_grammar_backend:GrammarMask.apply", ("logits",), "grammars"),
    Name(f"{_S}.model_executor.model_runner:ModelRunner.sampler", None, "drawing target tokens"),
    Name(
        f"{_S}.layers.sampler:Sampler.forward",
        (
            "logits_output",
            "sampling_info",
            "return_logprob",
            "top_logprobs_nums",
            "token_ids_logprobs",
            "positions",
        ),
        "drawing target tokens",
    ),
    *(
        Name(f"{_S}.sampling.sampling_batch_info:SamplingBatchInfo.{field}", None, "sampling rules")
        for field in (
            "temperatures",
            "top_ps",
            "top_ks",
            "min_ps",
            "is_all_greedy",
            "is_any_greedy",
            "need_top_p_sampling",
            "need_top_k_sampling",
            "need_min_p_sampling",
            "sampling_seed",
            "logit_bias",
            "grammars",
            "grammar_mask",
            "acc_additive_penalties",
            "acc_scaling_penalties",
            "has_custom_logit_processor",
            "custom_logit_processor",
            "custom_params",
        )
    ),
    Name(
        f"{_S}.speculative.spec_utils:GrammarTree.from_linear_chain", ("verify_ids_2d",), "grammars"
    ),
    Name(
        f"{_S}.speculative.spec_utils:build_grammar_vocab_mask",
        ("reqs", "tree", "sampling_info", "device", "barrier"),
        "grammars",
    ),
    Name(
        f"{_S}.speculative.spec_tp_sync:SpecTpSync.enabled",
        ("site",),
        "one decision for all ranks",
    ),
    Name(
        f"{_S}.speculative.spec_tp_sync:SpecTpSync.sync",
        ("site", "values"),
        "one decision for all ranks",
    ),
    Name(
        f"{_S}.speculative.spec_tp_sync:SpecTpSyncSite.DFLASH_ACCEPT_SAMPLE",
        None,
        "one decision for all ranks",
    ),
    Name(
        f"{_S}.speculative.spec_tp_sync:SpecTpSyncSite.DFLASH_TARGET",
        None,
        "one decision for all ranks",
    ),
    Name(f"{_S}.utils.common:async_h2d", ("args", "dtype", "device"), "host lists on the device"),
)

# The CPU platform: what cpu/ subclasses, calls or hooks.
CPU_NAMES: tuple[Name, ...] = (
    *CPU_RECURRENT_NAMES,
    # extension points: the platform
    Name(f"{_S}.platforms.interface:SRTPlatform", None, "the platform's base class"),
    Name(
        f"{_S}.platforms.interface:SRTPlatform.apply_server_args_defaults",
        ("server_args",),
        "backend and dtype defaults",
    ),
    Name(f"{_S}.platforms.interface:SRTPlatform.get_default_attention_backend", (), "our backend"),
    Name(
        f"{_S}.platforms.interface:SRTPlatform.get_default_speculative_draft_attention_backend",
        ("algorithm",),
        "our backend for the drafter",
    ),
    Name(f"{_S}.platforms.interface:SRTPlatform.get_kv_pool_cls", ("kind",), "our KV pool"),
    Name(f"{_S}.platforms.interface:SRTPlatform.get_compile_backend", ("mode",), "no compiler"),
    Name(
        f"{_S}.platforms.interface:SRTPlatform.get_speculative_cache_locs_fn",
        (),
        "slots of a block without Triton",
    ),
    Name(
        f"{_S}.platforms.interface:SRTPlatform.get_speculative_worker_cls",
        ("algorithm",),
        "SGLang's own worker without streams",
    ),
    Name(
        f"{_S}.platforms.interface:SRTPlatform.supports_speculative_algorithm",
        ("algorithm",),
        "DFLASH on this platform",
    ),
    Name(
        f"{_S}.platforms.interface:SRTPlatform.supports_speculative_draft_attention_backend",
        ("algorithm", "backend"),
        "our backend for the drafter",
    ),
    Name(
        f"{_S}.platforms.interface:SRTPlatform.post_load_model",
        ("model",),
        "where the scheduler process is prepared and the decoder fused",
    ),
    Name(f"{_S}.platforms.interface:SRTPlatform.get_dispatch_key_name", (), "our op forwards"),
    Name(f"{_S}.platforms.interface:PlatformCapabilities", None, "no Triton, no graphs"),
    Name(f"{_S}.platforms.interface:KVPoolKind", None, "the kinds of KV pool"),
    Name(f"{_S}.platforms.device_mixin:PlatformEnum.OOT", None, "an out-of-tree platform"),
    Name(
        f"{_S}.platforms.device_mixin:DeviceMixin.get_torch_profiler_activity_str",
        (),
        "profiling a server",
    ),
    Name(
        f"{_S}.platforms.device_mixin:DeviceMixin.get_torch_profiler_activity",
        (),
        "profiling a server",
    ),
    Name(f"{_S}.platforms.cpu:CpuDeviceMixin.get_device", ("device_id",), "a device string"),
    # extension points: attention, ops, choices
    Name(
        f"{_S}.arg_groups.choices:ATTENTION_BACKEND_CHOICES", None, "our name on the command line"
    ),
    Name(
        f"{_S}.arg_groups.choices:DRAFT_ATTENTION_BACKEND_CHOICES",
        None,
        "our name on the command line",
    ),
    Name(
        f"{_S}.arg_groups.choices:add_attention_backend_choices",
        None,
        "our name on the command line",
    ),
    Name(
        f"{_S}.arg_groups.choices:add_draft_attention_backend_choices",
        None,
        "our name on the command line",
    ),
    Name(
        f"{_S}.layers.attention.attention_registry:register_attention_backend",
        ("name",),
        "our attention backend",
    ),
    Name(
        f"{_S}.layers.attention.base_attn_backend:AttentionBackend.init_forward_metadata",
        ("forward_batch",),
        "one plan per forward",
    ),
    Name(
        f"{_S}.layers.attention.base_attn_backend:AttentionBackend.forward_extend",
        ("q", "k", "v", "layer", "forward_batch", "save_kv_cache"),
        "attention",
    ),
    Name(
        f"{_S}.layers.attention.base_attn_backend:AttentionBackend.forward_decode",
        ("q", "k", "v", "layer", "forward_batch", "save_kv_cache"),
        "attention",
    ),
    Name(
        f"{_S}.layers.attention.base_attn_backend:AttentionBackend.support_triton",
        (),
        "no Triton beside our backend",
    ),
    Name(
        f"{_S}.layers.attention.base_attn_backend:AttentionBackend.needs_cpu_seq_lens",
        None,
        "no host copy of the lengths",
    ),
    Name(
        "sglang.kernels.fused_op:BaseFusedOp.register_oot_forward",
        ("op_cls", "fn", "platform_key"),
        "our op forwards",
    ),
    # what the backend reads
    Name(
        f"{_S}.layers.radix_attention:RadixAttention",
        (
            "num_heads",
            "head_dim",
            "scaling",
            "num_kv_heads",
            "layer_id",
            "logit_cap",
            "v_head_dim",
            "sliding_window_size",
            "is_cross_attention",
        ),
        "what a layer asks of its attention",
    ),
    Name(f"{_S}.layers.radix_attention:AttentionType.ENCODER_ONLY", None, "blocks are not causal"),
    Name(f"{_S}.model_executor.forward_context:get_attn_backend", (), "the fused decoder"),
    Name(
        f"{_S}.model_executor.forward_batch_info:ForwardBatch.extend_seq_lens",
        None,
        "query lengths",
    ),
    Name(f"{_S}.model_executor.forward_batch_info:ForwardBatch.seq_lens", None, "context lengths"),
    Name(
        f"{_S}.model_executor.forward_batch_info:ForwardBatch.out_cache_loc", None, "slots to write"
    ),
    # the KV pool
    Name(
        f"{_S}.mem_cache.memory_pool:MHATokenToKVPool._create_buffers_normal",
        (),
        "keys and values of a layer in one tensor",
    ),
    Name(
        f"{_S}.mem_cache.memory_pool:MHATokenToKVPool._kv_buffer_shapes", (), "shapes of the pool"
    ),
    Name(
        f"{_S}.mem_cache.memory_pool:MHATokenToKVPool._init_kv_copy_and_warmup",
        (),
        "no Triton warm-up",
    ),
    Name(
        f"{_S}.mem_cache.memory_pool:MHATokenToKVPool._move_kv_cache_impl",
        ("tgt_loc", "src_loc"),
        "moving slots without Triton",
    ),
    Name(
        f"{_S}.mem_cache.memory_pool:MHATokenToKVPool._store_kv_layer",
        ("layer_idx", "loc", "cache_k", "cache_v"),
        "writing slots in one call",
    ),
    Name(
        f"{_S}.mem_cache.memory_pool:move_kv_cache_native",
        ("k_buffer", "v_buffer", "tgt_loc", "src_loc"),
        "moving slots without Triton",
    ),
    # hooks
    Name(
        f"{_S}.mem_cache.allocation:assign_req_to_token_pool_func",
        (
            "req_pool_indices",
            "req_to_token",
            "start_offset",
            "end_offset",
            "out_cache_loc",
            "batch_size",
        ),
        "hook: slots of a block written without Triton",
    ),
    Name(
        f"{_S}.mem_cache.allocation:get_last_loc",
        ("req_to_token", "req_pool_indices_tensor", "prefix_lens_tensor"),
        "hook: pages looked up without Triton",
    ),
    Name(
        f"{_S}.mem_cache.allocation:get_last_loc_torch",
        ("req_to_token", "req_pool_indices_tensor", "prefix_lens_tensor"),
        "hook: pages looked up without Triton",
    ),
    Name(
        f"{_S}.model_executor.model_runner:ModelRunner._extend_forward_kwargs",
        ("forward_batch", "pp_proxy_tensors"),
        "hook: the drafter's embeddings keep their dtype",
    ),
    Name(f"{_S}.plugins.hook_registry:HookRegistry.apply_hooks", (), "our hooks"),
    # the models the fused decoder replaces the forward of, and the modules it reads
    Name(
        f"{_S}.models.qwen3_moe:Qwen3MoeForCausalLM",
        ("config", "quant_config", "prefix"),
        "fused decoder: verifier",
    ),
    Name(
        f"{_S}.models.qwen2_moe:Qwen2MoeModel.forward",
        ("input_ids", "positions", "forward_batch", "input_embeds", "pp_proxy_tensors"),
        "fused decoder: verifier",
    ),
    Name(
        f"{_S}.models.qwen3_moe:Qwen3MoeAttention.forward_prepare",
        ("positions", "hidden_states", "forward_batch"),
        "fused decoder: verifier",
    ),
    Name(
        f"{_S}.models.qwen3_moe:Qwen3MoeSparseMoeBlock.forward_normal",
        ("hidden_states",),
        "fused decoder: verifier",
    ),
    Name(
        f"{_S}.models.dflash:DFlashDraftModel.forward",
        ("input_ids", "positions", "forward_batch", "input_embeds", "get_embedding"),
        "fused decoder: drafter",
    ),
    Name(f"{_S}.layers.activation:SiluAndMul", None, "fused decoder: gate of the MLP"),
    Name(
        f"{_S}.layers.layernorm:RMSNorm.forward_native",
        ("x", "residual", "post_residual_addition"),
        "op forward: norm",
    ),
    Name(
        f"{_S}.layers.rotary_embedding:RotaryEmbedding", None, "op forward and fused decoder: rope"
    ),
    Name(
        f"{_S}.layers.rotary_embedding.base:RotaryEmbedding.forward_native",
        ("positions", "query", "key", "offsets", "fused_set_kv_buffer_arg"),
        "op forward: rope",
    ),
    Name(
        f"{_S}.layers.quantization.unquant:UnquantizedLinearMethod.apply",
        ("layer", "x", "bias"),
        "products by the faster library",
    ),
    Name(
        f"{_S}.layers.quantization.unquant:UnquantizedEmbeddingMethod.apply",
        ("layer", "x", "bias"),
        "products by the faster library",
    ),
    Name(
        f"{_S}.layers.vocab_parallel_embedding:VocabParallelEmbedding",
        None,
        "products by the faster library",
    ),
    Name(
        f"{_S}.layers.vocab_parallel_embedding:ParallelLMHead",
        None,
        "products by the faster library",
    ),
    Name(
        f"{_S}.layers.logits_processor:should_apply_lm_head_quant_method",
        ("lm_head", "quant_method"),
        "the head's method is asked unless it is named as SGLang's unquantised ones",
    ),
    *(
        Name(f"{_UPDATER}:WeightUpdater.{update}", None, "weights were replaced in place (AFTER)")
        for update in (
            "update_weights_from_disk",
            "update_weights_from_tensor",
            "update_weights_from_ipc",
            "load_weights_from_distributed",
        )
    ),
    Name(
        f"{_S}.layers.quantization.unquant:UnquantizedFusedMoEMethod.forward_cpu",
        ("layer", "dispatch_output"),
        "op forward: experts",
    ),
    Name(f"{_S}.layers.linear:LinearBase", None, "layout of the weights"),
    Name(f"{_S}.layers.moe.fused_moe_triton.layer:FusedMoE", None, "layout of the weights"),
    Name(f"{_S}.layers.moe.topk:TopKConfig", None, "fused decoder: router"),
    Name(f"{_S}.layers.moe.moe_runner.base:MoeRunnerConfig", None, "fused decoder: experts"),
    Name(f"{_S}.layers.moe.token_dispatcher:StandardCombineInput", None, "op forward: experts"),
    Name(f"{_S}.layers.aux_hidden_states:AuxHiddenStateList", None, "fused decoder: tapped layers"),
    Name(
        f"{_S}.layers.logits_processor:LogitsProcessorOutput", None, "fused decoder: drafter output"
    ),
    Name(f"{_S}.runtime_context:get_exec", None, "what is recorded about experts"),
    Name(f"{_S}.runtime_context:get_lora", None, "whether adapters are on"),
    Name(f"{_S}.runtime_context:get_observability", None, "whether modules are watched"),
    Name(f"{_S}.runtime_context:get_parallel", None, "number of ranks"),
    # SGLang's own worker
    Name(
        f"{_S}.speculative.dflash_worker_v2:DFlashWorkerV2.forward_batch_generation",
        ("batch",),
        "SGLang's own worker without streams",
    ),
    Name(
        f"{_S}.utils.hf_transformers.config:get_config",
        ("model", "trust_remote_code", "revision"),
        "dtype of the checkpoint",
    ),
    Name(
        "sglang.kernels.ops.sampling.murmur_hash:murmur_hash32",
        ("seed", "positions", "col_indices"),
        "seeds without Triton (REPLACE)",
    ),
    Name(
        f"{_S}.model_executor.model_runner:ModelRunner.maybe_enable_batch_invariant_mode",
        (),
        "seeds without Triton (REPLACE)",
    ),
    Name(
        f"{_S}.arg_groups.choices:add_deterministic_attention_backend_choices",
        None,
        "our backend under --enable-deterministic-inference",
    ),
    Name(
        f"{_S}.arg_groups.choices:add_radix_supported_deterministic_attention_backend_choices",
        None,
        "the radix cache beside it",
    ),
)


def relied_on(*, with_cpu: bool) -> tuple[Name, ...]:
    """The names that matter here: the worker's, and the CPU platform's where it serves."""
    return HOST_NAMES + (CPU_NAMES if with_cpu else ())


def verify_contract(names: Iterable[Name] = HOST_NAMES) -> list[Mismatch]:
    """Compare the installed SGLang with a table of names.

    Args:
        names: entries to check; the worker's by default.

    Returns:
        The entries that do not match, in table order; empty when the host is as expected.
    """
    version = installed_version()
    if version is None:
        return [Mismatch(Name("sglang", None, "everything"), "not installed")]
    mismatches = []
    if version != SGLANG_VERSION:
        release = Name("sglang", None, f"this release of the plugin, made for {SGLANG_VERSION}")
        mismatches.append(Mismatch(release, f"version {version}"))
    for name in names:
        wrong = problem(name)
        if wrong is not None:
            mismatches.append(Mismatch(name, wrong))
    return mismatches


def installed_version() -> str | None:
    """Version of the installed sglang distribution, None without one."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None
