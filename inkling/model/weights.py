"""Fused weights of the target and of the MTP depths, as the model code wants them.

All matrices are ``[out, in]``. Rows that are multiplied together are stacked: q, k, v, r of an attention; all
gate rows, then all up rows of an MLP. Loading streams one tensor (one expert) at a time from memory-mapped
files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from inkling.checkpoint import Checkpoint
from inkling.config import ModelConfig
from inkling.errors import CheckpointError
from inkling.synthetic_weights import open_checkpoint
from inkling.tensors import (
    EMBED_NORM,
    MTP,
    TARGET,
    Naming,
    TensorSpec,
    depth_tensors,
    draft_tensors,
    target_tensors,
)


@dataclass
class AttentionWeights:
    qkvr: Tensor  # [n_q*d + 2*n_kv*d + n_q*16, H]
    o: Tensor  # [H, n_q*d]
    q_norm: Tensor  # [d]
    k_norm: Tensor  # [d]
    rel_proj: Tensor  # [16, R]
    k_conv: Tensor  # [n_kv*d, 4]; tap 3 multiplies the current input
    v_conv: Tensor  # [n_kv*d, 4]


@dataclass
class DenseWeights:
    w13: Tensor  # [2F, H], gate rows then up rows
    w2: Tensor  # [H, F]
    global_scale: float


@dataclass
class MoEWeights:
    gate: Tensor  # [E+S, H], shared rows last
    gate_bias: Tensor  # [E] fp32
    global_scale: float
    w13: Tensor  # [E, 2f, H], gate rows then up rows
    w2: Tensor  # [E, H, f]
    shared_w13: Tensor  # [S, 2f, H]
    shared_w2: Tensor  # [S, H, f]

    def shared_as_one(self) -> tuple[Tensor, Tensor]:
        """The shared experts as one MLP of two products: w13 ``[S*2f, H]``, one after another, and w2 ``[H, S*f]``.

        Both are memory of ``shared_w13`` and ``shared_w2``, whose strides change for that.
        """
        num_shared, hidden, width = self.shared_w2.shape
        w2 = self.shared_w2.transpose(0, 1).flatten(1).contiguous()
        self.shared_w2 = w2.view(hidden, num_shared, width).transpose(0, 1)
        return self.shared_w13.flatten(0, 1), w2


@dataclass
class LayerWeights:
    attn_norm: Tensor  # [H]
    attn: AttentionWeights
    attn_conv: Tensor  # [H, 4]
    mlp_norm: Tensor  # [H]
    mlp: DenseWeights | MoEWeights
    mlp_conv: Tensor  # [H, 4]


@dataclass
class TargetWeights:
    embed: Tensor  # [V, H]
    embed_norm: Tensor | None  # [H]
    layers: list[LayerWeights]
    norm: Tensor  # [H]
    head: Tensor  # [V', H]


@dataclass
class DepthWeights:
    hidden_norm: Tensor  # [H]
    embed_norm: Tensor  # [H]
    input_proj: Tensor  # [H, 2H], hidden half first
    block: LayerWeights


@dataclass
class DraftWeights:
    """The depths; embedding and head are the target's own."""

    depths: list[DepthWeights]
    chain_norm: Tensor | None  # [H]
    backbone_embed_norm: Tensor | None  # [H], the target's embed_norm


Progress = Callable[[int, int, str], None]  # bytes read, bytes to read, tensor


def load_target(
    directory: str | Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    progress: Progress | None = None,
) -> TargetWeights:
    """Reads every weight of the target.

    Matrices, norms and taps become ``dtype``, gate biases fp32. ``CheckpointError`` before anything is read
    when a tensor of the target is missing, surplus or mis-shaped, or when there are towers or NVFP4 experts.
    """
    checkpoint = open_checkpoint(directory, device)
    checkpoint.require(config, "target")
    reader = _Reader(checkpoint, target_tensors(config), dtype, torch.device(device), progress)
    weights = TargetWeights(
        embed=reader.tensor(TARGET + "embed.weight"),
        embed_norm=reader.tensor(EMBED_NORM) if config.use_embed_norm else None,
        layers=[
            _read_layer(reader, f"{TARGET}layers.{layer}.", config.layer_is_dense[layer])
            for layer in range(config.num_layers)
        ],
        norm=reader.tensor(TARGET + "norm.weight"),
        head=reader.tensor(TARGET + "unembed.weight", rows=config.vocab_size),
    )
    reader.finish()
    return weights


