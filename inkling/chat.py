"""Chat messages as prompt ids, and the ids of an answer that are its content.

A prompt is built on ids: text is encoded with no control token recognised in it, and control ids are put
between. Text that spells a marker stays text. The order is that of the released chat format:

    1. leading system and developer messages, in the order given
    2. a system message ``Thinking effort level: X``, before the first message of another role or at the end
    3. the other messages, in the order given
    4. ``<|message_model|>``, which opens the answer

Every message is ROLE [author] KIND payload ``<|end_message|>``; of a content list, each part is a message of
its own. The author is the message's ``name``; of a tool call and of its result, the function's. An assistant
turn is its thinking, its content, its calls, then ``<|content_model_end_sampling|>``. A call's payload is
``{"name":...,"args":{...}}`` without spaces, the keys of ``args`` sorted at every depth.

Effort is a name of ``EFFORTS`` or a number in [0, 0.99], printed as its shortest decimal; zero is printed ``0``, as
the template shipped with the released checkpoints prints it (vLLM prints ``0.0``).

Control ids are looked up by their text in the checkpoint's tokenizer. Function declarations, images and audio are
refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from tokenizers import Tokenizer

from inkling.errors import RequestError
from inkling.parameters import load_json, nearest, shown
from inkling.text import longest_piece

MAX_MESSAGES_CHARS = 1 << 24  # of the JSON text

USER, MODEL, SYSTEM, TOOL = (f"<|message_{role}|>" for role in ("user", "model", "system", "tool"))
TEXT, THINKING, CALL = "<|content_text|>", "<|content_thinking|>", "<|content_invoke_tool_json|>"
END_MESSAGE, END_TURN = "<|end_message|>", "<|content_model_end_sampling|>"
ROLES = {"system": SYSTEM, "developer": SYSTEM, "user": USER, "assistant": MODEL, "tool": TOOL}
FIELDS = {
    SYSTEM: ("role", "content", "name"),
    USER: ("role", "content", "name"),
    MODEL: ("role", "content", "name", "thinking", "reasoning_content", "tool_calls"),
    TOOL: ("role", "content", "name", "tool_call_id"),
}

EFFORTS = {"none": 0.0, "minimal": 0.1, "low": 0.2, "medium": 0.7, "high": 0.9, "max": 0.99, "xhigh": 0.99}
DEFAULT_EFFORT = "high"
MAX_EFFORT = 0.99

# Blocks of an answer: ids that open content, and ids behind which no content follows.
VISIBLE = (TEXT, "<|content_invoke_tool_text|>", "<|content_tool_error|>")
OTHER_BLOCKS = (THINKING, CALL, "<|content_xml|>", "<|content_image|>", "<|content_audio_input|>")
CLOSERS = (END_MESSAGE, END_TURN, *ROLES.values(), *OTHER_BLOCKS)


class ChatFormat:
    """The chat format over one tokenizer. ``chat_format`` keeps one for each."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._plain = _without_control_tokens(tokenizer)
        self._control_ids = {
            i for i, t in tokenizer.get_added_tokens_decoder().items() if _is_marker(t.content)
        }

    def prompt_ids(self, messages: str, effort: object, max_tokens: int) -> tuple[int, ...]:
        """Ids of the prompt that the JSON list ``messages`` and the effort make.

        ``max_tokens``: what the context has room for; text that cannot fit is refused before it is encoded.
        Raises RequestError naming the message, its field and value, or the missing control token.
        """
        level = _effort_level(effort)
        blocks = list(_blocks(load_json(messages, "messages", list, MAX_MESSAGES_CHARS), level))
        size = sum(len(_utf8(name, text)) for block in blocks if isinstance(block, tuple)
                   for name, text in (block[1], block[3]))  # fmt: skip
        if size > max_tokens * longest_piece(self._tokenizer):
            raise RequestError(
                f"messages hold {size} bytes of text, more than {max_tokens} tokens; shorten them"
            )
        ids: list[int] = []
        for block in blocks:
            if isinstance(block, str):
                ids.append(self._id(block))
                continue
            role, author, kind, payload = block
            ids += [self._id(role), *self._encode(*author), self._id(kind), *self._encode(*payload)]
            ids.append(self._id(END_MESSAGE))
        return tuple(ids)

    def content_blocks(self) -> ContentBlocks:
        """What tells content from the rest in one answer."""
        openers, closers = (self._known(tokens) for tokens in (VISIBLE, CLOSERS))
        return ContentBlocks(openers, closers)

    def _known(self, tokens: tuple[str, ...]) -> frozenset[int]:
        ids = (self._tokenizer.token_to_id(token) for token in tokens)
        return frozenset(token_id for token_id in ids if token_id is not None)

    def _id(self, token: str) -> int:
        token_id = self._tokenizer.token_to_id(token)
        if token_id is None:
            raise RequestError(
                f"messages need the control token {token}, which the checkpoint's tokenizer does not have; "
                "send text_input or input_ids"
            )
        return token_id

    def _encode(self, name: str, text: str) -> list[int]:
        ids = self._plain.encode(text, add_special_tokens=False).ids
        if not self._control_ids.isdisjoint(ids):  # a vocabulary that has the marker among its plain pieces
            raise RequestError(
                f"{name} is {shown(text)}, which the tokenizer encodes as a control token; reword it"
            )
        return ids


