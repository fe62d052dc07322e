"""bls_probe: one call to the target and one to the draft, over and over, with the messages of a constant round."""

from __future__ import annotations

import time

import numpy as np
import triton_python_backend_utils as pb_utils

from inkling.bls import BlsDraft, BlsTarget
from inkling.liveness import Heartbeat
from inkling.protocol import DraftStep, TargetStep, pack
from inkling.run_folder import RunFolder
from inkling.settings import Settings

POSITION = 100  # of the next row of every sequence


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        settings = Settings.load()
        folder = RunFolder.of_parent(settings.run_root)
        record = folder.wait_for_target(settings.load_timeout_s, print)
        self._key, self._generation = record.key_words, record.generation
        takes_hidden = settings.hidden_transport == "dlpack"
        heartbeat = Heartbeat(folder, "bls_probe")
        self._target = BlsTarget(pb_utils, heartbeat, takes_hidden)
        self._draft = BlsDraft(pb_utils, heartbeat)

    def execute(self, requests: list) -> list:
        return [self._measure(request) for request in requests]

    def _measure(self, request) -> object:
        batch, num_drafts, rounds = (
            int(pb_utils.get_input_tensor_by_name(request, name).as_numpy()[0])
            for name in ("BATCH", "NUM_DRAFTS", "ROUNDS")
        )
        to_target, to_draft = self._messages(batch, num_drafts)
        seconds = []
        for _ in range(rounds):
            start = time.perf_counter()
            _, hidden = self._target.step(to_target)
            self._draft.step(to_draft, hidden)
            seconds.append(time.perf_counter() - start)
        return pb_utils.InferenceResponse([pb_utils.Tensor("SECONDS", np.array(seconds, np.float32))])

    def _messages(self, batch: int, num_drafts: int) -> tuple[np.ndarray, np.ndarray]:
        rows = num_drafts + 1
        target = TargetStep(
            self._generation,
            1,
            1,
            segments=np.array([(slot, POSITION, rows, rows) for slot in range(batch)], np.int32),
            ids=np.zeros(batch * rows, np.int32),
        )
        window = (POSITION, POSITION + rows, num_drafts, num_drafts, rows)
        draft = DraftStep(
            self._generation,
            1,
            1,
            segments=np.array([(s, s * rows, POSITION, rows, *window) for s in range(batch)], np.int32),
            ids=np.zeros(batch * rows, np.int32),
        )
        return pack(target, self._key), pack(draft, self._key)
