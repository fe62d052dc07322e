"""A model process without the server around it: one packed step message in, tokens out.

``TargetRunner`` and ``DraftRunner`` own weights, caches and slots. The server's model files, the in-process engine
of the tests and the benchmarks all call these two.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from inkling.model.batch import Pass, PassShape, build_pass
from inkling.model.cache import PagedCache
from inkling.model.mtp import MtpModel
from inkling.model.scoring import ROWS_AT_ONCE, score, widened
from inkling.model.slots import Slots, positions_per_slot
from inkling.model.target import TargetModel
from inkling.model.token_rules import TokenRules
from inkling.protocol import DraftStep, Kind, TargetStep, ring_rows, unpack
from inkling.step_clock import StepClock
from kernels.rows import find_row_quantum, padded_rows, set_row_quantum


class TargetRunner:
    def __init__(
        self,
        model: TargetModel,
        *,
        generation: int,
        num_slots: int,
        max_context: int,
        num_draft_tokens: int,
        page_size: Mapping[Kind, int],
        num_pages: Mapping[Kind, int],
    ):
        config = model.config
        self.model = model
        self.shape = PassShape.of(config, config.layer_is_local, num_draft_tokens)
        geometries = [config.layer_geometry(i) for i in range(config.num_layers)]
        self.cache = PagedCache(
            geometries,
            config.hidden_size,
            page_size,
            num_pages,
            dtype=model.dtype,
            device=model.weights.embed.device,
        )
        self.slots = Slots(
            num_slots, positions_per_slot(max_context, num_draft_tokens), page_size, generation
        )
        self.rules = TokenRules(model.weights.head.shape[0])
        self.clock = StepClock()

    def step(self, control: np.ndarray) -> tuple[np.ndarray, Tensor]:
        """CONTROL (TargetStep) -> drawn tokens int32 [draws], hidden states [T, H]."""
        return self.step_scored(control)[:2]

    @torch.inference_mode()
    def step_scored(self, control: np.ndarray) -> tuple[np.ndarray, Tensor, np.ndarray]:
        """The same, and LOGPROBS int32 [scored, 2 + 2K]."""
        self.clock.start()
        message = unpack(TargetStep, control)
        self.cache.zero(self.slots.begin(message))
        self.rules.begin(message)
        self.rules.advance(message)
        slots, firsts, counts, draws = message.segments.T.astype(np.int64)
        batch = build_pass(slots, firsts, counts, self.slots.tables, self.shape)
        ids = torch.zeros(padded_rows(batch.num_rows), dtype=torch.int64)
        ids[: batch.num_rows] = torch.from_numpy(message.ids.astype(np.int64))
        hidden = self.model.hidden(ids, self.cache, batch)
        segment = np.repeat(np.arange(len(slots)), counts)
        rows = np.flatnonzero(np.arange(batch.num_rows) >= (batch.starts[1:] - draws)[segment])
        tokens, drawn_scores = self._draw(hidden, rows, slots[segment[rows]], batch.positions[rows] + 1)
        row, ids = message.scores.T.astype(np.int64)
        prompt_scores = self._score_prompt(hidden, row, ids, slots[segment[row]])
        width = max((table.shape[1] for table in (drawn_scores, prompt_scores)), default=2)
        scores = np.concatenate([widened(table, (width - 2) // 2) for table in (drawn_scores, prompt_scores)])
        self.clock.stop()
        return tokens.astype(np.int32), hidden[: batch.num_rows], scores

    def _draw(
        self, hidden: Tensor, rows: np.ndarray, slots: np.ndarray, positions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Tokens int64 [n] drawn after ``rows``, and the scores of those whose slot wants them."""
        if not len(rows):
            return np.empty(0, np.int64), np.empty((0, 2), np.int32)
        logits = self.model.logits(hidden, torch.from_numpy(rows))
        tokens = self.slots.draw(self.rules.shape(logits, slots, positions), slots, positions)
        wanted = self.slots.log_probs[slots]
        scored = np.flatnonzero(wanted)
        if not len(scored):
            return tokens, np.empty((0, 2), np.int32)
        raw = logits[torch.from_numpy(scored)]
        return tokens, score(raw, tokens[scored], int(wanted.max()) - 1)

    def _score_prompt(
        self, hidden: Tensor, rows: np.ndarray, ids: np.ndarray, slots: np.ndarray
    ) -> np.ndarray:
        num_top = int(self.slots.prompt_log_probs[slots].max(initial=1)) - 1
        parts = [np.empty((0, 2 + 2 * num_top), np.int32)]
        for start in range(0, len(rows), ROWS_AT_ONCE):
            part = slice(start, start + ROWS_AT_ONCE)
            logits = self.model.logits(hidden, torch.from_numpy(rows[part]))
            parts.append(widened(score(logits, ids[part], num_top), num_top))
        return np.concatenate(parts)

    def check_row_invariance(self, max_rows: int) -> int:
        """Finds and sets the row quantum for this model, machine and thread count; RuntimeError when none holds."""
        page_size = self.cache.page_size
        linears, batched = self.model.product_shapes({page_size[Kind.FULL], page_size[Kind.LOCAL]})
        weights = self.model.weights
        narrow = {layer.attn.qkvr.dtype for layer in weights.layers}
        quantum = find_row_quantum(linears, batched, max_rows, self.model.dtype, narrow)
        set_row_quantum(quantum)
        return quantum


