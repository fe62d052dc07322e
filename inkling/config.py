"""The shape of an Inkling model, read from ``config.json`` in either of its two spellings.

*Original*: ``text_config``, ``mtp_config`` (and tower configs) at the top level; ``intermediate_size`` is the
width of one expert. *Transformers*: what transformers 5.23 writes; ``intermediate_size`` is the dense width,
per-layer lists replace ids, MTP fields live in the text config. A text-only file may hold the text config as
its top level. How the tensors are named is another question: transformers writes its own config beside
tensors under original names.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from inkling.errors import CheckpointError
from inkling.synthetic import SyntheticName, is_synthetic

CONV_KERNEL = 4  # taps of the short convolution
D_REL = 16  # relative states per query head

_MODEL_TYPES = ("inkling_mm_model", "inkling_model", "inkling_text")
_LAYER_TYPES = ("hybrid", "hybrid_sliding")
_MLP_TYPES = ("sparse", "dense")
_REQUIRED = object()


@dataclass(frozen=True)
class AttentionGeometry:
    """Heads of one attention kind. ``window`` counts visible keys, the row's own included; ``None``: full."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rel_extent: int
    window: int | None


@dataclass(frozen=True)
class ModelConfig:
    """Everything the model code needs to know of a checkpoint; counts and sizes in elements.

    ``vocab_size`` (V') counts the tokens, ``padded_vocab_size`` (V) the stored rows. ``log_scaling_alpha`` is
    0 where the checkpoint turns log scaling off. ``dense_ffn`` is also the width of every MTP block.
    """

    hidden_size: int
    num_layers: int
    vocab_size: int
    padded_vocab_size: int
    full: AttentionGeometry
    local: AttentionGeometry
    layer_is_local: tuple[bool, ...]
    layer_is_dense: tuple[bool, ...]
    dense_ffn: int
    expert_ffn: int
    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    rms_norm_eps: float
    use_embed_norm: bool
    route_scale: float
    mup_multiplier: float
    log_scaling_floor: float
    log_scaling_alpha: float
    max_position: int
    eos_token_ids: tuple[int, ...]
    mtp_depths: int
    mtp_is_local: tuple[bool, ...]
    mtp_chain_norm: bool
    format: Literal["original", "transformers"]
    conv_kernel: int = CONV_KERNEL
    d_rel: int = D_REL

    def layer_geometry(self, layer: int) -> AttentionGeometry:
        return self.local if self.layer_is_local[layer] else self.full

    def depth_geometry(self, depth: int) -> AttentionGeometry:
        return self.local if self.mtp_is_local[depth] else self.full

    @classmethod
    def from_dir(cls, path: str | Path) -> ModelConfig:
        """Reads and validates ``path/config.json``; the first broken rule is a ``CheckpointError``.

        A synthetic name gives its own config.
        """
        values = SyntheticName.parse(path).config_json if is_synthetic(path) else None
        return _read_config(Path(path), values)


