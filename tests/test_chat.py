"""Chat messages on ids: the frame, what is refused, and what of an answer is content."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from inkling.chat import CALL, CLOSERS, EFFORTS, VISIBLE, chat_format
from inkling.errors import RequestError
from inkling.interface import InterfaceContext, parse_request
from tests.test_interface import tensor

MARKERS = sorted({*VISIBLE, *CLOSERS})
EOS = "<|content_model_end_sampling|>"


def make_tokenizer(*missing: str, special: bool = True, ignore_merges: bool = False) -> Tokenizer:
    """Byte-level BPE trained on the markers themselves, so that their letters make long pieces too."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not ignore_merges)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["<|message_user|> hello", "naïve 東京 🙂", *MARKERS] * 3, trainer)
    markers = [marker for marker in MARKERS if marker not in missing]
    tokenizer.add_tokens([AddedToken(marker, special=special, normalized=False) for marker in markers])
    begin = tokenizer.token_to_id("!")  # a prompt of messages must not get it
    tokenizer.post_processor = processors.TemplateProcessing(single="! $A", special_tokens=[("!", begin)])
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return make_tokenizer()


def spelled(tokenizer: Tokenizer, ids: tuple[int, ...]) -> list[str]:
    """Control tokens as they are, and the text between them."""
    controls = {tokenizer.token_to_id(marker) for marker in MARKERS}
    parts: list[str | list[int]] = []
    for token_id in ids:
        if token_id in controls:
            parts.append(tokenizer.id_to_token(token_id))
        elif parts and isinstance(parts[-1], list):
            parts[-1].append(token_id)
        else:
            parts.append([token_id])
    return [part if isinstance(part, str) else tokenizer.decode(part) for part in parts]


def ids_of(tokenizer: Tokenizer, messages: object, effort: object = "high") -> tuple[int, ...]:
    text = messages if isinstance(messages, str) else json.dumps(messages)
    return chat_format(tokenizer).prompt_ids(text, effort, 10_000)


def short(parts: list[str]) -> str:
    """``[user|text]hi[end]`` for the marker form."""
    names = {"<|end_message|>": "end", EOS: "eos", CALL: "call"}
    markers = {m: names.get(m, m.strip("<|>").split("_", 1)[1]) for m in MARKERS}
    return "".join(f"[{markers[part]}]" if part in markers else part for part in parts)


def frame(tokenizer: Tokenizer, messages: object, effort: object = "high") -> str:
    return short(spelled(tokenizer, ids_of(tokenizer, messages, effort)))


EFFORT = "[system][text]Thinking effort level: 0.9[end]"


def test_effort_stands_before_the_first_message_that_is_not_the_systems(tokenizer):
    system, developer = {"role": "system", "content": "s"}, {"role": "developer", "content": "d"}
    user = {"role": "user", "content": "hi"}
    assert frame(tokenizer, [user]) == f"{EFFORT}[user][text]hi[end][model]"
    assert (
        frame(tokenizer, [system, developer, user, system])
        == f"[system][text]s[end][system][text]d[end]{EFFORT}[user][text]hi[end][system][text]s[end][model]"
    )
    assert frame(tokenizer, [system]) == f"[system][text]s[end]{EFFORT}[model]"


def test_a_conversation_with_thinking_calls_and_results(tokenizer):
    call = {"id": "c1", "type": "function"}
    conversation = [
        {
            "role": "user",
            "name": "ann",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        },
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": [
                call
                | {"function": {"name": "look", "arguments": '{"z": [1, {"y": 2, "x": "é"}], "a": 1.5}'}},
                {"function": {"name": "wait", "arguments": {}}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "東京"},
        {"role": "tool", "name": "wait", "content": ""},
        {"role": "assistant", "content": "done", "thinking": "ok", "tool_calls": None},
        {"role": "user", "content": "bye"},
    ]
    assert frame(tokenizer, conversation) == (
        f"{EFFORT}[user]ann[text]a[end][user]ann[text]b[end]"
        '[model][thinking]hm[end][model]look[call]{"name":"look","args":{"a":1.5,"z":[1,{"x":"é","y":2}]}}[end]'
        '[model]wait[call]{"name":"wait","args":{}}[end][eos]'
        "[tool]look[text]東京[end][tool]wait[text][end]"
        "[model][thinking]ok[end][model][text]done[end][eos][user][text]bye[end][model]"
    )


