"""inkling_target: the Inkling decoder. Called by spec_ensemble, once per step, for the whole running batch."""

from __future__ import annotations

import torch
import triton_python_backend_utils as pb_utils

from inkling.bls import answer, check_key
from inkling.deployment import Deployment
from inkling.model.load import load_target_runner
from inkling.protocol import CONTROL, HIDDEN, LOGPROBS, TARGET_MODEL, TOKENS
from inkling.run_folder import RunFolder, TargetRecord
from inkling.settings import Settings


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        settings = Settings.load()
        folder = RunFolder.of_parent(settings.run_root)
        folder.create()
        folder.announce_loading()
        try:
            record = TargetRecord.create(folder.mapping)
            self._key = record.key_words.tobytes()
            self._runner = load_target_runner(
                Deployment.of(settings), generation=record.generation, mapping=folder.mapping, report=_report
            )
        except Exception as error:
            folder.publish_failure(str(error))
            raise
        folder.publish(record)

    def execute(self, requests: list) -> list:
        return [answer(pb_utils, request, self._step) for request in requests]

    def _step(self, request) -> list:
        control = pb_utils.get_input_tensor_by_name(request, CONTROL).as_numpy()
        check_key(TARGET_MODEL, control, self._key)
        tokens, hidden, log_probs = self._runner.step_scored(control)
        outputs = [
            pb_utils.Tensor(TOKENS, tokens),
            pb_utils.Tensor.from_dlpack(HIDDEN, hidden.view(torch.int32)),
        ]
        if LOGPROBS in request.requested_output_names():
            outputs.append(pb_utils.Tensor(LOGPROBS, log_probs))
        return outputs


def _report(line: str) -> None:
    print(f"{TARGET_MODEL}: {line}", flush=True)