class _Section:
    """One JSON object of a config file: typed, bounded access that names file, key, value and bound."""

    def __init__(self, file: Path, name: str, values: object):
        self.file, self.name = file, name
        if not isinstance(values, dict):
            raise CheckpointError(file, name or "top level", values, "must be a JSON object")
        self.values: dict[str, Any] = values

    def refuse(self, key: str, value: object, rule: str) -> CheckpointError:
        return CheckpointError(self.file, f"{self.name}.{key}" if self.name else key, value, rule)

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def get(self, *keys: str, default: Any = _REQUIRED) -> tuple[str, Any]:
        """The value under the first of several spellings; spellings that contradict each other are refused.

        ``null`` counts as absent.
        """
        found = [(key, self.values[key]) for key in keys if self.values.get(key) is not None]
        for key, value in found[1:]:
            if value != found[0][1]:
                raise self.refuse(key, value, f"must equal {found[0][0]} = {found[0][1]!r}")
        if found:
            return found[0]
        if default is _REQUIRED:
            raise self.refuse(keys[0], None, "it is required" + (f" (or {keys[1]})" if keys[1:] else ""))
        return keys[0], default

    def integer(self, *keys: str, least: int = 1, most: int | None = None, default: Any = _REQUIRED) -> int:
        key, value = self.get(*keys, default=default)
        if type(value) is not int or value < least or (most is not None and value > most):
            bound = f"at least {least}" if most is None else f"from {least} to {most}"
            raise self.refuse(key, value, f"must be an integer, {bound}")
        return value

    def number(self, key: str, *, default: Any = _REQUIRED, or_zero: bool = False) -> float:
        """A finite number above 0, or 0 where that is allowed."""
        key, value = self.get(key, default=default)
        is_number = type(value) in (int, float) and math.isfinite(value)
        if not is_number or value < 0 or (value == 0 and not or_zero):
            raise self.refuse(key, value, f"must be finite and {'at least' if or_zero else 'above'} 0")
        return float(value)

    def flag(self, *keys: str, default: Any = _REQUIRED) -> bool:
        key, value = self.get(*keys, default=default)
        if type(value) is not bool:
            raise self.refuse(key, value, "must be true or false")
        return value

    def fixed(self, key: str, required: object, why: str) -> None:
        """The key must be absent or hold the one value that this implementation computes."""
        value = self.values.get(key)
        if value is not None and (type(value) is not type(required) or value != required):
            raise self.refuse(key, value, f"must be {required!r}: {why}")

    def ids(self, *keys: str, count: int, default: Any = _REQUIRED) -> tuple[bool, ...]:
        """A list of unique ids in ``[0, count)`` as one flag for each id."""
        key, value = self.get(*keys, default=default)
        if not isinstance(value, list) or any(type(i) is not int for i in value):
            raise self.refuse(key, value, "must be a list of integers")
        for position, i in enumerate(value):
            if not 0 <= i < count:
                raise self.refuse(key, i, f"ids must be from 0 to {count - 1}")
            if i in value[:position]:
                raise self.refuse(key, i, "ids must be unique")
        return tuple(i in value for i in range(count))

    def kinds(self, key: str, names: tuple[str, str], count: int) -> tuple[bool, ...] | None:
        """A list of ``count`` names out of two, as flags for the second; ``None`` when absent."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != count:
            raise self.refuse(key, value, f"must be a list of {count} names, one for each layer")
        for name in value:
            if name not in names:
                raise self.refuse(key, name, f"must be {names[0]!r} or {names[1]!r}")
        return tuple(name == names[1] for name in value)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(file, "file", "missing", "every checkpoint has one; name its directory") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(file, "file", str(error), "must be readable JSON") from error
    return _Section(file, "", values).values


def _read_config(directory: Path, values: dict[str, Any] | None) -> ModelConfig:
    file = directory / "config.json"
    top = _Section(file, "", values or _read_json(file))
    _refuse_other_models(top)
    text = _Section(file, "text_config", top.values["text_config"]) if "text_config" in top.values else top
    _refuse_quantised(directory, top, text)
    _refuse_variants(top, text)
    is_transformers = _is_transformers(text)
    num_layers = text.integer("num_hidden_layers")
    hidden_size = text.integer("hidden_size")
    full, local = _geometry(text, "", hidden_size), _geometry(text, "swa_", hidden_size)
    padded = text.integer("vocab_size")
    num_experts = text.integer("n_routed_experts")
    if text.values.get("log_scaling_n_floor") is None:  # transformers: log scaling off
        floor, alpha = 1.0, 0.0
    else:
        floor = text.number("log_scaling_n_floor")
        alpha = text.number("log_scaling_alpha", default=0.1, or_zero=True)
    if is_transformers:
        dense_ffn, expert_ffn = text.integer("intermediate_size"), text.integer("moe_intermediate_size")
    else:
        expert_ffn = text.integer("intermediate_size")
        dense_ffn = text.integer("dense_intermediate_size", default=expert_ffn)
    return ModelConfig(
        hidden_size=hidden_size,
        num_layers=num_layers,
        vocab_size=text.integer("unpadded_vocab_size", most=padded, default=padded),
        padded_vocab_size=padded,
        full=full,
        local=local,
        layer_is_local=_local_layers(text, num_layers, is_transformers),
        layer_is_dense=_dense_layers(text, num_layers, is_transformers),
        dense_ffn=dense_ffn,
        expert_ffn=expert_ffn,
        num_experts=num_experts,
        num_experts_per_token=text.integer("num_experts_per_tok", most=num_experts),
        num_shared_experts=text.integer("n_shared_experts"),
        rms_norm_eps=text.number("rms_norm_eps"),
        use_embed_norm=text.flag("use_embed_norm", default=True),
        route_scale=text.number("route_scale"),
        mup_multiplier=text.number("logits_mup_width_multiplier"),
        log_scaling_floor=floor,
        log_scaling_alpha=alpha,
        max_position=text.integer("model_max_length", "max_position_embeddings"),
        eos_token_ids=_eos_token_ids(directory, top, text, padded),
        **_read_mtp(top, text),
        format="transformers" if is_transformers else "original",
    )


def _refuse_other_models(top: _Section) -> None:
    model_type = top.values.get("model_type")
    if model_type not in _MODEL_TYPES:
        raise top.refuse("model_type", model_type, f"must be one of {', '.join(_MODEL_TYPES)}")


def _refuse_quantised(directory: Path, *sections: _Section) -> None:
    remedy = "quantised checkpoints (NVFP4) are not supported yet; use the BF16 checkpoint"
    for section in sections:
        value = section.values.get("quantization_config")
        if value is not None:
            raise section.refuse("quantization_config", value, remedy)
    file = directory / "hf_quant_config.json"
    if file.exists():
        quantization = _read_json(file).get("quantization")
        algorithm = quantization.get("quant_algo") if isinstance(quantization, dict) else quantization
        raise CheckpointError(file, "quantization.quant_algo", algorithm, remedy)


def _refuse_variants(top: _Section, text: _Section) -> None:
    """Switches that no released checkpoint sets otherwise; the model code knows one value of each."""
    for section in (top, text):
        section.fixed("tie_word_embeddings", False, "embedding and head are separate tensors in this family")
    text.fixed("gate_activation", "sigmoid", "the router scores with a sigmoid")
    text.fixed("norm_after_topk", True, "expert weights are normalised over the chosen experts")
    text.fixed("shared_expert_sink", True, "shared experts take part in the normalisation")
    text.fixed("use_gate_bias", True, "the router selects with a bias for each expert")
    text.fixed("use_global_scale", True, "MLP outputs carry a scale")
    text.fixed("use_sconv", True, "every layer has four short convolutions")
    text.fixed("inference_moe_w13_interleaved", True, "gate and up rows of w13 alternate on disk")
    text.fixed("q_bias", False, "query projections have no bias")
    text.fixed("o_bias", False, "output projections have no bias")
    text.fixed("hidden_act", "silu", "MLPs are gated by SiLU")
    text.fixed("mtp_hidden_states_first", True, "input_proj takes the hidden half first")
    text.integer("sconv_kernel_size", "conv_kernel_size", least=CONV_KERNEL, most=CONV_KERNEL)
    text.integer("d_rel", least=D_REL, most=D_REL)
    softcap = text.values.get("final_logit_softcapping")
    if softcap is not None:
        raise text.refuse("final_logit_softcapping", softcap, "must be null: logits are scaled by muP alone")


def _is_transformers(text: _Section) -> bool:
    """Whether ``intermediate_size`` means the dense width (as vLLM tells the spellings apart)."""
    if text.values.get("dense_intermediate_size") is not None:
        return False
    has_expert_width = text.values.get("moe_intermediate_size") is not None
    return has_expert_width or text.values.get("model_type") == "inkling_text"


def _geometry(text: _Section, prefix: str, hidden_size: int) -> AttentionGeometry:
    heads = text.integer(prefix + "num_attention_heads")
    kv_heads = text.integer(prefix + "num_key_value_heads")
    for name, value in ((prefix + "num_attention_heads", heads), ("hidden_size", hidden_size)):
        if value % kv_heads:
            raise text.refuse(prefix + "num_key_value_heads", kv_heads, f"must divide {name} = {value}")
    window = text.integer("sliding_window_size") if prefix else None
    return AttentionGeometry(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=text.integer(prefix + "head_dim"),
        rel_extent=window or text.integer("rel_extent"),  # every visible key of a window has a bias
        window=window,
    )


def _agreed(first: tuple[_Section, str, Any], second: tuple[_Section, str, Any], absent: Any) -> Any:
    """The value of two spellings of one fact, each (section, key, value or ``None``); both must agree."""
    (section, key, value), (other_section, other_key, other) = first, second
    if value is not None and other is not None and value != other:
        rule = f"must say the same as {other_key} = {other_section.values[other_key]!r}"
        raise section.refuse(key, section.values[key], rule)
    return value if value is not None else other if other is not None else absent


def _local_layers(text: _Section, num_layers: int, is_transformers: bool) -> tuple[bool, ...]:
    types = text.kinds("layer_types", _LAYER_TYPES, num_layers)
    ids = text.ids("local_layer_ids", count=num_layers) if text.has("local_layer_ids") else None
    if types is None and ids is None and not is_transformers:
        raise text.refuse("local_layer_ids", None, "it is required (or layer_types)")
    # the default of transformers: every sixth layer is full
    absent = tuple(bool((i + 1) % 6) for i in range(num_layers))
    return _agreed((text, "layer_types", types), (text, "local_layer_ids", ids), absent)


def _dense_layers(text: _Section, num_layers: int, is_transformers: bool) -> tuple[bool, ...]:
    dense = text.kinds("mlp_layer_types", _MLP_TYPES, num_layers)
    below = None
    if text.has("dense_mlp_idx") or (dense is None and not is_transformers):
        end = text.integer("dense_mlp_idx", least=0, most=num_layers)
        below = tuple(i < end for i in range(num_layers))
    absent = (False,) * num_layers  # the default of transformers
    return _agreed((text, "mlp_layer_types", dense), (text, "dense_mlp_idx", below), absent)


def _read_mtp(top: _Section, text: _Section) -> dict[str, Any]:
    """The MTP fields: in ``mtp_config`` at the top level, in the text config's keys, or agreeing in both."""
    mtp = _Section(top.file, "mtp_config", top.values.get("mtp_config") or {})
    window = text.integer("sliding_window_size")
    mtp.integer("local_extent", least=window, most=window, default=window)
    for key in ("sliding_window_size", "swa_num_attention_heads", "swa_num_key_value_heads", "swa_head_dim"):
        text.fixed("mtp_" + key, text.values[key], "depths share the geometry of the local layers")

    def either(read: Callable[[_Section, str], Any], key: str, text_key: str, absent: Any) -> Any:
        values = [(s, k, read(s, k) if s.has(k) else None) for s, k in ((text, text_key), (mtp, key))]
        return _agreed(values[0], values[1], absent)

    count = either(lambda s, k: s.integer(k, least=0), "num_nextn_predict_layers", "num_mtp_layers", 0)
    local_ids = either(
        lambda s, k: s.ids(k, count=count), "local_layer_ids", "mtp_local_layer_ids", (False,) * count
    )
    chain = either(lambda s, k: s.flag(k), "chain_hidden_post_norm", "chain_hidden_post_norm", False)
    return {"mtp_depths": count, "mtp_is_local": local_ids, "mtp_chain_norm": chain}


def _eos_token_ids(directory: Path, top: _Section, text: _Section, padded: int) -> tuple[int, ...]:
    """Top level, else ``generation_config.json``, else the text config (where transformers defaults to 2)."""
    sources = [top]
    generation = directory / "generation_config.json"
    if generation.exists():
        sources.append(_Section(generation, "", _read_json(generation)))
    for section in [*sources, text]:
        value = section.values.get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        for token in ids:
            if type(token) is not int or not 0 <= token < padded:
                raise section.refuse("eos_token_id", token, f"ids must be from 0 to {padded - 1}")
        return tuple(ids)
    return ()
