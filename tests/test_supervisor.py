"""A lost server is replaced as often as was asked, ever more slowly, and with every reason told."""

from __future__ import annotations

import pytest

from inkling.supervisor import supervise
from inkling.tritonserver import ServerError, ServerLostError


class Runs:
    """Serves that end as ``endings`` say: an exception, or None for a stop."""

    def __init__(self, *endings: Exception | None):
        self.endings = list(endings)
        self.told: list[str] = []
        self.pauses: list[float] = []

    def __call__(self) -> None:
        if ending := self.endings.pop(0):
            raise ending

    def supervise(self, restarts: int) -> None:
        supervise(self, restarts, self.told.append, self.pauses.append)


def test_by_default_a_lost_server_is_the_end() -> None:
    runs = Runs(ServerLostError("gone"))
    with pytest.raises(ServerLostError, match="gone"):
        runs.supervise(0)
    assert runs.told == runs.pauses == []


def test_restarts_are_bounded_and_back_off() -> None:
    runs = Runs(*(ServerLostError(f"loss {i}") for i in range(9)))
    with pytest.raises(ServerLostError, match="loss 8"):
        runs.supervise(8)
    assert runs.pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    assert runs.told[0] == "loss 0; restart 1 of 8 in 1 s" and "loss 7" in runs.told[-1]


def test_a_stop_ends_it() -> None:
    runs = Runs(ServerLostError("gone"), None, None)
    runs.supervise(5)
    assert len(runs.endings) == 1


def test_a_start_that_fails_is_not_repeated() -> None:
    runs = Runs(ServerError("no such checkpoint"), None)
    with pytest.raises(ServerError, match="no such checkpoint"):
        runs.supervise(5)
