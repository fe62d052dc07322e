"""inkling_mtp: the draft depths. Called by spec_ensemble after each target step, for all drafting sequences."""

from __future__ import annotations

import torch
import triton_python_backend_utils as pb_utils

from inkling.bls import answer, read_control
from inkling.liveness import Heartbeat
from inkling.model.process import DraftProcess
from inkling.protocol import DRAFT_MODEL, DRAFTS, HIDDEN
from inkling.run_folder import RunFolder
from inkling.settings import Settings


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        settings = Settings.load()
        folder = RunFolder.of_parent(settings.run_root)
        folder.create()
        self._heartbeat = Heartbeat(folder, DRAFT_MODEL)
        self._draft = DraftProcess(settings, folder, _report)

    def execute(self, requests: list) -> list:
        return [answer(pb_utils, request, self._step, self._heartbeat) for request in requests]

    def _step(self, request) -> list:
        control = read_control(pb_utils, request, DRAFT_MODEL, self._draft.key)
        sent = pb_utils.get_input_tensor_by_name(request, HIDDEN)  # None where both models map a ring
        hidden = None if sent is None else torch.from_dlpack(sent.to_dlpack())
        return [pb_utils.Tensor(DRAFTS, self._draft.step(control, hidden))]


def _report(line: str) -> None:
    print(f"{DRAFT_MODEL}: {line}", flush=True)
