"""Page tables back what a pass reads or stores, hold nothing else, and stay below the worst case."""

from __future__ import annotations

from random import Random

import pytest

from inkling.engine.pages import (
    CacheLayout,
    Model,
    PageAllocator,
    PagesExhaustedError,
    PoolLayout,
    span_pages,
    worst_case_pages,
)
from inkling.errors import InklingError
from inkling.protocol import Kind


def layout_of(sizes: tuple[int, int, int], window: int, num_drafts: int, num_pages: int = 200) -> CacheLayout:
    pools = tuple(PoolLayout(size, num_pages) for size in sizes)
    return CacheLayout(window, num_drafts, pools, pools)


def held_positions(table) -> set[int]:
    size = table.pool.page_size
    return {index * size + offset for index in table.pages for offset in range(size)}


def test_span_pages_is_the_most_that_any_alignment_touches():
    for size in (1, 2, 3, 8):
        for positions in range(30):
            touched = [len({p // size for p in range(start, start + positions)}) for start in range(size)]
            assert span_pages(positions, size) == max(touched)


@pytest.mark.parametrize("seed", range(150))
def test_target_passes_find_every_position_they_read_and_store(seed: int):
    random = Random(seed)
    sizes = tuple(random.choice((1, 2, 3, 4, 8, 16)) for _ in Kind)
    window, num_drafts = random.randint(2, 20), random.randint(0, 8)
    layout = layout_of(sizes, window, num_drafts)
    num_prompt, num_positions, chunk = random.randint(1, 80), 0, random.choice((1, 3, 7, 100))
    num_positions = num_prompt + random.randint(0, 60)
    wanted = worst_case_pages(layout, Model.TARGET, num_positions, chunk, num_drafts)
    allocator = PageAllocator(layout)
    pages = allocator.tables(Model.TARGET)

    first, updates = 0, []
    written = {kind: set() for kind in Kind}
    while first < num_positions:
        if first < num_prompt:
            end = next_first = min(num_prompt, first + random.randint(1, chunk))
        else:
            end = min(num_positions, first + 1 + random.randint(0, num_drafts))
            next_first = random.randint(first + 1, end)  # a rejected tail is computed again
        updates.clear()
        pages.cover(first, end, 3, updates)
        for table in pages.tables:
            kind, reach = Kind(table.kind), table.reach
            held = held_positions(table)
            assert len(table.pages) <= wanted[kind]
            assert set(range(0 if reach is None else max(0, first - reach), first)) <= held & written[kind]
            stored = range(first if reach is None else max(first, end - reach - num_drafts - 1), end)
            assert set(stored) <= held
            written[kind] |= set(stored)
            if reach is not None:  # nothing is held that neither this pass nor a later one reads
                assert min(table.pages) >= (first - reach) // table.pool.page_size
            new = {
                (index, page)
                for slot, k, index, page, fresh in zip(*[iter(updates)] * 5, strict=True)
                if k == kind
            }
            assert all(table.pages[index] == page for index, page in new)
        allocator.check_integrity([(Model.TARGET, pages)])
        first = next_first
    pages.release()
    allocator.check_integrity([])


def test_pages_fall_out_behind_a_window_and_the_null_page_is_never_handed_out():
    layout = layout_of((4, 4, 4), window=9, num_drafts=0, num_pages=40)
    allocator = PageAllocator(layout)
    pages = allocator.tables(Model.TARGET)
    handed_out = set()
    for position in range(120):
        updates: list[int] = []
        pages.cover(position, position + 1, 0, updates)
        handed_out |= set(updates[3::5])
    assert 0 not in handed_out
    full, local, conv = pages.tables
    assert len(full.pages) == 30
    assert sorted(local.pages) == [27, 28, 29]  # positions 111 .. 119 and what shares their pages
    assert sorted(conv.pages) == [29]


def test_a_long_chunk_stores_only_its_end_in_windowed_kinds():
    layout = layout_of((4, 4, 4), window=9, num_drafts=2)
    pages = PageAllocator(layout).tables(Model.TARGET)
    pages.cover(0, 80, 0, [])
    full, local, conv = pages.tables
    assert len(full.pages) == 20
    assert sorted(local.pages) == [17, 18, 19]  # 8 + 2 + 1 positions: 69 .. 79
    assert sorted(conv.pages) == [18, 19]  # 3 + 2 + 1 positions: 74 .. 79


def test_a_shorter_later_pass_is_backed_at_its_own_start():
    """A catch-up window can end before the window ahead of it did, and then stores earlier rows."""
    layout = layout_of((1, 1, 1), window=50, num_drafts=3)
    pages = PageAllocator(layout).tables(Model.DRAFT)
    pages.cover(20, 50, 0, [])
    pages.cover(20, 40, 0, [])
    assert set(range(33, 40)) <= set(pages.tables[Kind.CONV].pages)


def test_a_kind_without_layers_has_no_table():
    pools = (PoolLayout(4, 0), PoolLayout(4, 10), PoolLayout(4, 10))
    layout = CacheLayout(8, 1, pools, pools)
    wanted = worst_case_pages(layout, Model.TARGET, 100, 10, 1)
    assert wanted[Kind.FULL] == 0
    pages = PageAllocator(layout).tables(Model.TARGET)
    assert [table.kind for table in pages.tables] == [Kind.LOCAL, Kind.CONV]


def test_nothing_is_held_in_the_draft_for_a_sequence_without_depths():
    assert worst_case_pages(layout_of((4, 4, 4), 8, 3), Model.DRAFT, 100, 10, 0) == (0, 0, 0)


def test_shortage_is_measured_against_empty_pools():
    allocator = PageAllocator(layout_of((4, 4, 4), 8, 0, num_pages=11))
    allocator.tables(Model.TARGET).cover(0, 36, 0, [])
    assert allocator.shortage(Model.TARGET, (10, 1, 1)) == ""
    assert "11 pages of the target full cache, which has 10" in allocator.shortage(Model.TARGET, (11, 1, 1))


def test_a_pass_that_found_no_page_goes_on_where_it_stopped():
    allocator = PageAllocator(layout_of((4, 4, 4), 8, 0, num_pages=6))
    other, pages = allocator.tables(Model.TARGET), allocator.tables(Model.TARGET)
    other.cover(0, 8, 0, [])
    updates: list[int] = []
    with pytest.raises(PagesExhaustedError):
        pages.cover(0, 20, 1, updates)
    other.release()
    pages.cover(0, 20, 1, updates)
    records = list(zip(*[iter(updates)] * 5, strict=True))
    assert sorted(index for _, kind, index, _, _ in records if kind == Kind.FULL) == [0, 1, 2, 3, 4]
    allocator.check_integrity([(Model.TARGET, pages)])


def test_a_shared_page_is_free_when_nobody_holds_or_keeps_it():
    allocator = PageAllocator(layout_of((4, 4, 4), 8, 0, num_pages=6))
    pool = allocator.pools[Model.TARGET][Kind.FULL]
    first, second = allocator.tables(Model.TARGET), allocator.tables(Model.TARGET)
    first.cover(0, 8, 0, [])
    shared = dict(first.tables[0].pages)
    for page in shared.values():
        pool.keep(page)
    second.tables[0].adopt(shared)
    kept = [(pool, page) for page in shared.values()]
    allocator.check_integrity([(Model.TARGET, first), (Model.TARGET, second)], kept)
    first.release()
    assert (len(pool.free), pool.num_idle) == (3, 0)
    second.release()
    assert (len(pool.free), pool.num_idle, pool.num_available) == (3, 2, 5)
    allocator.check_integrity([], kept)
    third = allocator.tables(Model.TARGET)
    third.tables[0].adopt(shared)
    assert pool.num_idle == 0
    third.release()
    for page in shared.values():
        pool.unkeep(page)
    assert (len(pool.free), pool.num_idle) == (5, 0)
    allocator.check_integrity([])


def test_shared_pages_are_announced_once_and_not_as_fresh():
    allocator = PageAllocator(layout_of((4, 4, 4), 8, 0, num_pages=20))
    first, second = allocator.tables(Model.TARGET), allocator.tables(Model.TARGET)
    first.cover(0, 8, 0, [])
    for old, new in zip(first.tables, second.tables, strict=True):
        new.adopt(old.pages)
    updates: list[int] = []
    second.cover(8, 9, 1, updates)
    records = list(zip(*[iter(updates)] * 5, strict=True))
    assert sorted(r[1:3] for r in records if r[4] == 0) == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 1)]
    assert sorted(r[1:3] for r in records if r[4] == 1) == [(0, 2), (1, 2), (2, 2)]
    updates.clear()
    second.cover(9, 10, 1, updates)
    assert not updates


def break_by_leak(allocator, pages):
    pages.tables[0].pages.popitem()


def break_by_sharing(allocator, pages):
    pages.tables[0].pages[99] = next(iter(pages.tables[0].pages.values()))


def break_by_freeing_twice(allocator, pages):
    pool = allocator.pools[Model.TARGET][0]
    pool.free.append(pool.free[0])


def break_by_null_page(allocator, pages):
    allocator.pools[Model.TARGET][0].free.append(0)


def break_by_keeping(allocator, pages):
    allocator.pools[Model.TARGET][1].keep(next(iter(pages.tables[1].pages.values())))


def break_by_counting(allocator, pages):
    allocator.pools[Model.TARGET][1].num_idle += 1


@pytest.mark.parametrize(
    "damage",
    [
        break_by_leak,
        break_by_sharing,
        break_by_freeing_twice,
        break_by_null_page,
        break_by_keeping,
        break_by_counting,
    ],
)
def test_check_integrity_sees(damage):
    allocator = PageAllocator(layout_of((4, 4, 4), 8, 0, num_pages=20))
    pages = allocator.tables(Model.TARGET)
    pages.cover(0, 20, 0, [])
    allocator.check_integrity([(Model.TARGET, pages)])
    damage(allocator, pages)
    with pytest.raises(InklingError):
        allocator.check_integrity([(Model.TARGET, pages)])


def test_taking_beyond_the_pool_is_an_error_that_names_it():
    allocator = PageAllocator(layout_of((4, 4, 4), 8, 0, num_pages=3))
    pages = allocator.tables(Model.TARGET)
    with pytest.raises(PagesExhaustedError, match="target full cache: all 2 pages"):
        pages.cover(0, 100, 0, [])
