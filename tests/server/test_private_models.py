"""Target and draft answer ``spec_ensemble`` alone: whoever lacks this start's key is refused, and no log tells it."""

from __future__ import annotations

import numpy as np
import pytest
import tritonclient.grpc as grpc
from tritonclient.utils import InferenceServerException

from inkling.client import stream_grpc
from inkling.protocol import CONTROL, DRAFT_MODEL, TARGET_MODEL, TargetStep, pack
from inkling.run_folder import RunFolder, TargetRecord
from inkling.server import RunningServer, ServerOptions
from inkling.settings import Settings

pytestmark = pytest.mark.server


def record_of(server: RunningServer) -> TargetRecord:
    return RunFolder.of_server(server.settings.run_root, server.pid).record()


def refusal(server: RunningServer, model: str, control: np.ndarray) -> str:
    tensor = grpc.InferInput(CONTROL, [control.size], "INT32")
    tensor.set_data_from_numpy(control)
    with (
        grpc.InferenceServerClient(server.grpc_url) as client,
        pytest.raises(InferenceServerException) as caught,
    ):
        client.infer(model, [tensor])
    return caught.value.message()


@pytest.mark.parametrize("model", [TARGET_MODEL, DRAFT_MODEL])
def test_a_call_needs_the_key_of_this_start(server, model: str):
    key = record_of(server).key_words
    almost = key.copy()
    almost[-1] ^= 1
    calls = {name: pack(TargetStep(0, 0, 0), key) for name, key in {"key": key, "almost": almost}.items()}
    calls |= {"zeros": np.zeros(64, np.int32), "short": np.zeros(1, np.int32)}
    refusals = {name: refusal(server, model, control) for name, control in calls.items()}
    private = {name for name, words in refusals.items() if "is private to this server" in words}
    assert private == {"almost", "zeros", "short"}, refusals


def test_each_start_has_another_key_which_no_log_tells(server, tiny_checkpoint):
    ports = ServerOptions(http_port=0, grpc_port=0, metrics_port=0, log_verbose=1)
    with RunningServer(Settings(str(tiny_checkpoint)), ports) as talkative:
        record = record_of(talkative)
        list(stream_grpc(talkative.grpc_url, {"input_ids": [1, 2], "max_tokens": 4}))
    assert record.key != record_of(server).key and len(record.key_words) * 32 >= 128
    log = "\n".join(talkative.log)
    assert "inkling_target" in log and len(talkative.log) > 100
    spellings = (record.key, *map(str, record.key_words.tolist()))
    assert not [spelling for spelling in spellings if spelling in log]
