"""The model processes with the CUDA runners: hidden states where the draft looks for them, by both ways the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from inkling.deployment import Deployment
from inkling.device_memory import BlockHandle, export_block
from inkling.model import process
from inkling.model.hidden_ring import HiddenRing
from inkling.testing import write_random_checkpoint
from tests.cuda.test_runner import SMALL
from tests.model.processes import run, settings_of


@pytest.fixture(autouse=True)
def one_process(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA opens no block where it was exported: there the draft gets the target's own. Without a GPU the CUDA runners
    work in Triton's interpreter, on memory of the CPU."""
    if device == "cpu":
        monkeypatch.setattr(Deployment, "device", torch.device("cpu"))
        monkeypatch.setattr(process, "use_gpu", lambda index: None)
        return
    exported: dict[BlockHandle, Tensor] = {}

    def export(num_bytes: int, device: torch.device, file: Path) -> tuple[Tensor, BlockHandle]:
        block, handle = export_block(num_bytes, device, file)
        exported[handle] = block
        return block, handle

    monkeypatch.setattr(process, "export_block", export)
    monkeypatch.setattr(process, "map_block", lambda handle, device: exported[handle])


def test_the_runner_leaves_the_states_in_the_ring_and_the_draft_takes_them_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_random_checkpoint(tmp_path, SMALL, seed=3)
    settings = settings_of(tmp_path, device="cuda", cache_bytes=1 << 24, cuda_graphs="off", max_context=48)
    puts = []

    def put(ring: HiddenRing, step: int, hidden: torch.Tensor) -> None:
        assert hidden.data_ptr() == ring.of_step(step).data_ptr(), "a copy, and another wait"
        puts.append(step)

    monkeypatch.setattr(HiddenRing, "put", put)
    ring, answers = run(settings, tmp_path / "ring", [(7, 5, 3)], max_tokens=6)
    sent, other_answers = run(
        replace(settings, hidden_transport="dlpack"), tmp_path / "dlpack", [(7, 5, 3)], max_tokens=6
    )
    assert answers == other_answers and all(len(ids) == 6 for ids in answers)
    assert len(ring.drafts) == len(sent.drafts) > 1
    assert all(np.array_equal(a, b) for a, b in zip(ring.drafts, sent.drafts, strict=True))
    assert ring.num_sent == 0 < sent.num_sent and puts == list(range(1, len(puts) + 1))
