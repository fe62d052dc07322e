"""Steps, page tables and the reference's addresses for the kernel tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
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
    segments: list[Segment], page_size: int, device: str, num_slots: int = 4, positions: int = 64, padded: int = 0
) -> Step:
    per_slot = -(-positions // page_size)
    total = sum(count for *_, count in segments)
    pages = page_table(num_slots, per_slot, device)
    return Step(make_rows(segments, device, total + padded), pages, page_size, num_slots * per_slot + 1)


def chunked(count: int, borders: list[int]) -> list[tuple[int, int]]:
    """(first, rows) of the chunks that ``borders`` cut ``count`` positions into."""
    edges = [0, *borders, count]
    return [(a, b - a) for a, b in zip(edges, edges[1:], strict=False)]


@contextmanager
def nearest_bf16() -> Iterator[None]:
    """Triton's interpreter cuts fp32 off to bf16; GPUs round to nearest. Makes the interpreter round too."""
    from triton.runtime import interpreter

    original = interpreter._convert_float

    def convert(values, source, target, rounding):
        if str(source) == "fp32" and str(target) == "bf16":
            rounded = torch.from_numpy(np.ascontiguousarray(values, np.float32)).bfloat16()
            return rounded.view(torch.int16).numpy().view(np.uint16).reshape(np.shape(values))
        return original(values, source, target, rounding)

    interpreter._convert_float = convert
    try:
        yield
    finally:
        interpreter._convert_float = original
