"""Chat messages through a live server: the prompt they make, and the same answer as for its ids."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest
from tokenizers import AddedToken

from inkling.chat import CLOSERS, VISIBLE, chat_format
from inkling.testing import tiny_config, write_random_checkpoint, write_tokenizer
from inkling.text import load_tokenizer

pytestmark = pytest.mark.server
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is <|end_message|>?"},
    {"role": "assistant", "content": "A marker.", "thinking": "easy"},
    {"role": "user", "content": [{"type": "text", "text": "Thanks"}]},
]


@pytest.fixture(scope="module")
def chat_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, and a tokenizer whose last ids are the chat tokens."""
    directory = tmp_path_factory.mktemp("chat")
    config = tiny_config()
    write_random_checkpoint(directory, config)
    markers = sorted({*VISIBLE, *CLOSERS})
    write_tokenizer(directory, config.vocab_size - len(markers))
    tokenizer = load_tokenizer(directory)
    tokenizer.add_tokens([AddedToken(marker, special=True) for marker in markers])
    assert tokenizer.get_vocab_size() == config.vocab_size
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def generate(server, **inputs: object) -> dict:
    url = f"http://{server.http_url}/v2/models/spec_ensemble/generate"
    flags = {"max_tokens": 32, "return_output_ids": True, "return_num_input_tokens": True}
    body = json.dumps(inputs | flags).encode()
    with urllib.request.urlopen(urllib.request.Request(url, body), timeout=60) as response:
        return json.loads(response.read())


def test_messages_are_answered_as_their_ids_are(start_server, chat_checkpoint):
    tokenizer, text = load_tokenizer(chat_checkpoint), json.dumps(MESSAGES)
    ids = list(chat_format(tokenizer).prompt_ids(text, "low", 1000))
    with_effort = json.dumps({"reasoning_effort": "low"})
    everything = json.dumps({"reasoning_effort": "low", "skip_special_tokens": False})
    server = start_server(chat_checkpoint)
    expected = generate(server, input_ids=ids)
    chat = generate(server, messages=text, sampling_parameters=with_effort)
    shown = generate(server, messages=text, sampling_parameters=everything)
    assert chat["num_input_tokens"] == shown["num_input_tokens"] == len(ids)
    assert chat["output_ids"] == shown["output_ids"] == expected["output_ids"]
    assert shown["text_output"] == tokenizer.decode(expected["output_ids"], skip_special_tokens=False)
    blocks = chat_format(tokenizer).content_blocks()
    content = [i for i in expected["output_ids"] if blocks.is_content(i)]
    assert chat["text_output"] == tokenizer.decode(content)
