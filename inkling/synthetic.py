"""Checkpoints that exist only as a name: ``synthetic:mini?seed=0`` stands wherever a checkpoint directory does.

They are for speed: real shapes, weights drawn at loading (``inkling.synthetic_weights``), no tokenizer and no end of
sequence. This module knows their names and shapes and gives their ``config.json``; it needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inkling.errors import CheckpointError

PREFIX = "synthetic:"
MTP_DEPTHS = 8
WIDTH_PER_MUP = 256  # H over the muP multiplier, as in both releases
_LOCAL_DEPTHS = [0, 2, 4, 5, 6, 7]


@dataclass(frozen=True)
class Shape:
    """What differs between the synthetic models; full and local layers have the same heads. The first two layers are
    dense, every ``full_every``-th attends to everything."""

    hidden: int
    layers: int
    full_every: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int
    experts: int
    experts_per_token: int
    expert_width: int
    dense_width: int
    padded_vocab: int
    vocab: int
    max_position: int


SHAPES = {
    "tiny": Shape(256, 4, 2, 4, 2, 32, 32, 16, 2, 64, 256, 16384, 16000, 4096),
    "micro": Shape(1024, 12, 6, 8, 2, 128, 512, 32, 4, 768, 4096, 32768, 32768, 1 << 20),
    "mini": Shape(2048, 24, 6, 16, 4, 128, 512, 128, 6, 1536, 8192, 201024, 200058, 1 << 20),
}


def is_synthetic(checkpoint: str | Path) -> bool:
    return str(checkpoint).startswith(PREFIX)


@dataclass(frozen=True)
class SyntheticName:
    """``synthetic:SHAPE?seed=S&peak=P``. ``peak``: about the logit of the likeliest token; the others lie around 0."""

    shape: Shape
    seed: int
    peak: int

    @classmethod
    def parse(cls, text: str | Path) -> SyntheticName:
        """CheckpointError for an unknown shape or option, or a value out of range."""
        name, _, query = str(text).removeprefix(PREFIX).partition("?")
        if name not in SHAPES:
            raise CheckpointError(text, "name", name, f"it must be one of {', '.join(SHAPES)}")
        options = {"seed": 0, "peak": 32}
        bounds = {"seed": (0, 2**63 - 1), "peak": (1, 64)}
        for option in filter(None, query.split("&")):
            key, _, value = option.partition("=")
            if key not in options:
                rule = f"the options are {' and '.join(options)}, as in {PREFIX}{name}?seed=0&peak=32"
                raise CheckpointError(text, "option", key, rule)
            low, high = bounds[key]
            is_number = value.isascii() and value.isdigit()
            if not is_number or not low <= int(value) <= high:
                raise CheckpointError(text, key, value, f"must be an integer from {low} to {high}")
            options[key] = int(value)
        return cls(SHAPES[name], **options)

    @property
    def config_json(self) -> dict[str, Any]:
        """The ``config.json`` that such a checkpoint would have, in the original spelling."""
        shape = self.shape
        heads = {
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
        }
        text = {
            "hidden_size": shape.hidden,
            "num_hidden_layers": shape.layers,
            "vocab_size": shape.padded_vocab,
            "unpadded_vocab_size": shape.vocab,
            **heads,
            **{f"swa_{key}": value for key, value in heads.items()},
            "rel_extent": 2 * shape.window,
            "sliding_window_size": shape.window,
            "local_layer_ids": [i for i in range(shape.layers) if (i + 1) % shape.full_every],
            "d_rel": 16,
            "log_scaling_n_floor": 128000,
            "log_scaling_alpha": 0.1,
            "rms_norm_eps": 1e-6,
            "use_embed_norm": True,
            "sconv_kernel_size": 4,
            "dense_mlp_idx": 2,
            "dense_intermediate_size": shape.dense_width,
            "intermediate_size": shape.expert_width,
            "n_routed_experts": shape.experts,
            "num_experts_per_tok": shape.experts_per_token,
            "n_shared_experts": 2,
            "shared_expert_sink": True,
            "norm_after_topk": True,
            "use_gate_bias": True,
            "use_global_scale": True,
            "gate_activation": "sigmoid",
            "use_sconv": True,
            "q_bias": False,
            "o_bias": False,
            "route_scale": 8.0,
            "logits_mup_width_multiplier": shape.hidden / WIDTH_PER_MUP,
            "final_logit_softcapping": None,
            "model_max_length": shape.max_position,
        }
        mtp = {
            "num_nextn_predict_layers": MTP_DEPTHS,
            "local_layer_ids": _LOCAL_DEPTHS,
            "chain_hidden_post_norm": False,
        }
        return {
            "architectures": ["InklingForConditionalGeneration"],
            "model_type": "inkling_mm_model",
            "text_config": text,
            "mtp_config": mtp,
        }