def load_draft(
    directory: str | Path,
    config: ModelConfig,
    num_depths: int,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    progress: Progress | None = None,
) -> DraftWeights:
    """Reads the first ``num_depths`` MTP depths; of the others, the headers are checked and no data is read.

    ``CheckpointError`` when the checkpoint has fewer depths, or when an MTP tensor is missing, surplus or
    mis-shaped.
    """
    if not 1 <= num_depths <= config.mtp_depths:
        rule = f"{num_depths} are asked for; ask for 1 to the checkpoint's number, or turn drafting off"
        raise CheckpointError(Path(directory) / "config.json", "MTP depths", config.mtp_depths, rule)
    checkpoint = open_checkpoint(directory, device)
    checkpoint.require(config, "draft")
    specs = [spec for depth in range(num_depths) for spec in depth_tensors(config, depth)]
    backbone = [spec for spec in target_tensors(config) if spec.key == EMBED_NORM]
    chain = [spec for spec in draft_tensors(config) if spec.key == MTP + "chain_norm.weight"]
    reader = _Reader(checkpoint, [*specs, *backbone, *chain], dtype, torch.device(device), progress)
    weights = DraftWeights(
        depths=[_read_depth(reader, f"{MTP}layers.{depth}.") for depth in range(num_depths)],
        chain_norm=reader.tensor(chain[0].key) if chain else None,
        backbone_embed_norm=reader.tensor(backbone[0].key) if backbone else None,
    )
    reader.finish()
    return weights


class _Reader:
    """Copies tensors out of the mapped files one by one, and keeps count of what is still to come."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        specs: list[TensorSpec],
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress | None,
    ):
        self.checkpoint, self.dtype, self.device, self.progress = checkpoint, dtype, device, progress
        self.unread = {spec.key: spec for spec in specs}
        self.total_bytes = sum(self._num_bytes(spec) for spec in specs)
        self.done_bytes = 0

    def _num_bytes(self, spec: TensorSpec) -> int:
        return sum(self.checkpoint.tensors[piece.name].num_bytes for piece in self.checkpoint.pieces(spec))

    def _pieces(self, key: str) -> tuple[TensorSpec, list[Tensor]]:
        spec = self.unread.pop(key)
        return spec, [self.checkpoint.read(piece.name) for piece in self.checkpoint.pieces(spec)]

    def _report(self, spec: TensorSpec) -> None:
        self.done_bytes += self._num_bytes(spec)
        if self.progress is not None:
            self.progress(self.done_bytes, self.total_bytes, spec.key)

    def _empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)

    def tensor(self, key: str, *, rows: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor, or its first ``rows``."""
        spec, (stored,) = self._pieces(key)
        stored = stored[:rows]
        copy = self._empty(*stored.shape, dtype=dtype).copy_(stored)
        self._report(spec)
        return copy

    def taps(self, key: str) -> Tensor:
        return self.tensor(key).squeeze(1)  # [C, 1, 4] -> [C, 4]

    def scalar(self, key: str) -> float:
        spec, (stored,) = self._pieces(key)
        self._report(spec)
        return float(stored)

    def stacked(self, *keys: str) -> Tensor:
        """The rows of several matrices in one."""
        specs = [self.unread[key] for key in keys]
        fused = self._empty(sum(spec.shape[0] for spec in specs), specs[0].shape[1])
        start = 0
        for spec in specs:
            _, (stored,) = self._pieces(spec.key)
            fused[start : start + spec.shape[0]].copy_(stored)
            start += spec.shape[0]
            self._report(spec)
        return fused

    def gate_up(self, key: str) -> Tensor:
        """w13 with all gate rows first, ``[..., 2F, H]``, from any of the three ways to store it."""
        spec, stored = self._pieces(key)
        fused = self._empty(*spec.shape)
        width = spec.shape[-2] // 2
        if len(stored) == 2:
            gate, up = stored
        elif self.checkpoint.naming(spec) is Naming.ORIGINAL:
            gate, up = stored[0][..., 0::2, :], stored[0][..., 1::2, :]
        else:
            gate, up = stored[0][..., :width, :], stored[0][..., width:, :]
        if fused.dim() == 2:
            fused, gate, up = fused[None], gate[None], up[None]
        for expert in range(fused.shape[0]):  # a strided copy to a GPU is staged in host memory
            fused[expert, :width].copy_(gate[expert])
            fused[expert, width:].copy_(up[expert])
        self._report(spec)
        return fused.view(spec.shape)

    def finish(self) -> None:
        assert not self.unread, f"never read: {sorted(self.unread)}"
        assert self.done_bytes == self.total_bytes
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # the device memory of tensors that were drawn and copied


