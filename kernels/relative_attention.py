"""Attention over paged keys with a learned bias by distance; one definition for prompts, decodes and verification.

    o_t = sum_s softmax_s(q_t . k_s / d + B_t(t - s)) v_s      over 0 <= t - s (< W on local layers)

B is zero beyond its extent R. Row-invariance: keys are walked in blocks of one page, aligned to multiples of the
page size in absolute position and always full; a row's maximum is exact, each block's sum has a fixed width, and
blocks are added in ascending order starting from zero, so a block that a row cannot see changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import e, log2

import torch
from torch import Tensor

_LOG2_E = log2(e)


@dataclass
class QueryTiles:
    """Query rows in tiles of ``Q`` rows of one sequence, with the pages they look at. ``n`` tiles, ``b`` blocks."""

    rows: Tensor  # [n * Q] row of the pass; a tile's tail repeats a row
    pages: Tensor  # [n * b]; page 0 holds zeros
    bias_index: Tensor  # [n, Q, b * page_size] bank column: distance, R (no bias), R + 1 (not visible)
    # keys of this very pass that are not in the cache (long prompt chunks on local layers), or None:
    fill_rows: Tensor | None  # [m] row of the pass
    fill_blocks: Tensor | None  # [m] index in ``pages``
    fill_offsets: Tensor | None  # [m] offset in that block


@dataclass
class AttentionRows:
    """Addresses of one pass for one cache kind, shared by its layers."""

    groups: list[QueryTiles]
    output_rows: Tensor  # [Tp] where each row of the pass stands in the concatenated tiles


def relative_attention_reference(
    q: Tensor,  # [Tp, n_q, d]
    k: Tensor,  # [Tp, n_kv, d], keys of this pass
    v: Tensor,
    bank: Tensor,  # [Tp, n_q, R + 2]
    key_cache: Tensor,  # [pages, n_kv, page_size, d]
    value_cache: Tensor,
    rows: AttentionRows,
) -> Tensor:
    """-> [Tp, n_q * d] in ``q.dtype``. Softmax and sums in fp32."""
    parts = [_attend(q, k, v, bank, key_cache, value_cache, group) for group in rows.groups]
    tiles = parts[0] if len(parts) == 1 else torch.cat(parts)
    return tiles.index_select(0, rows.output_rows).to(q.dtype)


def _attend(q, k, v, bank, key_cache, value_cache, group: QueryTiles) -> Tensor:
    num_kv, page_size, d = key_cache.shape[1:]
    num_heads = q.shape[1]
    per_kv = num_heads // num_kv
    n, size, keys = group.bias_index.shape
    blocks, m = keys // page_size, size * per_kv

    key_blocks = _gather(key_cache, k, group)  # [n * b, n_kv, page_size, d]
    value_blocks = _gather(value_cache, v, group)
    queries = q.index_select(0, group.rows).view(n, 1, size, num_kv, per_kv, d).transpose(2, 3)
    queries = queries.expand(n, blocks, num_kv, size, per_kv, d).reshape(n * blocks * num_kv, m, d)
    scores = torch.bmm(queries, key_blocks.view(-1, page_size, d).transpose(1, 2)).float()
    scores = scores.view(n, blocks, num_kv, size, per_kv, page_size)

    bias = bank.index_select(0, group.rows).view(n, size, num_heads, -1)
    bias = bias.gather(3, group.bias_index[:, :, None].expand(n, size, num_heads, keys))
    bias = bias.view(n, size, num_kv, per_kv, blocks, page_size).permute(0, 4, 2, 1, 3, 5)
    scores = scores.mul_(1.0 / d).add_(bias)  # in place: the product's result is ours

    # base 2: the vendor library's exp takes a slow path at -inf
    weights = scores.sub_(scores.amax(dim=(1, 5), keepdim=True)).mul_(_LOG2_E).exp2_()
    block_sums = weights.sum(-1)  # [n, b, n_kv, Q, per_kv]: a fixed width
    block_outputs = torch.bmm(weights.view(-1, m, page_size).to(v.dtype), value_blocks.view(-1, page_size, d))
    block_outputs = block_outputs.float().view(n, blocks, num_kv, size, per_kv, d)
    parts = torch.cat((block_outputs, block_sums[..., None]), -1)
    total = torch.zeros_like(parts[:, 0])
    for part in parts.unbind(1):
        total += part
    output = total[..., :d] / total[..., d:]
    return output.transpose(1, 2).reshape(n * size, num_heads * d)


def _gather(cache: Tensor, new: Tensor, group: QueryTiles) -> Tensor:
    blocks = cache.index_select(0, group.pages)
    if group.fill_rows is not None:
        blocks[group.fill_blocks, :, group.fill_offsets] = new.index_select(0, group.fill_rows)
    return blocks
