"""Random checkpoints of stated small shapes, in either format, for tests and rehearsals.

Weights are scaled so that activations stay near 1 and logits are spread (standard deviation around 2), and
gate bias, global scales, norms and taps all differ from their neutral values: a mistake in any of them shows.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from inkling.config import AttentionGeometry, ModelConfig
from inkling.tensors import MTP, Naming, TensorSpec, draft_tensors, stored_pieces, target_tensors


def tiny_config(**overrides: Any) -> ModelConfig:
    """The default geometry of tests: unequal head counts, a short window, early log scaling."""
    config = ModelConfig(
        hidden_size=64,
        num_layers=4,
        vocab_size=251,
        padded_vocab_size=256,
        full=AttentionGeometry(num_heads=4, num_kv_heads=2, head_dim=16, rel_extent=24, window=None),
        local=AttentionGeometry(num_heads=8, num_kv_heads=4, head_dim=16, rel_extent=11, window=11),
        layer_is_local=(True, False, True, False),
        layer_is_dense=(True, False, False, False),
        dense_ffn=96,
        expert_ffn=32,
        num_experts=8,
        num_experts_per_token=2,
        num_shared_experts=2,
        rms_norm_eps=1e-6,
        use_embed_norm=True,
        route_scale=2.5,
        mup_multiplier=2.0,
        log_scaling_floor=16.0,
        log_scaling_alpha=0.1,
        max_position=4096,
        eos_token_ids=(1,),
        mtp_depths=3,
        mtp_is_local=(True, False, True),
        mtp_chain_norm=False,
        format="original",
    )
    return dataclasses.replace(config, **overrides)


def released_config(name: Literal["Inkling", "Inkling-Small"]) -> ModelConfig:
    """The shapes of a released model: for arithmetic, and for rehearsals at full size."""
    is_small = name == "Inkling-Small"
    num_layers, heads = (42, 32) if is_small else (66, 64)
    local_depths = (0, 2, 4, 5, 6, 7)
    return ModelConfig(
        hidden_size=4096 if is_small else 6144,
        num_layers=num_layers,
        vocab_size=200058,
        padded_vocab_size=201024,
        full=AttentionGeometry(heads, num_kv_heads=8, head_dim=128, rel_extent=1024, window=None),
        local=AttentionGeometry(heads, 8 if is_small else 16, head_dim=128, rel_extent=512, window=512),
        layer_is_local=tuple(layer % 6 != 5 for layer in range(num_layers)),
        layer_is_dense=tuple(layer < 2 for layer in range(num_layers)),
        dense_ffn=16384 if is_small else 24576,
        expert_ffn=2048 if is_small else 3072,
        num_experts=256,
        num_experts_per_token=6,
        num_shared_experts=2,
        rms_norm_eps=1e-6,
        use_embed_norm=True,
        route_scale=8.0,
        mup_multiplier=16.0 if is_small else 24.0,
        log_scaling_floor=128000.0,
        log_scaling_alpha=0.1,
        max_position=1048576,
        eos_token_ids=(200006,),
        mtp_depths=8,
        mtp_is_local=tuple(depth in local_depths for depth in range(8)),
        mtp_chain_norm=False,
        format="original",
    )


def random_tensors(config: ModelConfig, seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Every tensor of target and depths under its original name, from ``seed`` alone.

    Values are drawn in fp32 and rounded to ``dtype``; gate bias and gate global scale stay fp32.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for spec in [*target_tensors(config), *draft_tensors(config)]:
        value = _random(spec, config, generator)
        tensors[spec.key] = value if spec.itemsize == 4 else value.to(dtype)
    return tensors


def _random(spec: TensorSpec, config: ModelConfig, generator: torch.Generator) -> Tensor:
    noise = torch.randn(spec.shape, generator=generator)
    name = spec.key.removesuffix(".weight").rpartition(".")[2]
    if name.endswith("norm"):
        return 1 + 0.2 * noise
    if name.endswith("sconv"):
        return 0.25 * noise
    if name == "global_scale":
        return 1 + 0.3 * torch.rand(spec.shape, generator=generator)
    if name == "bias":
        return 0.2 * noise
    if name == "proj":
        return 0.5 * noise
    if name == "embed":
        return noise
    if name == "unembed":  # the head sees a normed state divided by the muP multiplier
        return 2.0 * config.mup_multiplier * noise / config.hidden_size**0.5
    return noise / spec.shape[-1] ** 0.5


def write_random_checkpoint(
    directory: str | Path,
    config: ModelConfig | None = None,
    *,
    seed: int = 0,
    format: Literal["original", "transformers"] = "original",
    text_only: bool = False,
    shards: int = 1,
    mtp_file: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    tokenizer: bool = False,
) -> ModelConfig:
    """Writes a checkpoint and returns its config as ``ModelConfig.from_dir`` reads it.

    ``text_only`` writes the text config as the top level, as ``InklingForCausalLM`` does. ``shards`` > 1
    writes an index; ``mtp_file`` puts the depths into ``mtp.safetensors``, else they lie among the others.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    config = dataclasses.replace(config or tiny_config(), format=format)
    write_config(directory, config, text_only=text_only)
    naming = Naming.ORIGINAL
    if format == "transformers":
        naming = Naming.TRANSFORMERS_TEXT if text_only else Naming.TRANSFORMERS
    write_tensors(directory, rename(random_tensors(config, seed, dtype), config, naming), shards, mtp_file)
    if tokenizer:
        write_tokenizer(directory, config.vocab_size)
    return config


