"""spec_ensemble: the public model. A decoupled BLS model, despite its name: a Triton ensemble is a fixed graph and
cannot loop. ``execute`` only admits; one thread runs the draft/verify loop for all requests, one sends.
"""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from typing import Any

import triton_python_backend_utils as pb_utils

from inkling.bls import BlsDraft, BlsTarget
from inkling.deployment import Deployment
from inkling.engine.channel import Session
from inkling.engine.loop import Engine
from inkling.engine.metrics import RequestTrace
from inkling.engine.scheduler import EngineLimits
from inkling.errors import CancelledError, InklingError, ModelLostError
from inkling.interface import InterfaceContext
from inkling.liveness import CALLED_MODELS, Heartbeat, Watch, watch
from inkling.metrics import Publisher
from inkling.protocol import ENSEMBLE_MODEL
from inkling.run_folder import RunFolder
from inkling.settings import Settings
from inkling.text import load_tokenizer
from inkling.triton_io import TritonReply, read_request, send_error

_CANCEL_S = 5.0  # for the answers of requests that a drain cuts off


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        settings = Settings.load()
        self._folder = RunFolder.of_parent(settings.run_root)
        self._folder.create()
        heartbeat = Heartbeat(self._folder, ENSEMBLE_MODEL)
        record = self._folder.wait_for_target(settings.load_timeout_s, _report)
        deployment = Deployment.of(replace(settings, cache_bytes=record.cache_bytes))  # never asks a GPU
        config = deployment.config
        self._context = InterfaceContext(
            load_tokenizer(settings.checkpoint),
            config.vocab_size,
            frozenset(config.eos_token_ids),
            deployment.max_context,
            deployment.num_draft_tokens,
        )
        limits = EngineLimits.of(settings, deployment.max_context, deployment.num_draft_tokens)
        session = Session(record.key_words, record.generation)
        target = BlsTarget(pb_utils, heartbeat, deployment.sends_hidden)
        draft = BlsDraft(pb_utils, heartbeat)
        self._engine = Engine(limits, deployment.layout, target, draft, session)
        self._engine.start()
        self._publisher = Publisher(pb_utils, self._engine, settings.log_format, self._folder.restarts())
        self._publisher.start()
        called = [Watch(self._folder, model, settings.step_timeout_s) for model in CALLED_MODELS]
        for target, *args in ((self._folder.serve_drain, self._drain), (watch, called, self._give_up)):
            threading.Thread(target=target, args=args, name=target.__name__, daemon=True).start()

    def execute(self, requests: list) -> None:
        for request in requests:
            sender, trace = request.get_response_sender(), RequestTrace()
            try:
                parsed = read_request(request, self._context, trace)
                reply = TritonReply(pb_utils, sender, parsed)
                stream, assembler = parsed.stream, parsed.assembler
                self._engine.submit(parsed.request, reply, assembler, stream=stream, trace=trace)
            except InklingError as error:
                self._reject(sender, trace, error)
            except Exception as error:
                self._reject(sender, trace, InklingError(f"the request could not be read: {error!r}"))

    def _reject(self, sender: Any, trace: RequestTrace, error: InklingError) -> None:
        send_error(pb_utils, sender, error)
        self._engine.metrics.reject(trace, error)

    def _drain(self, timeout_s: float) -> None:
        if not self._engine.drain(timeout_s):
            error = CancelledError(f"the server stops; the answer was not complete within {timeout_s:g} s")
            self._engine.abandon(error)
            self._engine.sender.wait_all_sent(_CANCEL_S)
        scheduler = self._engine.scheduler
        totals = {"preemptions": scheduler.num_preemptions, "prefix_hits": scheduler.prefixes.num_hits}
        _report(f"totals {json.dumps(totals)}")

    def _give_up(self, reason: str) -> None:
        """A blocked call cannot be interrupted: the engine's loop may never come back."""
        if not self._folder.drained.exists():  # else the server is being stopped
            _report(reason)
        self._engine.abandon(ModelLostError(f"{reason}; the server must be replaced"))

    def finalize(self) -> None:
        self._engine.close()
        self._publisher.stop()
        self._folder.remove()


def _report(line: str) -> None:
    print(f"{ENSEMBLE_MODEL}: {line}", flush=True)
