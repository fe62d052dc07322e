"""The prompts of a run and the tokens that the server gave for them, kept so that a run can go on where one ended.

Every answer to a prompt must begin with the tokens of every other: with any number of drafts, in any batch, by any
server of the same build.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.results import ROOT

TABLE = ROOT / "benchmarks" / "gpu_serving.csv"  # of ``benchmarks.gpu_serving``
ANSWERS = ROOT / "build" / "gpu_serving_answers.json"


def prompt(seed: int, length: int, index: int, vocab_size: int) -> list[int]:
    """``length`` random ids; each (length, index) has ids of its own."""
    return Random(f"{seed} {length} {index}").choices(range(vocab_size), k=length)


class Answers:
    """Longest known answers by (prompt length, index), and scored ones, in one JSON file."""

    def __init__(self, file: Path, source: Mapping[str, Any]):
        """``source``: what the answers depend on; a file of another one is replaced."""
        self._file = file
        self._content: dict[str, Any] = {"source": dict(source), "answers": {}, "scored": []}
        if file.exists() and (content := json.loads(file.read_text()))["source"] == self._content["source"]:
            self._content = content

    def differing(self, length: int, index: int, ids: Sequence[int]) -> list[int]:
        """Positions where ``ids`` differ from the known answer, as far as both go; a longer equal one is kept."""
        key = f"{length}/{index}"
        known = self._content["answers"].get(key, [])
        pairs = enumerate(zip(ids, known, strict=False))
        positions = [position for position, (given, expected) in pairs if given != expected]
        if not positions and len(ids) > len(known):
            self._content["answers"][key] = list(ids)
        return positions

    @property
    def scored(self) -> list[dict[str, Any]]:
        """Answers with log probs: ``context`` (prompt ids), ``index``, ``ids``; of each ``top``: {id: log prob}."""
        return self._content["scored"]

    def save(self) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        partial = self._file.with_suffix(".partial")
        partial.write_text(json.dumps(self._content))
        partial.replace(self._file)