@pytest.mark.parametrize(
    "effort, printed",
    [
        *((name, {"none": "0", "minimal": "0.1", "low": "0.2", "medium": "0.7", "high": "0.9"}.get(name, "0.99"))
          for name in EFFORTS),
        (0, "0"), (0.0, "0"), (0.25, "0.25"), ("0.5", "0.5"), (".5", "0.5"), (0.99, "0.99"), (1e-7, "0.0000001"),
    ],
)  # fmt: skip
def test_effort_is_printed_as_its_shortest_decimal(tokenizer, effort, printed):
    parts = spelled(tokenizer, ids_of(tokenizer, [{"role": "user", "content": "x"}], effort))
    assert parts[2] == f"Thinking effort level: {printed}"


@pytest.mark.parametrize("effort", [1, 0.991, -0.1, True, "huge", "", "1e-3", [], {}, float("nan"), 10**400])
def test_other_efforts_are_refused(tokenizer, effort):
    with pytest.raises(RequestError, match="reasoning_effort is"):
        ids_of(tokenizer, [{"role": "user", "content": "x"}], effort)


@pytest.mark.parametrize("special", [True, False])
@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([*MARKERS, "a", " ", "<|", "|>", "🙂", "\n"]), max_size=6).map("".join))
def test_text_that_spells_a_marker_stays_text(special, text):
    tokenizer, text = TOKENIZERS[special], "q" + text

    def conversation(text: str) -> list[dict]:
        return [
            {"role": "system", "content": text, "name": text},
            {"role": "assistant", "content": text, "thinking": text},
            {"role": "tool", "name": text, "content": [{"type": "text", "text": text}]},
        ]

    plain, loud = conversation("x"), conversation(text)
    controls = [part for part in spelled(tokenizer, ids_of(tokenizer, plain)) if part in MARKERS]
    ids = ids_of(tokenizer, loud)
    marker_ids = {tokenizer.token_to_id(marker) for marker in MARKERS}
    assert [tokenizer.id_to_token(i) for i in ids if i in marker_ids] == controls
    assert tokenizer.decode(ids, skip_special_tokens=False).count(text) >= 6


TOKENIZERS = {special: make_tokenizer(special=special) for special in (True, False)}


def test_a_vocabulary_that_cannot_tell_a_marker_from_text_is_refused():
    tokenizer = make_tokenizer(ignore_merges=True)  # whole words are looked up, markers among them
    state = json.loads(tokenizer.to_str())
    marker = MARKERS[0]
    state["model"]["vocab"][marker] = tokenizer.token_to_id(marker)
    tokenizer = Tokenizer.from_str(json.dumps(state))
    ids_of(tokenizer, [{"role": "user", "content": "x"}])
    with pytest.raises(RequestError, match=r"messages\[0\].content is .* encodes as a control token"):
        ids_of(tokenizer, [{"role": "user", "content": marker}])


@pytest.mark.parametrize(
    "marker", ["<|message_user|>", "<|message_model|>", "<|content_text|>", "<|end_message|>"]
)
def test_a_checkpoint_without_the_tokens_is_refused_by_the_missing_one(marker):
    with pytest.raises(RequestError) as caught:
        ids_of(make_tokenizer(marker), [{"role": "user", "content": "x"}])
    assert f"control token {marker}" in str(caught.value) and "send text_input" in str(caught.value)


def test_only_tokens_that_are_needed_must_exist():
    tokenizer = make_tokenizer(CALL, "<|message_tool|>")
    ids_of(tokenizer, [{"role": "user", "content": "x"}])
    with pytest.raises(RequestError, match="invoke_tool_json"):
        ids_of(
            tokenizer, [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}]
        )


FUNCTION = {"name": "f", "arguments": {}}


