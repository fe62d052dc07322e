"""The two memory ceilings of a GPU, measured in the run whose figures are compared with them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl

STREAM_BYTES = 4 << 30


@triton.jit
def _read_kernel(source, sums, num_words, BLOCK: tl.constexpr):
    """Each program reads every n-th block of 32-bit words and writes one word."""
    total = tl.zeros((BLOCK,), tl.int32)
    for start in tl.range(tl.program_id(0) * BLOCK, num_words, tl.num_programs(0) * BLOCK, num_stages=4):
        total += tl.load(source + start + tl.arange(0, BLOCK))
    tl.store(sums + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def _copy_kernel(source, target, num_words, BLOCK: tl.constexpr):
    for start in tl.range(tl.program_id(0) * BLOCK, num_words, tl.num_programs(0) * BLOCK, num_stages=4):
        tl.store(target + start + tl.arange(0, BLOCK), tl.load(source + start + tl.arange(0, BLOCK)))


def seconds_per_run(groups: Sequence[Sequence[Callable[[], None]]], rounds: int = 7) -> list[float]:
    """Median seconds of one run of each group, by graph replay; the groups take turns, so that clocks are shared.

    A round replays a group's graph, every run of it once, for at least 5 ms.
    """
    graphs = [capture(runs) for runs in groups]
    repeats = [max(1, round(0.005 / max(_replay_seconds(graph, 1), 1e-6))) for graph in graphs]
    times: list[list[float]] = [[] for _ in groups]
    for _ in range(rounds):
        for graph, repeat, found in zip(graphs, repeats, times, strict=True):
            found.append(_replay_seconds(graph, repeat))
    return [statistics.median(found) / len(runs) for found, runs in zip(times, groups, strict=True)]


def capture(runs: Sequence[Callable[[], None]]) -> torch.cuda.CUDAGraph:
    """One graph with every run once, warmed up."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for run in runs:
            run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    return graph


def _replay_seconds(graph: torch.cuda.CUDAGraph, repeats: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e-3 / repeats


def ceilings() -> tuple[float, float]:
    """Bytes a second of a read-only stream and of a copy (read and written bytes both count), best of several grids.

    A captured ``Tensor.copy_`` is the driver's memory copy, slower than a kernel's; the faster one counts.
    """
    source = torch.randint(-(2**31), 2**31 - 1, (STREAM_BYTES // 4,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    sums = torch.empty(1 << 20, dtype=torch.int32, device="cuda")
    processors = torch.cuda.get_device_properties(0).multi_processor_count

    def read(block: int, programs: int) -> None:
        _read_kernel[(programs,)](source, sums, source.numel(), BLOCK=block, num_warps=block // 1024)

    def copy(block: int, programs: int) -> None:
        _copy_kernel[(programs,)](source, target, source.numel(), BLOCK=block, num_warps=block // 1024)

    grids = [(block, processors * n) for block in (4096, 8192) for n in (2, 4, 8, 16)]
    reads = [[lambda b=b, n=n: read(b, n)] for b, n in grids]
    expected = int(source.sum(dtype=torch.int64)) % 2**32
    for run, (_, programs) in zip(reads, grids, strict=True):
        run[0]()
        assert int(sums[:programs].sum(dtype=torch.int64)) % 2**32 == expected, "the stream read other bytes"
    copies = [[lambda b=b, n=n: copy(b, n)] for b, n in grids]
    for run in copies:
        target.zero_()
        run[0]()
        assert torch.equal(target, source), "the copy has other bytes"
    seconds = seconds_per_run([*reads, *copies, [lambda: target.copy_(source)]])
    return STREAM_BYTES / min(seconds[: len(reads)]), 2 * STREAM_BYTES / min(seconds[len(reads) :])
