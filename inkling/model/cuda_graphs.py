"""CUDA graphs of the steps that occur again and again, by size; steps between two sizes run padded to the larger."""

from __future__ import annotations

import gc
import time
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)  # at most a third of padding

Report = Callable[[str], None]


def bucket_sizes(most: int) -> list[int]:
    """Ascending sizes up to ``most``, which is one of them."""
    return [size for size in _SIZES if size < most] + [most]


def bucket_of(sizes: Sequence[int], size: int) -> int | None:
    """The smallest of ``sizes`` that holds ``size``; None when none does."""
    index = bisect_left(sizes, size)
    return sizes[index] if index < len(sizes) else None


class DeviceStream:
    """The one stream on which a runner works, from what the default one has done on; nothing on the CPU."""

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(device))

    def __call__(self) -> AbstractContextManager:
        return torch.cuda.stream(self.stream) if self.stream is not None else nullcontext()

    def synchronize(self) -> None:
        if self.stream is not None:
            self.stream.synchronize()


class StepGraphs:
    """Captured runs by key. All share one memory pool: they run one after another, and nothing in it outlives a run.

    ``run(key)`` launches a step of that size; it reads and writes buffers whose addresses never change.
    """

    def __init__(self, stream: DeviceStream, run: Callable, what: str):
        self.stream, self.run, self.what = stream, run, what
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool: tuple[int, int] | None = None

    def __contains__(self, key: Hashable) -> bool:
        return key in self._graphs

    def replay(self, key: Hashable) -> None:
        """On the current stream."""
        self._graphs[key].replay()

    def capture(
        self, keys: Sequence[Hashable], warm_others: Callable[[], None], report: Report = lambda line: None
    ) -> None:
        """Captures ``run`` for every key, after running it once as it is: kernels compile and load then. At last calls
        ``warm_others``, which does that for the runs without a graph.

        Largest first, so that the pool is as large as the largest. ``report`` gets time and memory of every tenth part.
        """
        torch.cuda.synchronize()  # what the step buffer holds is there
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        began, before, count = time.monotonic(), _reserved_mb(), len(keys)
        with self.stream(), _no_collection():
            for index, key in enumerate(keys):
                self.run(key)
                self.stream.synchronize()
                graph = torch.cuda.CUDAGraph()
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    self.run(key)
                finally:
                    graph.capture_end()
                self._graphs[key] = graph
                if 10 * (index + 1) // count > 10 * index // count:
                    took, size = time.monotonic() - began, _reserved_mb() - before
                    report(
                        f"{self.what}: {index + 1} of {count} graphs in {took:.1f} s, {size:.0f} MB; last {key}"
                    )
        report(f"{self.what}: {count} graphs in {time.monotonic() - began:.1f} s")
        began = time.monotonic()
        warm_others()
        report(f"{self.what}: prompt kernels ready in {time.monotonic() - began:.1f} s")


def _reserved_mb() -> float:
    """Memory of this process's device that is not free, graphs' own included."""
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 1e6


@contextmanager
def _no_collection() -> Iterator[None]:
    """A garbage collection inside a capture could free memory, which a capture forbids."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
