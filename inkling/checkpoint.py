"""Where a checkpoint keeps its tensors, and whether they are all there.

Opening reads headers alone. Files: ``model.safetensors``, or ``model.safetensors.index.json`` with its
shards; ``mtp.safetensors`` counts whether or not the index lists it. The naming is told from the names, not
from the config: target and depths may be named in different formats.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from safetensors import SafetensorError, safe_open
from torch import Tensor

from inkling.config import ModelConfig
from inkling.errors import CheckpointError
from inkling.tensors import (
    EMBED_NORM,
    MTP,
    TOWERS,
    Naming,
    StoredPiece,
    TensorSpec,
    draft_tensors,
    stored_pieces,
    target_tensors,
)

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
MTP_FILE = "mtp.safetensors"

_FLOAT_BYTES = {"BF16": 2, "F16": 2, "F32": 4}
_TRANSFORMERS_MTP_MARKS = (".mtp_block.", ".hnorm.", ".enorm.", ".eh_proj.")
# transformers' MtpModel.save_pretrained adds copies of the target's embedding and head; nothing reads them
_MTP_COPIES = ("model.mtp.embed_tokens.weight", "model.mtp.shared_head.weight")
_QUANTISED_EXTRA = re.compile(r"experts\.w(13|2)_weight\.")

Concern = Literal["target", "draft"]


@dataclass(frozen=True)
class StoredTensor:
    """One entry of a file header. ``dtype`` is the safetensors name, such as ``BF16``."""

    file: Path
    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Payload bytes; 0 for a dtype that this project does not read."""
        return self.size * _FLOAT_BYTES.get(self.dtype, 0)


class Checkpoint:
    """The tensors of a directory by stored name. ``CheckpointError`` when files or index are broken."""

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        self.tensors: dict[str, StoredTensor] = {}
        self.index_problems: list[CheckpointError] = []
        self._handles: dict[Path, safe_open] = {}
        files, indexed = _locate(self.directory)
        for file in files:
            self._open(file)
        self._compare_with_index(indexed)
        self.target_naming = _target_naming(self.tensors)
        is_transformers = any(mark in name for name in self.tensors for mark in _TRANSFORMERS_MTP_MARKS)
        self.mtp_naming = Naming.TRANSFORMERS if is_transformers else Naming.ORIGINAL

    def _open(self, file: Path) -> None:
        try:
            handle = safe_open(file, framework="pt")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(file, "file", str(error), "must be a whole safetensors file") from error
        self._handles[file] = handle
        for name in handle.keys():  # noqa: SIM118 (a handle is no mapping)
            header = handle.get_slice(name)
            stored = StoredTensor(file, tuple(header.get_shape()), header.get_dtype())
            if name in self.tensors:
                rule = f"it is stored in {self.tensors[name].file.name} too"
                self.index_problems.append(CheckpointError(file, name, file.name, rule))
            self.tensors[name] = stored

    def _compare_with_index(self, indexed: dict[str, str] | None) -> None:
        if indexed is None:
            return
        index = self.directory / INDEX_FILE
        listed_files = set(indexed.values())
        for name, file in indexed.items():
            if name not in self.tensors:
                self.index_problems.append(CheckpointError(index, name, file, "that file does not hold it"))
        for name, stored in self.tensors.items():
            if stored.file.name in listed_files and indexed.get(name) != stored.file.name:
                rule = f"must say {stored.file.name!r}, which holds the tensor"
                self.index_problems.append(CheckpointError(index, name, indexed.get(name), rule))

    def pieces(self, spec: TensorSpec) -> tuple[StoredPiece, ...]:
        """The stored tensors that make up ``spec`` here."""
        return stored_pieces(spec, self.naming(spec))

    def naming(self, spec: TensorSpec) -> Naming:
        return self.mtp_naming if spec.key.startswith(MTP) else self.target_naming

    def read(self, name: str) -> Tensor:
        """The tensor as a view of the mapped file: copy it before you keep it."""
        stored = self.tensors[name]
        return self._handles[stored.file].get_tensor(name)

    def problems(self, config: ModelConfig, concern: Concern | None = None) -> list[CheckpointError]:
        """Everything wrong with the tensors of target or draft (``None``: both), from the headers alone."""
        specs: list[TensorSpec] = []
        if concern != "draft":
            specs += target_tensors(config)
        if concern != "target":
            specs += draft_tensors(config)
        if concern == "draft":  # the draft norms embeddings as the target does
            specs += [spec for spec in target_tensors(config) if spec.key == EMBED_NORM]
        expected = {piece.name: piece for spec in specs for piece in self.pieces(spec)}
        surplus = [
            name
            for name in self.tensors
            if name not in expected and (concern is None or name.startswith(MTP) == (concern == "draft"))
        ]
        found = list(self.index_problems)
        found += self._refusals(surplus, expected)
        found += [problem for piece in expected.values() for problem in self._compare(piece)]
        found += [self._surplus(name, config) for name in surplus if self._is_plain_surplus(name)]
        return found

    def require(self, config: ModelConfig, concern: Concern) -> None:
        """Raises the first problem, with the number of the others."""
        problems = self.problems(config, concern)
        if problems:
            first, others = problems[0], len(problems) - 1
            more = f" ({others} more: inkling check {self.directory} lists them)" if others else ""
            raise CheckpointError(first.file, first.key, first.value, first.rule + more)

    def _compare(self, piece: StoredPiece) -> Iterable[CheckpointError]:
        stored = self.tensors.get(piece.name)
        if stored is None:
            yield CheckpointError(self.directory, piece.name, None, f"it is missing; shape {piece.shape}")
        elif stored.shape != piece.shape and stored.dtype in _FLOAT_BYTES:
            yield CheckpointError(stored.file, piece.name, stored.shape, f"its shape must be {piece.shape}")
        elif stored.dtype not in _FLOAT_BYTES and not _is_quantised(piece.name, stored):
            yield CheckpointError(stored.file, piece.name, stored.dtype, "its dtype must be BF16, F16 or F32")

    def _refusals(self, surplus: list[str], expected: dict[str, StoredPiece]) -> Iterable[CheckpointError]:
        """What a good checkpoint may hold and this project cannot serve yet, each said once."""
        towers = [name for name in surplus if name.startswith(TOWERS)]
        if towers:
            rule = f"towers are not supported yet ({len(towers)} tensors); use a text-only checkpoint"
            yield CheckpointError(self.tensors[towers[0]].file, towers[0], "a tower tensor", rule)
        present = [name for name in expected if name in self.tensors]
        quantised = [name for name in [*present, *surplus] if _is_quantised(name, self.tensors[name])]
        if quantised:
            stored = self.tensors[quantised[0]]
            rule = f"NVFP4 is not supported yet ({len(quantised)} tensors); use the BF16 checkpoint"
            yield CheckpointError(stored.file, quantised[0], stored.dtype, rule)

    def _is_plain_surplus(self, name: str) -> bool:
        is_refused = name.startswith(TOWERS) or _is_quantised(name, self.tensors[name])
        return not is_refused and name not in _MTP_COPIES

    def _surplus(self, name: str, config: ModelConfig) -> CheckpointError:
        rule = f"it is surplus: this config has no tensor of that name ({config.mtp_depths} MTP depths)"
        if name.endswith((".mtp.chain_norm.weight", ".mtp.shared_post_norm.weight")):
            rule = "it is surplus while chain_hidden_post_norm is false; set it to true or remove the tensor"
        return CheckpointError(self.tensors[name].file, name, self.tensors[name].shape, rule)


