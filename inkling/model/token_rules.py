"""What a request's settings do to the target's logits, and the token history they need. The draft knows none of it.

The target meets every id of a sequence as an input row. Ids are committed to a slot's history as soon as they are
certain: all of a segment but the drafts of its last rows at once, those drafts when the slot's next segment begins
behind them. A row of a verification window is shaped by the history and the drafts up to and including its own id.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from inkling.errors import ProtocolError
from inkling.protocol import SlotOptions, TargetStep
from kernels.penalties import (
    NO_ID,
    PenaltyRows,
    ban_reference,
    bias_reference,
    completions_reference,
    output_counts_reference,
    penalize_reference,
)


@dataclass
class SlotRules:
    """One open slot. Positions below ``end`` are in the history; ``drafts`` are the ids from ``end`` on."""

    options: SlotOptions
    # on the device of the logits:
    masked: Tensor  # ids int64 that may not be drawn below options.min_position
    bias_ids: Tensor  # int64
    bias: Tensor  # fp32
    in_prompt: Tensor | None  # [V'] bool
    counts: Tensor | None  # [V'] int32, times in the output
    # on the CPU:
    words: Tensor  # [B, L + 1] int64, bad words, padded on the left
    recent: np.ndarray  # [L] int64, the output's last ids
    end: int = 0
    drafts: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))

    @property
    def has_history(self) -> bool:
        return self.counts is not None or self.recent.size > 0

    def commit(self, ids: np.ndarray) -> None:
        prompt = max(0, self.options.prompt_length - self.end)
        self.end += len(ids)
        if self.counts is not None:
            known = torch.from_numpy(ids).to(self.counts.device)
            self.in_prompt[known[:prompt]] = True
            self.counts += torch.bincount(known[prompt:], minlength=len(self.counts))
        self.recent = _last(np.concatenate((self.recent, ids[prompt:])), self.recent.size)

    def begin_segment(self, first: int, ids: np.ndarray, num_drafts: int) -> None:
        self.commit(self.drafts[: max(0, first - self.end)])
        if first != self.end:
            raise ProtocolError(
                f"slot {self.options.slot}: rows from {first} on, its history ends at {self.end}"
            )
        self.commit(ids[: len(ids) - num_drafts])
        self.drafts = ids[len(ids) - num_drafts :]


class TokenRules:
    def __init__(self, vocab_size: int, device: torch.device | str = "cpu"):
        self._vocab_size, self._device = vocab_size, device
        self._slots: dict[int, SlotRules] = {}  # slots with a setting that shapes logits

    def begin(self, message: TargetStep) -> None:
        """Applies the opens and closes of a step."""
        if message.previous_step == 0:
            self._slots.clear()
        for slot in message.closes.tolist():
            self._slots.pop(slot, None)
        for words in message.opens:
            options = SlotOptions.from_words(words)
            self._slots.pop(options.slot, None)
            rules = self._rules(options, message)
            if rules is not None:
                self._slots[options.slot] = rules
                if rules.has_history:
                    rules.commit(_of_slot(message.history, options.slot)[:, 0])

    def advance(self, message: TargetStep) -> None:
        """Takes the ids of a step's segments into the histories."""
        if not self._slots:
            return
        start = 0
        for slot, first, rows, draws in message.segments.tolist():
            rules = self._slots.get(slot)
            if rules is not None and rules.has_history:
                ids = message.ids[start : start + rows].astype(np.int64)
                rules.begin_segment(first, ids, max(0, draws - 1))
            start += rows

    def apply_to(self, slots: np.ndarray) -> bool:
        """Whether a setting shapes the logits of one of ``slots``."""
        return bool(self._slots) and any(slot in self._slots for slot in slots.tolist())

    def shape(self, logits: Tensor, slots: np.ndarray, positions: np.ndarray) -> Tensor:
        """Logits [n, V'] fp32 to draw from, for ``positions`` [n] of ``slots`` [n]; the input stays as it is."""
        shaped = [i for i, slot in enumerate(slots.tolist()) if slot in self._slots]
        if not shaped:
            return logits
        rules = [self._slots[slots[i]] for i in shaped]
        at = positions[shaped].tolist()  # a row's id stands at the position before the one that it draws
        before = [r.drafts[: max(0, p - r.end)] for r, p in zip(rules, at, strict=True)]
        index = torch.tensor(shaped, device=logits.device)
        rows = self._penalize(logits.index_select(0, index), rules, before)
        for row, (r, position) in enumerate(zip(rules, at, strict=True)):
            if len(r.bias_ids):
                bias_reference(rows, torch.full_like(r.bias_ids, row), r.bias_ids, r.bias)
            if len(r.masked) and position < r.options.min_position:
                ban_reference(rows, torch.full_like(r.masked, row), r.masked)
            if len(r.words):
                recent = _last(np.concatenate((r.recent, before[row])), r.recent.size)
                matched, ids = completions_reference(torch.from_numpy(recent)[None], r.words)
                ban_reference(rows, (matched + row).to(rows.device), ids.to(rows.device))
        return logits.index_copy(0, index, rows)

    @staticmethod
    def _penalize(logits: Tensor, rules: list[SlotRules], before: list[np.ndarray]) -> Tensor:
        penalized = [i for i, r in enumerate(rules) if r.counts is not None]
        if not penalized:
            return logits
        mine = [rules[i] for i in penalized]
        sources = {r.options.slot: r for r in mine}
        order = {slot: i for i, slot in enumerate(sources)}
        device = logits.device
        source = torch.tensor([order[r.options.slot] for r in mine], device=device)
        drafts = np.full((len(mine), max(len(before[i]) for i in penalized)), NO_ID)
        for row, i in enumerate(penalized):
            drafts[row, : len(before[i])] = before[i]
        counts = torch.stack([r.counts for r in sources.values()])
        rows = PenaltyRows(
            torch.tensor([r.options.repetition_penalty for r in mine], device=device),
            torch.tensor([r.options.presence_penalty for r in mine], device=device),
            torch.tensor([r.options.frequency_penalty for r in mine], device=device),
            torch.stack([r.in_prompt for r in sources.values()])[source],
            output_counts_reference(counts, source, torch.from_numpy(drafts).to(device)),
        )
        index = torch.tensor(penalized, device=device)
        return logits.index_copy(0, index, penalize_reference(logits[index], rows))

    def _rules(self, options: SlotOptions, message: TargetStep) -> SlotRules | None:
        """None when nothing shapes the slot's logits."""
        masked = _of_slot(message.masks, options.slot)[:, 0]
        bias = _of_slot(message.bias, options.slot)
        words = _bad_words(_of_slot(message.bad_words, options.slot))
        is_penalized = (
            options.repetition_penalty,
            options.presence_penalty,
            options.frequency_penalty,
        ) != (1.0, 0.0, 0.0)
        if not (len(masked) or len(bias) or len(words) or is_penalized):
            return None
        device = self._device
        return SlotRules(
            options,
            torch.from_numpy(masked).to(device),
            torch.from_numpy(bias[:, 0]).to(device),
            torch.from_numpy(bias[:, 1].astype(np.int32).view(np.float32)).to(device),
            torch.zeros(self._vocab_size, dtype=torch.bool, device=device) if is_penalized else None,
            torch.zeros(self._vocab_size, dtype=torch.int32, device=device) if is_penalized else None,
            torch.from_numpy(words),
            np.full(words.shape[1] - 1, NO_ID),
        )


def _of_slot(records: np.ndarray, slot: int) -> np.ndarray:
    """The records of a slot without their first word, int64."""
    return records[records[:, 0] == slot, 1:].astype(np.int64)


def _bad_words(records: np.ndarray) -> np.ndarray:
    """(word, id) records -> [words, longest] int64, padded on the left."""
    words = [records[records[:, 0] == word, 1] for word in np.unique(records[:, 0])]
    table = np.full((len(words), max((len(word) for word in words), default=1)), NO_ID)
    for row, word in enumerate(words):
        table[row, table.shape[1] - len(word) :] = word
    return table


def _last(ids: np.ndarray, count: int) -> np.ndarray:
    return ids[len(ids) - count :]
