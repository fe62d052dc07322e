"""``inkling check``: is this checkpoint whole, and how large are its parts. Reads headers alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from inkling.checkpoint import Checkpoint
from inkling.config import ModelConfig
from inkling.errors import CheckpointError
from inkling.memory import format_bytes
from inkling.synthetic import is_synthetic
from inkling.synthetic_weights import open_checkpoint
from inkling.tensors import TensorSpec, draft_tensors, target_tensors


@dataclass(frozen=True)
class PartSize:
    """One part of the model: elements, and payload bytes in the dtypes of the files."""

    name: str
    parameters: int
    num_bytes: int


@dataclass(frozen=True)
class CheckReport:
    """``problems`` holds every broken rule of the tensors, or the first one of the config or of the files."""

    directory: Path
    config: ModelConfig | None
    problems: tuple[CheckpointError, ...]
    parts: tuple[PartSize, ...]

    @property
    def ok(self) -> bool:
        return not self.problems

    @property
    def parameters(self) -> int:
        return sum(part.parameters for part in self.parts)

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    def render(self) -> str:
        lines = [str(problem) for problem in self.problems]
        if self.parts:
            total = PartSize("total", self.parameters, self.num_bytes)
            lines += ["", f"{'part':<24}{'parameters':>18}{'bytes':>18}"]
            lines += [
                f"{part.name:<24}{part.parameters:>18,}{part.num_bytes:>18,}  {format_bytes(part.num_bytes)}"
                for part in (*self.parts, total)
            ]
        noun = "problem" if len(self.problems) == 1 else "problems"
        verdict = "is complete" if self.ok else f"has {len(self.problems)} {noun}"
        note = ": synthetic weights" if is_synthetic(self.directory) else ""
        return "\n".join([*lines, "", f"{self.directory} {verdict}{note}"]).lstrip()


def check_checkpoint(directory: str | Path) -> CheckReport:
    """Checks config, files and every tensor of target and depths; broken rules are reported, not raised."""
    directory = Path(directory)
    try:
        config = ModelConfig.from_dir(directory)
    except CheckpointError as problem:
        return CheckReport(directory, None, (problem,), ())
    try:
        checkpoint = open_checkpoint(directory)
    except CheckpointError as problem:
        return CheckReport(directory, config, (problem,), ())
    specs = [*target_tensors(config), *draft_tensors(config)]
    return CheckReport(directory, config, tuple(checkpoint.problems(config)), _part_sizes(checkpoint, specs))


def _part_sizes(checkpoint: Checkpoint, specs: Sequence[TensorSpec]) -> tuple[PartSize, ...]:
    """Sizes of what is there; a missing tensor counts as nothing."""
    sizes: dict[str, list[int]] = {}
    for spec in specs:
        part = sizes.setdefault(spec.part, [0, 0])
        for piece in checkpoint.pieces(spec):
            stored = checkpoint.tensors.get(piece.name)
            if stored is not None:
                part[0] += stored.size
                part[1] += stored.num_bytes
    return tuple(PartSize(name, *size) for name, size in sizes.items())
