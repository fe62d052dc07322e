"""Row metadata from segments."""

from __future__ import annotations

import pytest
import torch

from kernels.cuda.rows_meta import allocate_rows, fill_rows, make_rows


@pytest.mark.parametrize(
    "segments", [[(3, 10, 5), (0, 0, 1), (2, 7, 130)], [(i, 3 * i, i % 4 + 1) for i in range(70)]]
)
@pytest.mark.parametrize("padding", [0, 1, 140])
def test_every_row_finds_its_segment_and_the_rest_is_padding(segments, padding, device):
    expected = [
        (slot, first + i, i, count - i, index)
        for index, (slot, first, count) in enumerate(segments)
        for i in range(count)
    ] + [(-1, 0, 0, 0, -1)] * padding
    rows = make_rows(segments, device, len(expected))
    found = torch.stack((rows.slot, rows.position, rows.offset, rows.from_end, rows.segment), 1)
    assert found.tolist() == [list(row) for row in expected]


def test_a_second_fill_overwrites_the_first_and_empty_segments_hold_no_row(device):
    rows = allocate_rows(10, 4, device)
    rows.segments.copy_(
        torch.tensor([[5, 0, 100, 7], [6, 7, 0, 3], [-1, 0, 0, 0], [-1, 0, 0, 0]], dtype=torch.int32)
    )
    fill_rows(rows)
    rows.segments.copy_(
        torch.tensor([[-1, 0, 0, 0], [4, 1, 9, 2], [-1, 0, 0, 0], [8, 5, 0, 1]], dtype=torch.int32)
    )
    fill_rows(rows)
    assert rows.slot.tolist() == [-1, 4, 4, -1, -1, 8, -1, -1, -1, -1]
    assert rows.position.tolist() == [0, 9, 10, 0, 0, 0, 0, 0, 0, 0]
    assert rows.from_end.tolist() == [0, 2, 1, 0, 0, 1, 0, 0, 0, 0]
