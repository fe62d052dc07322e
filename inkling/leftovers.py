"""What a server leaves behind when its ``inkling serve`` is killed, found and removed by the next start.

Each start keeps a work folder in the temporary directory, and in it who owns it: pid, start time, and the prefix of
all its shared memory, which is also in the command lines of its processes.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from inkling import process_group

SHARED_MEMORY = Path("/dev/shm")
KILL_S = 10.0
_WORK_FOLDERS = "inkling-serve-"
_OWNER = "owner"


def make_work_folder(region_prefix: str) -> Path:
    """A new one, mode 0700, owned by this process."""
    folder = Path(tempfile.mkdtemp(prefix=_WORK_FOLDERS))
    pid = os.getpid()
    (folder / _OWNER).write_text(f"{pid} {process_group.start_time(pid)} {region_prefix}")
    return folder


def remove_regions(prefix: str) -> None:
    for region in SHARED_MEMORY.glob(prefix + "*"):
        region.unlink(missing_ok=True)


def remove_leftovers(run_root: Path, report: Callable[[str], None] = lambda line: None) -> None:
    """Of this user's servers whose owner is gone: processes, shared memory, work folders, and the run folders below
    ``run_root`` of servers that are gone."""
    for folder in Path(tempfile.gettempdir()).glob(_WORK_FOLDERS + "*"):
        with contextlib.suppress(
            OSError, ValueError
        ):  # another start removes it too, or it is not ours to read
            pid, started, prefix = (folder / _OWNER).read_text().split()
            if folder.stat().st_uid == os.getuid() and not process_group.is_running(int(pid), started):
                report(f"removing what a server left behind whose serve (pid {pid}) was killed")
                _kill(prefix)
                remove_regions(prefix)
                shutil.rmtree(folder, ignore_errors=True)
    for folder in run_root.glob("inkling-*-*"):
        name = re.fullmatch(r"inkling-(\d+)-(\d+)", folder.name)
        with contextlib.suppress(OSError):
            is_mine = name and folder.stat().st_uid == os.getuid()
            if is_mine and not process_group.is_running(int(name[1]), name[2]):
                shutil.rmtree(folder, ignore_errors=True)


def _kill(region_prefix: str) -> None:
    """SIGKILL to all of a server's processes; returns when none is left, or after some seconds. Raises ValueError for
    what is no prefix of ours: a word such as "python" is in the command lines of strangers."""
    if not re.fullmatch(r"inkling_[0-9a-f]{12}_", region_prefix):
        raise ValueError(f"{region_prefix!r} is no prefix of a server's shared memory")
    deadline = time.monotonic() + KILL_S
    while (pids := process_group.with_word(region_prefix)) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
