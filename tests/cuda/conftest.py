"""Kernels run on the GPU where there is one, and otherwise in Triton's interpreter on small shapes: same bodies.

The interpreter proves indexing, masks and bounds. It knows neither wgmma nor tf32 nor layouts: a GPU proves the bits.
"""

from __future__ import annotations

import os

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before the first import of triton: it decides at decoration


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if HAS_GPU else "cpu"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
