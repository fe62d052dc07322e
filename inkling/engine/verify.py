"""Acceptance is equality: a draft stands when it is the token the target drew for its position."""

from __future__ import annotations

from collections.abc import Sequence


def accepted_prefix(drafts: Sequence[int], tokens: Sequence[int]) -> int:
    """How many ``drafts`` [n] equal the target's ``tokens`` [n + 1] before the first that does not.

    The tokens up to and including the one behind the accepted prefix are what the target alone would have
    drawn: a correction when a draft fell, a bonus token when all stood.
    """
    accepted = 0
    for draft, token in zip(drafts, tokens, strict=False):
        if draft != token:
            break
        accepted += 1
    return accepted
