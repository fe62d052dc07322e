"""Pages of the paged caches: who holds which, and how many a request can need at most.

A cache kind is a pool of pages; a sequence has one page table per model and kind. Windowed kinds hold only
what a later row can read, so their tables have holes. The engine owns the tables and tells the models of
changes; a freed page is not announced, because no later row reads or writes its positions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from inkling.errors import InklingError
from inkling.protocol import Kind, ring_rows

CONV_TAPS = 4  # a short convolution sees a position and the 3 before it


class Model(IntEnum):
    TARGET = 0
    DRAFT = 1


@dataclass(frozen=True)
class PoolLayout:
    page_size: int  # positions of one page
    num_pages: int  # page 0, the null page, included; 0: the model has no layer of this kind


@dataclass(frozen=True)
class CacheLayout:
    """Sizes of all pools. ``target`` and ``draft`` are indexed by ``Kind``."""

    local_window: int  # W: positions a local attention row sees, itself included
    num_draft_tokens: int  # N: a pass keeps the N + 1 rows before its end that the next one may start at
    target: tuple[PoolLayout, PoolLayout, PoolLayout]
    draft: tuple[PoolLayout, PoolLayout, PoolLayout]

    def pools(self, model: Model) -> tuple[PoolLayout, PoolLayout, PoolLayout]:
        return self.draft if model is Model.DRAFT else self.target

    def reach(self, kind: Kind) -> int | None:
        """Positions before a row that the row reads; None: all."""
        return {Kind.FULL: None, Kind.LOCAL: self.local_window - 1, Kind.CONV: CONV_TAPS - 1}[kind]


def span_pages(positions: int, page_size: int) -> int:
    """The most pages that ``positions`` consecutive positions can touch."""
    return (positions + page_size - 2) // page_size + 1 if positions > 0 else 0


def worst_case_pages(
    layout: CacheLayout, model: Model, num_positions: int, max_chunk: int, num_depths: int
) -> tuple[int, int, int]:
    """The most pages per kind that one sequence holds at any time.

    ``num_positions``: rows the target computes for it at most (prompt + max_tokens - 1). ``max_chunk``: rows
    of the longest prompt chunk. ``num_depths``: D_s; with 0 the draft holds nothing.
    """
    if model is Model.DRAFT and num_depths == 0:
        return 0, 0, 0
    pages = []
    for kind, pool in zip(Kind, layout.pools(model), strict=True):
        reach = layout.reach(kind)
        most = -(-num_positions // pool.page_size) if pool.num_pages else 0
        if reach is not None and most:
            keep = reach + layout.num_draft_tokens + 1
            if model is Model.TARGET:
                rows = max(min(max_chunk, keep), layout.num_draft_tokens + 1)
            else:  # a window takes up the entries that waited; a catch-up window is as long as the ring
                rows = max(min(max_chunk + num_depths - 1, keep), ring_rows(num_depths))
            most = min(most, span_pages(reach, pool.page_size) + span_pages(rows, pool.page_size))
        pages.append(most)
    return tuple(pages)


class PagePool:
    """Free pages of one kind of one model. Admission reserves; a sequence takes no more than it reserved."""

    def __init__(self, name: str, layout: PoolLayout):
        self.name = name
        self.page_size = layout.page_size
        self.num_usable = max(0, layout.num_pages - 1)
        self.num_reserved = 0
        self.free = list(range(self.num_usable, 0, -1))

    def take(self) -> int:
        if not self.free:
            raise InklingError(
                f"{self.name}: all {self.num_usable} pages are taken although admission reserves them"
            )
        return self.free.pop()


class PageTable:
    """The live pages of one sequence in one pool: index in the table -> page."""

    __slots__ = ("pool", "kind", "reach", "keep", "pages", "backed_from", "backed_to", "release_from")

    def __init__(self, pool: PagePool, kind: Kind, reach: int | None, num_draft_tokens: int):
        self.pool = pool
        self.kind = int(kind)
        self.reach = reach
        self.keep = 0 if reach is None else reach + num_draft_tokens + 1
        self.pages: dict[int, int] = {}
        self.backed_from = self.backed_to = 0  # positions that the last ``cover`` backed, whole pages
        self.release_from = 0  # a pass that reads nothing below this position frees the oldest page

    def cover(self, first: int, end: int, slot: int, updates: list[int]) -> None:
        """Backs the rows that a pass over [first, end) stores: all, or in a windowed kind the last ``keep``.

        Frees the pages that neither it nor a later pass reads. Appends (slot, kind, index, page, 1) to
        ``updates`` for every new page.
        """
        start, oldest = first, 0
        if self.reach is not None:
            start, oldest = max(first, end - self.keep), first - self.reach
        if start >= self.backed_from and end <= self.backed_to and oldest < self.release_from:
            return
        size = self.pool.page_size
        if self.reach is not None and oldest >= self.release_from:
            self._free_below(oldest // size)
        indices = range(start // size, (end - 1) // size + 1)
        for index in indices:
            if index not in self.pages:
                page = self.pages[index] = self.pool.take()
                updates += (slot, self.kind, index, page, 1)
        self.backed_from, self.backed_to = indices.start * size, indices.stop * size
        self.release_from = 1 if self.reach is None else (min(self.pages) + 1) * size

    def _free_below(self, lowest: int) -> None:
        for index in [i for i in self.pages if i < lowest]:
            self.pool.free.append(self.pages.pop(index))

    def release(self) -> None:
        self.pool.free.extend(self.pages.values())
        self.pages.clear()


class SequencePages:
    """The page tables of one sequence in one model, and what was reserved for them."""

    __slots__ = ("tables", "reserved")

    def __init__(self, tables: tuple[PageTable, ...], reserved: tuple[int, ...]):
        self.tables = tables
        self.reserved = reserved

    def cover(self, first: int, end: int, slot: int, updates: list[int]) -> None:
        for table in self.tables:
            table.cover(first, end, slot, updates)

    def records(self, slot: int, fresh: set[tuple[int, int, int]]) -> list[int]:
        """Page records of all live pages; ``fresh``: the (slot, kind, index) whose pages are to be zeroed."""
        words: list[int] = []
        for table in self.tables:
            for index, page in table.pages.items():
                words += (slot, table.kind, index, page, int((slot, table.kind, index) in fresh))
        return words


class PageAllocator:
    """All pools of both models."""

    def __init__(self, layout: CacheLayout):
        self.layout = layout
        self.pools = {
            model: tuple(
                PagePool(f"{model.name.lower()} {kind.name.lower()} cache", pool)
                for kind, pool in zip(Kind, layout.pools(model), strict=True)
            )
            for model in Model
        }

    def shortage(self, model: Model, pages: tuple[int, ...], empty: bool = False) -> str:
        """Why ``pages`` per kind cannot be reserved, now or (``empty``) ever; empty when they can."""
        for pool, wanted in zip(self.pools[model], pages, strict=True):
            if wanted > pool.num_usable - (0 if empty else pool.num_reserved):
                return f"{wanted} pages of the {pool.name}, which has {pool.num_usable}"
        return ""

    def reserve(self, model: Model, pages: tuple[int, ...]) -> SequencePages:
        """Tables of a new sequence that takes at most ``pages`` per kind. Call when nothing is short."""
        layout, tables = self.layout, []
        for kind, pool, wanted in zip(Kind, self.pools[model], pages, strict=True):
            pool.num_reserved += wanted
            if pool.num_usable:
                tables.append(PageTable(pool, kind, layout.reach(kind), layout.num_draft_tokens))
        return SequencePages(tuple(tables), pages)

    def release(self, model: Model, pages: SequencePages) -> None:
        for pool, reserved in zip(self.pools[model], pages.reserved, strict=True):
            pool.num_reserved -= reserved
        for table in pages.tables:
            table.release()

    def check_integrity(self, live: Iterable[tuple[Model, SequencePages]]) -> None:
        """Raises InklingError unless every page is free or held by exactly one table of ``live``, no table
        holds more than its reservation, and the reservations add up."""
        held = {(model, kind): [] for model in Model for kind in Kind}
        reserved = {(model, kind): 0 for model in Model for kind in Kind}
        for model, pages in live:
            for kind, wanted in zip(Kind, pages.reserved, strict=True):
                reserved[model, kind] += wanted
            for table in pages.tables:
                held[model, table.kind] += table.pages.values()
                num_held, wanted = len(table.pages), pages.reserved[table.kind]
                if num_held > wanted:
                    raise InklingError(f"{table.pool.name}: {num_held} pages held, {wanted} reserved")
        for (model, kind), pages in held.items():
            pool = self.pools[model][kind]
            if sorted(pool.free + pages) != list(range(1, pool.num_usable + 1)):
                raise InklingError(
                    f"{pool.name}: {len(pool.free)} free and {len(pages)} held of {pool.num_usable} pages"
                )
            if pool.num_reserved != reserved[model, kind] or pool.num_reserved > pool.num_usable:
                raise InklingError(
                    f"{pool.name}: {pool.num_reserved} reserved, {reserved[model, kind]} by live sequences"
                )
