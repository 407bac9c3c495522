"""How a trained verifier is stored: tensor names and config.json of its public architecture."""

from typing import Any

from torch import Tensor

from bench.train import data
from bench.train.verifier.mixers import Attention
from bench.train.verifier.model import Verifier, VerifierLayer
from bench.train.verifier.shape import DeltaShape, VerifierShape

Tensors = dict[str, Tensor]


def verifier_tensors(model: Verifier) -> Tensors:
    """The weights under their public names."""
    # The head is stored although it equals the embedding: SGLang's Qwen3-MoE does not tie them.
    tensors: Tensors = {
        "model.embed_tokens.weight": model.embed,
        "lm_head.weight": model.embed,
        "model.norm.weight": model.norm,
    }
    for index, layer in enumerate(model.decoder_layers()):
        found = _mixer(layer.mixer) | _experts(layer) | _norms(layer)
        tensors |= {f"model.layers.{index}.{name}": tensor for name, tensor in found.items()}
    return tensors


def verifier_config(shape: VerifierShape) -> dict[str, Any]:
    """The content of the verifier's config.json."""
    architecture = _qwen3_moe(shape) if shape.delta is None else _qwen3_5_moe(shape, shape.delta)
    return architecture | {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "num_experts": shape.num_experts,
        "num_experts_per_tok": shape.top_k,
        "moe_intermediate_size": shape.expert_size,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        # transformers 5 reads rope_parameters, SGLang the top-level value.
        "rope_theta": shape.rope_theta,
        "max_position_embeddings": shape.max_positions,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": data.END_ID,
        "pad_token_id": data.PAD_ID,
        "dtype": "bfloat16",
    }


def _qwen3_moe(shape: VerifierShape) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "intermediate_size": 2 * shape.hidden_size,  # of dense layers; there are none
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "use_sliding_window": False,
        "sliding_window": None,
    }


def _qwen3_5_moe(shape: VerifierShape, delta: DeltaShape) -> dict[str, Any]:
    attention = [shape.is_attention(layer) for layer in range(shape.num_layers)]
    share = shape.rotary_dim / shape.head_dim
    # Angles turn by time, height and width in turns; a text token has one position for the three.
    sections = [(shape.rotary_dim // 2 + left) // 3 for left in (2, 1, 0)]
    return {
        # The text model alone; public checkpoints wrap it in Qwen3_5MoeForConditionalGeneration.
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "layer_types": ["full_attention" if full else "linear_attention" for full in attention],
        # SGLang derives the kinds of layers from the interval alone.
        "full_attention_interval": shape.full_attention_interval,
        "attn_output_gate": shape.output_gate,
        "shared_expert_intermediate_size": shape.shared_expert_size,
        "linear_num_key_heads": delta.num_key_heads,
        "linear_num_value_heads": delta.num_value_heads,
        "linear_key_head_dim": delta.key_dim,
        "linear_value_head_dim": delta.value_dim,
        "linear_conv_kernel_dim": delta.conv_kernel,
        "partial_rotary_factor": share,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": shape.rope_theta,
            "partial_rotary_factor": share,
            "mrope_section": sections,
            "mrope_interleaved": True,
        },
    }


def _mixer(mixer: Any) -> Tensors:
    if isinstance(mixer, Attention):
        names = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
        return {f"self_attn.{name}.weight": getattr(mixer, name) for name in names}
    return {
        "linear_attn.in_proj_qkv.weight": mixer.qkv,
        "linear_attn.in_proj_z.weight": mixer.z,
        "linear_attn.in_proj_b.weight": mixer.beta_gate,
        "linear_attn.in_proj_a.weight": mixer.decay_gate,
        "linear_attn.conv1d.weight": mixer.conv[:, None],
        "linear_attn.A_log": mixer.log_rate,
        "linear_attn.dt_bias": mixer.decay_bias,
        "linear_attn.norm.weight": mixer.norm,
        "linear_attn.out_proj.weight": mixer.out,
    }


def _experts(layer: VerifierLayer) -> Tensors:
    tensors: Tensors = {"mlp.gate.weight": layer.experts.gate}
    if layer.shared is not None:  # Qwen3.5: all experts in one tensor, and one for every token
        gate, up = layer.shared.gate_up.chunk(2)
        return tensors | {
            "mlp.experts.gate_up_proj": layer.experts.gate_up,
            "mlp.experts.down_proj": layer.experts.down,
            "mlp.shared_expert.gate_proj.weight": gate,
            "mlp.shared_expert.up_proj.weight": up,
            "mlp.shared_expert.down_proj.weight": layer.shared.down,
            "mlp.shared_expert_gate.weight": layer.shared.gate,
        }
    for expert, (gate_up, down) in enumerate(
        zip(layer.experts.gate_up, layer.experts.down, strict=True)
    ):
        gate, up = gate_up.chunk(2)
        tensors[f"mlp.experts.{expert}.gate_proj.weight"] = gate
        tensors[f"mlp.experts.{expert}.up_proj.weight"] = up
        tensors[f"mlp.experts.{expert}.down_proj.weight"] = down
    return tensors


def _norms(layer: VerifierLayer) -> Tensors:
    return {
        "input_layernorm.weight": layer.input_norm,
        "post_attention_layernorm.weight": layer.post_norm,
    }
