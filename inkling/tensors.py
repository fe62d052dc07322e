"""The tensors of an Inkling checkpoint: names, shapes and parts, in one table for loaders, checks and sizes.

Keys are original names. transformers renames them, and stores gate and up rows apart (dense, shared) or
stacked (experts) where the original format alternates them; ``stored_pieces`` answers for each naming.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from inkling.config import AttentionGeometry, ModelConfig

TARGET = "model.llm."
MTP = "model.mtp."
EMBED_NORM = "model.llm.embed_norm.weight"
TOWERS = ("model.visual.", "model.audio.", "model.vision_tower.", "model.audio_tower.")


class Naming(Enum):
    """How a checkpoint names its tensors, by the prefix of the target's blocks."""

    ORIGINAL = "model.llm."
    TRANSFORMERS = "model.language_model."  # InklingForConditionalGeneration
    TRANSFORMERS_TEXT = "model."  # InklingForCausalLM


@dataclass(frozen=True)
class TensorSpec:
    """One tensor under its original name. ``part`` groups sizes; ``itemsize``: bytes in the BF16 releases."""

    key: str
    shape: tuple[int, ...]
    part: str
    itemsize: int = 2

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def is_gate_up(self) -> bool:
        """Whether gate rows (even) and up rows (odd) alternate along the last axis but one."""
        return self.key.endswith(("w13_dn.weight", "w13_weight"))


@dataclass(frozen=True)
class StoredPiece:
    name: str
    shape: tuple[int, ...]


def target_tensors(config: ModelConfig) -> list[TensorSpec]:
    """Every tensor of the target."""
    hidden, padded = config.hidden_size, config.padded_vocab_size
    specs = [TensorSpec(TARGET + "embed.weight", (padded, hidden), "embedding")]
    if config.use_embed_norm:
        specs.append(TensorSpec(EMBED_NORM, (hidden,), "norms and convolutions"))
    for layer in range(config.num_layers):
        prefix = f"{TARGET}layers.{layer}."
        specs += _block(config, prefix, config.layer_geometry(layer), config.layer_is_dense[layer])
    specs.append(TensorSpec(TARGET + "norm.weight", (hidden,), "norms and convolutions"))
    specs.append(TensorSpec(TARGET + "unembed.weight", (padded, hidden), "head"))
    return specs


def depth_tensors(config: ModelConfig, depth: int) -> list[TensorSpec]:
    """Every tensor of one MTP depth; its block is dense."""
    hidden, prefix = config.hidden_size, f"{MTP}layers.{depth}."
    part = f"depth {depth} ({'local' if config.mtp_is_local[depth] else 'full'})"
    block = _block(config, prefix + "transformer_block.", config.depth_geometry(depth), is_dense=True)
    return [
        TensorSpec(prefix + "hidden_norm.weight", (hidden,), part),
        TensorSpec(prefix + "embed_norm.weight", (hidden,), part),
        TensorSpec(prefix + "input_proj.weight", (hidden, 2 * hidden), part),
        *(TensorSpec(spec.key, spec.shape, part) for spec in block),
    ]


def draft_tensors(config: ModelConfig) -> list[TensorSpec]:
    """Every tensor of all MTP depths, and the norm that chains them where there is one."""
    specs = [spec for depth in range(config.mtp_depths) for spec in depth_tensors(config, depth)]
    if config.mtp_depths and config.mtp_chain_norm:
        specs.append(TensorSpec(MTP + "chain_norm.weight", (config.hidden_size,), "chain norm"))
    return specs


def _block(config: ModelConfig, prefix: str, geometry: AttentionGeometry, is_dense: bool) -> list[TensorSpec]:
    hidden, head_dim = config.hidden_size, geometry.head_dim
    q_width, kv_width = geometry.num_heads * head_dim, geometry.num_kv_heads * head_dim
    taps = config.conv_kernel
    attention = {
        "attn.wq_du.weight": (q_width, hidden),
        "attn.wk_dv.weight": (kv_width, hidden),
        "attn.wv_dv.weight": (kv_width, hidden),
        "attn.wr_du.weight": (geometry.num_heads * config.d_rel, hidden),
        "attn.wo_ud.weight": (hidden, q_width),
        "attn.rel_logits_proj.proj": (config.d_rel, geometry.rel_extent),
    }
    small = {
        "attn_norm.weight": (hidden,),
        "mlp_norm.weight": (hidden,),
        "attn.q_norm.weight": (head_dim,),
        "attn.k_norm.weight": (head_dim,),
        "attn.k_sconv.weight": (kv_width, 1, taps),
        "attn.v_sconv.weight": (kv_width, 1, taps),
        "attn_sconv.weight": (hidden, 1, taps),
        "mlp_sconv.weight": (hidden, 1, taps),
    }
    specs = [TensorSpec(prefix + key, shape, "attention") for key, shape in attention.items()]
    specs += [TensorSpec(prefix + key, shape, "norms and convolutions") for key, shape in small.items()]
    return specs + (_dense(config, prefix + "mlp.") if is_dense else _experts(config, prefix + "mlp."))


