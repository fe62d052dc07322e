"""Blocks of committed prefixes that later sequences may start from instead of computing them again.

A block [b, e) has one fixed number of positions. Its key is a hash of all ids 0 .. e+N-1: the N ids behind it are
those that the depths used for its last entries, so draft entries below e are the same for every sequence that has
the key. It is registered once these ids are committed and all entries below e are computed and final.

Full attention: the pages of each block. Windowed kinds: the pages with the rows before e, which only a hit that
ends there reads; they may go before the block does. Prompt chunks end at block ends, and a pass stores the rows
before its end, so these rows are in pages when the pass is over; a block whose rows did not get there (a long
draft window ran past) still carries the hits of later blocks. Blocks are multiples of every page size: no page
holds positions on both sides of e, so whoever has started at e never writes a shared page.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

from inkling.engine.pages import CacheLayout, Model, PagePool, SequencePages
from inkling.protocol import Kind

if TYPE_CHECKING:
    from inkling.engine.sequence import Sequence

NO_HIT = -1


@dataclass(slots=True, eq=False)
class Block:
    """Kept pages by model and kind: index in the table -> page."""

    num_depths: int  # depths whose full attention pages it has; with 0, the target alone
    hit_depths: int = NO_HIT  # sequences of at most so many depths may start at its end
    pages: dict[tuple[Model, int], tuple[PagePool, dict[int, int]]] = field(default_factory=dict)

    def keep(self, model: Model, kind: int, pool: PagePool, pages: dict[int, int]) -> None:
        for page in pages.values():
            pool.keep(page)
        self.pages[model, kind] = pool, pages

    def forget(self) -> None:
        for key in list(self.pages):
            self._forget(key)

    def forget_rows(self) -> None:
        """Only the pages of full attention stay: it carries the hits of later blocks."""
        for key in [key for key in self.pages if key[1] != Kind.FULL]:
            self._forget(key)
        self.hit_depths = NO_HIT

    def _forget(self, key: tuple[Model, int]) -> None:
        pool, pages = self.pages.pop(key)
        for page in pages.values():
            pool.unkeep(page)

    def frees(self, pool: PagePool) -> bool:
        """Whether it keeps a page of ``pool`` that no sequence holds."""
        return any(kept is pool and pool.users[page] == 0 for kept, page in self.kept())

    def frees_rows(self, pool: PagePool) -> bool:
        """The same, and ``forget_rows`` lets go of it."""
        return pool.kind is not Kind.FULL and self.frees(pool)

    def kept(self) -> Iterator[tuple[PagePool, int]]:
        return ((pool, page) for pool, pages in self.pages.values() for page in pages.values())


@dataclass(slots=True)
class Trail:
    """How far one sequence's blocks are keyed, passed and registered; ends of blocks, in positions."""

    keys: list[bytes] = field(default_factory=list)  # of all blocks whose ids are known; survive a preemption
    target: int = 0  # the target has passed so far
    draft: int = 0  # so has ``final``
    registered: int = 0
    passed: dict[int, Block] = field(default_factory=dict)  # by end; not registered yet

    def restart(self, start: int) -> None:
        self.drop()
        self.target = self.draft = self.registered = start

    def drop(self) -> None:
        for block in self.passed.values():
            block.forget()
        self.passed.clear()


