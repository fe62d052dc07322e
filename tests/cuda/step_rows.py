"""Steps, page tables and the reference's addresses for the kernel tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cuda.rows_meta import Rows, make_rows

Segment = tuple[int, int, int]  # slot, first position, rows


@dataclass
class Step:
    rows: Rows
    pages: Tensor  # int32 [slots, pages per slot]
    page_size: int
    num_pages: int


def page_table(num_slots: int, pages_per_slot: int, device: str, seed: int = 0) -> Tensor:
    """Distinct shuffled pages for every entry, int32; page 0 is nothing's."""
    order = torch.randperm(num_slots * pages_per_slot, generator=torch.Generator().manual_seed(seed)) + 1
    return order.view(num_slots, pages_per_slot).int().to(device)


def make_step(
    segments: list[Segment],
    page_size: int,
    device: str,
    num_slots: int = 4,
    positions: int = 64,
    padded: int = 0,
) -> Step:
    per_slot = -(-positions // page_size)
    total = sum(count for *_, count in segments)
    pages = page_table(num_slots, per_slot, device)
    return Step(make_rows(segments, device, total + padded), pages, page_size, num_slots * per_slot + 1)


def chunked(count: int, borders: list[int]) -> list[tuple[int, int]]:
    """(first, rows) of the chunks that ``borders`` cut ``count`` positions into."""
    edges = [0, *borders, count]
    return [(a, b - a) for a, b in zip(edges, edges[1:], strict=False)]
