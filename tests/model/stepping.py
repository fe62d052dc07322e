"""Runners stepped by hand: no loop, pages from the engine's own allocator, and a view of the caches by position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from inkling.engine.pages import CacheLayout, Model, PageAllocator, SequencePages, worst_case_pages
from inkling.memory import cache_layout
from inkling.model.batch import PageTables
from inkling.model.cache import PagedCache
from inkling.model.load import runner_sizes
from inkling.model.runner import DraftRunner, TargetRunner
from inkling.protocol import OPEN_WIDTH, DraftStep, Kind, SlotOptions, TargetStep, pack
from tests.in_process import GENERATION, SESSION, LocalModels

SMALL_PAGES = {Kind.FULL: 16, Kind.LOCAL: 16, Kind.CONV: 4}  # positions; short sequences cross many borders


def small_pages(models: LocalModels, max_chunk: int = 512) -> CacheLayout:
    """The layout of ``models`` with SMALL_PAGES."""
    deployment = models.deployment
    return cache_layout(
        deployment.config,
        cache_bytes=1 << 28,
        num_drafts=deployment.num_draft_tokens,
        dtype=deployment.dtype,
        max_sequences=deployment.settings.max_running_sequences,
        max_length=deployment.max_context,
        max_chunk=max_chunk,
        page_size=SMALL_PAGES,
    )


def new_target(models: LocalModels, layout: CacheLayout) -> TargetRunner:
    """The same weights with caches of its own."""
    return TargetRunner(
        models.target.model, **runner_sizes(models.deployment, Model.TARGET, GENERATION, layout)
    )


def new_draft(
    models: LocalModels, layout: CacheLayout, kind: type[DraftRunner] = DraftRunner, **more: object
) -> DraftRunner:
    return kind(
        models.draft.model, **runner_sizes(models.deployment, Model.DRAFT, GENERATION, layout), **more
    )


@dataclass(frozen=True)
class Run:
    """Consecutive rows of one slot; ids are drawn for the last ``draws`` of them."""

    slot: int
    first: int
    ids: Sequence[int]
    draws: int = 0


class Steps:
    """Opens slots, keeps their pages, numbers the steps."""

    def __init__(self, runner: TargetRunner | DraftRunner, layout: CacheLayout, model: Model):
        self.runner, self.layout, self.model = runner, layout, model
        self.allocator = PageAllocator(layout)
        self.pages: dict[int, SequencePages] = {}
        self.zero_fresh_pages = True
        self._opens: list[list[int]] = []

    def open(self, options: SlotOptions, max_positions: int, max_chunk: int) -> None:
        wanted = worst_case_pages(self.layout, self.model, max_positions, max_chunk, options.num_depths)
        assert not self.allocator.shortage(self.model, wanted)
        self.pages[options.slot] = self.allocator.tables(self.model)
        self._opens.append(options.words())

    def release(self, slot: int) -> None:
        self.pages.pop(slot).release()

    def control(self, kind: type, updates: list[int], segments: list, ids: list[int]) -> np.ndarray:
        last = self.runner.slots.last_step
        pages = np.array(updates, np.int32).reshape(-1, 5)
        pages[:, 4] &= self.zero_fresh_pages
        message = kind(
            GENERATION,
            last + 1,
            last,
            opens=np.array(self._opens, np.int32).reshape(-1, OPEN_WIDTH),
            pages=pages,
            segments=np.array(segments, np.int32),
            ids=np.array(ids, np.int32),
        )
        self._opens = []
        return pack(message, SESSION.key)


class TargetSteps(Steps):
    def __init__(self, runner: TargetRunner, layout: CacheLayout):
        super().__init__(runner, layout, Model.TARGET)

    def step(self, *runs: Run) -> list[tuple[Tensor, list[int]]]:
        """Per run its states [rows, H] and the tokens drawn."""
        updates: list[int] = []
        for run in runs:
            self.pages[run.slot].cover(run.first, run.first + len(run.ids), run.slot, updates)
        segments = [(run.slot, run.first, len(run.ids), run.draws) for run in runs]
        ids = [token for run in runs for token in run.ids]
        tokens, hidden = self.runner.step(self.control(TargetStep, updates, segments, ids))
        drawn = np.split(tokens, np.cumsum([run.draws for run in runs])[:-1])
        states = hidden.split([len(run.ids) for run in runs])
        return [(state, part.tolist()) for state, part in zip(states, drawn, strict=True)]

    def prompt(self, slot: int, ids: Sequence[int], chunks: Sequence[int], draws: int = 0) -> Tensor:
        """States of ``ids`` [T, H] from chunks of the given sizes, the last of which repeats."""
        states, first, sizes = [], 0, list(chunks)
        while first < len(ids):
            size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
            part = ids[first : first + size]
            states.append(self.step(Run(slot, first, part, min(draws, len(part))))[0][0])
            first += size
        return torch.cat(states)


class DraftSteps(Steps):
    def __init__(self, runner: DraftRunner, layout: CacheLayout):
        super().__init__(runner, layout, Model.DRAFT)

    def fill(self, slot: int, hidden: Tensor, ids: Sequence[int], end: int, depths: int) -> None:
        """One window over entries [0, end) in ``depths`` depths; ``ids`` are known up to end + depths - 1."""
        updates: list[int] = []
        self.pages[slot].cover(0, end, slot, updates)
        known = list(ids[1 : end + depths])
        segment = (slot, 0, 0, end, 0, end, depths, 0, len(known))
        self.runner.step(self.control(DraftStep, updates, [segment], known), hidden[:end])


def readable(
    cache: PagedCache,
    tables: PageTables,
    layout: CacheLayout,
    slot: int,
    end: int,
    num_layers: int | None = None,
) -> list[Tensor]:
    """What the row at position ``end`` reads, oldest first: per layer keys, values and the three conv inputs."""
    parts = []
    for layer, kind in list(zip(cache.layers, cache.kinds, strict=True))[:num_layers]:
        for cached in (layer.keys, layer.values):
            pages, offsets = _places(tables, layout, slot, kind, end)
            parts.append(cached[pages, :, offsets].clone())
        pages, offsets = _places(tables, layout, slot, Kind.CONV, end)
        places = pages * tables.page_size[Kind.CONV] + offsets
        parts += [c[places].clone() for c in (layer.kv_conv, layer.attn_conv, layer.mlp_conv)]
    return parts


def _places(
    tables: PageTables, layout: CacheLayout, slot: int, kind: Kind, end: int
) -> tuple[Tensor, Tensor]:
    reach = layout.reach(kind)
    positions = np.arange(0 if reach is None else max(0, end - reach), end)
    pages = tables.pages[kind][slot, positions // tables.page_size[kind]]
    assert (pages > 0).all(), f"slot {slot}: {kind.name} positions {positions} lie on pages {pages}"
    return torch.from_numpy(pages), torch.from_numpy(positions % tables.page_size[kind])


def same_bits(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
