"""One measured point: an operation at a shape, with its correctness gate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

ROTATED_BYTES = 256 << 20  # several times the 60 MB of second-level cache
MAX_SETS = 256
T = TypeVar("T")


@dataclass
class Built:
    """Buffers made and kernels bound. ``runs[i]`` launches the operation once, on buffer set i."""

    runs: list[Callable[[], None]]  # together over at least ROTATED_BYTES
    check: Callable[[], None]  # correctness gate: raises AssertionError
    bytes: int  # that one run has to move, each input and output once
    flops: int = 0  # of one run
    baseline: list[Callable[[], None]] | None = None  # the same by cuBLAS or torch
    bound: str = ""  # what the issue demands, e.g. ">= 75 % of the read ceiling"


@dataclass
class Cell:
    """``build`` makes the committed configuration, ``candidates`` others by name, built with ``--candidates`` only."""

    op: str
    shape: str
    build: Callable[[], Built]
    candidates: dict[str, Callable[[], Built]] = field(default_factory=dict)
    timeout_s: float = 30  # of each build with its compilation, gate and timing
    configuration: str = "table"  # what ``build`` makes


def rotating(make: Callable[[], T], bytes_each: int) -> list[T]:
    """As many buffer sets as cover ROTATED_BYTES (two at least, MAX_SETS at most)."""
    return [make() for _ in range(min(MAX_SETS, max(2, -(-ROTATED_BYTES // bytes_each))))]