def _is_quantised(name: str, stored: StoredTensor) -> bool:
    """Packed codes, their scales, or what lies beside them (``experts.w13_weight.scale2`` and the like)."""
    is_code = stored.dtype in ("U8", "I8") or stored.dtype.startswith("F8")
    return is_code or _QUANTISED_EXTRA.search(name) is not None


def _target_naming(names: Iterable[str]) -> Naming:
    for naming in (Naming.ORIGINAL, Naming.TRANSFORMERS):
        if any(name.startswith(naming.value) for name in names):
            return naming
    is_text = any(name.startswith(("model.embed_tokens.", "model.layers.")) for name in names)
    return Naming.TRANSFORMERS_TEXT if is_text else Naming.ORIGINAL


def _locate(directory: Path) -> tuple[list[Path], dict[str, str] | None]:
    """The safetensors files, and the index where there is one."""
    index, single, mtp = (directory / name for name in (INDEX_FILE, SINGLE_FILE, MTP_FILE))
    if not index.exists():
        if not single.exists():
            raise CheckpointError(directory, "files", None, f"must hold {SINGLE_FILE} or {INDEX_FILE}")
        return [single, *([mtp] if mtp.exists() else [])], None
    weight_map = _read_index(index)
    names = sorted(set(weight_map.values()))
    for name in names:
        if Path(name).name != name:
            raise CheckpointError(index, "weight_map", name, "must be a file name without a folder")
        if not (directory / name).exists():
            raise CheckpointError(index, "weight_map", name, "it is listed and does not exist")
    if single.exists() and SINGLE_FILE not in names:
        raise CheckpointError(single, "file", SINGLE_FILE, f"it is not in {INDEX_FILE}; remove one of them")
    if mtp.exists() and MTP_FILE not in names:
        names.append(MTP_FILE)
    return [directory / name for name in names], weight_map


def _read_index(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(index, "weight_map", repr(error), "must be a JSON object") from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(index, "weight_map", weight_map, "must map tensor names to file names")
    for name, file in weight_map.items():
        if not isinstance(file, str):
            raise CheckpointError(index, f"weight_map.{name}", file, "must be a file name")
    return weight_map