class DraftRunner:
    def __init__(
        self,
        model: MtpModel,
        *,
        generation: int,
        num_slots: int,
        max_context: int,
        num_draft_tokens: int,
        page_size: Mapping[Kind, int],
        num_pages: Mapping[Kind, int],
    ):
        config, num_depths = model.config, len(model.blocks)
        geometries = [config.depth_geometry(k) for k in range(num_depths)]
        self.model = model
        self.shape = PassShape.of(config, config.mtp_is_local[:num_depths], num_draft_tokens)
        self.cache = PagedCache(
            geometries,
            config.hidden_size,
            page_size,
            num_pages,
            dtype=model.dtype,
            device=model.embed.device,
        )
        self.slots = Slots(
            num_slots, positions_per_slot(max_context, num_draft_tokens), page_size, generation
        )
        self.ring_rows = ring_rows(num_depths)
        # target states of entries that later windows may need again: entry p stands in row p % ring_rows
        self.ring = torch.zeros(
            num_slots * self.ring_rows, config.hidden_size, dtype=model.dtype, device=model.embed.device
        )
        self.clock = StepClock()

    @torch.inference_mode()
    def step(self, control: np.ndarray, hidden: Tensor) -> np.ndarray:
        """CONTROL (DraftStep) and the target's states [T, H] -> drafts int32, segment by segment."""
        self.clock.start()
        message = unpack(DraftStep, control)
        self.cache.zero(self.slots.begin(message))
        windows = _Windows(message)
        states = self._window_states(windows, hidden)
        self._keep(message.segments.astype(np.int64), hidden)
        for k in range(windows.max_depths):
            states = self._run_depth(k, windows, states)
        self.clock.stop()
        return windows.drafts_out().astype(np.int32)

    def _run_depth(self, k: int, windows: _Windows, states: Tensor) -> Tensor:
        """One depth over the windows that run it. ``states``: output rows of depth k-1 (unpadded)."""
        states = states if (rows := windows.keep_running(k)) is None else states.index_select(0, rows)
        if windows.batch is None:
            windows.batch = build_pass(
                windows.slots, windows.first, windows.count, self.slots.tables, self.shape
            )
        batch = windows.batch
        padded = padded_rows(batch.num_rows)
        states = torch.nn.functional.pad(states, (0, 0, 0, padded - batch.num_rows))
        ids = torch.zeros(padded, dtype=torch.int64)
        ids[: batch.num_rows] = torch.from_numpy(windows.ids_of_depth(k))
        out = self.model.depth(k, states, ids, self.cache.layers[k], batch)
        drawing = windows.drawing(k)
        if len(drawing):
            logits = self.model.logits(out, torch.from_numpy(batch.starts[1:][drawing] - 1))
            tokens = self.slots.draw(logits, windows.slots[drawing], windows.end[drawing] + k + 1)
            windows.add_drafts(k, drawing, tokens)
        return out[: batch.num_rows]

    def _window_states(self, windows: _Windows, hidden: Tensor) -> Tensor:
        """Target states of all window entries, [rows, H]: from this step, older ones from the ring."""
        segment = np.repeat(np.arange(len(windows.slots)), windows.count)
        entry = np.concatenate(
            [np.arange(f, e) for f, e in zip(windows.first, windows.end, strict=True)] or [[]]
        )
        new = entry >= windows.hidden_position[segment]
        states = hidden.new_empty(len(entry), hidden.shape[1])
        fresh, old = np.flatnonzero(new), np.flatnonzero(~new)
        row = (windows.hidden_row[segment] + entry - windows.hidden_position[segment])[fresh].astype(np.int64)
        states.index_copy_(0, torch.from_numpy(fresh), hidden.index_select(0, torch.from_numpy(row)))
        if len(old):
            place = (windows.slots[segment] * self.ring_rows + entry % self.ring_rows)[old].astype(np.int64)
            states.index_copy_(0, torch.from_numpy(old), self.ring.index_select(0, torch.from_numpy(place)))
        return states

    def _keep(self, segments: np.ndarray, hidden: Tensor) -> None:
        """Stores the last ``ring_rows`` new states of each segment in its ring."""
        slots, row, position, count = segments[:, :4].T
        kept = np.minimum(count, self.ring_rows)
        segment = np.repeat(np.arange(len(slots)), kept)
        back = np.concatenate([np.arange(n, 0, -1) for n in kept] or [[]]).astype(np.int64)
        source = (row + count)[segment] - back
        place = slots[segment] * self.ring_rows + ((position + count)[segment] - back) % self.ring_rows
        self.ring.index_copy_(0, torch.from_numpy(place), hidden.index_select(0, torch.from_numpy(source)))


