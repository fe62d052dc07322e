"""What ``spec_ensemble`` takes and gives: a Triton request's tensors become one validated
``GenerateRequest``.

Everything a request may carry is in ``inkling.parameters``. A setting may come as an input, or in the JSON
object of ``sampling_parameters``, or under two names; given twice, it must be the same. The server checks
types and shapes of inputs, but lets JSON integers wrap and passes unknown keys on as request parameters:
ranges and names are checked here. Nothing here knows the server, so all of it is testable without one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from inkling.chat import DEFAULT_EFFORT, chat_format
from inkling.engine.request import GenerateRequest, StopRules
from inkling.errors import RequestError
from inkling.log_prob_outputs import LogProbOutputs
from inkling.parameters import (
    FP32,
    INPUTS,
    INT32,
    KEYS,
    MAX_IDS,
    SAMPLING_PARAMETERS,
    STRING,
    UINT64,
    Value,
    check_id,
    check_ids,
    from_json,
    from_tensor,
    load_json,
    nearest,
    shown,
)
from inkling.sampling_inputs import read_sampling
from inkling.text import TextAssembler, longest_piece

# name -> (Triton data type, dims); with INPUTS of inkling.parameters, all of spec_ensemble/config.pbtxt.
OUTPUTS: dict[str, tuple[str, tuple[int, ...]]] = {
    "text_output": (STRING, (1,)),
    "output_ids": (INT32, (-1,)),
    "finish_reason": (STRING, (1,)),
    "num_input_tokens": (INT32, (1,)),
    "num_output_tokens": (INT32, (1,)),
    "total_draft_tokens": (INT32, (1,)),
    "total_accepted_draft_tokens": (INT32, (1,)),
    "acceptance_rate": (FP32, (1,)),
    "seed": (UINT64, (1,)),
    "output_log_probs": (FP32, (-1,)),
    "cum_log_probs": (FP32, (1,)),
    "top_log_probs": (STRING, (1,)),
    "logprobs": (STRING, (1,)),
    "cumulative_logprob": (FP32, (1,)),
    "prompt_logprobs": (STRING, (1,)),
}
PERF_METRICS = ("total_draft_tokens", "total_accepted_draft_tokens", "acceptance_rate")
ASKED_BY = {
    "return_output_ids": ("output_ids",),
    "return_finish_reason": ("finish_reason",),
    "return_num_input_tokens": ("num_input_tokens",),
    "return_num_output_tokens": ("num_output_tokens",),
    "return_perf_metrics": PERF_METRICS,
}
PROMPTS = ("text_input", "input_ids", "messages")
DEFAULT_MAX_TOKENS = 16


@dataclass(frozen=True)
class InterfaceContext:
    """What of checkpoint and settings a request is held against."""

    tokenizer: Tokenizer | None
    vocab_size: int  # V', ids a request may name
    eos_token_ids: frozenset[int]
    max_context: int  # positions of prompt and answer together
    num_draft_tokens: int  # the deployment's N

    def __post_init__(self) -> None:
        if self.tokenizer is not None:  # seconds for a large vocabulary: now, not in somebody's request
            longest_piece(self.tokenizer)
            chat_format(self.tokenizer)


@dataclass(frozen=True)
class ParsedRequest:
    request: GenerateRequest
    assembler: TextAssembler  # of the answer's text
    stream: bool  # one response a step or more, or exactly one at the end
    prompt_text: str  # stands before the first text; empty unless the client asked for it
    wanted: frozenset[str]  # optional outputs to send, but for log probs
    log_probs: LogProbOutputs

    @property
    def seed(self) -> int:
        return self.request.sampling.seed


class Given(NamedTuple):
    value: Value
    name: str  # the name it was given under


def parse_request(
    tensors: Mapping[str, np.ndarray],
    parameters: Mapping[str, object],
    timeout_us: int,
    context: InterfaceContext,
) -> ParsedRequest:
    """One validated request.

    ``tensors``: inputs by name, [1] or [n]; BYTES as object arrays of bytes. ``parameters``: the request
    parameters. ``timeout_us``: the request's own timeout, 0 for none. Raises RequestError naming the field,
    value and bound.
    """
    check_request_parameters(parameters)
    if timeout_us >= 2**63:  # how the server hands on a negative one
        raise RequestError(f"the request's timeout is {timeout_us - 2**64} us; it must be 0 (none) or more")
    given = read_settings(tensors)
    get = _getter(given)
    prompt_ids, prompt_text = _read_prompt(given, context, echo=not get("exclude_input_in_output", True))
    stop = _read_stop_rules(given, context, len(prompt_ids))
    log_probs = LogProbOutputs.of(given, context.tokenizer)
    request = GenerateRequest(
        prompt_ids=prompt_ids,
        sampling=read_sampling(given, stop, context),
        stop=stop,
        num_draft_tokens=_read_num_drafts(given, context),
        priority=get("priority", 0),
        timeout_us=_sooner(get("timeout_ms", 0) * 1000, timeout_us),
        log_probs=log_probs.log_probs,
        prompt_log_probs=log_probs.prompt_log_probs,
    )
    skip_special_tokens = get("skip_special_tokens", True)
    is_filtered = "messages" in given and skip_special_tokens
    assembler = TextAssembler(
        context.tokenizer,
        stop.stop_words,
        hidden_ids=context.eos_token_ids | stop.stop_ids,
        skip_special_tokens=skip_special_tokens,
        min_tokens=stop.min_tokens,
        blocks=chat_format(context.tokenizer).content_blocks() if is_filtered else None,
    )
    wanted = {output for flag, outputs in ASKED_BY.items() if get(flag, False) for output in outputs}
    if "input_ids" in given:
        wanted.add("output_ids")
    return ParsedRequest(request, assembler, get("stream", False), prompt_text, frozenset(wanted), log_probs)


def check_request_parameters(parameters: Mapping[str, object]) -> None:
    """Request parameters carry no setting: all but ``id`` and ``triton_*`` are mistakes, such as a misspelt
    input, which the server passes on as a parameter. Raises RequestError."""
    for name, value in parameters.items():
        if name == "id" or name.startswith("triton_"):
            continue
        if name in INPUTS:
            raise RequestError(f"request parameter {name} is {shown(value)}; send it as the input {name!r}")
        if name in KEYS:
            raise RequestError(
                f"request parameter {name} is {shown(value)}; send it inside {SAMPLING_PARAMETERS}"
            )
        hint = nearest(name, {*INPUTS, *KEYS}) or "; the model's metadata lists its inputs"
        raise RequestError(f"unknown request parameter {shown(name)}{hint}")


def read_settings(tensors: Mapping[str, np.ndarray]) -> dict[str, Given]:
    """Field name -> its value, from the inputs and from ``sampling_parameters``. Raises RequestError."""
    given: dict[str, Given] = {}

    def put(field_name: str, value: Value, name: str) -> None:
        before = given.get(field_name)
        if before is not None and before.value != value:
            both = f"{before.name} is {shown(before.value)} and {name} is {shown(value)}"
            raise RequestError(f"{both}; they are one setting, so give one of them")
        given.setdefault(field_name, Given(value, name))

    for name, array in tensors.items():
        value = from_tensor(name, array)
        if name != SAMPLING_PARAMETERS:
            put(INPUTS[name].name, value, name)
            continue
        for key, item in load_json(value).items():
            if (setting := from_json(key, item)) is not None:
                put(KEYS[key].name, setting, f"{SAMPLING_PARAMETERS}.{key}")
    return given


def _getter(given: Mapping[str, Given]) -> Callable[[str, Any], Any]:
    return lambda name, default: given[name].value if name in given else default


def _read_prompt(
    given: Mapping[str, Given], context: InterfaceContext, echo: bool
) -> tuple[tuple[int, ...], str]:
    """Prompt ids, and the text to stand before the answer: the prompt's when ``echo``, else none."""
    names = [name for name in PROMPTS if name in given]
    if not names:
        raise RequestError(
            "none of text_input, input_ids, messages is given; a request has exactly one prompt"
        )
    if len(names) > 1:
        raise RequestError(f"{' and '.join(names[:2])} are both given; a request has exactly one prompt")
    if "reasoning_effort" in given and names != ["messages"]:
        effort, name = given["reasoning_effort"]
        raise RequestError(f"{name} is {shown(effort)}; it is a setting of messages, and none are given")
    if names != ["text_input"]:
        ids = given["input_ids"].value if "input_ids" in given else _read_messages(given, context)
        _check_length(names[0], len(ids), context)
        check_ids(names[0], ids, context.vocab_size)
        return ids, context.tokenizer.decode(list(ids)) if echo and context.tokenizer else ""
    text = given["text_input"].value
    if context.tokenizer is None:
        raise RequestError(
            f"text_input is {shown(text)}, but the checkpoint has no tokenizer.json; send input_ids"
        )
    if not text:
        raise RequestError("text_input is ''; a prompt must have at least one character")
    size = len(text.encode())
    if size > context.max_context * longest_piece(context.tokenizer):  # too long however it is split
        raise RequestError(
            f"text_input has {size} bytes, more than {context.max_context - 1} tokens; shorten the prompt"
        )
    ids = tuple(context.tokenizer.encode(text).ids)
    _check_length("text_input", len(ids), context)
    check_ids("text_input", ids, context.vocab_size)
    return ids, text if echo else ""