def _read_layer(reader: _Reader, prefix: str, is_dense: bool) -> LayerWeights:
    return LayerWeights(
        attn_norm=reader.tensor(prefix + "attn_norm.weight"),
        attn=_read_attention(reader, prefix + "attn."),
        attn_conv=reader.taps(prefix + "attn_sconv.weight"),
        mlp_norm=reader.tensor(prefix + "mlp_norm.weight"),
        mlp=_read_dense(reader, prefix + "mlp.") if is_dense else _read_experts(reader, prefix + "mlp."),
        mlp_conv=reader.taps(prefix + "mlp_sconv.weight"),
    )


def _read_attention(reader: _Reader, prefix: str) -> AttentionWeights:
    rows = ("wq_du", "wk_dv", "wv_dv", "wr_du")
    return AttentionWeights(
        qkvr=reader.stacked(*(f"{prefix}{name}.weight" for name in rows)),
        o=reader.tensor(prefix + "wo_ud.weight"),
        q_norm=reader.tensor(prefix + "q_norm.weight"),
        k_norm=reader.tensor(prefix + "k_norm.weight"),
        rel_proj=reader.tensor(prefix + "rel_logits_proj.proj"),
        k_conv=reader.taps(prefix + "k_sconv.weight"),
        v_conv=reader.taps(prefix + "v_sconv.weight"),
    )


def _read_dense(reader: _Reader, prefix: str) -> DenseWeights:
    return DenseWeights(
        w13=reader.gate_up(prefix + "w13_dn.weight"),
        w2=reader.tensor(prefix + "w2_md.weight"),
        global_scale=reader.scalar(prefix + "global_scale"),
    )


def _read_experts(reader: _Reader, prefix: str) -> MoEWeights:
    return MoEWeights(
        gate=reader.tensor(prefix + "gate.weight"),
        gate_bias=reader.tensor(prefix + "gate.bias", dtype=torch.float32),
        global_scale=reader.scalar(prefix + "gate.global_scale"),
        w13=reader.gate_up(prefix + "experts.w13_weight"),
        w2=reader.tensor(prefix + "experts.w2_weight"),
        shared_w13=reader.gate_up(prefix + "shared_experts.shared_w13_weight"),
        shared_w2=reader.tensor(prefix + "shared_experts.shared_w2_weight"),
    )


def _read_depth(reader: _Reader, prefix: str) -> DepthWeights:
    return DepthWeights(
        hidden_norm=reader.tensor(prefix + "hidden_norm.weight"),
        embed_norm=reader.tensor(prefix + "embed_norm.weight"),
        input_proj=reader.tensor(prefix + "input_proj.weight"),
        block=_read_layer(reader, prefix + "transformer_block.", is_dense=True),
    )
