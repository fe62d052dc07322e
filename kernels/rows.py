"""Row-exact products: every row of ``x @ w.T`` has the same bits whatever the other rows are.

BLAS libraries choose a code path by the number of rows. With rows zero-padded to a multiple of a small quantum the
path that each row takes was seen to be the same for every row count (MKL, 1 to 8 threads); ``find_row_quantum``
checks that for the shapes, the library and the thread count in force, and refuses to serve when it does not hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

_QUANTA = (4, 8, 16)
_WIDENED_ELEMENTS = 1 << 18  # of a block of narrow weights: 1 MiB in fp32
_quantum = _QUANTA[0]


def row_quantum() -> int:
    """Rows of every product are padded to a multiple of this."""
    return _quantum


def set_row_quantum(quantum: int) -> None:
    global _quantum
    _quantum = quantum


def padded_rows(rows: int) -> int:
    """The smallest multiple of the row quantum that holds ``rows``."""
    return -(-rows // _quantum) * _quantum


def pad_rows(x: Tensor) -> Tensor:
    """``x [T, K]`` with zero rows appended up to a multiple of the quantum."""
    missing = padded_rows(x.shape[0]) - x.shape[0]
    return F.pad(x, (0, 0, 0, missing)) if missing else x


def linear_reference(x: Tensor, w: Tensor) -> Tensor:
    """``x [T, K] @ w[N, K].T -> [T, N]``, fp32 accumulation, rounded once to ``x.dtype``. T: a quantum multiple."""
    assert x.shape[0] % _quantum == 0, (x.shape, _quantum)
    return widened_linear(x, w)


def widened_linear(x: Tensor, w: Tensor) -> Tensor:
    """The same for any T, row-exact only for quantum multiples.

    Weights may be narrower than ``x``: bf16 weights widened here, in blocks that stay in the second-level cache, give
    the bits of fp32 ones for half the memory traffic.
    """
    if w.dtype is x.dtype:
        return F.linear(x, w)
    block = max(64, _WIDENED_ELEMENTS // w.shape[1] // 64 * 64)
    if w.shape[0] <= block:
        return F.linear(x, w.to(x.dtype))
    return torch.cat([F.linear(x, part.to(x.dtype)) for part in w.split(block)], 1)


def row_counts(quantum: int, max_rows: int) -> list[int]:
    """Row counts that the check tries: the small ones, powers of two with a quantum beside them, the largest."""
    counts = {quantum * i for i in range(1, 9)}
    size = quantum * 8
    while size < max_rows:
        counts |= {size, size + quantum}
        size *= 2
    return sorted(c for c in counts | {-(-max_rows // quantum) * quantum} if c <= max_rows + quantum)


def _rows_agree(
    multiply: Callable[[Tensor], Tensor], width: int, quantum: int, max_rows: int, dtype: torch.dtype
) -> bool:
    generator = torch.Generator().manual_seed(0)
    counts = row_counts(quantum, max_rows)
    x = torch.randn(counts[-1], width, generator=generator).to(dtype)
    alone = torch.cat([multiply(part.clone()) for part in x.split(quantum)])
    return all(torch.equal(multiply(x[:count].clone()), alone[:count]) for count in counts)


def find_row_quantum(
    linears: Iterable[tuple[int, int]],
    batched: Iterable[tuple[int, int]],
    max_rows: int,
    dtype: torch.dtype,
    weight_dtypes: Iterable[torch.dtype] = (),
) -> int:
    """The first quantum of 4, 8, 16 for which every product of the model is row-exact on this machine.

    ``linears``: (K, N) of every weight, tried in ``dtype`` and in each of ``weight_dtypes``; ``batched``: (K, N) of
    the attention products. Raises RuntimeError with the shape that failed when none holds. Cost: one product of
    ``max_rows`` rows per shape and a few small ones.
    """
    failed: tuple[int, int] | None = None
    for quantum in _QUANTA:
        weights = product(sorted(set(linears)), {dtype, *weight_dtypes})
        failed = _first_failure(weights, sorted(set(batched)), quantum, max_rows, dtype)
        if failed is None:
            return quantum
    raise RuntimeError(
        f"products of K={failed[0]}, N={failed[1]} give a row other bits in another batch at every row quantum "
        f"{_QUANTA} with {torch.get_num_threads()} threads; try another `threads` setting or BLAS library"
    )


def _first_failure(
    weights: Iterable[tuple[tuple[int, int], torch.dtype]],
    batched: Iterable[tuple[int, int]],
    quantum: int,
    max_rows: int,
    dtype: torch.dtype,
) -> tuple[int, int] | None:
    """(K, N) of the first product whose rows depend on one another."""
    generator = torch.Generator().manual_seed(1)
    for (k, n), weight_dtype in weights:
        w = torch.randn(n, k, generator=generator).to(weight_dtype)
        if not _rows_agree(lambda x, w=w: widened_linear(x, w), k, quantum, max_rows, dtype):
            return k, n
    for k, n in batched:
        values = torch.randn(3, k, n, generator=generator).to(dtype)
        keys = torch.randn(3, n, k, generator=generator).to(dtype).transpose(1, 2)
        for w in (values, keys):
            if not _rows_agree(lambda x, w=w: _stack(x, w), k, quantum, min(max_rows, 256), dtype):
                return k, n
    return None


def _stack(x: Tensor, w: Tensor) -> Tensor:
    """The same rows against the middle matrix of a batch of three, ``[T, N]``."""
    return torch.bmm(x.expand(3, -1, -1), w)[1]
