"""Rows of draft windows: states of the step and of the ring, ids known and drawn, page changes, states handed out."""

from __future__ import annotations

import torch

from kernels.cuda.draft_rows import depth_ids, keep_states, window_states
from kernels.cuda.rows_meta import make_rows
from kernels.cuda.step_inputs import assign_pages, hand_out

WIDTH, RING = 24, 5
# slot, first hidden row, its position, hidden rows
RECORDS = [(2, 0, 30, 3), (0, 3, 7, 1), (3, 4, 0, 9), (-1, 0, 0, 0)]


def address_of(states: torch.Tensor, device: str) -> torch.Tensor:
    return torch.tensor([states.data_ptr()], dtype=torch.int64, device=device)


def test_windows_read_new_states_and_older_ones_from_the_ring(device):
    hidden = torch.randn(13, WIDTH, device=device).bfloat16()
    ring = torch.randn(4 * RING, WIDTH, device=device).bfloat16()
    records = torch.tensor(RECORDS, dtype=torch.int32, device=device)
    rows = make_rows([(2, 27, 6), (0, 7, 1), (3, 0, 4), (-1, 0, 0)], device, 14)  # three rows of padding
    out = torch.full((14, WIDTH), -9.0, device=device).bfloat16()
    window_states(address_of(hidden, device), ring, records, rows, RING, out)
    expected = [ring[2 * RING + entry % RING] for entry in (27, 28, 29)]
    expected += [hidden[i] for i in (0, 1, 2, 3, 4, 5, 6, 7)]
    assert torch.equal(out[:11], torch.stack(expected))
    assert (out[11:] == -9).all()


def test_the_last_states_of_each_sequence_stay_in_its_ring(device):
    hidden = torch.randn(13, WIDTH, device=device).bfloat16()
    ring = torch.randn(4 * RING, WIDTH, device=device).bfloat16()
    expected = ring.clone()
    for slot, row, position, count in RECORDS[:3]:
        for i in range(max(0, count - RING), count):
            expected[slot * RING + (position + i) % RING] = hidden[row + i]
    keep_states(
        address_of(hidden, device), ring, torch.tensor(RECORDS, dtype=torch.int32, device=device), RING
    )
    assert torch.equal(ring, expected)


def test_a_depth_takes_known_ids_then_what_earlier_depths_drew(device):
    rows = make_rows([(1, 10, 3), (-1, 0, 0), (0, 4, 2)], device, 7)
    known = torch.tensor(
        [(0, 3), (3, 0), (3, 4)], dtype=torch.int32, device=device
    )  # the last knows two more
    ids = torch.tensor([10, 11, 12, 20, 21, 22, 23, 99], dtype=torch.int32, device=device)
    drafts = torch.tensor([(50, 51, 52, -1), (60, 61, 999, -1)], dtype=torch.int32, device=device)
    expected = [
        [10, 11, 12, 20, 21, -1, -1],
        [11, 12, 50, 21, 22, -1, -1],
        [12, 50, 60, 22, 23, -1, -1],
    ]
    out = torch.empty(7, dtype=torch.int32, device=device)
    for depth in range(3):
        depth_ids(depth, known, ids, drafts, rows, 200, out)
        assert out.tolist() == expected[depth]
    depth_ids(3, known, ids, torch.cat((drafts, drafts[:1])), rows, 200, out)
    assert out.tolist() == [50, 60, 50, 23, 52, -1, -1]
    depth_ids(2, known, ids, drafts, rows, 15, out)
    assert max(out.tolist()) == 14, "an id beyond the vocabulary"


def test_only_the_counted_page_changes_are_applied(device):
    tables = torch.zeros(40, dtype=torch.int32, device=device)
    updates = torch.tensor([(3, 7), (39, 8), (5, 9)] + [(1, 1)] * 300, dtype=torch.int32, device=device)
    assign_pages(updates, torch.tensor([2], dtype=torch.int32, device=device), tables)
    assert tables.nonzero().flatten().tolist() == [3, 39]
    assert tables[[3, 39]].tolist() == [7, 8]


def test_states_go_to_the_output_whose_turn_it_is(device):
    states = torch.randn(3, 1040, device=device).bfloat16()
    outputs = torch.zeros(2, 5, 1040, device=device).bfloat16()
    hand_out(states, outputs, torch.tensor([1], dtype=torch.int32, device=device))
    assert torch.equal(outputs[1, :3], states) and not outputs[0].any() and not outputs[1, 3:].any()
