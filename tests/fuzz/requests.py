"""Malformed requests without end, to the public model and the private ones, some valid ones among them."""

from __future__ import annotations

from random import Random

from tests.fuzz.grpc_kinds import GRPC_KINDS
from tests.fuzz.http_kinds import HTTP_KINDS
from tests.fuzz.values import Fuzzed

KINDS = HTTP_KINDS | GRPC_KINDS


def fuzzed(seed: int, number: int) -> Fuzzed:
    """Request ``number`` of a seed: always the same. Every kind is as likely as any other."""
    random = Random(f"{seed}:{number}")
    return KINDS[random.choice(sorted(KINDS))](random)
