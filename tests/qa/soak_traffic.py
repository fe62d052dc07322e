"""32 streams of one light process: whole and streamed answers over gRPC and HTTP, and clients that leave in every way.

Each answer that is read to its end is compared with the right one. What an answer can lack: it is ``lost`` (no final
response, or an error), ``duplicated`` (a second final response, or more tokens after all the right ones), ``wrong``
(other tokens) or ``hung`` (not over after HUNG_S); a refusal that is none is ``wrong``, too.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import cycle
from random import Random
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2_grpc
from tritonclient.grpc.service_pb2 import ModelInferRequest, ModelStreamInferResponse

from inkling.client import Tally
from inkling.protocol import ENSEMBLE_MODEL
from tests.malformed import GRPC, STREAM, Case, RefusedOverGrpc, RefusedOverHttp, grpc_request, http_body
from tests.qa.soak_questions import MAX_TOKENS, Question, malformed, unique_prompt
from tests.server.conftest import ServeCommand

STREAMS, CONNECTIONS = 32, 8
HUNG_S = 60.0  # an answer takes half a second
GENERATE = f"/v2/models/{ENSEMBLE_MODEL}/generate"
KILLED_CLIENT = """
import sys
from inkling.client import stream
for response in stream({url!r}, {inputs!r}):
    print("token", flush=True)
