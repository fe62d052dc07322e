"""inkling_mtp: the draft depths. Called by spec_ensemble after each target step, for all drafting sequences."""

from __future__ import annotations

from pathlib import Path

import torch
import triton_python_backend_utils as pb_utils

from inkling.bls import answer, check_key
from inkling.deployment import Deployment
from inkling.model.load import load_draft_runner
from inkling.model.shared_weights import SharedWeights
from inkling.protocol import CONTROL, DRAFT_MODEL, DRAFTS, HIDDEN
from inkling.run_folder import RunFolder
from inkling.settings import Settings


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        settings = Settings.load()
        deployment = Deployment.of(settings)
        folder = RunFolder.of_parent(settings.run_root)
        folder.create()
        record = folder.wait_for_target(settings.load_timeout_s, _report)
        shared = SharedWeights.open(Path(record.mapping), deployment.config, deployment.weight_dtype)
        self._key = record.key_words.tobytes()
        self._dtype = deployment.dtype
        self._runner = load_draft_runner(deployment, shared, generation=record.generation, report=_report)

    def execute(self, requests: list) -> list:
        return [answer(pb_utils, request, self._step) for request in requests]

    def _step(self, request) -> list:
        control = pb_utils.get_input_tensor_by_name(request, CONTROL).as_numpy()
        check_key(DRAFT_MODEL, control, self._key)
        hidden = torch.from_dlpack(pb_utils.get_input_tensor_by_name(request, HIDDEN).to_dlpack())
        return [pb_utils.Tensor(DRAFTS, self._runner.step(control, hidden.view(self._dtype)))]


def _report(line: str) -> None:
    print(f"{DRAFT_MODEL}: {line}", flush=True)