@pytest.mark.parametrize(
    "messages, words",
    [
        ("", ["messages is not valid JSON"]),
        ("{}", ["messages is {}", "a JSON list"]),
        ("[]", ["messages is []", "at least one message"]),
        ('[{"role": "user", "role": "user", "content": "x"}]', ["messages has the key 'role' twice"]),
        ("[" * 60_000, ["messages is nested too deep"]),
        (["x"], ["messages[0] is 'x'", "a JSON object"]),
        ([{"content": "x"}], ["messages[0].role is None", "user, assistant, tool"]),
        ([{"role": "model", "content": "x"}], ["messages[0].role is 'model'"]),
        ([{"role": ["user"], "content": "x"}], ["messages[0].role is ['user']"]),
        ([{"role": "user"}], ["messages[0].content is None", "must have content"]),
        ([{"role": "user", "content": []}], ["messages[0].content is []", "must have content"]),
        ([{"role": "user", "content": 5}], ["messages[0].content is 5", "a string or a list"]),
        ([{"role": "user", "content": ["x"]}], ["messages[0].content[0] is 'x'", "only text"]),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "u"}]}], ["content[0] is", "only text"]),
        ([{"role": "user", "content": [{"type": "text"}]}], ["content[0].text is None"]),
        ([{"role": "user", "content": [{"type": "text", "text": "x", "txt": 1}]}], ["unknown field 'txt'", "'text'"]),
        ([{"role": "user", "content": "\ud800"}], ["messages[0].content is", "surrogate"]),
        ([{"role": "user", "content": "x", "name": 5}], ["messages[0].name is 5", "a string"]),
        ([{"role": "user", "content": "x", "thinking": "y"}], ["unknown field 'thinking'", "known are"]),
        ([{"role": "assistant", "content": "x", "tool_call": []}], ["'tool_call'", "did you mean 'tool_calls'"]),
        ([{"role": "assistant"}], ["messages[0] has no content"]),
        ([{"role": "assistant", "thinking": "a", "reasoning_content": "b"}], ["both thinking and reasoning_content"]),
        ([{"role": "assistant", "tool_calls": {}}], ["tool_calls is {}", "a list"]),
        ([{"role": "assistant", "tool_calls": [5]}], ["tool_calls[0] is 5"]),
        ([{"role": "assistant", "tool_calls": [{"function": FUNCTION, "type": "x"}]}], ["tool_calls[0].type is 'x'"]),
        ([{"role": "assistant", "tool_calls": [{}]}], ["tool_calls[0].function is None"]),
        ([{"role": "assistant", "tool_calls": [{"function": {"arguments": {}}}]}], ["function.name is None"]),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}], ["function.arguments is None"]),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]}], ["arguments is []"]),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}], ["not valid JSON"]),
        ('[{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1e999}}}]}]',
         ["arguments cannot be written"]),
        ([{"role": "tool", "content": "x"}], ["messages[0] has neither name nor tool_call_id"]),
        ([{"role": "tool", "content": "x", "tool_call_id": "c"}], ["tool_call_id is 'c'", "no call before it"]),
    ],
)  # fmt: skip
def test_malformed_messages_are_refused_by_name(tokenizer, messages, words):
    with pytest.raises(RequestError) as caught:
        ids_of(tokenizer, messages)
    for word in words:
        assert word in str(caught.value)
    assert len(str(caught.value).encode()) < 400


def test_messages_that_cannot_fit_are_refused_before_they_are_encoded(tokenizer):
    with pytest.raises(RequestError, match="messages hold 10000027 bytes of text, more than 10 tokens"):
        chat_format(tokenizer).prompt_ids(
            json.dumps([{"role": "user", "content": "x" * 10**7, "name": "n"}]), "low", 10
        )
    with pytest.raises(RequestError, match="messages has 20000"):
        ids_of(tokenizer, [{"role": "user", "content": "x" * 20_000_000}])


# Through the interface


def parse(tokenizer: Tokenizer | None, messages: object, **inputs: object):
    tensors = {"messages": tensor("messages", json.dumps(messages))}
    tensors |= {name: tensor(name, value) for name, value in inputs.items()}
    eos = frozenset({tokenizer.token_to_id(EOS)}) if tokenizer else frozenset({0})
    return parse_request(tensors, {}, 0, InterfaceContext(tokenizer, 500, eos, 64, 3))


HELLO = [{"role": "user", "content": "x"}]


def test_messages_are_a_prompt_like_any_other(tokenizer):
    parsed = parse(tokenizer, HELLO, max_tokens=5)
    assert parsed.request.prompt_ids == ids_of(tokenizer, HELLO)
    assert parsed.wanted == frozenset() and parsed.request.stop.max_tokens == 5
    low = parse(tokenizer, HELLO, sampling_parameters='{"reasoning_effort": "low"}')
    assert low.request.prompt_ids == ids_of(tokenizer, HELLO, "low")
    with pytest.raises(RequestError, match="messages has .* tokens; a prompt must have 1 to 63"):
        parse(tokenizer, [{"role": "user", "content": "🦊" * 20}])
    with pytest.raises(RequestError, match="input_ids and messages are both given"):
        parse(tokenizer, HELLO, input_ids=[1])
    with pytest.raises(RequestError, match="no tokenizer.json"):
        parse(None, HELLO)


