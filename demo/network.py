"""Inkling as a differentiable whole-sequence network, for training the demo checkpoint only.

Parameter names and shapes are those of the original on-disk format, so `state_dict()` is the checkpoint.
Everything is written over whole sequences of one length; there is no cache. B sequences, T positions,
H hidden size, R relative extent, W window, E experts, S shared experts, F widths, V' vocabulary.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class TextConfig:
    """`text_config` of the original format. `intermediate_size` is the width of one expert."""

    hidden_size: int = 256
    num_hidden_layers: int = 6
    vocab_size: int = 4224  # rows of the embedding and the head
    unpadded_vocab_size: int = 4096  # ids that exist
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    head_dim: int = 32
    swa_num_attention_heads: int = 8
    swa_num_key_value_heads: int = 4
    swa_head_dim: int = 32
    sliding_window_size: int = 128
    local_layer_ids: list[int] = field(default_factory=lambda: [0, 1, 3, 4])
    d_rel: int = 16
    rel_extent: int = 256
    log_scaling_n_floor: int = 512
    log_scaling_alpha: float = 0.1
    rms_norm_eps: float = 1e-6
    q_bias: bool = False
    o_bias: bool = False
    use_embed_norm: bool = True
    use_sconv: bool = True
    sconv_kernel_size: int = 4
    dense_mlp_idx: int = 2
    dense_intermediate_size: int = 512
    intermediate_size: int = 256
    n_routed_experts: int = 16
    num_experts_per_tok: int = 2
    n_shared_experts: int = 1
    shared_expert_sink: bool = True
    norm_after_topk: bool = True
    use_gate_bias: bool = True
    use_global_scale: bool = True
    gate_activation: str = "sigmoid"
    route_scale: float = 3.0
    logits_mup_width_multiplier: float = 2.0
    final_logit_softcapping: float | None = None
    tie_word_embeddings: bool = False
    model_max_length: int = 4096


@dataclass(frozen=True)
class MtpConfig:
    """`mtp_config` of the original format: depths 0 and 2 are sliding-window, 1 and 3 full."""

    num_nextn_predict_layers: int = 4
    local_layer_ids: list[int] = field(default_factory=lambda: [0, 2])
    chain_hidden_post_norm: bool = False


def config_json(text: TextConfig, mtp: MtpConfig, eos_token_id: int) -> dict:
    """The text-only `config.json` in the original format."""
    return {
        "architectures": ["InklingForConditionalGeneration"],
        "model_type": "inkling_mm_model",
        "torch_dtype": "bfloat16",
        "eos_token_id": eos_token_id,
        "text_config": asdict(text) | {"eos_token_id": eos_token_id, "bos_token_id": None},
        "mtp_config": asdict(mtp),
    }


class Norm(nn.Module):
    """RMSNorm over the last dimension, statistics in fp32."""

    def __init__(self, size: int, eps: float, init: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), init))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps))


class ShortConv(nn.Module):
    """y_t = u_t + sum_j w_j u_(t-K+1+j) per channel over [B, T, C]; zero before the first position."""

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(channels, 1, taps))

    def forward(self, u: Tensor) -> Tensor:
        u = u.float()
        taps, length = self.weight.shape[2], u.shape[1]
        padded = F.pad(u, (0, 0, taps - 1, 0))
        return u + sum(self.weight[:, 0, j] * padded[:, j : j + length] for j in range(taps))


def linear(out_size: int, in_size: int, scale: float = 0.5) -> nn.Linear:
    layer = nn.Linear(in_size, out_size, bias=False)
    nn.init.normal_(layer.weight, std=scale * in_size**-0.5)
    return layer


def full_bias(bank: Tensor) -> Tensor:
    """[.., T, R] bank over distances to [.., T, T]: entry (t, s) is bank[t, t-s], 0 where t-s >= R.

    Entries above the diagonal are arbitrary. The shift is the pad-and-reshape one of Transformer-XL.
    """
    length, extent = bank.shape[-2:]
    shifted = F.pad(bank[..., :length].flip(-1), (max(length - extent, 0) + 1, 0))
    return shifted.flatten(-2)[..., length:].unflatten(-1, (length, length))


def local_bias(bank: Tensor) -> Tensor:
    """[.., W, W] bank of one block to [.., W, 2W]: (i, j) is bank[i, i+W-j]; arbitrary where invisible."""
    window = bank.shape[-1]
    sheared = F.pad(bank.flip(-1), (1, window)).flatten(-2)  # row width 2W+1
    return sheared[..., : 2 * window * window].unflatten(-1, (window, 2 * window))


class RelativeBank(nn.Module):
    def __init__(self, d_rel: int, extent: int) -> None:
        super().__init__()
        self.proj = nn.Parameter(torch.randn(d_rel, extent) * 0.02)


class Attention(nn.Module):
    """Relative-position attention; `scaled` turns the log scaling by position on (trunk, full layers)."""

    def __init__(self, c: TextConfig, local: bool, scaled: bool) -> None:
        super().__init__()
        self.window = c.sliding_window_size if local else 0
        self.d = c.swa_head_dim if local else c.head_dim
        self.n_q = c.swa_num_attention_heads if local else c.num_attention_heads
        self.n_kv = c.swa_num_key_value_heads if local else c.num_key_value_heads
        self.floor, self.alpha = (c.log_scaling_n_floor if scaled else None), c.log_scaling_alpha
        h, d, taps = c.hidden_size, self.d, c.sconv_kernel_size
        self.wq_du, self.wr_du = linear(self.n_q * d, h, 1.0), linear(self.n_q * c.d_rel, h, 1.0)
        self.wk_dv, self.wv_dv = linear(self.n_kv * d, h, 1.0), linear(self.n_kv * d, h, 1.0)
        self.wo_ud = linear(h, self.n_q * d)
        self.k_sconv, self.v_sconv = ShortConv(self.n_kv * d, taps), ShortConv(self.n_kv * d, taps)
        self.q_norm, self.k_norm = Norm(d, c.rms_norm_eps, 2.0), Norm(d, c.rms_norm_eps, 2.0)
        self.rel_logits_proj = RelativeBank(c.d_rel, self.window or c.rel_extent)

    def forward(self, a: Tensor) -> Tensor:
        batch, length, _ = a.shape
        groups = self.n_q // self.n_kv
        q = self.q_norm(self.wq_du(a).unflatten(-1, (self.n_q, self.d))) / self.d
        k = self.k_norm(self.k_sconv(self.wk_dv(a)).unflatten(-1, (self.n_kv, self.d)))
        v = self.v_sconv(self.wv_dv(a)).unflatten(-1, (self.n_kv, self.d))
        bank = self.wr_du(a).unflatten(-1, (self.n_q, -1)) @ self.rel_logits_proj.proj  # [B, T, n_q, R]
        q, bank = q.to(bank.dtype), bank.transpose(1, 2)
        k = k.to(bank.dtype).repeat_interleave(groups, 2).transpose(1, 2)
        v = v.to(bank.dtype).repeat_interleave(groups, 2).transpose(1, 2)
        attend = self.attend_local if self.window else self.attend_full
        out = attend(q.transpose(1, 2), k, v, bank)
        return self.wo_ud(out.transpose(1, 2).reshape(batch, length, -1))

    def attend_full(self, q: Tensor, k: Tensor, v: Tensor, bank: Tensor) -> Tensor:
        """q, k, v [B, n_q, T, d], q already divided by d; bank [B, n_q, T, R]. Returns [B, n_q, T, d]."""
        length = q.shape[2]
        position = torch.arange(length, device=q.device)
        logits = (q @ k.transpose(-1, -2)).float() + full_bias(bank).float()
        if self.floor is not None:
            n = ((position + 1).float() / self.floor).clamp(min=1.0)
            logits = logits * (1.0 + self.alpha * n.log())[:, None]
        logits = logits.masked_fill(position[:, None] < position, float("-inf"))
        return logits.softmax(-1).to(v.dtype) @ v

    def attend_local(self, q: Tensor, k: Tensor, v: Tensor, bank: Tensor) -> Tensor:
        """As `attend_full`, in blocks of W queries over the 2W keys that end with the block."""
        length, window = q.shape[2], self.window
        fill = -length % window
        q, bank = F.pad(q, (0, 0, 0, fill)), F.pad(bank, (0, 0, 0, fill))
        q, bank = q.unflatten(2, (-1, window)), bank.unflatten(2, (-1, window))
        k = F.pad(k, (0, 0, window, fill)).unflatten(2, (-1, window))
        v = F.pad(v, (0, 0, window, fill)).unflatten(2, (-1, window))
        k, v = torch.cat((k[:, :, :-1], k[:, :, 1:]), 3), torch.cat((v[:, :, :-1], v[:, :, 1:]), 3)
        logits = (q @ k.transpose(-1, -2)).float() + local_bias(bank).float()
        i = torch.arange(window, device=q.device)[:, None]
        j = torch.arange(2 * window, device=q.device)
        block = torch.arange(q.shape[2], device=q.device)[:, None, None]
        visible = (j > i) & (j <= i + window) & (block * window + j >= window)
        logits = logits.masked_fill(~visible, float("-inf"))
        return (logits.softmax(-1).to(v.dtype) @ v).flatten(2, 3)[:, :, :length]


def swiglu(rows: Tensor) -> Tensor:
    """silu(gate) * up over interleaved rows [.., 2F] -> [.., F], product in fp32."""
    gate, up = rows.unflatten(-1, (-1, 2)).float().unbind(-1)
    return F.silu(gate) * up


class DenseMlp(nn.Module):
    def __init__(self, c: TextConfig) -> None:
        super().__init__()
        self.w13_dn = linear(2 * c.dense_intermediate_size, c.hidden_size, 1.0)
        self.w2_md = linear(c.hidden_size, c.dense_intermediate_size)
        self.global_scale = nn.Parameter(torch.ones(1))

    def forward(self, m: Tensor) -> Tensor:
        return self.w2_md(swiglu(self.w13_dn(m))) * self.global_scale


class Gate(nn.Module):
    """Sigmoid router: `bias` only takes part in the choice of experts and is moved to balance the load."""

    def __init__(self, c: TextConfig) -> None:
        super().__init__()
        self.shared, self.top, self.scale = c.n_shared_experts, c.num_experts_per_tok, c.route_scale
        self.weight = nn.Parameter(torch.randn(c.n_routed_experts + self.shared, c.hidden_size) * 0.02)
        self.global_scale = nn.Parameter(torch.ones(1))
        self.register_buffer("bias", torch.zeros(c.n_routed_experts))
        self.register_buffer("load", torch.zeros(c.n_routed_experts), persistent=False)

    def forward(self, m: Tensor) -> tuple[Tensor, Tensor]:
        """[.., H] -> weights [.., E+S], zero for experts not chosen, and the rows per expert [E]."""
        with torch.autocast(m.device.type, enabled=False):
            scores = torch.sigmoid(F.linear(m.float(), self.weight.float()))
            routed, shared = scores[..., : -self.shared], scores[..., -self.shared :]
            chosen = (routed + self.bias).topk(self.top, dim=-1).indices
            mask = torch.zeros_like(routed).scatter(-1, chosen, 1.0)
            active = torch.cat((routed * mask, shared), -1)
            weights = active / active.sum(-1, keepdim=True) * (self.scale * self.global_scale)
        return weights, mask.detach().flatten(0, -2).sum(0)


class Experts(nn.Module):
    def __init__(self, c: TextConfig) -> None:
        super().__init__()
        e, h, f = c.n_routed_experts, c.hidden_size, c.intermediate_size
        self.w13_weight = nn.Parameter(torch.randn(e, 2 * f, h) * h**-0.5)
        self.w2_weight = nn.Parameter(torch.randn(e, h, f) * 0.5 * f**-0.5)


class SharedExperts(nn.Module):
    def __init__(self, c: TextConfig) -> None:
        super().__init__()
        s, h, f = c.n_shared_experts, c.hidden_size, c.intermediate_size
        self.shared_w13_weight = nn.Parameter(torch.randn(s, 2 * f, h) * h**-0.5)
        self.shared_w2_weight = nn.Parameter(torch.randn(s, h, f) * 0.5 * f**-0.5)


class MoeMlp(nn.Module):
    """Every expert runs on every row and unchosen ones get weight 0: two large products, simple gradients."""

    def __init__(self, c: TextConfig) -> None:
        super().__init__()
        self.gate, self.experts, self.shared_experts = Gate(c), Experts(c), SharedExperts(c)

    def forward(self, m: Tensor) -> Tensor:
        weights, load = self.gate(m)
        if self.training:
            self.gate.load.copy_(load)
        w13 = torch.cat((self.experts.w13_weight, self.shared_experts.shared_w13_weight))  # [E+S, 2F, H]
        w2 = torch.cat((self.experts.w2_weight, self.shared_experts.shared_w2_weight))  # [E+S, H, F]
        hidden = swiglu(F.linear(m, w13.flatten(0, 1))).unflatten(-1, (w13.shape[0], -1))
        return F.linear((hidden * weights[..., None]).flatten(-2), w2.transpose(0, 1).flatten(1))


class Block(nn.Module):
    """One decoder layer, of the trunk or of a depth."""

    def __init__(self, c: TextConfig, local: bool, dense: bool, trunk: bool) -> None:
        super().__init__()
        self.attn_norm = Norm(c.hidden_size, c.rms_norm_eps)
        self.mlp_norm = Norm(c.hidden_size, c.rms_norm_eps)
        self.attn = Attention(c, local, scaled=trunk)
        self.mlp = DenseMlp(c) if dense else MoeMlp(c)
        self.attn_sconv = ShortConv(c.hidden_size, c.sconv_kernel_size)
        self.mlp_sconv = ShortConv(c.hidden_size, c.sconv_kernel_size)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn_sconv(self.attn(self.attn_norm(x)))
        return x + self.mlp_sconv(self.mlp(self.mlp_norm(x)))


class Depth(nn.Module):
    """One MTP depth: hidden half first, then a dense block; no norm on what it returns."""

    def __init__(self, c: TextConfig, local: bool) -> None:
        super().__init__()
        self.hidden_norm = Norm(c.hidden_size, c.rms_norm_eps)
        self.embed_norm = Norm(c.hidden_size, c.rms_norm_eps)
        self.input_proj = linear(c.hidden_size, 2 * c.hidden_size, 1.0)
        self.transformer_block = Block(c, local, dense=True, trunk=False)

    def forward(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        joined = torch.cat((self.hidden_norm(hidden), self.embed_norm(embedded)), -1)
        return self.transformer_block(self.input_proj(joined).float())


class Inkling(nn.Module):
    """Target and depths. Everything that turns hidden states into logits is left to `logits`."""

    def __init__(self, text: TextConfig, mtp: MtpConfig) -> None:
        super().__init__()
        self.text, self.mtp = text, mtp
        v, h, eps = text.vocab_size, text.hidden_size, text.rms_norm_eps
        llm = nn.Module()
        llm.embed, llm.unembed = nn.Embedding(v, h), linear(v, h)
        nn.init.normal_(llm.embed.weight, std=0.1)
        llm.embed_norm, llm.norm = Norm(h, eps), Norm(h, eps)
        llm.layers = nn.ModuleList(
            Block(text, i in text.local_layer_ids, i < text.dense_mlp_idx, trunk=True)
            for i in range(text.num_hidden_layers)
        )
        depths = nn.Module()
        depths.layers = nn.ModuleList(
            Depth(text, i in mtp.local_layer_ids) for i in range(mtp.num_nextn_predict_layers)
        )
        self.model = nn.Module()
        self.model.llm, self.model.mtp = llm, depths

    def embed(self, ids: Tensor, normed: bool = True) -> Tensor:
        rows = self.model.llm.embed(ids)
        return self.model.llm.embed_norm(rows) if normed else rows

    def hidden(self, ids: Tensor) -> Tensor:
        """ids [B, T] -> target states after the final norm [B, T, H]."""
        x = self.embed(ids)
        for layer in self.model.llm.layers:
            x = layer(x)
        return self.model.llm.norm(x)

    def depth(self, k: int, hidden: Tensor, next_ids: Tensor, backbone_norm: bool = True) -> Tensor:
        """States of depth k from those of depth k-1 (or the target) and the ids k+1 positions ahead."""
        return self.model.mtp.layers[k](hidden, self.embed(next_ids, backbone_norm))

    def head(self) -> Tensor:
        """[V', H], the muP divisor folded in."""
        c = self.text
        return self.model.llm.unembed.weight[: c.unpadded_vocab_size] / c.logits_mup_width_multiplier

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.head()).float()
