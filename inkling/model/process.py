"""The two model processes of a server, without the server: from settings to answers of packed messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from inkling.deployment import Deployment
from inkling.device_memory import export_block, map_block, use_gpu
from inkling.errors import ProtocolError
from inkling.memory import format_bytes
from inkling.model.hidden_ring import RING_SLOTS, HiddenRing
from inkling.model.load import load_draft_runner, load_target_runner
from inkling.protocol import control_step
from inkling.run_folder import RunFolder, TargetRecord
from inkling.settings import Settings

Report = Callable[[str], None]


class TargetProcess:
    """Loads the target and publishes in ``folder`` what the other processes need, or why there is no target."""

    def __init__(self, settings: Settings, folder: RunFolder, report: Report):
        folder.create()
        folder.announce_loading()
        try:
            record = self._load(settings, folder, report)
        except Exception as error:
            folder.publish_failure(str(error))
            raise
        folder.publish(record)

    def _load(self, settings: Settings, folder: RunFolder, report: Report) -> TargetRecord:
        self.device = _use_device(settings)
        deployment = Deployment.of(settings)
        block, handle = export_block(deployment.shared_layout.num_bytes, self.device, folder.shared_block)
        shared, self._ring = deployment.shared_layout.of_block(block)
        self._sends_hidden = deployment.sends_hidden
        if (
            self._sends_hidden and self.device.type == "cuda"
        ):  # a sent tensor is read after the step has returned
            rows, width = settings.max_tokens_per_step, deployment.config.hidden_size
            states = torch.empty(RING_SLOTS, rows, width, dtype=deployment.dtype, device=self.device)
            self._ring = HiddenRing(states)
        record = TargetRecord.create(deployment.plan.cache_bytes, handle)
        self.key = record.key_words.tobytes()
        self._runner = load_target_runner(
            deployment, generation=record.generation, shared=shared, report=report
        )
        report(f"{format_bytes(block.nbytes)} shared with the draft; {_memory_line(deployment, self.device)}")
        return record

    def step(self, control: np.ndarray) -> tuple[np.ndarray, Tensor | None, np.ndarray]:
        """TOKENS, HIDDEN [T, H] where it is sent, and LOGPROBS of one CONTROL; everything is complete then."""
        tokens, hidden, log_probs = self._runner.step_scored(control)
        if self._ring is not None:
            hidden = self._ring.put(control_step(control), hidden)
        _finish(self.device)
        return tokens, hidden if self._sends_hidden else None, log_probs


class DraftProcess:
    """Waits for the target in ``folder``, maps what it shares, and loads the depths."""

    def __init__(self, settings: Settings, folder: RunFolder, report: Report):
        folder.create()
        record = folder.wait_for_target(settings.load_timeout_s, report)
        self.key = record.key_words.tobytes()
        deployment = Deployment.of(replace(settings, cache_bytes=record.cache_bytes))
        if not deployment.num_draft_tokens:
            self._runner = None  # nobody calls; a GPU is not opened for that
            return
        self.device, self._dtype = _use_device(settings), deployment.dtype
        block = map_block(record.block, self.device)
        shared, self._ring = deployment.shared_layout.of_block(block)
        self._runner = load_draft_runner(deployment, shared, generation=record.generation, report=report)
        report(
            f"{format_bytes(block.nbytes)} mapped from the target; {_memory_line(deployment, self.device)}"
        )

    def step(self, control: np.ndarray, hidden: Tensor | None) -> np.ndarray:
        """DRAFTS of one CONTROL. ``hidden`` is HIDDEN, needed where there is no ring; it is not read afterwards."""
        if self._runner is None:
            raise ProtocolError("num_draft_tokens is 0 for this server; it has no draft model")
        if self._ring is not None:
            hidden = self._ring.of_step(control_step(control))
        elif hidden is None:
            raise ProtocolError("HIDDEN is missing, and hidden_transport is 'dlpack'")
        drafts = self._runner.step(control, hidden.view(self._dtype))
        _finish(self.device)
        return drafts


def _use_device(settings: Settings) -> torch.device:
    return use_gpu(settings.gpu) if settings.device == "cuda" else torch.device("cpu")


def _finish(device: torch.device) -> None:
    """Whoever is called next reads what was written, or writes what was read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _memory_line(deployment: Deployment, device: torch.device) -> str:
    planned = f"plan {format_bytes(deployment.plan.total_bytes)} in all"
    if device.type == "cpu":
        return planned
    free, total = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_reserved(device)
    return f"{planned}; this process's allocator {format_bytes(held)}; the GPU {format_bytes(total - free)} in use"
