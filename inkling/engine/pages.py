"""Pages of the paged caches: who holds which, and how many a request can need at most.

Pages are taken when a pass needs them. Several tables may hold one page (a shared prefix; nobody writes it), and
the prefix cache may keep a page that no table holds any more: such an idle page is free for the taking, once the
cache has let go of it.

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


class PagesExhaustedError(InklingError):
    """A pool has no free page. The scheduler makes room; nobody else sees this."""

    def __init__(self, pool: PagePool):
        super().__init__(f"{pool.name}: all {pool.num_usable} pages are taken")
        self.pool = pool


class PagePool:
    """The pages of one kind of one model."""

    def __init__(self, name: str, kind: Kind, layout: PoolLayout):
        self.name = name
        self.kind = kind
        self.page_size = layout.page_size
        self.num_usable = max(0, layout.num_pages - 1)
        self.free = list(range(self.num_usable, 0, -1))
        self.users = [0] * (self.num_usable + 1)  # tables that hold the page
        self.keeps = [0] * (self.num_usable + 1)  # entries of the prefix cache that do
        self.num_idle = 0  # pages without a user that the prefix cache keeps

    @property
    def num_available(self) -> int:
        return len(self.free) + self.num_idle

    def take(self) -> int:
        if not self.free:
            raise PagesExhaustedError(self)
        page = self.free.pop()
        self.users[page] = 1
        return page

    def share(self, page: int) -> None:
        """One more table holds ``page``, which somebody holds or keeps."""
        self.num_idle -= self.users[page] == 0
        self.users[page] += 1

    def drop(self, page: int) -> None:
        """One table less holds ``page``."""
        self.users[page] -= 1
        if self.users[page] == 0:
            if self.keeps[page]:
                self.num_idle += 1
            else:
                self.free.append(page)

    def keep(self, page: int) -> None:
        self.keeps[page] += 1

    def unkeep(self, page: int) -> None:
        self.keeps[page] -= 1
        if self.keeps[page] == 0 and self.users[page] == 0:
            self.num_idle -= 1
            self.free.append(page)


class PageTable:
    """The live pages of one sequence in one pool: index in the table -> page."""

    __slots__ = (
        "pool",
        "kind",
        "reach",
        "keep",
        "pages",
        "backed_from",
        "backed_to",
        "release_from",
        "adopted",
    )

    def __init__(self, pool: PagePool, kind: Kind, reach: int | None, num_draft_tokens: int):
        self.pool = pool
        self.kind = int(kind)
        self.reach = reach
        self.keep = 0 if reach is None else reach + num_draft_tokens + 1
        self.pages: dict[int, int] = {}
        self.backed_from = self.backed_to = 0  # positions that the last ``cover`` backed, whole pages
        self.release_from = 0  # a pass that reads nothing below this position frees the oldest page
        self.adopted = False  # holds shared pages that the model has not been told of

    def adopt(self, pages: dict[int, int]) -> None:
        """Holds pages of a shared prefix, in an empty table; the next ``cover`` announces them."""
        for page in pages.values():
            self.pool.share(page)
        self.pages.update(pages)
        self.adopted = bool(self.pages)

    def cover(self, first: int, end: int, slot: int, updates: list[int]) -> None:
        """Backs the rows that a pass over [first, end) stores: all, or in a windowed kind the last ``keep``.

        Frees the pages that neither it nor a later pass reads. Appends (slot, kind, index, page, 1) to
        ``updates`` for every new page. Raises PagesExhaustedError; what was taken until then stays in the table
        and in ``updates``, and the same call may be made again.
        """
        start, oldest = first, 0
        if self.reach is not None:
            start, oldest = max(first, end - self.keep), first - self.reach
        if start >= self.backed_from and end <= self.backed_to and oldest < self.release_from:
            return
        size = self.pool.page_size
        if self.reach is not None and oldest >= self.release_from:
            self._free_below(oldest // size)
        if self.adopted:
            self.adopted = False
            for index, page in self.pages.items():
                updates += (slot, self.kind, index, page, 0)
        indices = range(start // size, (end - 1) // size + 1)
        for index in indices:
            if index not in self.pages:
                page = self.pages[index] = self.pool.take()
                updates += (slot, self.kind, index, page, 1)
        self.backed_from, self.backed_to = indices.start * size, indices.stop * size
        self.release_from = 1 if self.reach is None else (min(self.pages) + 1) * size

    def _free_below(self, lowest: int) -> None:
        for index in [i for i in self.pages if i < lowest]:
            self.pool.drop(self.pages.pop(index))

    def release(self) -> None:
        for page in self.pages.values():
            self.pool.drop(page)
        self.pages.clear()


class SequencePages:
    """The page tables of one sequence in one model, and the pass they were last made ready for."""

    __slots__ = ("tables", "first", "end", "_ready_from", "_ready_below", "_ready_to")

    def __init__(self, tables: tuple[PageTable, ...]):
        self.tables = tables
        self.first = self.end = 0
        # passes that no table has anything to do for: they begin in [from, below) and end at ``to`` or before
        self._ready_from = self._ready_below = self._ready_to = 0

    def is_ready(self, first: int, end: int) -> bool:
        """Whether a pass over [first, end) needs no ``cover``; it then is the one they were last made ready for."""
        if self._ready_from <= first < self._ready_below and end <= self._ready_to:
            self.first, self.end = first, end
            return True
        return False

    def cover(self, first: int, end: int, slot: int, updates: list[int]) -> None:
        self._ready_to = 0
        for table in self.tables:
            table.cover(first, end, slot, updates)
        self.first, self.end = first, end
        self._ready_from = max((table.backed_from for table in self.tables), default=0)
        windowed = [table.release_from + table.reach for table in self.tables if table.reach is not None]
        self._ready_below = min(windowed, default=1 << 62)
        self._ready_to = min((table.backed_to for table in self.tables), default=1 << 62)

    def release(self) -> None:
        for table in self.tables:
            table.release()

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
                PagePool(f"{model.name.lower()} {kind.name.lower()} cache", kind, pool)
                for kind, pool in zip(Kind, layout.pools(model), strict=True)
            )
            for model in Model
        }

    def shortage(self, model: Model, pages: tuple[int, ...]) -> str:
        """Why ``pages`` per kind do not fit empty pools; empty when they do."""
        for pool, wanted in zip(self.pools[model], pages, strict=True):
            if wanted > pool.num_usable:
                return f"{wanted} pages of the {pool.name}, which has {pool.num_usable}"
        return ""

    def tables(self, model: Model) -> SequencePages:
        """Empty tables of a new sequence."""
        layout = self.layout
        return SequencePages(
            tuple(
                PageTable(pool, kind, layout.reach(kind), layout.num_draft_tokens)
                for kind, pool in zip(Kind, self.pools[model], strict=True)
                if pool.num_usable
            )
        )

    def check_integrity(
        self, live: Iterable[tuple[Model, SequencePages]], kept: Iterable[tuple[PagePool, int]] = ()
    ) -> None:
        """Raises InklingError unless every page is either free or held as often as the tables of ``live`` and
        the prefix cache (``kept``: pool and page, once per entry) say."""
        users = {pool: [0] * (pool.num_usable + 1) for pools in self.pools.values() for pool in pools}
        keeps = {pool: [0] * (pool.num_usable + 1) for pool in users}
        for _, pages in live:
            for table in pages.tables:
                for page in table.pages.values():
                    users[table.pool][page] += 1
        for pool, page in kept:
            keeps[pool][page] += 1
        for pool, held in users.items():
            if held != pool.users or keeps[pool] != pool.keeps or held[0] or keeps[pool][0]:
                raise InklingError(
                    f"{pool.name}: {sum(held)} pages held and {sum(keeps[pool])} kept, "
                    f"{sum(pool.users)} and {sum(pool.keeps)} counted"
                )
            idle = [page for page, kept_by in enumerate(pool.keeps) if kept_by and not held[page]]
            free = [page for page in range(1, pool.num_usable + 1) if not held[page] and not pool.keeps[page]]
            if sorted(pool.free) != free or pool.num_idle != len(idle):
                raise InklingError(
                    f"{pool.name}: {len(pool.free)} pages in the free list and {pool.num_idle} idle, "
                    f"{len(free)} and {len(idle)} of {pool.num_usable} are"
                )