def _dense(config: ModelConfig, prefix: str) -> list[TensorSpec]:
    hidden, width = config.hidden_size, config.dense_ffn
    return [
        TensorSpec(prefix + "w13_dn.weight", (2 * width, hidden), "dense MLPs"),
        TensorSpec(prefix + "w2_md.weight", (hidden, width), "dense MLPs"),
        TensorSpec(prefix + "global_scale", (1,), "dense MLPs"),
    ]


def _experts(config: ModelConfig, prefix: str) -> list[TensorSpec]:
    hidden, width = config.hidden_size, config.expert_ffn
    routed, shared = config.num_experts, config.num_shared_experts
    shared_prefix = prefix + "shared_experts.shared_"
    return [
        TensorSpec(prefix + "gate.weight", (routed + shared, hidden), "routers"),
        TensorSpec(prefix + "gate.bias", (routed,), "routers", itemsize=4),
        TensorSpec(prefix + "gate.global_scale", (1,), "routers", itemsize=4),
        TensorSpec(prefix + "experts.w13_weight", (routed, 2 * width, hidden), "routed experts"),
        TensorSpec(prefix + "experts.w2_weight", (routed, hidden, width), "routed experts"),
        TensorSpec(shared_prefix + "w13_weight", (shared, 2 * width, hidden), "shared experts"),
        TensorSpec(shared_prefix + "w2_weight", (shared, hidden, width), "shared experts"),
    ]


# The names of transformers 5.23 (models/inkling, conversion_mapping.py); two names: gate rows, up rows.
_TRANSFORMERS_TOP = {
    "model.llm.embed.weight": "embed_tokens.weight",
    "model.llm.embed_norm.weight": "embed_tokens.embed_norm.weight",
    "model.llm.norm.weight": "norm.weight",
}
_TRANSFORMERS_DEPTH = {
    "hidden_norm.weight": "hnorm.weight",
    "embed_norm.weight": "enorm.weight",
    "input_proj.weight": "eh_proj.weight",
}
_TRANSFORMERS_BLOCK: dict[str, str | tuple[str, str]] = {
    "attn_norm.weight": "input_layernorm.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "attn.wq_du.weight": "self_attn.q_proj.weight",
    "attn.wk_dv.weight": "self_attn.k_proj.weight",
    "attn.wv_dv.weight": "self_attn.v_proj.weight",
    "attn.wr_du.weight": "self_attn.r_proj.weight",
    "attn.wo_ud.weight": "self_attn.o_proj.weight",
    "attn.q_norm.weight": "self_attn.q_norm.weight",
    "attn.k_norm.weight": "self_attn.k_norm.weight",
    "attn.rel_logits_proj.proj": "self_attn.rel_logits_proj.proj",
    "attn.k_sconv.weight": "self_attn.k_sconv.conv1d.weight",
    "attn.v_sconv.weight": "self_attn.v_sconv.conv1d.weight",
    "attn_sconv.weight": "attn_sconv.conv1d.weight",
    "mlp_sconv.weight": "mlp_sconv.conv1d.weight",
    "mlp.w13_dn.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.w2_md.weight": "mlp.down_proj.weight",
    "mlp.global_scale": "mlp.global_scale",
    "mlp.gate.weight": "mlp.gate.weight",
    "mlp.gate.bias": "mlp.gate.e_score_correction_bias",
    "mlp.gate.global_scale": "mlp.gate.global_scale",
    "mlp.experts.w13_weight": "mlp.experts.gate_up_proj",
    "mlp.experts.w2_weight": "mlp.experts.down_proj",
    "mlp.shared_experts.shared_w13_weight": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    "mlp.shared_experts.shared_w2_weight": "mlp.shared_experts.down_proj",
}


def stored_pieces(spec: TensorSpec, naming: Naming) -> tuple[StoredPiece, ...]:
    """The stored tensors that make up ``spec``: itself, or its gate rows and its up rows.

    A single gate/up piece alternates its rows in the original format; in the other all gate rows come first.
    """
    if naming is Naming.ORIGINAL:
        return (StoredPiece(spec.key, spec.shape),)
    if spec.key == "model.llm.unembed.weight":
        return (StoredPiece("lm_head.weight", spec.shape),)
    if spec.key == "model.mtp.chain_norm.weight":
        return (StoredPiece("model.mtp.shared_post_norm.weight", spec.shape),)
    if spec.key in _TRANSFORMERS_TOP:
        return (StoredPiece(naming.value + _TRANSFORMERS_TOP[spec.key], spec.shape),)
    base, index, rest = _split_layer(spec.key)
    prefix = (naming.value if base == TARGET else MTP) + f"layers.{index}."
    if rest in _TRANSFORMERS_DEPTH:
        return (StoredPiece(prefix + _TRANSFORMERS_DEPTH[rest], spec.shape),)
    if base == MTP:
        prefix, rest = prefix + "mtp_block.", rest.removeprefix("transformer_block.")
    names = _TRANSFORMERS_BLOCK[rest]
    if isinstance(names, str):
        return (StoredPiece(prefix + names, spec.shape),)
    *batch, rows, columns = spec.shape
    return tuple(StoredPiece(prefix + name, (*batch, rows // 2, columns)) for name in names)


def _split_layer(key: str) -> tuple[str, str, str]:
    """``model.llm.layers.3.attn...`` as (``model.llm.``, ``3``, ``attn...``)."""
    base, _, tail = key.partition("layers.")
    index, _, rest = tail.partition(".")
    return base, index, rest
