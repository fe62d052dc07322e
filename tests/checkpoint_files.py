"""What tests of checkpoints share: loading, comparing bits, and damaging files."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from inkling.config import ModelConfig
from inkling.model.weights import DraftWeights, TargetWeights, load_draft, load_target
from inkling.testing import tiny_config

CHAINED = tiny_config(mtp_chain_norm=True)


def load(directory: Path, num_depths: int = 3, dtype=torch.float32) -> tuple[TargetWeights, DraftWeights]:
    config = ModelConfig.from_dir(directory)
    target = load_target(directory, config, dtype=dtype, device="cpu")
    return target, load_draft(directory, config, num_depths, dtype=dtype, device="cpu")


def leaves(weights: object, path: str = "") -> Iterator[tuple[str, Tensor | float]]:
    if isinstance(weights, Tensor | float):
        yield path, weights
    elif isinstance(weights, list | tuple):
        for index, item in enumerate(weights):
            yield from leaves(item, f"{path}.{index}")
    elif dataclasses.is_dataclass(weights):
        for field in dataclasses.fields(weights):
            yield from leaves(getattr(weights, field.name), f"{path}.{field.name}")


def assert_equal_bits(one: object, other: object) -> None:
    one, other = dict(leaves(one)), dict(leaves(other))
    assert one.keys() == other.keys() and one
    for path, value in one.items():
        if isinstance(value, Tensor):
            assert value.dtype == other[path].dtype and torch.equal(value, other[path]), path
        else:
            assert value == other[path], path


def edit(
    directory: Path, change: Callable[[dict[str, Tensor]], object], file: str = "model.safetensors"
) -> None:
    """Rewrites one file with changed tensors."""
    tensors = {name: value.clone() for name, value in load_file(directory / file).items()}
    change(tensors)
    save_file(tensors, directory / file)