@lru_cache(maxsize=8)
def chat_format(tokenizer: Tokenizer) -> ChatFormat:
    return ChatFormat(tokenizer)


class ContentBlocks:
    """Which ids of an answer are content: those between an id that opens visible content and the next control id.

    The answer begins in a message header: what stands before the first block is an author's name.
    """

    def __init__(self, openers: frozenset[int], closers: frozenset[int]):
        self._openers, self._closers = openers, closers
        self._inside = False

    def is_content(self, token_id: int) -> bool:
        """Takes the next id of the answer; whether it has a part in the text."""
        if token_id in self._openers:
            self._inside = True
            return False
        if token_id in self._closers:
            self._inside = False
            return False
        return self._inside


Text = tuple[str, str]  # where it stands in the request, and the text
Block = str | tuple[str, Text, str, Text]  # one control token, or (role, author, kind, payload)
_NO_AUTHOR: Text = ("", "")


def _blocks(messages: list, level: str) -> Iterator[Block]:
    if not messages:
        raise RequestError("messages is []; a prompt must have at least one message")
    effort: Block = (SYSTEM, _NO_AUTHOR, TEXT, ("reasoning_effort", f"Thinking effort level: {level}"))
    has_effort = False
    called: dict[str, str] = {}  # tool call id -> function name
    for index, message in enumerate(messages):
        name = f"messages[{index}]"
        role = _role(name, message)
        if not has_effort and role != SYSTEM:
            has_effort = True
            yield effort
        author = (f"{name}.name", _string(f"{name}.name", message.get("name")) or "")
        if role == MODEL:
            yield from _assistant_turn(name, message, author, called)
            continue
        if role == TOOL and not author[1]:
            author = (f"{name}.tool_call_id", _called_function(name, message, called))
        contents = _contents(f"{name}.content", message.get("content"))
        if not contents:
            raise RequestError(
                f"{name}.content is {shown(message.get('content'))}; a message must have content"
            )
        yield from ((role, author, TEXT, content) for content in contents)
    if not has_effort:
        yield effort
    yield MODEL


def _assistant_turn(name: str, message: dict, author: Text, called: dict[str, str]) -> Iterator[Block]:
    blocks: list[Block] = []
    for key in ("thinking", "reasoning_content"):
        if thought := _string(f"{name}.{key}", message.get(key)):
            blocks.append((MODEL, author, THINKING, (f"{name}.{key}", thought)))
    if len(blocks) > 1:
        raise RequestError(f"{name} has both thinking and reasoning_content; they are one field, so give one")
    calls = [_call(f"{name}.tool_calls[{i}]", call, called) for i, call in enumerate(_calls(name, message))]
    contents = _contents(f"{name}.content", message.get("content"))
    if contents and not (contents[0][1] == "" and len(contents) == 1 and (blocks or calls)):
        blocks += ((MODEL, author, TEXT, content) for content in contents)
    blocks += calls
    if not blocks:
        raise RequestError(
            f"{name} has no content, thinking or tool_calls; an assistant message must have one"
        )
    yield from blocks
    yield END_TURN


def _calls(name: str, message: dict) -> list:
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise RequestError(f"{name}.tool_calls is {shown(calls)}; it must be a list of calls")
    return calls or []