def rename(tensors: dict[str, Tensor], config: ModelConfig, naming: Naming) -> dict[str, Tensor]:
    """Tensors under original names as ``naming`` stores them (gate and up rows apart or stacked)."""
    stored: dict[str, Tensor] = {}
    for spec in [*target_tensors(config), *draft_tensors(config)]:
        stored |= renamed(spec, tensors[spec.key], naming)
    return stored


def renamed(spec: TensorSpec, value: Tensor, naming: Naming) -> dict[str, Tensor]:
    """One original tensor as ``naming`` stores it, in one piece or two."""
    pieces = stored_pieces(spec, naming)
    if naming is Naming.ORIGINAL or not spec.is_gate_up:
        return {pieces[0].name: value}
    gate_up = [value[..., 0::2, :], value[..., 1::2, :]]
    if len(pieces) == 1:
        gate_up = [torch.cat(gate_up, dim=-2)]
    return {piece.name: part.contiguous() for piece, part in zip(pieces, gate_up, strict=True)}


def write_tensors(directory: Path, tensors: dict[str, Tensor], shards: int, mtp_file: bool) -> None:
    """Writes ``tensors`` as one file or as shards with an index; the index lists ``mtp.safetensors`` too."""
    files: dict[str, dict[str, Tensor]] = {}
    rest = {name: value for name, value in tensors.items() if not (mtp_file and name.startswith(MTP))}
    if len(rest) < len(tensors):
        files["mtp.safetensors"] = {name: value for name, value in tensors.items() if name not in rest}
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors" if shards > 1 else "model.safetensors"
        files[file] = {name: rest[name] for name in list(rest)[number::shards]}
    for file, members in files.items():
        save_file(members, directory / file, metadata={"format": "pt"})
    if shards > 1:
        total = sum(value.nbytes for value in tensors.values())
        weight_map = {name: file for file, members in files.items() for name in members}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def write_config(directory: Path, config: ModelConfig, *, text_only: bool = False) -> None:
    """Writes ``config.json`` in the spelling that ``config.format`` names."""
    is_original = config.format == "original"
    text = _shared_keys(config) | (_original_keys(config) if is_original else _transformers_keys(config))
    mtp = {
        "num_nextn_predict_layers": config.mtp_depths,
        "local_layer_ids": [k for k, is_local in enumerate(config.mtp_is_local) if is_local],
        "chain_hidden_post_norm": config.mtp_chain_norm,
    }
    eos = config.eos_token_ids[0] if len(config.eos_token_ids) == 1 else list(config.eos_token_ids)
    values: dict[str, Any] = {"eos_token_id": eos} if config.eos_token_ids else {}
    if text_only:
        values |= text | {"architectures": ["InklingForCausalLM"], "model_type": "inkling_text"}
    else:
        values |= {"architectures": ["InklingForConditionalGeneration"], "model_type": "inkling_mm_model"}
        values |= {"text_config": text} | _tower_keys(config)
    if is_original:
        values["mtp_config"] = mtp
    (directory / "config.json").write_text(json.dumps(values, indent=2))


