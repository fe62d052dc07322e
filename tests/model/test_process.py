"""The two model processes side by side: what they publish, what they share, and both ways of the hidden states."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from inkling.errors import GenerationError, ModelError, ProtocolError
from inkling.model.process import DraftProcess, TargetProcess
from inkling.protocol import DraftStep, TargetStep, pack
from inkling.run_folder import RunFolder
from inkling.settings import Settings
from inkling.testing import write_random_checkpoint
from tests.model.processes import load, run, settings_of


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    write_random_checkpoint(directory, seed=11)
    return directory


def test_the_ring_gives_the_drafts_that_sent_tensors_give_and_sends_none(checkpoint, tmp_path):
    (ring, answers), (sent, other_answers) = (
        run(settings_of(checkpoint, hidden_transport=transport), tmp_path / transport)
        for transport in ("ring", "dlpack")
    )
    assert answers == other_answers and all(len(ids) == 20 for ids in answers)
    assert len(ring.drafts) == len(sent.drafts) >= 10
    assert all(np.array_equal(a, b) for a, b in zip(ring.drafts, sent.drafts, strict=True))
    assert ring.num_sent == 0 < sent.num_sent


def test_embedding_and_head_exist_once(checkpoint, tmp_path):
    target, draft, _ = load(settings_of(checkpoint), tmp_path)
    ours, theirs = target._runner.model.weights, draft._runner.model
    for mine, other in ((ours.embed, theirs.embed), (ours.head, theirs.head)):
        assert mine.data_ptr() != other.data_ptr()
        mine[0, 0] += 1.0  # seen through the other mapping: it is the same memory
        assert (mine == other).all()


def test_a_message_of_another_generation_is_refused_by_both(checkpoint, tmp_path):
    target, draft, _ = load(settings_of(checkpoint), tmp_path)
    _, _, other_folder = load(settings_of(checkpoint), tmp_path / "other")  # a target that restarted
    record = other_folder.record()
    for kind, step in ((TargetStep, target.step), (DraftStep, lambda c: draft.step(c, None))):
        with pytest.raises(GenerationError, match="restart the server"):
            step(pack(kind(record.generation, 1, 0), record.key_words))


def test_the_draft_needs_the_states_that_are_not_in_a_ring(checkpoint, tmp_path):
    _, draft, _ = load(settings_of(checkpoint, hidden_transport="dlpack"), tmp_path)
    with pytest.raises(ProtocolError, match="HIDDEN is missing, and hidden_transport is 'dlpack'"):
        draft.step(np.zeros(64, np.int32), None)


def test_a_server_without_drafts_has_no_draft_model(checkpoint, tmp_path):
    target, draft, run_folder = load(settings_of(checkpoint, num_draft_tokens=0), tmp_path)
    assert target._ring is None and run_folder.record().block.num_bytes > 0
    with pytest.raises(ProtocolError, match="num_draft_tokens is 0"):
        draft.step(np.zeros(64, np.int32), None)


def test_a_target_that_cannot_load_says_why_to_the_others(checkpoint, tmp_path):
    settings = Settings(str(checkpoint), device="cuda")
    folder = RunFolder.of_server(tmp_path, os.getpid())
    with pytest.raises(Exception, match="sees no GPU|gpu is"):
        TargetProcess(Settings(str(checkpoint), device="cuda", gpu=99), folder, lambda line: None)
    with pytest.raises(ModelError, match="inkling_target failed to load: "):
        DraftProcess(settings, folder, lambda line: None)
