"""``priority`` is an input of its own: any 32-bit integer, under no other name."""

from __future__ import annotations

import numpy as np
import pytest

from inkling.errors import RequestError
from inkling.interface import InterfaceContext, check_request_parameters, parse_request

CONTEXT = InterfaceContext(None, 256, frozenset(), max_context=64, num_draft_tokens=3)
PROMPT = {"input_ids": np.array([3, 4], np.int32)}


@pytest.mark.parametrize("value", [0, 7, -7, 2**31 - 1, -(2**31)])
def test_any_32_bit_integer_is_taken(value: int):
    inputs = PROMPT | {"priority": np.array([value], np.int32)}
    assert parse_request(inputs, {}, 0, CONTEXT).request.priority == value


def test_it_is_neither_a_sampling_parameter_nor_a_request_parameter():
    inputs = PROMPT | {"sampling_parameters": np.array([b'{"priority": 1}'], object)}
    with pytest.raises(RequestError, match="'priority' is an input of its own"):
        parse_request(inputs, {}, 0, CONTEXT)
    with pytest.raises(RequestError, match="send it as the input 'priority'"):
        check_request_parameters({"priority": 1})
