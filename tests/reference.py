"""The model, written once more: straight-line PyTorch, one sequence, no caches, no batching, no kernels.

Everything the product computes is compared with this file, so it shares no code with it. It reads a dict of
tensors under the checkpoint's original names (``w13`` rows interleaved: row 2j is gate j, row 2j + 1 is up j)
and recomputes everything from position 0 on every call. All arithmetic runs in the one ``dtype`` it is given,
without the bfloat16 rounding points of the serving path. It knows text only, and no sampling but the argmax.

Letters: T rows (positions), H hidden, V' vocabulary, P depth entries, R relative extent, W window, d head
width. Entry p of depth k pairs the target's state of position p with the id of position p + k + 1, and
predicts p + k + 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from inkling.config import AttentionGeometry, ModelConfig


class Reference:
    """One checkpoint. ``tensors``: unquantised, by original name; ``dtype``: of all arithmetic."""

    def __init__(
        self, tensors: dict[str, Tensor], config: ModelConfig, dtype: torch.dtype = torch.float32
    ) -> None:
        self.config = config
        self.dtype = dtype
        self._tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}

    def target(self, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        """States after the final norm [T, H] and logits [T, V'] of every position of ``ids`` (T of them)."""
        config = self.config
        x = self._embed(ids)
        for i in range(config.num_layers):
            x = self._block(f"model.llm.layers.{i}.", x, config.layer_geometry(i), config.layer_is_dense[i])
        hidden = self._rms_norm(x, "model.llm.norm.weight")
        return hidden, self._logits(hidden)

    def depth(self, k: int, hidden_in: Tensor, ids_shifted: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Depth ``k`` over entries 0..P-1: its raw block output [P, H] and its draft logits [P, V'].

        ``hidden_in`` [P, H] is the previous depth's output, for depth 0 the target's post-norm state;
        ``ids_shifted`` [P] holds id p + k + 1 for entry p. The attention temperature of a full-attention
        depth is that of position p, not p + k + 1: below ``log_scaling_floor`` it is 1 either way.
        Convolutions see zeros before entry 0. The output feeds the head and the next depth; only a chain
        norm, where there is one, is applied to it.
        """
        config = self.config
        if hidden_in.shape[0] != len(ids_shifted):
            raise ValueError(
                f"depth {k} has {hidden_in.shape[0]} states and {len(ids_shifted)} ids; want as many"
            )
        layer = f"model.mtp.layers.{k}."
        hidden = self._rms_norm(hidden_in.to(self.dtype), layer + "hidden_norm.weight")
        embedding = self._rms_norm(self._embed(ids_shifted), layer + "embed_norm.weight")
        u = torch.cat([hidden, embedding], dim=1) @ self._tensors[layer + "input_proj.weight"].T  # [P, H]
        out = self._block(layer + "transformer_block.", u, config.depth_geometry(k), is_dense=True)
        if config.mtp_chain_norm:
            out = self._rms_norm(out, "model.mtp.chain_norm.weight")
        return out, self._logits(out)

    def draft_hidden(
        self, ids: Sequence[int], n_entries: int, num_depths: int, drafts: Sequence[int] = ()
    ) -> list[Tensor]:
        """Per depth 0..``num_depths``-1 the output [n_entries, H] of entries 0..``n_entries``-1.

        ``ids`` are the committed ids; ids beyond them are taken from ``drafts``. Together they must reach
        position ``n_entries`` + ``num_depths`` - 1, the last id that the last entry of the last depth uses.
        """
        known = list(ids) + list(drafts)
        if n_entries > len(ids) or len(known) < n_entries + num_depths:
            raise ValueError(
                f"{n_entries} entries of {num_depths} depths need {n_entries} committed ids and "
                f"{n_entries + num_depths} in all; got {len(ids)} and {len(known)}"
            )
        hidden, _ = self.target(known[:n_entries])
        outputs = []
        for k in range(num_depths):
            hidden, _ = self.depth(k, hidden, known[k + 1 : k + 1 + n_entries])
            outputs.append(hidden)
        return outputs

    def greedy_drafts(self, ids: Sequence[int], n: int) -> list[int]:
        """The ``n`` ids that depths 0..n-1 propose after ``ids[-1]``, each fed with the drafts before it.

        ``ids`` is prompt + emitted, at least two of them: the target state of position len(ids) - 2 is the
        newest one that exists when ``ids[-1]`` has been drawn, so the drafts come from entry len(ids) - 2 of
        every depth.
        """
        if len(ids) < 2:
            raise ValueError(
                f"{len(ids)} ids; a draft needs at least 2: one with a target state and the one after it"
            )
        hidden, _ = self.target(ids[:-1])
        known = list(ids)
        for k in range(n):
            hidden, logits = self.depth(k, hidden, known[k + 1 :])
            known.append(_argmax(logits[-1]))
        return known[len(ids) :]

    def generate(self, ids: Sequence[int], max_new_tokens: int, n: int) -> tuple[list[int], list[int]]:
        """Greedy speculative decoding after ``ids``: the emitted ids, and the accepted drafts of every step.

        A step drafts ``n`` ids (fewer when fewer than n + 1 may still be emitted), runs the target over all
        of them, emits the drafts that equal the target's own choice and then the target's next choice. The
        first step has no drafts: it is the prompt's, and is not counted.
        """
        known = list(ids)
        end = len(known) + max_new_tokens
        accepted_counts: list[int] = []
        if max_new_tokens > 0:
            known.append(_argmax(self.target(known)[1][-1]))
        while len(known) < end:
            drafts = self.greedy_drafts(known, min(n, end - len(known) - 1))
            _, logits = self.target(known + drafts)
            choices = [_argmax(row) for row in logits[len(known) - 1 :]]  # one a draft, one after the last
            accepted = 0
            while accepted < len(drafts) and drafts[accepted] == choices[accepted]:
                accepted += 1
            known += choices[: accepted + 1]
            accepted_counts.append(accepted)
        return known[len(ids) :], accepted_counts

    def _embed(self, ids: Sequence[int]) -> Tensor:
        """Rows of the embedding table, normed by the backbone's own norm where it has one: [T, H]."""
        x = self._tensors["model.llm.embed.weight"][torch.as_tensor(list(ids), dtype=torch.long)]
        return self._rms_norm(x, "model.llm.embed_norm.weight") if self.config.use_embed_norm else x

    def _logits(self, hidden: Tensor) -> Tensor:
        head = self._tensors["model.llm.unembed.weight"][: self.config.vocab_size]  # [V', H]
        return (hidden / self.config.mup_multiplier) @ head.T

    def _rms_norm(self, x: Tensor, name: str) -> Tensor:
        """w * x / sqrt(mean(x^2) + eps) over the last axis."""
        mean_square = (x * x).mean(dim=-1, keepdim=True)
        return self._tensors[name] * x / torch.sqrt(mean_square + self.config.rms_norm_eps)

    def _short_conv(self, u: Tensor, name: str) -> Tensor:
        """y_t = u_t + sum over j of w_j * u_{t-K+1+j}, K taps a channel, zeros before row 0: [T, C]."""
        taps = self._tensors[name].squeeze(1)  # [C, K], the last tap multiplies the current row
        num_taps = taps.shape[1]
        y = u.clone()
        for j in range(num_taps):
            delay = num_taps - 1 - j
            y[delay:] += taps[:, j] * u[: max(len(u) - delay, 0)]
        return y

    def _block(self, block: str, x: Tensor, geometry: AttentionGeometry, is_dense: bool) -> Tensor:
        """One layer, trunk or depth: x [T, H] -> [T, H]. Each convolution keeps its own residual inside."""
        attention = self._attention(block + "attn.", self._rms_norm(x, block + "attn_norm.weight"), geometry)
        x = x + self._short_conv(attention, block + "attn_sconv.weight")
        m = self._rms_norm(x, block + "mlp_norm.weight")
        mlp = self._dense_mlp(block + "mlp.", m) if is_dense else self._experts(block + "mlp.", m)
        return x + self._short_conv(mlp, block + "mlp_sconv.weight")

    def _attention(self, attn: str, a: Tensor, geometry: AttentionGeometry) -> Tensor:
        """Attention of the normed rows a [T, H] -> [T, H]: q k / d plus a bias per distance, no RoPE."""
        num_rows = len(a)
        num_heads, num_kv_heads, d = geometry.num_heads, geometry.num_kv_heads, geometry.head_dim
        weight = self._tensors
        q = (a @ weight[attn + "wq_du.weight"].T).reshape(num_rows, num_heads, d)
        k = self._short_conv(a @ weight[attn + "wk_dv.weight"].T, attn + "k_sconv.weight")
        v = self._short_conv(a @ weight[attn + "wv_dv.weight"].T, attn + "v_sconv.weight")
        r = (a @ weight[attn + "wr_du.weight"].T).reshape(num_rows, num_heads, -1)  # [T, heads, 16]
        q = self._rms_norm(q, attn + "q_norm.weight")
        k = self._rms_norm(k.reshape(num_rows, num_kv_heads, d), attn + "k_norm.weight")
        v = v.reshape(num_rows, num_kv_heads, d)

        position = torch.arange(num_rows)
        distance = position[:, None] - position[None, :]  # [T, T], query minus key
        visible = distance >= 0
        if geometry.window is not None:
            visible &= distance <= geometry.window - 1  # W keys, the row itself among them
        has_bias = visible & (distance < geometry.rel_extent)
        tau = torch.ones(num_rows, dtype=self.dtype)  # local attention has no temperature
        if geometry.window is None:
            tau = self._temperature(position)
        profile = weight[attn + "rel_logits_proj.proj"]  # [16, R], bias of every distance below R

        heads = []
        for head in range(num_heads):
            kv_head = head // (num_heads // num_kv_heads)
            bias = r[:, head] @ profile  # [T, R]
            bias = torch.gather(bias, 1, distance.clamp(0, geometry.rel_extent - 1))  # [T, T]
            bias = torch.where(has_bias, bias, torch.zeros_like(bias))
            scores = (q[:, head] * tau[:, None]) @ k[:, kv_head].T / d + bias * tau[:, None]
            scores = scores.masked_fill(~visible, float("-inf"))
            heads.append(torch.softmax(scores, dim=1) @ v[:, kv_head])
        return torch.cat(heads, dim=1) @ weight[attn + "wo_ud.weight"].T

    def _temperature(self, position: Tensor) -> Tensor:
        """tau = 1 + alpha * ln(max((position + 1) / floor, 1)), for full-attention layers: [T]."""
        ratio = (position.to(self.dtype) + 1) / self.config.log_scaling_floor
        return 1 + self.config.log_scaling_alpha * torch.log(ratio.clamp(min=1))

    def _dense_mlp(self, mlp: str, m: Tensor) -> Tensor:
        activated = _silu_mul(m @ self._tensors[mlp + "w13_dn.weight"].T)
        return self._tensors[mlp + "global_scale"] * (activated @ self._tensors[mlp + "w2_md.weight"].T)

    def _experts(self, mlp: str, m: Tensor) -> Tensor:
        """Routed and shared experts, row by row: m [T, H] -> [T, H].

        The bias takes part in the choice alone. The weights of the chosen and the shared experts are their
        sigmoids, normalised over all of them to the sum route_scale * global_scale.
        """
        config = self.config
        weight = self._tensors
        w13, w2 = weight[mlp + "experts.w13_weight"], weight[mlp + "experts.w2_weight"]
        shared_w13 = weight[mlp + "shared_experts.shared_w13_weight"]
        shared_w2 = weight[mlp + "shared_experts.shared_w2_weight"]
        gate = torch.sigmoid(m @ weight[mlp + "gate.weight"].T)  # [T, E + S], the shared experts last
        out = torch.zeros_like(m)
        for t in range(len(m)):
            chosen = self.choose_experts(gate[t, : config.num_experts] + weight[mlp + "gate.bias"])
            shared = range(config.num_shared_experts)
            active = chosen + [config.num_experts + j for j in shared]
            gamma = gate[t, active] / gate[t, active].sum()
            gamma = gamma * config.route_scale * weight[mlp + "gate.global_scale"]
            pairs = [(w13[e], w2[e]) for e in chosen] + [(shared_w13[j], shared_w2[j]) for j in shared]
            for share, (up, down) in zip(gamma, pairs, strict=True):
                out[t] += share * (down @ _silu_mul(up @ m[t]))
        return out

    def choose_experts(self, scores: Tensor) -> list[int]:
        """The ``num_experts_per_token`` highest of ``scores`` [E]; of equal ones the lowest index first."""
        by_score = sorted(range(len(scores)), key=lambda e: (-scores[e].item(), e))
        return by_score[: self.config.num_experts_per_token]


def _silu_mul(w13_out: Tensor) -> Tensor:
    """silu(gate) * up of interleaved columns (gate 0, up 0, gate 1, up 1, ...): [..., 2F] -> [..., F]."""
    gate, up = w13_out[..., 0::2], w13_out[..., 1::2]
    return gate * torch.sigmoid(gate) * up


def _argmax(logits: Tensor) -> int:
    """Index of the largest logit; the lowest of equal ones."""
    return int(torch.nonzero(logits == logits.max())[0])


class EntryLedger:
    """Which depth entries still hold what the committed ids say: drafting's bookkeeping, without a model.

    ``record`` notes the ids that a draft pass fed to its entries. An entry is right when it, every entry of
    the same and of shallower depths at or before its position, were all fed the committed ids: an entry reads
    those through its hidden input, its attention and its convolutions.
    """

    def __init__(self, num_depths: int) -> None:
        self._fed: list[list[int]] = [[] for _ in range(num_depths)]  # per depth the id each entry was fed

    def record(self, k: int, start: int, ids: Sequence[int]) -> None:
        """Depth ``k`` computed entries ``start``.. from ``ids``; its later ones no longer exist.

        Nor do those of deeper depths from ``start`` on: their hidden input has been replaced.
        """
        fed = self._fed[k]
        if start > len(fed):
            raise ValueError(
                f"depth {k} has entries up to {len(fed)} and was given {start}; that leaves a hole"
            )
        fed[start:] = ids
        for deeper in self._fed[k + 1 :]:
            del deeper[start:]

    def num_right(self, k: int, committed: Sequence[int]) -> int:
        """How many leading entries of depth ``k`` are right, given the ids ``committed`` so far."""
        right = len(self._fed[k])
        for depth in range(k + 1):
            fed = self._fed[depth]
            known = committed[depth + 1 :]
            same = 0
            while same < min(len(fed), len(known)) and fed[same] == known[same]:
                same += 1
            right = min(right, same)
        return right

    def final(self, committed: Sequence[int]) -> int:
        """Entries below it are right in all depths: the least start that a window of all depths may have."""
        return self.num_right(len(self._fed) - 1, committed)