class PrefixCache:
    """``block``: positions of a block; 0 turns prefix reuse off. ``num_draft_tokens``: the deployment's N."""

    def __init__(self, layout: CacheLayout, block: int):
        for pool in (*layout.target, *layout.draft):
            if block % pool.page_size:
                raise ValueError(
                    f"prefix_block is {block}; it must be a multiple of every page size, {pool.page_size} is one"
                )
        self.block = block
        self.lookahead = layout.num_draft_tokens
        self.blocks: OrderedDict[bytes, Block] = (
            OrderedDict()
        )  # least recently used first, ends before starts
        self.ends: OrderedDict[bytes, Block] = OrderedDict()  # those with rows; the last hit that ended there
        self.num_hits = 0  # sequences started from a hit
        self.num_hit_positions = 0

    def chunk_rows(self, first: int, rows: int, num_ids: int) -> int:
        """``rows`` of a prompt chunk that begins at ``first``, cut at the first block end that can be keyed."""
        if self.block == 0:
            return rows
        end = first - first % self.block + self.block
        return min(rows, end - first) if end + self.lookahead <= num_ids else rows

    def start(
        self, sequence: Sequence, target_pages: SequencePages, draft_pages: SequencePages | None
    ) -> int:
        """Puts the longest hit into empty tables; returns its length, 0 for none."""
        takes_hits = (
            self.block and not sequence.request.prompt_log_probs
        )  # those come from rows computed here
        hit = self._longest_hit(sequence) if takes_hits else []
        length = len(hit) * self.block
        sequence.trail.restart(length)
        for model, pages in ((Model.TARGET, target_pages), (Model.DRAFT, draft_pages)):
            for table in pages.tables if hit and pages is not None else ():
                for block in hit if table.reach is None else hit[-1:]:
                    table.adopt(block.pages[model, table.kind][1])
        return length

    def started(self, sequence: Sequence) -> None:
        """The sequence runs: its hit counts, and was used just now."""
        if hit := sequence.trail.registered // self.block if self.block else 0:
            self.num_hits += 1
            self.num_hit_positions += sequence.trail.registered
            self._touch(sequence.trail.keys[:hit])
            self.ends.move_to_end(sequence.trail.keys[hit - 1])

    def record(self, sequence: Sequence) -> None:
        """Keeps what the last pass completed. Call after each pass of either model, before its tables change."""
        trail, block = sequence.trail, self.block
        if block == 0 or not (trail.passed or sequence.num_computed >= trail.target + block):
            return
        num_ids, depths = len(sequence.ids), sequence.num_depths
        while trail.target + block <= min(sequence.num_computed, num_ids):
            trail.target += block
            passed = trail.passed[trail.target] = Block(depths)
            if self._keep_rows_before(trail.target, passed, Model.TARGET, sequence.target_pages):
                passed.hit_depths = 0
        final = sequence.window.final if sequence.window is not None else trail.target
        while trail.draft + block <= min(final, trail.target):
            trail.draft += block
            passed = trail.passed.get(trail.draft)
            if depths and passed and passed.hit_depths == 0:
                kept = self._keep_rows_before(trail.draft, passed, Model.DRAFT, sequence.draft_pages)
                passed.hit_depths = depths if kept else 0
        while trail.registered + block <= min(trail.draft, num_ids - self.lookahead):
            trail.registered += block
            if passed := trail.passed.pop(trail.registered, None):
                self._register(passed, trail.registered, sequence)

    def make_room(self, pool: PagePool, running: Iterable[Sequence]) -> bool:
        """Lets go of blocks, least recently used first, until ``pool`` has a free page; whether it has."""
        while not pool.free and pool.num_idle:
            if key := next((key for key, block in self.ends.items() if block.frees_rows(pool)), None):
                self.ends.pop(key).forget_rows()
            elif key := next((key for key, block in self.blocks.items() if block.frees(pool)), None):
                self.ends.pop(key, None)
                self.blocks.pop(key).forget()
            else:  # what is left is kept for blocks on their way here
                for sequence in running:
                    sequence.trail.drop()
        return bool(pool.free)

    def clear(self) -> None:
        for block in self.blocks.values():
            block.forget()
        self.blocks.clear()
        self.ends.clear()

    def kept(self, running: Iterable[Sequence]) -> Iterator[tuple[PagePool, int]]:
        """Pool and page of everything that is kept, once for each block that keeps it."""
        for block in self.blocks.values():
            yield from block.kept()
        for sequence in running:
            for block in sequence.trail.passed.values():
                yield from block.kept()

    def _keys(self, sequence: Sequence) -> list[bytes]:
        """Keys of the blocks whose ids, and the N behind, are known: a chain of hashes."""
        keys, ids = sequence.trail.keys, sequence.ids
        while (end := (len(keys) + 1) * self.block) + self.lookahead <= len(ids):
            new = ids[end - self.block + self.lookahead if keys else 0 : end + self.lookahead]
            parent = keys[-1] if keys else b""
            keys.append(blake2b(parent + np.array(new, np.int32).tobytes(), digest_size=32).digest())
        return keys

    def _longest_hit(self, sequence: Sequence) -> list[Block]:
        """The blocks of [0, h), h <= T - max(1, N): one row at least remains to draw from."""
        most = (len(sequence.ids) - max(1, self.lookahead)) // self.block
        depths, hit, longest = sequence.num_depths, [], 0
        for key in self._keys(sequence)[:most]:
            block = self.blocks.get(key)
            if block is None or block.num_depths < depths:
                break
            hit.append(block)
            if block.hit_depths >= depths:
                longest = len(hit)
        return hit[:longest]

    def _keep_rows_before(self, end: int, block: Block, model: Model, pages: SequencePages) -> bool:
        """Keeps the windowed rows before ``end``; False, and nothing, when the last pass did not store them."""
        rows = {}
        for table in pages.tables:
            if table.reach is not None:
                stored = max(pages.first, pages.end - table.keep)  # rows below ``first`` were stored before
                begin = max(0, end - table.reach)
                indices = range(begin // table.pool.page_size, (end - 1) // table.pool.page_size + 1)
                if stored > max(pages.first, begin) or any(i not in table.pages for i in indices):
                    return False
                rows[table] = {i: table.pages[i] for i in indices}
        for table, held in rows.items():
            block.keep(model, table.kind, table.pool, held)
        return True

    def _register(self, block: Block, end: int, sequence: Sequence) -> None:
        number = end // self.block
        block.num_depths = min(block.num_depths, sequence.num_depths)  # it may have given up some on the way
        block.hit_depths = min(block.hit_depths, block.num_depths)
        keys = self._keys(sequence)[:number]
        known = self.blocks.get(keys[-1])
        is_better = known is None or (
            block.num_depths >= known.num_depths
            and block.hit_depths >= known.hit_depths
            and (block.num_depths, block.hit_depths) != (known.num_depths, known.hit_depths)
        )
        if not is_better or (number > 1 and keys[-2] not in self.blocks):  # nobody could reach it
            block.forget()
        else:
            if known is not None:
                known.forget()
                self.ends.pop(keys[-1], None)
            for model, pages in ((Model.TARGET, sequence.target_pages), (Model.DRAFT, sequence.draft_pages)):
                for table in pages.tables if pages is not None else ():
                    if table.reach is None:
                        size = table.pool.page_size
                        indices = range((end - self.block) // size, end // size)
                        block.keep(model, table.kind, table.pool, {i: table.pages[i] for i in indices})
            self.blocks[keys[-1]] = block
            if block.hit_depths != NO_HIT:
                self.ends[keys[-1]] = block
        self._touch(keys)

    def _touch(self, keys: list[bytes]) -> None:
        for key in reversed(keys):  # the first block is the last to go: without it no other is reached
            if key in self.blocks:
                self.blocks.move_to_end(key)