def test_effort_without_messages_is_refused(tokenizer):
    tensors = {"text_input": tensor("text_input", "a")}
    tensors["sampling_parameters"] = tensor("sampling_parameters", '{"reasoning_effort": "low"}')
    with pytest.raises(
        RequestError, match="sampling_parameters.reasoning_effort is 'low'; it is a setting of messages"
    ):
        parse_request(tensors, {}, 0, InterfaceContext(tokenizer, 500, frozenset(), 64, 3))


def answer_ids(tokenizer: Tokenizer, *parts: str) -> list[int]:
    ids: list[int] = []
    for part in parts:
        ids += (
            [tokenizer.token_to_id(part)]
            if part in MARKERS
            else tokenizer.encode(part, add_special_tokens=False).ids
        )
    return ids


ANSWER = (
    "author", "<|content_thinking|>", "let me think", "<|end_message|>",
    "<|message_model|>", "<|content_text|>", "The ", "answer", "<|end_message|>",
    "<|message_model|>", "look", CALL, '{"name":"look"}', "<|end_message|>",
    "<|message_model|>", "<|content_text|>", " is 42.", "<|end_message|>", EOS,
)  # fmt: skip


def text_of(parsed, ids: list[int]) -> tuple[str, int]:
    """The text, and after how many ids a stop word was complete (all of them: none was)."""
    for count, token_id in enumerate(ids, 1):
        if parsed.assembler.append(token_id):
            return parsed.assembler.finish(), count
    return parsed.assembler.finish(), len(ids)


def test_an_answers_text_is_its_content(tokenizer):
    ids = answer_ids(tokenizer, *ANSWER)
    assert text_of(parse(tokenizer, HELLO), ids) == ("The answer is 42.", len(ids))
    everything = parse(tokenizer, HELLO, sampling_parameters='{"skip_special_tokens": false}')
    assert text_of(everything, ids)[0] == "".join(ANSWER[:-1])  # EOS has no text


def test_a_header_alone_or_a_block_without_one_is_no_content(tokenizer):
    assert text_of(parse(tokenizer, HELLO), answer_ids(tokenizer, "just text", EOS))[0] == ""
    ids = answer_ids(
        tokenizer, "<|content_text|>", "a", "<|end_message|>", "b", "<|content_tool_error|>", "c", EOS
    )
    assert text_of(parse(tokenizer, HELLO), ids)[0] == "ac"


def test_a_stop_word_ends_the_answer_in_content_only(tokenizer):
    ids = answer_ids(tokenizer, *ANSWER)
    assert text_of(parse(tokenizer, HELLO, stop_words=["think"]), ids) == ("The answer is 42.", len(ids))
    text, count = text_of(parse(tokenizer, HELLO, stop_words=["swer is"]), ids)
    assert text == "The an" and count < len(ids)
    plain = parse(
        tokenizer, HELLO, stop_words=["me think"], sampling_parameters='{"skip_special_tokens": false}'
    )
    assert text_of(plain, ids)[0] == "author<|content_thinking|>let "


KEYS = [
    "role",
    "content",
    "name",
    "thinking",
    "tool_calls",
    "tool_call_id",
    "type",
    "text",
    "function",
    "arguments",
    "id",
]
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
LEAVES |= st.sampled_from(["user", "assistant", "tool", "system", "text", "function", "{}", '{"a": 1}'])
JSON = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=5),
    max_leaves=12,
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool"])},
    optional={"content": JSON, "tool_calls": JSON, "name": JSON, "thinking": JSON},
)


@settings(max_examples=400, deadline=None)
@given(JSON | st.lists(MESSAGE, max_size=3), LEAVES)
def test_any_json_is_a_prompt_or_a_refusal_and_nothing_else(tokenizer, messages, effort):
    try:
        ids = ids_of(tokenizer, messages, effort)
    except RequestError as error:
        assert any(name in str(error) for name in ("messages", "reasoning_effort"))
        str(error).encode()
        return
    assert ids[-1] == tokenizer.token_to_id("<|message_model|>")


@pytest.mark.parametrize("depth", [10, 500, 900, 950, 980, 100_000])
def test_arguments_nested_deep_are_a_prompt_or_a_refusal(tokenizer, depth):
    arguments = '{"a":' * depth + "1" + "}" * depth
    function = {"name": "f", "arguments": arguments}
    try:
        ids = ids_of(tokenizer, [{"role": "assistant", "tool_calls": [{"function": function}]}])
    except RequestError as error:
        assert depth > 500 and "arguments" in str(error)
        return
    assert f'{{"name":"f","args":{arguments}}}' in spelled(tokenizer, ids)
