"""The settings that shape or report the probabilities of tokens: penalties, bias, bad words, log probs."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from inkling.engine.request import SamplingParams, StopRules
from inkling.errors import RequestError
from inkling.parameters import check_id, shown

if TYPE_CHECKING:
    from inkling.interface import Given, InterfaceContext

DRAWN_SEED_BITS = 53  # a drawn seed survives clients that read numbers as doubles


def read_sampling(given: Mapping[str, Given], stop: StopRules, context: InterfaceContext) -> SamplingParams:
    """Raises RequestError where a setting does not fit the checkpoint."""
    numbers = (
        "temperature",
        "top_p",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
    )
    values = {name: given[name].value for name in numbers if name in given}
    if "logit_bias" in given:
        for token, _ in given["logit_bias"].value:
            check_id(f"an id of {given['logit_bias'].name}", token, context.vocab_size)
    bad_words = _read_bad_words(given, context.tokenizer)
    banned = {word[-1] for word in bad_words} | (stop.stop_ids if stop.min_tokens else set())
    if bad_words and len(banned) >= context.vocab_size:
        raise RequestError(
            f"{given['bad_words'].name} and the stop ids before min_tokens can ban all {context.vocab_size} tokens "
            "of the checkpoint at once; give fewer bad words"
        )
    return SamplingParams(
        top_k=max(0, given["top_k"].value) if "top_k" in given else 0,
        seed=given["seed"].value if "seed" in given else secrets.randbits(DRAWN_SEED_BITS),
        bad_words=bad_words,
        **values,
    )


def _read_bad_words(given: Mapping[str, Given], tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], ...]:
    """Ids of each word at the beginning of a text and after a space, as in vLLM; each form once."""
    words, name = given.get("bad_words", ((), ""))
    if words and tokenizer is None:
        raise RequestError(f"{name} is {shown(words)}, but the checkpoint has no tokenizer.json")
    forms: dict[tuple[int, ...], None] = {}
    for index, word in enumerate(words):
        bare = word.lstrip()
        for text in (bare, " " + bare) if bare else (word,):
            ids = tuple(tokenizer.encode(text, add_special_tokens=False).ids)
            if not ids:
                raise RequestError(f"{name}[{index}] is {shown(word)}, which has no tokens; leave it out")
            forms[ids] = None
    return tuple(forms)