class _Windows:
    """The windows of one draft step. Arrays hold the segments that still run; they shrink with the depth."""

    def __init__(self, message: DraftStep):
        segments = message.segments.astype(np.int64)
        slot, hidden_row, hidden_position, _, first, end, depths, drafts, known = segments.T
        running = np.flatnonzero((end > first) & (depths > 0))
        self.max_depths = int(depths[running].max()) if len(running) else 0
        self._wanted = drafts
        self._drafts = np.zeros((len(segments), max(1, self.max_depths)), np.int64)
        # ids[i, c]: id of position first + 1 + c; columns from ``known`` on take drafts
        columns = int((end - first)[running].max() + self.max_depths) if len(running) else 0
        self._ids = np.zeros((len(segments), columns), np.int64)
        starts = np.concatenate(([0], np.cumsum(known)))
        for i in running.tolist():
            self._ids[i, : known[i]] = message.ids[starts[i] : starts[i + 1]]
        self.batch: Pass | None = None
        self._all = (slot, hidden_row, hidden_position, first, end, depths, known)
        self._select(running)

    def _select(self, index: np.ndarray) -> None:
        self.index = index
        self.slots, self.hidden_row, self.hidden_position, self.first, self.end, self.depths, self.known = (
            values[index] for values in self._all
        )
        self.count = self.end - self.first
        # a window whose ids end with its last entry's own id is continued by drafts
        self.chained = self.known == self.count

    def keep_running(self, k: int) -> Tensor | None:
        """Drops the windows that end before depth k; the rows that stay, or None when all do."""
        running = self.depths > k
        if running.all():
            return None
        rows = torch.from_numpy(np.flatnonzero(np.repeat(running, self.count)))
        self._select(self.index[running])
        self.batch = None
        return rows

    def ids_of_depth(self, k: int) -> np.ndarray:
        """Entry p of depth k takes id p+k+1."""
        return np.concatenate([self._ids[i, k : k + n] for i, n in zip(self.index, self.count, strict=True)])

    def drawing(self, k: int) -> np.ndarray:
        """Windows (as positions in the current arrays) whose depth k must draw: a draft, or the next depth's id."""
        return np.flatnonzero(self.chained & ((k < self._wanted[self.index]) | (k + 1 < self.depths)))

    def add_drafts(self, k: int, drawing: np.ndarray, tokens: np.ndarray) -> None:
        rows = self.index[drawing]
        self._drafts[rows, k] = tokens
        self._ids[rows, self.known[drawing] + k] = tokens

    def drafts_out(self) -> np.ndarray:
        return self._drafts[np.arange(self._drafts.shape[1]) < self._wanted[:, None]]
