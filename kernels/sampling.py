"""Draw one token per row: temperature, min_p, top_k, top_p, Gumbel noise, argmax.

    token = argmax(f(logits) + g)        f: temperature and filters; greedy rows: f(logits) = logits, g = 0

The noise g is a pure function of (request seed, absolute position of the token drawn, token id). So the
target and the draft, one row or N+1 rows, a replay after a preemption: all draw with the same noise. Adding
Gumbel noise before an argmax samples softmax(f(logits)) exactly (the Gumbel-max trick,
https://arxiv.org/abs/1611.00712).

    words  = Philox4x32-10(counter = (id div 4, position low, position high, 0), key = (seed low, seed high))
    v      = min((words[id mod 4] + 0.5) * 2^-32, 1 - 2^-24)
    g      = -log(-log1p(-v))

v is near 0, where fp32 is finest, when g is large; g lies in [-2.82, 22.88]. Philox is exact integer
arithmetic (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). All else is fp32, rounded
to nearest after every step: word to fp32, + 0.5, * 2^-32 (exact), log1p, log; logits / temperature; + g. Only
the running sum that top_p compares is fp64.

Filters, in vLLM's order; each sees what the one before left and keeps at least one token:
    min_p   keeps tokens with exp(x - max x) >= min_p
    top_k   keeps the k largest
    top_p   keeps the smallest set of largest tokens whose share of the mass left so far reaches top_p
Ties go to the lower id everywhere: in the argmax, and at the edge of top_k and top_p, so exactly k stay.

Row-invariance: every step is elementwise or runs along one row in an order that the row alone fixes; the
other rows of the batch decide only which work is skipped. This file knows no penalties, bias or requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

MIN_TEMPERATURE = 0.01  # a temperature in (0, 0.01) is raised to this

_LOW_32 = np.uint64(0xFFFFFFFF)
_SHIFT_32 = np.uint64(32)
_PHILOX_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_PHILOX_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_PHILOX_ROUNDS = 10

# Up to this many largest values torch.topk beats a whole sort (V' 4096: 38 against 73 us a row).
_TOPK_LIMIT = 128


@dataclass(frozen=True)
class SamplingRows:
    """One entry per row drawn; tensors on the device of the logits. The caller has checked the ranges."""

    temperature: Tensor  # [R] fp32, >= 0; 0: greedy, the filters are ignored
    top_k: Tensor  # [R] int32, >= 0; 0: off (callers turn -1 into 0)
    top_p: Tensor  # [R] fp32, (0, 1]; 1: off
    min_p: Tensor  # [R] fp32, [0, 1]; 0: off
    seed: Tensor  # [R] int64, the bit pattern of the unsigned 64-bit seed
    position: Tensor  # [R] int64, absolute position of the token drawn

    def select(self, index: Tensor) -> SamplingRows:
        """The rows of ``index`` ([n] int64), in its order."""
        return SamplingRows(**{name: getattr(self, name)[index] for name in self.__dataclass_fields__})


def philox4x32_10(counter: Tensor, key: Tensor) -> Tensor:
    """Philox4x32-10 blocks.

    counter [..., 4] and key [..., 2] hold unsigned 32-bit words in int64, on the CPU; their leading
    dimensions broadcast. Returns [..., 4] int64 words in [0, 2^32).
    """
    assert counter.shape[-1] == 4 and key.shape[-1] == 2, (counter.shape, key.shape)
    counter_words = np.moveaxis(counter.numpy().astype(np.uint64), -1, 0)
    key_words = np.moveaxis(key.numpy().astype(np.uint64), -1, 0)
    words = np.broadcast_arrays(*_philox_rounds(tuple(counter_words), tuple(key_words)))
    return torch.from_numpy(np.stack(words, axis=-1).astype(np.int64))


def gumbel_noise(seed: Tensor, position: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise of ids below vocab_size: seed, position [R] int64, on the CPU -> [R, V'] fp32."""
    seed_bits, position_bits = (x.numpy().astype(np.uint64)[:, None] for x in (seed, position))
    num_blocks = -(-vocab_size // 4)
    block = np.arange(num_blocks, dtype=np.uint64)[None]
    counter = (block, position_bits & _LOW_32, position_bits >> _SHIFT_32, np.zeros((1, 1), np.uint64))
    words = _philox_rounds(counter, (seed_bits & _LOW_32, seed_bits >> _SHIFT_32))
    words_fp32 = np.empty((len(seed_bits), num_blocks, 4), np.float32)
    for i, word in enumerate(words):
        words_fp32[..., i] = word
    return _gumbel_from_words(torch.from_numpy(words_fp32).flatten(1))[:, :vocab_size]


def filter_logits_reference(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Temperature and filters of sampled rows, on the CPU: [R, V'] fp32 -> same shape, -inf: filtered out."""
    scaled = logits / rows.temperature.clamp(min=MIN_TEMPERATURE)[:, None]
    if (rows.min_p > 0).any():
        scaled = _apply_min_p(scaled, rows.min_p)
    ranked = (rows.top_k > 0) | (rows.top_p < 1)  # only these rows pay for an ordering
    if ranked.all():
        return _apply_top_k_top_p(scaled, rows.top_k, rows.top_p)
    if ranked.any():
        index = ranked.nonzero()[:, 0]
        scaled[index] = _apply_top_k_top_p(scaled[index], rows.top_k[index], rows.top_p[index])
    return scaled


def sample_reference(logits: Tensor, rows: SamplingRows) -> Tensor:
    """One token per row on the CPU: logits [R, V'] fp32 -> [R] int64. See the module's docstring."""
    tokens = _argmax(logits)
    sampled = rows.temperature > 0
    if not sampled.any():
        return tokens
    if not sampled.all():
        index = sampled.nonzero()[:, 0]
        tokens[index] = sample_reference(logits[index], rows.select(index))
        return tokens
    noise = gumbel_noise(rows.seed, rows.position, logits.shape[1])
    return _argmax(noise.add_(filter_logits_reference(logits, rows)))


def sample(logits: Tensor, rows: SamplingRows) -> Tensor:
    """One token per row: logits [R, V'] fp32, rows of R entries -> [R] int64, on the device of the logits.

    Raises NotImplementedError off the CPU: there is no kernel yet.
    """
    assert logits.dtype == torch.float32 and logits.dim() == 2, (logits.dtype, logits.shape)
    assert rows.temperature.shape == logits.shape[:1], (rows.temperature.shape, logits.shape)
    if logits.device.type == "cpu":
        return sample_reference(logits, rows)
    raise NotImplementedError(f"logits are on {logits.device}; sample has only its CPU path: move them there")


def _philox_rounds(counter: tuple[np.ndarray, ...], key: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
    """Four uint64 arrays of 32-bit words from four counter and two key arrays that broadcast together.

    numpy rather than torch: it has unsigned 64-bit integers and costs half as much per call. Words that are
    equal for a whole row stay [R, 1] until the rounds have mixed them.
    """
    c0, c1, c2, c3 = counter
    key_0, key_1 = key
    for i in range(_PHILOX_ROUNDS):
        round_key_0 = (key_0 + np.uint64(i) * _PHILOX_KEY_STEPS[0]) & _LOW_32
        round_key_1 = (key_1 + np.uint64(i) * _PHILOX_KEY_STEPS[1]) & _LOW_32
        product_0, product_1 = c0 * _PHILOX_MULTIPLIERS[0], c2 * _PHILOX_MULTIPLIERS[1]
        c0 = (product_1 >> _SHIFT_32) ^ (c1 ^ round_key_0)
        c2 = (product_0 >> _SHIFT_32) ^ (c3 ^ round_key_1)
        c1, c3 = product_1 & _LOW_32, product_0 & _LOW_32
    return c0, c1, c2, c3


def _gumbel_from_words(words: Tensor) -> Tensor:
    """-log(-log1p(-v)) in place; ``words`` are 32-bit words rounded to fp32 (2^32 - 1 is 2^32: v is cut)."""
    v = words.add_(0.5).mul_(2.0**-32).clamp_(max=1.0 - 2.0**-24)
    return v.neg_().log1p_().neg_().log_().neg_()


def _argmax(x: Tensor) -> Tensor:
    """Lowest id of the largest value: [R, V'] -> [R] int64. numpy's takes a tenth of torch's time."""
    return torch.from_numpy(x.numpy().argmax(axis=1))


def _apply_min_p(scaled: Tensor, min_p: Tensor) -> Tensor:
    relative_prob = torch.exp(scaled - scaled.amax(dim=1, keepdim=True))
    return scaled.masked_fill_(relative_prob < min_p[:, None], -torch.inf)


def _apply_top_k_top_p(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Both filters as one rank cut: they keep the ``num_kept`` largest of a row."""
    vocab_size = scaled.shape[1]
    num_kept = torch.where(top_k > 0, top_k, vocab_size).clamp(max=vocab_size).long()  # [R]
    width = int(num_kept.max())
    ordered = _largest(scaled, width)  # [R, width] descending
    if (top_p < 1).any():
        beyond_k = torch.arange(width) >= num_kept[:, None]
        weight = torch.exp(ordered - ordered[:, :1]).masked_fill_(beyond_k, 0.0)
        mass = weight.cumsum(dim=1, dtype=torch.float64)
        enough = top_p.double()[:, None] * mass[:, -1:]
        num_nucleus = 1 + (mass[:, :-1] < enough).sum(dim=1)
        num_kept = torch.where(top_p < 1, torch.minimum(num_nucleus, num_kept), num_kept)
    threshold = ordered.gather(1, num_kept[:, None] - 1)
    kept, tied = scaled > threshold, scaled == threshold
    num_tied_kept = num_kept[:, None] - kept.sum(dim=1, keepdim=True)
    if (tied.sum(dim=1, keepdim=True) > num_tied_kept).any():
        tied &= tied.cumsum(dim=1) <= num_tied_kept
    return scaled.masked_fill_(~(kept | tied), -torch.inf)


def _largest(x: Tensor, width: int) -> Tensor:
    """The ``width`` largest values of each row, descending. Values only: the method cannot show in them."""
    if width <= _TOPK_LIMIT:
        return torch.topk(x, width, dim=1).values
    return torch.from_numpy(np.sort(x.numpy(), axis=1)).flip(1)[:, :width]
