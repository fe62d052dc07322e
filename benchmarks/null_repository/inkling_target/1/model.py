"""inkling_target with nothing in it: constant tokens, zero states of the checkpoint's width."""

from __future__ import annotations

import triton_python_backend_utils as pb_utils

from inkling.bls import answer, read_control
from inkling.config import ModelConfig
from inkling.device_memory import BlockHandle
from inkling.engine.null_models import NullTarget
from inkling.liveness import Heartbeat
from inkling.protocol import HIDDEN, LOGPROBS, TARGET_MODEL, TOKENS
from inkling.run_folder import RunFolder, TargetRecord
from inkling.settings import Settings


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        settings = Settings.load()
        folder = RunFolder.of_parent(settings.run_root)
        folder.create()
        self._heartbeat = Heartbeat(folder, TARGET_MODEL)
        record = TargetRecord.create(settings.cache_bytes, BlockHandle(0))
        self._key = record.key_words.tobytes()
        self._target = NullTarget(hidden_words=ModelConfig.from_dir(settings.checkpoint).hidden_size)
        folder.publish(record)

    def execute(self, requests: list) -> list:
        return [answer(pb_utils, request, self._step, self._heartbeat) for request in requests]

    def _step(self, request) -> list:
        control = read_control(pb_utils, request, TARGET_MODEL, self._key)
        if LOGPROBS in request.requested_output_names():
            tokens, hidden, log_probs = self._target.step_scored(control)
            scored = [pb_utils.Tensor(LOGPROBS, log_probs)]
        else:
            (tokens, hidden), scored = self._target.step(control), []
        sent = [pb_utils.Tensor(HIDDEN, hidden)] if HIDDEN in request.requested_output_names() else []
        return [pb_utils.Tensor(TOKENS, tokens), *sent, *scored]
