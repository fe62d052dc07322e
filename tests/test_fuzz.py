"""What ``tests/qa/test_fuzz.py`` sends."""

from __future__ import annotations

from tests.fuzz.requests import KINDS, fuzzed


def test_a_seed_makes_the_same_requests_of_every_kind():
    made = [fuzzed(1, number) for number in range(600)]
    assert made == [fuzzed(1, number) for number in range(600)]
    assert {request.kind for request in made} == set(KINDS)
    assert made[0] != fuzzed(2, 0)
