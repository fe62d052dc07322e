"""Processes, from /proc: those of one group, those with a word in their command line, and the state of one.

A killed server leaves busy python stubs behind as orphans; their group, and the prefix of their shared memory in
their command lines, are what still ties them to it.
"""

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
    for folder in Path("/proc").glob("[0-9]*"):
        if fields := _stat(int(folder.name)):
            state, parent, of_group = fields[:3]
            if int(of_group) == group:
                found.append(Member(int(folder.name), int(parent), state in "ZX"))
    return found


def with_word(word: str) -> list[int]:
    """The running processes that have ``word`` in their command lines."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # ended meanwhile
            if word.encode() in file.read_bytes():
                found.append(int(file.parent.name))
    return found


def state(pid: int) -> str:
    """Of proc(5): R, S, D, T (stopped by a signal), Z (ended) and rarer ones; empty when there is no such process."""
    fields = _stat(pid)
    return fields[0] if fields else ""


def start_time(pid: int) -> str:
    """Clock ticks between boot and the start of ``pid``: tells two processes of one pid apart. Empty: none."""
    fields = _stat(pid)
    return fields[19] if fields else ""


def is_running(pid: int, started: str) -> bool:
    """Whether ``pid`` is still the process that started at ``started``, and has not ended."""
    return start_time(pid) == started and state(pid) not in "ZX"


def kill(group: int, timeout_s: float = 10.0) -> None:
    """SIGKILL to the whole group; returns when none of it runs, or after ``timeout_s`` seconds."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    deadline = time.monotonic() + timeout_s
    while any(not m.is_zombie for m in members(group)) and time.monotonic() < deadline:
        time.sleep(0.01)


def _stat(pid: int) -> list[str]:
    """state, ppid, pgrp ... of ``/proc/<pid>/stat``; empty when the process is gone. The name before them may itself
    hold blanks and parentheses."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
