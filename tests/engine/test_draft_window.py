"""The ``final`` rule at token level: who knew which id when, in every depth, over random runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random

import pytest

from inkling.engine.draft_window import DraftWindow
from inkling.engine.pages import (
    CacheLayout,
    Model,
    PageAllocator,
    PoolLayout,
    SequencePages,
    worst_case_pages,
)
from inkling.protocol import Kind, ring_rows


class TokenSimulator:
    """One sequence. ("id", p) is the committed id of position p, ("wrong", n) a draft that falls.

    ``built[k][p]``: the id that depth k last used for entry p. ``ring``: entries whose state the draft has.
    """

    def __init__(self, random: Random, num_depths: int, num_prompt: int, max_tokens: int, max_chunk: int):
        self.random, self.depths = random, num_depths
        self.window = DraftWindow(num_depths)
        self.num_known = num_prompt  # L
        self.num_entries = 0  # E
        self.end = num_prompt + max_tokens
        self.max_chunk = max_chunk
        self.drafts: list[tuple] = []
        self.built: list[dict[int, tuple]] = [{} for _ in range(num_depths)]
        self.ring: dict[int, int] = {}
        self.wrong = self.checked = 0
        self.seen = Counter()
        self.pages, self.allocator = self._pages()

    def _pages(self) -> tuple[SequencePages, PageAllocator]:
        random = self.random
        pools = tuple(PoolLayout(random.choice((1, 2, 3, 5, 8)), 400) for _ in Kind)
        layout = CacheLayout(
            random.choice((random.randint(2, 12), 50)), self.depths + random.randint(0, 2), pools, pools
        )
        allocator = PageAllocator(layout)
        wanted = worst_case_pages(layout, Model.DRAFT, self.end - 1, self.max_chunk, self.depths)
        self.most = wanted
        return allocator.tables(Model.DRAFT), allocator

    def target_step(self) -> tuple[int, int]:
        """Rows of a prompt chunk or a verification; returns the rows that stand, [first, E)."""
        first, left = self.num_entries, self.num_known - self.num_entries
        if left > 1:
            rows = self.random.randint(1, min(left, self.max_chunk))
            self.num_entries += rows
            self.num_known += rows == left
            self.window.verified(0)
            return first, self.num_entries
        verified = self.drafts[: self.random.randint(0, len(self.drafts))]  # a short budget verifies fewer
        true = [("id", self.num_known + i) for i in range(len(verified))]
        accepted = next(
            (i for i, (d, t) in enumerate(zip(verified, true, strict=True)) if d != t), len(verified)
        )
        self.num_entries += 1 + accepted
        self.num_known += 1 + accepted
        self.window.verified(accepted)
        self.seen["accepted", accepted] += 1
        return first, self.num_entries

    def draft_step(self, new: tuple[int, int], num_drafts: int, probability: float) -> None:
        waiting = self.num_known - self.num_entries > 1
        before = self.window.final
        window = self.window.plan(self.num_entries, self.num_known, 0 if waiting else num_drafts)
        assert self.window.final >= before
        assert window.first == before and window.end <= self.num_entries
        assert (
            window.drafts == (0 if waiting else num_drafts) and window.drafts <= window.depths <= self.depths
        )
        ids = self._check_ids(window)
        self._check_states(window, new)
        if window.end > window.first:
            self.drafts = self._run(window, ids, probability)
            self.seen["depths", window.depths - window.drafts] += 1
        else:
            self.drafts = []
        self.check_final()
        for entry in range(max(new[0], new[1] - ring_rows(self.depths)), new[1]):
            self.ring[entry % ring_rows(self.depths)] = entry
        waited = self.num_entries - self.window.final
        assert waited + self.depths + 1 <= ring_rows(self.depths) or window.drafts, f"{waited} entries wait"

    def _check_ids(self, window) -> dict[int, tuple]:
        """The ids of a window exist before it reads them."""
        last = window.first + window.num_known
        assert last < self.num_known, f"id of position {last} does not exist yet"
        if window.drafts:
            assert last == self.num_known - 1 == window.end, "drafts follow the newest id"
        return {p: ("id", p) for p in range(window.first + 1, last + 1)}

    def _check_states(self, window, new: tuple[int, int]) -> None:
        for entry in range(window.first, min(window.end, new[0])):
            assert self.ring.get(entry % ring_rows(self.depths)) == entry, f"state of entry {entry} is gone"

    def _run(self, window, ids: dict[int, tuple], probability: float) -> list[tuple]:
        self._check_pages(window)
        drafts = []
        for k in range(window.depths):
            for p in range(window.first, window.end):
                assert p + k + 1 in ids, f"entry {p} of depth {k} needs an id that nobody has"
                self.built[k][p] = ids[p + k + 1]
            if window.drafts:
                position = window.end + k + 1
                self.wrong += 1
                is_true = self.random.random() < probability
                ids[position] = ("id", position) if is_true else ("wrong", self.wrong)
                drafts.append(ids[position])
        return drafts[: window.drafts]

    def _check_pages(self, window) -> None:
        self.pages.cover(window.first, window.end, 0, [])
        for table in self.pages.tables:
            reach, size = table.reach, table.pool.page_size
            read = range(0 if reach is None else max(0, window.first - reach), window.first)
            stored = range(
                window.first if reach is None else max(window.first, window.end - table.keep), window.end
            )
            for p in [*read, *stored]:
                assert p // size in table.pages, f"{Kind(table.kind).name}: position {p} has no page"
            assert len(table.pages) <= self.most[table.kind]
        self.allocator.check_integrity([(Model.DRAFT, self.pages)])

    def check_final(self) -> None:
        """Entries below ``final`` are right in every depth; no window writes there again."""
        for k in range(self.depths):
            for p in range(self.checked, self.window.final):
                assert self.built[k].get(p) == ("id", p + k + 1), f"entry {p} of depth {k} is not final"
        self.checked = self.window.final


def simulate(seed: int, choose: Callable[[Random, int], int]) -> TokenSimulator:
    random = Random(seed)
    depths = random.randint(1, 8)
    prompt = random.choice((random.randint(1, depths + 2), random.randint(1, 90), 160))
    sim = TokenSimulator(
        random, depths, prompt, random.randint(3, 120), random.choice((1, 2, depths, depths + 1, 64))
    )
    probability = random.choice((0.0, 0.5, 0.7, 0.95, 1.0))
    while True:
        new = sim.target_step()
        sim.check_final()
        left = sim.end - sim.num_known
        if left <= 1:
            return sim
        sim.draft_step(new, min(choose(random, depths), left - 1, depths), probability)


def always_all(random: Random, depths: int) -> int:
    return depths


def any_number(random: Random, depths: int) -> int:
    return random.randint(0, depths)


def mostly_none(random: Random, depths: int) -> int:
    return depths if random.random() < 0.03 else 0


def mostly_one(random: Random, depths: int) -> int:
    return depths if random.random() < 0.03 else 1


@pytest.mark.parametrize("choose", [always_all, any_number, mostly_none, mostly_one])
def test_no_window_reads_an_id_before_it_exists_and_every_final_entry_is_right(choose):
    seen = Counter()
    for seed in range(500):
        seen += simulate(seed, choose).seen
    assert {count for name, count in seen if name == "accepted"} >= set(
        range(9 if choose is always_all else 2)
    )
    if choose in (any_number, mostly_one):  # the ring forced windows of all depths on shorter drafts
        assert any(name == "depths" and more > 0 for name, more in seen)


def test_with_constant_n_the_window_is_the_replayed_and_the_new_rows():
    """r - 1 replayed and a + 1 new rows after r of N drafts fell and a stood."""
    for depths in range(1, 9):
        for accepted in range(depths + 1):
            window = DraftWindow(depths)
            window.plan(50, 51, depths)
            window.verified(accepted)
            entries = 50 + accepted + 1
            plan = window.plan(entries, entries + 1, depths)
            rejected = depths - accepted
            assert plan.end - plan.first == max(0, rejected - 1) + accepted + 1
            assert plan.depths == plan.drafts == depths


def test_prompt_chunks_wait_for_ids_that_come_later():
    window = DraftWindow(3)
    assert window.plan(2, 10, 0).end == 2  # ids up to 2 - 1 + 3 = 4 are known
    chunk = window.plan(8, 10, 0)  # entry p needs ids up to p + 3 <= 9
    assert (chunk.first, chunk.end, chunk.depths, chunk.num_known) == (2, 7, 3, 7)
    last = window.plan(10, 11, 3)
    assert (last.first, last.end, last.num_known) == (7, 10, 3)


def test_a_prompt_shorter_than_the_depths_runs_nothing_before_its_last_chunk():
    window = DraftWindow(5)
    assert window.plan(1, 3, 0).num_known == 0
    assert window.final == 0
    assert window.plan(3, 4, 5).first == 0


def test_fewer_depths_leave_final_where_it_was():
    window = DraftWindow(4)
    window.plan(20, 21, 4)
    window.verified(4)
    assert window.final == 20
    window.plan(25, 26, 2)
    window.verified(2)
    assert window.final == 20
    assert window.plan(28, 29, 4).first == 20


def test_a_full_ring_makes_all_depths_run():
    window = DraftWindow(4)
    entries = 0
    while (plan := window.plan(entries := entries + 1, entries + 1, 1)).depths == 1:
        window.verified(0)
    assert plan.depths == 4 and plan.drafts == 1
    assert entries + 4 + 1 == ring_rows(4) + 1
