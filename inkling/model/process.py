"""The two model processes of a server, without the server: from settings to answers of packed messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from inkling.deployment import Deployment
from inkling.device_memory import check_host_memory, export_block, map_block, use_gpu
from inkling.engine.pages import Model
from inkling.errors import ProtocolError
from inkling.memory import format_bytes
from inkling.model.load import load_draft_runner, load_target_runner
from inkling.protocol import DRAFT_MODEL, TARGET_MODEL, control_step
from inkling.run_folder import RunFolder, TargetRecord
from inkling.settings import Settings
from inkling.step_clock import StepClock

Report = Callable[[str], None]


class TargetProcess:
    """Loads the target and publishes in ``folder`` what the other processes need, or why there is no target."""

    def __init__(self, settings: Settings, folder: RunFolder, report: Report):
        folder.create()
        folder.announce_loading()
        try:
            self._load(settings, folder, report)
        except Exception as error:
            folder.publish_failure(str(error))
            raise

    def _load(self, settings: Settings, folder: RunFolder, report: Report) -> None:
        if settings.device == "cuda":
            use_gpu(settings.gpu)
        deployment = Deployment.of(settings)
        if settings.device == "cpu":
            check_host_memory(deployment.plan.pool_bytes)
        layout, device = deployment.shared_layout, deployment.device
        block, handle = export_block(layout.num_bytes, device, folder.shared_block)
        shared, self._ring = layout.of_block(block)
        self._sends_hidden = deployment.sends_hidden
        record = TargetRecord.create(deployment.plan.cache_bytes, handle)
        self.key = record.key_words.tobytes()
        self._runner = load_target_runner(
            deployment,
            generation=record.generation,
            shared=shared,
            outputs=None if self._ring is None else self._ring.states,
            report=report,
        )
        if deployment.device.type == "cuda":
            torch.cuda.synchronize(deployment.device)  # the shared weights are in place
        self._runner.clock = StepClock(folder.clock(TARGET_MODEL), settings.device)
        folder.publish(record)  # the draft loads while graphs are captured here
        loaded = _torch_bytes(device)
        _capture(self._runner, settings, report)
        report(
            f"{format_bytes(block.nbytes)} shared with the draft; {_memory(deployment, Model.TARGET, loaded)}"
        )

    def step(self, control: np.ndarray) -> tuple[np.ndarray, Tensor | None, np.ndarray]:
        """TOKENS, HIDDEN [T, H] where it is sent, and LOGPROBS of one CONTROL; all of it complete.

        HIDDEN stays as it is until the next step but one: the server reads it after this has returned.
        """
        tokens, hidden, log_probs = self._runner.step_scored(control)
        if self._ring is not None:
            self._ring.put(control_step(control), hidden)
        return tokens, hidden if self._sends_hidden else None, log_probs


class DraftProcess:
    """Waits for the target in ``folder``, maps what it shares, and loads the depths."""

    def __init__(self, settings: Settings, folder: RunFolder, report: Report):
        folder.create()
        record = folder.wait_for_target(settings.load_timeout_s, report)
        self.key = record.key_words.tobytes()
        deployment = Deployment.of(replace(settings, cache_bytes=record.cache_bytes))
        self._dtype = deployment.dtype
        if not deployment.num_draft_tokens:
            self._runner = None  # nobody calls; no GPU is opened for that
            return
        if settings.device == "cuda":
            use_gpu(settings.gpu)
        block = map_block(record.block, deployment.device)
        shared, self._ring = deployment.shared_layout.of_block(block)
        self._runner = load_draft_runner(deployment, shared, generation=record.generation, report=report)
        self._runner.clock = StepClock(folder.clock(DRAFT_MODEL), settings.device)
        loaded = _torch_bytes(deployment.device)
        _capture(self._runner, settings, report)
        report(
            f"{format_bytes(block.nbytes)} mapped from the target; {_memory(deployment, Model.DRAFT, loaded)}"
        )

    def step(self, control: np.ndarray, hidden: Tensor | None) -> np.ndarray:
        """DRAFTS of one CONTROL. ``hidden`` is HIDDEN, needed where there is no ring; it is not read afterwards."""
        if self._runner is None:
            raise ProtocolError("num_draft_tokens is 0 for this server; it has no draft model")
        if self._ring is not None:
            hidden = self._ring.of_step(control_step(control))
        elif hidden is None:
            raise ProtocolError("HIDDEN is missing, and hidden_transport is 'dlpack'")
        return self._runner.step(control, hidden.view(self._dtype))


def _capture(runner: Any, settings: Settings, report: Report) -> None:
    if settings.device == "cuda" and settings.cuda_graphs == "on":
        runner.capture(report)


def _torch_bytes(device: torch.device) -> tuple[int, int]:
    """In use by tensors of this process, and held for them; on a GPU."""
    if device.type == "cpu":
        return 0, 0
    return torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)


def _memory(deployment: Deployment, model: Model, loaded: tuple[int, int]) -> str:
    """What is planned, and on a GPU what is taken; ``loaded``: ``_torch_bytes`` before graphs were captured."""
    device, plan = deployment.device, deployment.plan
    planned = ", ".join(f"{name} {format_bytes(size)}" for name, size in plan.of_model(model).items() if size)
    if device.type == "cpu":
        return f"plan {planned}; {format_bytes(plan.total_bytes)} in all"
    free, total = torch.cuda.mem_get_info(device)
    used, held, used_now, held_now = map(format_bytes, (*loaded, *_torch_bytes(device)))
    return (
        f"plan {planned}; {format_bytes(plan.total_bytes)} in all. Loaded, torch had {used} in use and held {held}; "
        f"now {used_now} and {held_now}; the GPU has {format_bytes(total - free)} in use"
    )
