"""The processes of one process group, from /proc. A killed server leaves busy python stubs behind as orphans;
their group is what still ties them to it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Member:
    pid: int
    parent: int
    is_zombie: bool  # it has ended; its parent has not fetched the exit status yet


def members(group: int) -> list[Member]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:  # "pid (name) state ppid pgrp ...", proc(5); the name may itself hold blanks and parentheses
            state, parent, of_group = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:  # ended meanwhile
            continue
        if int(of_group) == group:
            found.append(Member(int(stat.parent.name), int(parent), state in "ZX"))
    return found


def kill(group: int, timeout_s: float = 10.0) -> None:
    """SIGKILL to the whole group; returns when none of it runs, or after ``timeout_s`` seconds."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    deadline = time.monotonic() + timeout_s
    while any(not m.is_zombie for m in members(group)) and time.monotonic() < deadline:
        time.sleep(0.01)