"""


@dataclass
class Answer:
    ids: list[int] = field(default_factory=list)
    num_accepted: int = 0
    num_finals: int = 0
    error: str = ""

    def add(self, outputs: dict[str, Any], is_final: bool) -> None:
        ids = outputs.get("output_ids", [])
        self.ids += ids if isinstance(ids, list) else [ids]
        self.num_accepted = outputs.get("total_accepted_draft_tokens", self.num_accepted)
        self.num_finals += is_final

    def add_grpc(self, response: ModelStreamInferResponse) -> None:
        self.error = self.error or response.error_message
        infer = response.infer_response
        outputs: dict[str, Any] = {}
        for output, raw in zip(infer.outputs, infer.raw_output_contents, strict=True):
            if output.datatype == "INT32":
                values = np.frombuffer(raw, np.int32).tolist()
                outputs[output.name] = values if output.name == "output_ids" else values[0]
        self.add(outputs, infer.parameters["triton_final_response"].bool_param)

    def fault(self, ids: list[int]) -> str:
        if self.error or not self.num_finals:
            return f"lost: {self.error or 'no final response'}"
        if self.num_finals > 1 or (len(self.ids) > len(ids) and self.ids[: len(ids)] == ids):
            return f"duplicated: {self.num_finals} final responses, tokens {self.ids} in place of {ids}"
        return "" if self.ids == ids else f"wrong: tokens {self.ids} in place of {ids}"


class Traffic:
    """``run`` asks until the time is over. ``minutes``: drafts and tokens of the complete answers of each."""

    def __init__(self, command: ServeCommand, questions: list[Question], vocab_size: int, random: Random):
        self.done: Counter[str] = Counter()  # requests that ended, by kind
        self.faults: list[str] = []
        self.minutes: list[Tally] = []
        self._command, self._random, self._vocab_size = command, random, vocab_size
        self._questions, self._malformed = cycle(questions), malformed()
        self._host, _, self._port = command.http_url.partition(":")
        kinds: dict[Callable[[], Awaitable[None]], int] = {  # of 500 requests
            self.grpc_streamed: 190,
            self.grpc_whole: 90,
            self.http_streamed: 50,
            self.http_whole: 50,
            self.unique_prompt_twice: 12,
            self.cancelled_before_the_first_token: 30,
            self.cancelled_in_the_answer: 40,
            self.connection_cut: 20,
            self.malformed: 17,
            self.client_killed: 1,
        }
        self._kinds, self._weights = list(kinds), list(kinds.values())

    @property
    def num_requests(self) -> int:
        return self.done.total()

    async def run(self, seconds: float) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        channels = [grpc.aio.insecure_channel(self._command.grpc_url, options) for _ in range(CONNECTIONS)]
        self._stubs = cycle([service_pb2_grpc.GRPCInferenceServiceStub(channel) for channel in channels])
        self._start = time.monotonic()
        await asyncio.gather(*(self._stream(self._start + seconds) for _ in range(STREAMS)))
        for channel in channels:
            await channel.close()

    async def _stream(self, end: float) -> None:
        while time.monotonic() < end:
            (kind,) = self._random.choices(self._kinds, self._weights)
            try:
                async with asyncio.timeout(HUNG_S):
                    await kind()
            except TimeoutError:
                self.faults.append(f"{kind.__name__}: hung: not over after {HUNG_S:g} s")
            except Exception as error:
                self.faults.append(f"{kind.__name__}: lost: {error!r}")
            self.done[kind.__name__] += 1

    def _check(self, kind: str, question: Question, answer: Answer) -> None:
        if fault := answer.fault(question.ids):
            self.faults.append(f"{kind}: {fault}: {question.inputs}")
            return
        minute = int((time.monotonic() - self._start) / 60)
        while len(self.minutes) <= minute:
            self.minutes.append(Tally())
        self.minutes[minute] += Tally(len(answer.ids), answer.num_accepted)

    def _check_prefix(self, kind: str, question: Question, answer: Answer) -> None:
        """Of an answer that was left."""
        if answer.error or answer.ids != question.ids[: len(answer.ids)]:
            self.faults.append(f"{kind}: {answer}: {question}")

    # The kinds of requests.

    async def grpc_streamed(self) -> None:
        question = next(self._questions)
        self._check("grpc_streamed", question, await self._ask_grpc(question.inputs | {"stream": True}))

    async def grpc_whole(self) -> None:
        question = next(self._questions)
        self._check("grpc_whole", question, await self._ask_grpc(question.inputs))

    async def http_streamed(self) -> None:
        question = next(self._questions)
        self._check("http_streamed", question, await self._ask_http(question.inputs, "_stream"))

    async def http_whole(self) -> None:
        question = next(self._questions)
        self._check("http_whole", question, await self._ask_http(question.inputs, ""))

    async def unique_prompt_twice(self) -> None:
        """With drafts and without, which must agree."""
        prompt = unique_prompt(self._random, self._vocab_size)
        inputs = {"input_ids": prompt, "max_tokens": MAX_TOKENS, "ignore_eos": True}
        first = await self._ask_grpc(inputs | {"stream": True})
        self.done["unique_prompt_twice"] += 1
        second = await self._ask_grpc(inputs | {"num_draft_tokens": 0})
        if fault := first.fault(second.ids) or second.fault(first.ids):
            self.faults.append(f"unique_prompt_twice: {fault}: {inputs}")

    async def cancelled_before_the_first_token(self) -> None:
        question = next(self._questions)
        call = next(self._stubs).ModelStreamInfer()
        await call.write(grpc_request(question.inputs | {"stream": True}))
        await asyncio.sleep(0.02 * self._random.random())
        call.cancel()

    async def cancelled_in_the_answer(self) -> None:
        question, answer = next(self._questions), Answer()
        call = next(self._stubs).ModelStreamInfer()
        await call.write(grpc_request(question.inputs | {"stream": True}))
        answer.add_grpc(await call.read())
        call.cancel()
        self._check_prefix("cancelled_in_the_answer", question, answer)

    async def connection_cut(self) -> None:
        """Of an answer over HTTP; a whole one before it has come."""
        question, answer = next(self._questions), Answer()
        is_stream = self._random.random() < 0.7
        body = http_body(question.inputs | {"stream": True})
        reader, writer = await self._post(GENERATE + "_stream" * is_stream, body)
        if is_stream:
            await reader.readuntil(b"data: ")
            answer.add(json.loads(await reader.readline()), False)
        else:
            await asyncio.sleep(0.02 * self._random.random())
        writer.transport.abort()
        self._check_prefix("connection_cut", question, answer)

    async def malformed(self) -> None:
        transport, case = next(self._malformed)
        refused = await self._refusal(transport, case)
        words = (case.words,) if isinstance(case.words, str) else case.words
        if any(word not in refused for word in words):
            self.faults.append(f"malformed: wrong: {case.name!r} over {transport}: {refused[:300]}")

    async def client_killed(self) -> None:
        """A process, at its first token."""
        question = next(self._questions)
        url = self._random.choice((f"grpc://{self._command.grpc_url}", f"http://{self._command.http_url}"))
        script = KILLED_CLIENT.format(url=url, inputs=question.inputs | {"max_tokens": MAX_TOKENS})
        client = await asyncio.create_subprocess_exec(
            sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE
        )
        if await client.stdout.readline() != b"token\n":
            self.faults.append(f"client_killed: lost: no token over {url}")
        client.kill()
        await client.communicate()

    # How they are sent.

    async def _ask_grpc(self, inputs: dict[str, Any]) -> Answer:
        """The answer, read to the end of its stream."""
        return await self._read_grpc(grpc_request(inputs | {"return_perf_metrics": True}))

    async def _read_grpc(self, request: ModelInferRequest) -> Answer:
        answer = Answer()
        call = next(self._stubs).ModelStreamInfer()
        await call.write(request)
        await call.done_writing()
        while (response := await call.read()) is not grpc.aio.EOF:
            answer.add_grpc(response)
        return answer

    async def _ask_http(self, inputs: dict[str, Any], suffix: str) -> Answer:
        inputs = inputs | {"return_perf_metrics": True, "stream": bool(suffix)}
        status, body = await self._answer_http(GENERATE + suffix, http_body(inputs))
        answer = Answer(error="" if status == 200 else body)
        for line in body.splitlines() if status == 200 else []:
            if line:
                outputs = json.loads(line.removeprefix("data: "))
                answer.error = outputs.get("error", "")
                answer.add(outputs, "seed" in outputs)  # it comes with the last response alone
        return answer

    async def _refusal(self, transport: str, case: Case | RefusedOverHttp | RefusedOverGrpc) -> str:
        """What came back, where it is no answer."""
        if isinstance(case, RefusedOverGrpc):
            return (await self._read_grpc(case.request())).error
        if transport == GRPC:
            return (await self._read_grpc(grpc_request(case.all_inputs(), case.parameters))).error
        if isinstance(case, RefusedOverHttp):
            status, body = await self._answer_http(case.path, case.body)
            return body if status == case.status else f"status {status}"
        body = http_body(case.all_inputs(), case.parameters)
        status, text = await self._answer_http(GENERATE + "_stream" * (transport == STREAM), body)
        return json.loads(text.removeprefix("data: "))["error"] if status == 400 else f"status {status}"

    async def _post(self, path: str, body: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(self._host, int(self._port))
        head = f"POST {path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        return reader, writer

    async def _answer_http(self, path: str, body: bytes) -> tuple[int, str]:
        """Status and body, on a connection of its own."""
        reader, writer = await self._post(path, body)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            if "transfer-encoding: chunked" not in head:
                size = int(head.partition("content-length: ")[2].partition("\r\n")[0])
                text = await reader.readexactly(size)
            else:
                text = b""
                while size := int(await reader.readline(), 16):
                    text += (await reader.readexactly(size + 2))[:-2]  # a line end follows
            return int(head.split()[1]), text.decode()
        finally:
            writer.close()
