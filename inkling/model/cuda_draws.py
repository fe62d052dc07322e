"""The target's draws on the device, and the log probabilities that go with them.

Rows of steps in which all are greedy and nothing shapes logits take their argmax inside the head's product. Any other
step stores logits and draws from them, rows without settings too: their argmax has the same bits either way.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

from inkling.model.cuda_pass import ArrayTypes, StepBuffer
from inkling.model.scoring import widened
from inkling.model.slots import Slots
from inkling.model.token_rules import TokenRules
from kernels.cuda.head import Drawn, allocate_drawn, head_draw, head_logits
from kernels.cuda.log_probs import score_rows
from kernels.cuda.sampling import sample
from kernels.sampling import SamplingRows

LOGIT_ROWS = 128  # rows of logits held at once: one tile of the head's product

_NO_SCORES = np.empty((0, 2), np.int32)


def draw_arrays(count: int) -> ArrayTypes:
    """What a step says of up to ``count`` draws; ``SamplingRows`` and the row that each follows."""
    wide, narrow, real = (torch.int64, (count,)), (torch.int32, (count,)), (torch.float32, (count,))
    return {"draw_seed": wide, "draw_position": wide, "draw_temperature": real, "draw_top_p": real,
            "draw_min_p": real, "draw_top_k": narrow, "draw_row": narrow}  # fmt: skip


class TargetDraws:
    def __init__(
        self, head: Tensor, mup: float, slots: Slots, rules: TokenRules, buffer: StepBuffer, max_draws: int
    ):
        self._head, self._mup, self._slots, self._rules, self._buffer = head, mup, slots, rules, buffer
        device = head.device
        self._drawn = allocate_drawn(max_draws, head)
        self._logits = torch.empty(0)  # made when first wanted
        self._scratch = [torch.empty(LOGIT_ROWS, device=device) for _ in range(2)]
        self._host_tokens = torch.zeros(max_draws, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._views = cache(self._views_of)
        self._is_sampled = self._is_ranked = self._wants_logits = False  # of the step

    def write(self, rows: np.ndarray, slots: np.ndarray, positions: np.ndarray) -> None:
        """The draws of a step: after ``rows`` [n] of ``slots`` [n], tokens for ``positions`` [n]."""
        count, host, options = len(rows), self._buffer.host, self._slots
        self._step = slots, positions
        host["draw_row"][:count] = rows
        temperature = options.temperature[slots]
        self._is_sampled = bool(temperature.any())
        self._wants_logits = (
            self._is_sampled or self._rules.apply_to(slots) or bool(options.log_probs[slots].any())
        )
        host["draw_temperature"][:count] = temperature
        if self._is_sampled:
            host["draw_seed"][:count] = options.seed[slots].view(np.int64)
            host["draw_position"][:count] = positions
            top_k, top_p = options.top_k[slots], options.top_p[slots]
            host["draw_top_k"][:count], host["draw_top_p"][:count] = top_k, top_p
            host["draw_min_p"][:count] = options.min_p[slots]
            self._is_ranked = bool(((temperature > 0) & ((top_k > 0) | (top_p < 1))).any())

    @property
    def num_greedy(self) -> int:
        """Draws of the step, if all are argmaxes of the logits as they are; else 0."""
        return 0 if self._wants_logits else len(self._step[0])

    def run_greedy(self, hidden: Tensor, count: int) -> None:
        """Launches ``count`` draws from rows of ``hidden [T, H]``; those written with row -1 do nothing."""
        index, drawn, _ = self._views(count)
        head_draw(hidden, index, self._head, self._mup, None, drawn)

    def run(self, hidden: Tensor) -> np.ndarray:
        """Launches draws that want logits; -> scores of the rows whose slot wants them."""
        count = len(self._step[0])
        return self._draw_from_logits(hidden, self._drawn.tokens[:count]) if count else _NO_SCORES

    def copy_tokens(self) -> None:
        """Launches the copy to the host."""
        if count := len(self._step[0]):
            _, drawn, host_tokens = self._views(count)
            host_tokens.copy_(drawn.tokens, non_blocking=True)

    def pad(self, count: int) -> None:
        """No rows behind those of the step, up to ``count`` draws. Before the copy to the device."""
        self._buffer.host["draw_row"][len(self._step[0]) : count] = -1

    def tokens(self) -> np.ndarray:
        """Int32 [n], after the stream has been waited for."""
        return self._host_tokens[: len(self._step[0])].numpy().copy()

    def score_prompt(
        self, hidden: Tensor, rows: np.ndarray, ids: np.ndarray, slots: np.ndarray
    ) -> np.ndarray:
        """Scores of prompt tokens ``ids`` [n] that follow ``rows`` [n]."""
        num_top = int(self._slots.prompt_log_probs[slots].max(initial=1)) - 1
        device, parts = self._head.device, [np.empty((0, 2 + 2 * num_top), np.int32)]
        for start in range(0, len(rows), LOGIT_ROWS):
            part = slice(start, start + LOGIT_ROWS)
            index = torch.from_numpy(rows[part].astype(np.int32)).to(device)
            scores = score_rows(
                self._logits_of(hidden, index),
                torch.from_numpy(ids[part].astype(np.int64)).to(device),
                num_top,
            )
            parts.append(widened(scores.cpu().numpy(), num_top))
        return np.concatenate(parts)

    def _views_of(self, count: int) -> tuple[Tensor, Drawn, Tensor]:
        """Rows, room on the device and tokens on the host of ``count`` draws."""
        rows, host_tokens = self._buffer.device["draw_row"][:count], self._host_tokens[:count]
        return rows, self._drawn.first(count), host_tokens

    def _logits_of(self, hidden: Tensor, index: Tensor) -> Tensor:
        if not len(self._logits):
            self._logits = torch.empty(LOGIT_ROWS, self._head.shape[0], device=self._head.device)
        logits = self._logits[: len(index)]
        head_logits(hidden, index, self._head, self._mup, logits)
        return logits

    def _draw_from_logits(self, hidden: Tensor, tokens: Tensor) -> np.ndarray:
        slots, positions = self._step
        wanted = self._slots.log_probs[slots]
        num_top = int(wanted.max(initial=1)) - 1
        scores = [np.empty((0, 2 + 2 * num_top), np.int32)]
        for start in range(0, len(slots), LOGIT_ROWS):
            part = slice(start, min(start + LOGIT_ROWS, len(slots)))
            logits = self._logits_of(hidden, self._buffer.device["draw_row"][part])
            shaped = self._rules.shape(logits, slots[part], positions[part])
            row_max, log_sum = (x[: len(logits)] for x in self._scratch)
            sample(shaped, self._sampling(part), tokens[part], row_max, log_sum, ranked=self._is_ranked)
            if len(scored := np.flatnonzero(wanted[part])):
                index = torch.from_numpy(scored).to(logits.device)
                table = score_rows(
                    logits.index_select(0, index), tokens[part].index_select(0, index), num_top
                )
                scores.append(widened(table.cpu().numpy(), num_top))
        return np.concatenate(scores)

    def _sampling(self, part: slice) -> SamplingRows | None:
        if not self._is_sampled:
            return None
        arrays = self._buffer.device
        return SamplingRows(
            **{name: arrays[f"draw_{name}"][part] for name in SamplingRows.__dataclass_fields__}
        )
