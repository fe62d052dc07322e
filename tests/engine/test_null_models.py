"""The null models answer what a step asks for, log probs included."""

from __future__ import annotations

import numpy as np

from inkling.engine.channel import Session
from inkling.engine.log_probs import TokenLogProb
from inkling.engine.loop import Engine
from inkling.engine.null_models import NullDraft, NullTarget
from inkling.engine.pages import CacheLayout, PoolLayout
from inkling.engine.request import GenerateRequest, StopRules
from inkling.engine.scheduler import EngineLimits
from inkling.protocol import KEY_WORDS
from tests.engine.harness import RecordedReply

N, TOKEN = 3, 2


def test_log_probs_of_a_mixed_batch_reach_those_who_asked() -> None:
    pools = tuple(PoolLayout(16, 64) for _ in range(3))
    session = Session(np.zeros(KEY_WORDS, np.int32), 1)
    layout = CacheLayout(512, N, pools, pools)
    engine = Engine(EngineLimits(256, 4, 64, 8, N), layout, NullTarget(TOKEN), NullDraft(TOKEN), session)
    replies = {}
    for log_probs, prompt_log_probs in ((0, 0), (1, 0), (3, 0), (0, 2), (2, 1)):
        request = GenerateRequest(
            (5, 6, 7),
            stop=StopRules(9),
            num_draft_tokens=N,
            log_probs=log_probs,
            prompt_log_probs=prompt_log_probs,
        )
        replies[log_probs, prompt_log_probs] = reply = RecordedReply()
        engine.submit(request, reply)
    while engine.step():
        pass
    engine.sender.send_ready()
    for (log_probs, prompt_log_probs), reply in replies.items():
        (chunk,) = reply.chunks
        assert chunk.error is None
        assert chunk.ids == [TOKEN] * 9
        drawn = [TokenLogProb(TOKEN, 0.0, 1, ((TOKEN, 0.0),) * (log_probs - 1))] * 9
        assert chunk.log_probs == (drawn if log_probs else [])
        top = ((TOKEN, 0.0),) * (prompt_log_probs - 1)
        scored = [TokenLogProb(token, 0.0, 1, top) for token in (6, 7)]
        assert chunk.prompt_log_probs == (scored if prompt_log_probs else None)