def _read_messages(given: Mapping[str, Given], context: InterfaceContext) -> tuple[int, ...]:
    messages = given["messages"].value
    if context.tokenizer is None:
        raise RequestError(
            f"messages is {shown(messages)}, but the checkpoint has no tokenizer.json; send input_ids"
        )
    effort = _getter(given)("reasoning_effort", DEFAULT_EFFORT)
    return chat_format(context.tokenizer).prompt_ids(messages, effort, context.max_context - 1)


def _check_length(name: str, num_tokens: int, context: InterfaceContext) -> None:
    if not 1 <= num_tokens < context.max_context:
        raise RequestError(
            f"{name} has {num_tokens} tokens; a prompt must have 1 to {context.max_context - 1}, "
            f"so that one more fits into the context of {context.max_context}"
        )


def _read_stop_rules(
    given: Mapping[str, Given], context: InterfaceContext, num_prompt_tokens: int
) -> StopRules:
    get = _getter(given)
    max_tokens, min_tokens = get("max_tokens", DEFAULT_MAX_TOKENS), get("min_tokens", 0)
    if min_tokens > max_tokens:
        raise RequestError(
            f"{given['min_tokens'].name} is {min_tokens}, more than max_tokens, which is {max_tokens}"
            f"{'' if 'max_tokens' in given else ' when absent'}; raise max_tokens or lower it"
        )
    max_tokens = min(max_tokens, context.max_context - num_prompt_tokens)
    stop_ids = frozenset() if get("ignore_eos", False) else context.eos_token_ids
    if "end_id" in given:
        check_id(given["end_id"].name, given["end_id"].value, context.vocab_size)
        stop_ids |= {given["end_id"].value}
    if "stop_token_ids" in given:
        ids, name = given["stop_token_ids"]
        if len(ids) > MAX_IDS:
            raise RequestError(f"{name} has {len(ids)} ids; at most {MAX_IDS} are allowed")
        check_ids(name, ids, context.vocab_size)
        stop_ids |= set(ids)
    stop_words = get("stop_words", ())
    if stop_words and context.tokenizer is None:
        raise RequestError(
            f"{given['stop_words'].name} is {shown(stop_words)}, but the checkpoint has no tokenizer.json; "
            "send stop_token_ids"
        )
    return StopRules(max_tokens, min(min_tokens, max_tokens), stop_ids, stop_words)


def _read_num_drafts(given: Mapping[str, Given], context: InterfaceContext) -> int:
    if "num_draft_tokens" not in given:
        return context.num_draft_tokens
    value, name = given["num_draft_tokens"]
    if not 0 <= value <= context.num_draft_tokens:
        bound = f"it must be in [0, {context.num_draft_tokens}], the drafts this deployment verifies a step"
        raise RequestError(f"{name} is {value}; {bound}")
    return value


def _sooner(*timeouts_us: int) -> int:
    """The shortest timeout, 0 when there is none."""
    return min((t for t in timeouts_us if t > 0), default=0)
