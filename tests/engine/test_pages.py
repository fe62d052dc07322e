"""Page tables back what a pass reads or stores, hold nothing else, and stay below what was reserved."""

from __future__ import annotations

from random import Random

import pytest

from inkling.engine.pages import CacheLayout, Model, PageAllocator, PoolLayout, span_pages, worst_case_pages
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
    pages = allocator.reserve(Model.TARGET, wanted)

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
    allocator.release(Model.TARGET, pages)
    allocator.check_integrity([])


def test_pages_fall_out_behind_a_window_and_the_null_page_is_never_handed_out():
    layout = layout_of((4, 4, 4), window=9, num_drafts=0, num_pages=40)
    allocator = PageAllocator(layout)
    pages = allocator.reserve(Model.TARGET, worst_case_pages(layout, Model.TARGET, 120, 1, 0))
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
    pages = PageAllocator(layout).reserve(Model.TARGET, (100, 100, 100))
    pages.cover(0, 80, 0, [])
    full, local, conv = pages.tables
    assert len(full.pages) == 20
    assert sorted(local.pages) == [17, 18, 19]  # 8 + 2 + 1 positions: 69 .. 79
    assert sorted(conv.pages) == [18, 19]  # 3 + 2 + 1 positions: 74 .. 79


def test_a_shorter_later_pass_is_backed_at_its_own_start():
    """A catch-up window can end before the window ahead of it did, and then stores earlier rows."""
    layout = layout_of((1, 1, 1), window=50, num_drafts=3)
    pages = PageAllocator(layout).reserve(Model.DRAFT, (100, 100, 100))
    pages.cover(20, 50, 0, [])
    pages.cover(20, 40, 0, [])
    assert set(range(33, 40)) <= set(pages.tables[Kind.CONV].pages)


def test_a_kind_without_layers_has_no_table():
    pools = (PoolLayout(4, 0), PoolLayout(4, 10), PoolLayout(4, 10))
    layout = CacheLayout(8, 1, pools, pools)
    wanted = worst_case_pages(layout, Model.TARGET, 100, 10, 1)
    assert wanted[Kind.FULL] == 0
    pages = PageAllocator(layout).reserve(Model.TARGET, wanted)
    assert [table.kind for table in pages.tables] == [Kind.LOCAL, Kind.CONV]


def test_nothing_is_reserved_in_the_draft_for_a_sequence_without_depths():
    assert worst_case_pages(layout_of((4, 4, 4), 8, 3), Model.DRAFT, 100, 10, 0) == (0, 0, 0)


def test_reservations_count_against_later_ones_but_not_against_an_empty_pool():
    allocator = PageAllocator(layout_of((4, 4, 4), 8, 0, num_pages=11))
    first = allocator.reserve(Model.TARGET, (7, 1, 1))
    assert allocator.shortage(Model.TARGET, (3, 1, 1)) == ""
    assert "4 pages of the target full cache, which has 10" in allocator.shortage(Model.TARGET, (4, 1, 1))
    assert allocator.shortage(Model.TARGET, (10, 1, 1), empty=True) == ""
    assert allocator.shortage(Model.TARGET, (11, 1, 1), empty=True) != ""
    allocator.release(Model.TARGET, first)
    assert allocator.shortage(Model.TARGET, (10, 1, 1)) == ""


def break_by_leak(allocator, pages):
    pages.tables[0].pages.popitem()


def break_by_sharing(allocator, pages):
    pages.tables[0].pages[99] = next(iter(pages.tables[0].pages.values()))


def break_by_freeing_twice(allocator, pages):
    pool = allocator.pools[Model.TARGET][0]
    pool.free.append(pool.free[0])


def break_by_null_page(allocator, pages):
    allocator.pools[Model.TARGET][0].free.append(0)


def break_reservation(allocator, pages):
    allocator.pools[Model.TARGET][1].num_reserved += 1


def break_bound(allocator, pages):
    for index in range(20, 26):
        pages.tables[0].pages[index] = allocator.pools[Model.TARGET][0].take()


@pytest.mark.parametrize(
    "damage",
    [
        break_by_leak,
        break_by_sharing,
        break_by_freeing_twice,
        break_by_null_page,
        break_reservation,
        break_bound,
    ],
)
def test_check_integrity_sees(damage):
    allocator = PageAllocator(layout_of((4, 4, 4), 8, 0, num_pages=20))
    pages = allocator.reserve(Model.TARGET, (5, 5, 5))
    pages.cover(0, 20, 0, [])
    allocator.check_integrity([(Model.TARGET, pages)])
    damage(allocator, pages)
    with pytest.raises(InklingError):
        allocator.check_integrity([(Model.TARGET, pages)])


def test_taking_beyond_the_pool_is_an_error_that_names_it():
    allocator = PageAllocator(layout_of((4, 4, 4), 8, 0, num_pages=3))
    pages = allocator.reserve(Model.TARGET, (2, 2, 2))
    with pytest.raises(InklingError, match="target full cache: all 2 pages"):
        pages.cover(0, 100, 0, [])
