"""One embedding table, one head and one ring of hidden states for two processes."""

from __future__ import annotations

import pytest
import torch

from inkling.config import ModelConfig
from inkling.device_memory import export_block, map_block
from inkling.errors import ModelError, ProtocolError
from inkling.model.hidden_ring import RING_SLOTS, HiddenRing
from inkling.model.shared_weights import SharedLayout
from inkling.testing import tiny_config

CPU = torch.device("cpu")
ROWS = 16


def layout(config: ModelConfig, ring_rows: int = ROWS) -> SharedLayout:
    return SharedLayout.of(config, torch.bfloat16, torch.float32, ring_rows)


def test_both_sides_find_the_same_tensors_in_the_same_memory(tmp_path):
    config = tiny_config()
    block, handle = export_block(layout(config).num_bytes, CPU, tmp_path / "block")
    assert (tmp_path / "block").stat().st_mode & 0o777 == 0o600
    ours, our_ring = layout(config).of_block(block)
    theirs, their_ring = layout(config).of_block(map_block(handle, CPU))  # as another process would
    assert ours.embed.shape == (config.padded_vocab_size, config.hidden_size)
    assert ours.head.shape == (config.vocab_size, config.hidden_size)
    for i, tensor in enumerate((ours.embed, ours.head, our_ring.states)):
        tensor.fill_(i + 1)
    for i, (mine, other) in enumerate(
        ((ours.embed, theirs.embed), (ours.head, theirs.head), (our_ring.states, their_ring.states))
    ):
        assert mine.data_ptr() != other.data_ptr()
        assert (other == i + 1).all(), "another tensor lies over it, or it is a copy"
        assert mine.dtype is other.dtype and mine.data_ptr() % 64 == other.data_ptr() % 64 == 0


def test_without_a_ring_the_block_holds_the_weights_alone():
    config = tiny_config()
    block = torch.zeros(layout(config, 0).num_bytes, dtype=torch.uint8)
    assert layout(config, 0).of_block(block)[1] is None
    assert layout(config).num_bytes - block.numel() == layout(config).ring_bytes
    assert layout(config).ring_bytes == RING_SLOTS * ROWS * config.hidden_size * 4


def test_a_block_of_another_size_is_refused():
    block = torch.zeros(layout(tiny_config()).num_bytes, dtype=torch.uint8)
    with pytest.raises(ModelError, match=f"has {block.numel()} bytes, these settings need"):
        layout(tiny_config(), ROWS + 1).of_block(block)


def test_a_block_of_a_gpu_is_not_mapped_on_the_cpu(tmp_path):
    _, handle = export_block(256, CPU, tmp_path / "block")
    with pytest.raises(ModelError, match="give both one device"):
        map_block(type(handle)(256, ipc="00" * 64, gpu_uuid="GPU-1"), CPU)


def test_a_step_finds_its_own_states_while_the_next_ones_are_written():
    ring = HiddenRing(torch.zeros(RING_SLOTS, ROWS, 4))
    for step in range(1, 6):
        ring.put(step, torch.full((step, 4), float(step)))
        assert (ring.of_step(step)[:step] == step).all()
        assert step == 1 or (ring.of_step(step - 1)[: step - 1] == step - 1).all()


def test_states_written_in_their_slot_stay_there():
    ring = HiddenRing(torch.zeros(RING_SLOTS, ROWS, 4))
    hidden = ring.of_step(7)[:3].fill_(7.0)
    ring.put(7, hidden)
    assert (ring.states.sum(), hidden.sum()) == (84.0, 84.0)
    ring.put(8, hidden)  # in another step's slot: copied
    assert (ring.of_step(8)[:3] == 7).all()


def test_a_step_with_more_rows_than_the_ring_is_refused():
    with pytest.raises(ProtocolError, match=f"step 3 has {ROWS + 1} rows, the ring of hidden states {ROWS}"):
        HiddenRing(torch.zeros(RING_SLOTS, ROWS, 4)).put(3, torch.zeros(ROWS + 1, 4))
