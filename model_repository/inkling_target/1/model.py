"""inkling_target: the Inkling decoder. Called by spec_ensemble, once per step, for the whole running batch."""

from __future__ import annotations

import torch
import triton_python_backend_utils as pb_utils

from inkling.bls import answer, read_control
from inkling.liveness import Heartbeat
from inkling.model.process import TargetProcess
from inkling.protocol import HIDDEN, LOGPROBS, TARGET_MODEL, TOKENS
from inkling.run_folder import RunFolder
from inkling.settings import Settings


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        settings = Settings.load()
        folder = RunFolder.of_parent(settings.run_root)
        folder.create()
        self._heartbeat = Heartbeat(folder, TARGET_MODEL)
        self._target = TargetProcess(settings, folder, _report)

    def execute(self, requests: list) -> list:
        return [answer(pb_utils, request, self._step, self._heartbeat) for request in requests]

    def _step(self, request) -> list:
        control = read_control(pb_utils, request, TARGET_MODEL, self._target.key)
        tokens, hidden, log_probs = self._target.step(control)
        requested = request.requested_output_names()
        outputs = [pb_utils.Tensor(TOKENS, tokens)]
        if hidden is not None and HIDDEN in requested:  # as a tensor: a capsule would not wait for its stream
            outputs.append(pb_utils.Tensor.from_dlpack(HIDDEN, hidden.view(torch.int32)))
        if LOGPROBS in requested:
            outputs.append(pb_utils.Tensor(LOGPROBS, log_probs))
        return outputs


def _report(line: str) -> None:
    print(f"{TARGET_MODEL}: {line}", flush=True)
