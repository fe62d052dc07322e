"""inkling_mtp with nothing in it: constant drafts."""

from __future__ import annotations

import triton_python_backend_utils as pb_utils

from inkling.bls import answer, read_control
from inkling.engine.null_models import NullDraft
from inkling.liveness import Heartbeat
from inkling.protocol import DRAFT_MODEL, DRAFTS
from inkling.run_folder import RunFolder
from inkling.settings import Settings


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        settings = Settings.load()
        folder = RunFolder.of_parent(settings.run_root)
        record = folder.wait_for_target(settings.load_timeout_s, print)
        self._heartbeat = Heartbeat(folder, DRAFT_MODEL)
        self._key = record.key_words.tobytes()
        self._draft = NullDraft()

    def execute(self, requests: list) -> list:
        return [answer(pb_utils, request, self._step, self._heartbeat) for request in requests]

    def _step(self, request) -> list:
        control = read_control(pb_utils, request, DRAFT_MODEL, self._key)
        return [pb_utils.Tensor(DRAFTS, self._draft.step(control, None))]