def _tower_keys(config: ModelConfig) -> dict[str, Any]:
    """Small towers that have a config and no weights, as in a text-only copy of a release."""
    is_original = config.format == "original"
    width = "decoder_dmodel" if is_original else "text_hidden_size"
    vision = {"vision_encoder_type": "hmlp"} if is_original else {"model_type": "inkling_vision"}
    audio = {"audio_mode": "dmel"} if is_original else {"model_type": "inkling_audio"}
    vision |= {width: config.hidden_size, "n_channels" if is_original else "num_channels": 1}
    vision |= {"n_layers": 3, "patch_size": 2, "temporal_patch_size": 2}
    audio |= {width: config.hidden_size, "n_mel_bins": 4, "mel_vocab_size": 2}
    return {"vision_config": vision, "audio_config": audio}


def _shared_keys(config: ModelConfig) -> dict[str, Any]:
    """Keys with one name in both spellings."""
    full, local = config.full, config.local
    return {
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "vocab_size": config.padded_vocab_size,
        "unpadded_vocab_size": config.vocab_size,
        "num_attention_heads": full.num_heads,
        "num_key_value_heads": full.num_kv_heads,
        "head_dim": full.head_dim,
        "rel_extent": full.rel_extent,
        "swa_num_attention_heads": local.num_heads,
        "swa_num_key_value_heads": local.num_kv_heads,
        "swa_head_dim": local.head_dim,
        "sliding_window_size": local.window,
        "d_rel": config.d_rel,
        "log_scaling_n_floor": int(config.log_scaling_floor),  # transformers takes no float
        "log_scaling_alpha": config.log_scaling_alpha,
        "rms_norm_eps": config.rms_norm_eps,
        "n_routed_experts": config.num_experts,
        "num_experts_per_tok": config.num_experts_per_token,
        "n_shared_experts": config.num_shared_experts,
        "shared_expert_sink": True,
        "route_scale": config.route_scale,
        "logits_mup_width_multiplier": config.mup_multiplier,
    }


def _original_keys(config: ModelConfig) -> dict[str, Any]:
    num_dense = sum(config.layer_is_dense)
    if any(config.layer_is_dense[num_dense:]):
        raise ValueError(f"layer_is_dense is {config.layer_is_dense}; dense layers must come first here")
    return {
        "dense_intermediate_size": config.dense_ffn,
        "intermediate_size": config.expert_ffn,
        "sconv_kernel_size": config.conv_kernel,
        "local_layer_ids": [i for i, is_local in enumerate(config.layer_is_local) if is_local],
        "dense_mlp_idx": num_dense,
        "model_max_length": config.max_position,
        "q_bias": False,
        "o_bias": False,
        "use_embed_norm": config.use_embed_norm,
        "use_sconv": True,
        "use_gate_bias": True,
        "use_global_scale": True,
        "norm_after_topk": True,
        "gate_activation": "sigmoid",
        "final_logit_softcapping": None,
    }


def _transformers_keys(config: ModelConfig) -> dict[str, Any]:
    return {
        "model_type": "inkling_text",
        "intermediate_size": config.dense_ffn,
        "moe_intermediate_size": config.expert_ffn,
        "conv_kernel_size": config.conv_kernel,
        "layer_types": ["hybrid_sliding" if is_local else "hybrid" for is_local in config.layer_is_local],
        "mlp_layer_types": ["dense" if is_dense else "sparse" for is_dense in config.layer_is_dense],
        "max_position_embeddings": config.max_position,
        "hidden_act": "silu",
        "num_mtp_layers": config.mtp_depths or None,
        "mtp_local_layer_ids": [k for k, is_local in enumerate(config.mtp_is_local) if is_local],
        "chain_hidden_post_norm": config.mtp_chain_norm,
        "mtp_hidden_states_first": True,
    }


def write_tokenizer(directory: Path, vocab_size: int) -> None:
    """A byte-level ``tokenizer.json`` of exactly ``vocab_size`` pieces: bytes, then two-byte merges.

    Below 257 pieces there is no room for every byte: the last have no piece and are dropped in encoding.
    Id 1 is the special ``<|eos|>``.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges: list[tuple[str, str]] = []
    letters = [piece for piece in pieces if piece.isascii()]
    vocab = [pieces[0], "<|eos|>", *pieces[1:]]
    for pair in ((a, b) for a in letters for b in letters):
        if len(vocab) >= vocab_size:
            break
        merges.append(pair)
        vocab.append("".join(pair))
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(vocab[:vocab_size])}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|eos|>"])
    tokenizer.save(str(directory / "tokenizer.json"))
