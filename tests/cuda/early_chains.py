"""Chains of launches that may overlap, replayed as one graph: what each reads is there, and nothing it reads goes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def assert_overlap_changes_no_bit(
    chain: Callable[[bool], list[Tensor]], case: object, num_replays: int = 20
) -> None:
    """``chain(is_early)`` launches everything and returns its input, then all outputs. ``case`` names a failure."""
    wanted = chain(False)
    chain(True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain(True)
    for _ in range(num_replays):
        for out in found[1:]:
            out.fill_(float("nan"))
        graph.replay()
        assert all(map(torch.equal, found, wanted)), case
