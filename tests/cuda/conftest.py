"""Kernels run on the GPU where there is one, and otherwise in Triton's interpreter on small shapes: same bodies.

The interpreter proves indexing, masks and bounds. It knows neither wgmma nor tf32 nor layouts: a GPU proves the bits.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before the first import of triton: it decides at decoration

    import triton.language as tl
    from triton.runtime import interpreter

    # Triton 3.6's interpreter keeps bf16 as uint16, multiplies those in a dot and cuts fp32 off instead of rounding it.
    convert_float, create_dot = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot

    def rounded(data: np.ndarray, source: tl.dtype, target: tl.dtype, rounding_mode: object) -> np.ndarray:
        """As the interpreter's own conversion, as unsigned integers; fp32 to bf16 to the nearest, ties to even."""
        if (source, target) == (tl.float32, tl.bfloat16):
            values = torch.from_numpy(np.ascontiguousarray(data)).bfloat16()
            return values.view(torch.int16).numpy().view(np.uint16)
        if (source, target) == (tl.bfloat16, tl.float32):
            return np.ascontiguousarray(data).astype(np.uint32) << 16
        return convert_float(data, source, target, rounding_mode)

    def dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        a, b = (self.cast_impl(h, tl.float32) if h.dtype.scalar == tl.bfloat16 else h for h in (a, b))
        with np.errstate(all="ignore"):  # rows of padding hold anything, infinities too
            return create_dot(self, a, b, d, input_precision, max_num_imprecise_acc)

    interpreter._convert_float, interpreter.InterpreterBuilder.create_dot = rounded, dot


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if HAS_GPU else "cpu"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            # the interpreter takes scalars out of arrays of one element
            item.add_marker(pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"))
        if item.get_closest_marker("gpu") and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