def _call(name: str, call: object, called: dict[str, str]) -> Block:
    _check_fields(name, call, ("id", "type", "function"))
    if (kind := call.get("type", "function")) != "function":
        raise RequestError(f"{name}.type is {shown(kind)}; it must be 'function'")
    function = call.get("function")
    _check_fields(f"{name}.function", function, ("name", "arguments"))
    author = _string(f"{name}.function.name", function.get("name"))
    if not author:
        raise RequestError(f"{name}.function.name is {shown(author)}; a call must name its function")
    arguments, place = function.get("arguments"), f"{name}.function.arguments"
    if isinstance(arguments, str):  # as OpenAI clients send them
        arguments = load_json(arguments, place, dict, MAX_MESSAGES_CHARS)
    if not isinstance(arguments, dict):
        raise RequestError(f"{place} is {shown(arguments)}; it must be a JSON object, or its text")
    if (call_id := _string(f"{name}.id", call.get("id"))) is not None:
        called[call_id] = author
    payload = f'{{"name":{_compact_json(place, author)},"args":{_compact_json(place, arguments)}}}'
    return MODEL, (f"{name}.function.name", author), CALL, (place, payload)


def _compact_json(name: str, value: object) -> str:
    """No spaces, keys sorted at every depth, other than ASCII characters as they are."""
    try:
        return json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (ValueError, RecursionError) as error:  # a number beyond double; nested too deep
        raise RequestError(f"{name} cannot be written as JSON: {error}") from error


def _called_function(name: str, message: dict, called: dict[str, str]) -> str:
    """The function whose result a tool message without a name is."""
    call_id = _string(f"{name}.tool_call_id", message.get("tool_call_id"))
    if call_id is None:
        raise RequestError(
            f"{name} has neither name nor tool_call_id; a tool's result must tell its function"
        )
    if call_id not in called:
        raise RequestError(f"{name}.tool_call_id is {shown(call_id)}; no call before it has this id")
    return called[call_id]


def _role(name: str, message: object) -> str:
    if not isinstance(message, dict):
        raise RequestError(f"{name} is {shown(message)}; a message must be a JSON object")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise RequestError(f"{name}.role is {shown(role)}; it must be one of {', '.join(ROLES)}")
    _check_fields(name, message, FIELDS[ROLES[role]])
    return ROLES[role]


def _check_fields(name: str, value: object, known: tuple[str, ...]) -> None:
    if not isinstance(value, dict):
        raise RequestError(f"{name} is {shown(value)}; it must be a JSON object")
    for key, item in value.items():
        if key not in known and item is not None:
            hint = nearest(key, known) or f"; known are {', '.join(known)}"
            raise RequestError(f"{name} has the unknown field {shown(key)}{hint}")


def _contents(name: str, content: object) -> list[Text]:
    """The texts of a content: one of a string, one a part of a list, none of null."""
    if content is None or isinstance(content, str):
        return [] if content is None else [(name, content)]
    if not isinstance(content, list):
        raise RequestError(f"{name} is {shown(content)}; it must be a string or a list of text parts")
    return [_part(f"{name}[{i}]", part) for i, part in enumerate(content)]


def _part(name: str, part: object) -> Text:
    if not isinstance(part, dict) or part.get("type") != "text":
        raise RequestError(
            f'{name} is {shown(part)}; it must be {{"type": "text", "text": ...}}: only text is taken'
        )
    _check_fields(name, part, ("type", "text"))
    text = _string(f"{name}.text", part.get("text"))
    if text is None:
        raise RequestError(f"{name}.text is None; it must be a string")
    return f"{name}.text", text


def _string(name: str, value: object) -> str | None:
    if value is not None and not isinstance(value, str):
        raise RequestError(f"{name} is {shown(value)}; it must be a string")
    return value


def _utf8(name: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{name} is {shown(text)}; it must not hold a lone surrogate") from error


def _effort_level(effort: object) -> str:
    """The number as it is printed into the prompt."""
    level = EFFORTS.get(effort, effort) if isinstance(effort, str) else effort
    if isinstance(level, str) and len(level) < 32 and re.fullmatch(r"\d+\.?\d*|\.\d+", level, re.ASCII):
        level = float(level)  # numbers may come as strings
    if isinstance(level, bool) or not isinstance(level, int | float) or not 0 <= level <= MAX_EFFORT:
        rule = f"it must be one of {', '.join(EFFORTS)}, or a number in [0, {MAX_EFFORT}]"
        raise RequestError(f"reasoning_effort is {shown(effort)}; {rule} (absent: {DEFAULT_EFFORT})")
    return np.format_float_positional(float(level), trim="-")


def _is_marker(token: str) -> bool:
    return token.startswith("<|") and token.endswith("|>")


def _without_control_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """A copy that reads no control token out of text: markers count as special tokens, and those are encoded like
    other text."""
    copy = json.loads(tokenizer.to_str())
    for token in copy["added_tokens"]:
        token["special"] |= _is_marker(token["content"])
    plain = Tokenizer.from_str(json.dumps(copy))
    plain.encode_special_tokens = True
    return plain
