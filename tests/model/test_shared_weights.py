"""One embedding table and one head for two processes."""

from __future__ import annotations

import torch

from inkling.deployment import Deployment
from inkling.model.load import load_draft_runner, load_target_runner
from inkling.model.shared_weights import SharedWeights
from inkling.settings import Settings
from inkling.testing import write_random_checkpoint


def test_target_and_draft_read_the_same_mapping_and_hold_no_copy(tmp_path):
    write_random_checkpoint(tmp_path / "checkpoint", seed=8)
    deployment = Deployment.of(Settings(checkpoint=str(tmp_path / "checkpoint"), threads=1, max_context=64))
    file = tmp_path / "mapping"
    target = load_target_runner(deployment, generation=1, mapping=file)
    assert file.stat().st_mode & 0o777 == 0o600

    shared = SharedWeights.open(file, deployment.config, deployment.weight_dtype)  # as another process would
    draft = load_draft_runner(deployment, shared, generation=1)
    for ours, theirs in (
        (target.model.weights.embed, draft.model.embed),
        (target.model.weights.head, draft.model.head),
    ):
        assert torch.equal(ours, theirs) and ours.data_ptr() != theirs.data_ptr()
        theirs[0, 0] += 1.0  # seen through the other mapping: it is the same memory
        assert torch.equal(ours, theirs)
        assert ours.data_ptr() % 64 == theirs.data_ptr() % 64 == 0
