"""What the next start removes, and what it must leave alone."""

from __future__ import annotations

import secrets
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from inkling import leftovers, process_group
from inkling.leftovers import make_work_folder, remove_leftovers

PREFIX = f"inkling_{secrets.token_hex(6)}_"  # of this run alone: others may run at the same time


@pytest.fixture(autouse=True)
def shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """All folders below ``tmp_path``."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(leftovers, "SHARED_MEMORY", folder)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (folder / f"{PREFIX}region").touch()
    (folder / "inkling_another_region").touch()
    return folder


@pytest.fixture
def orphan() -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", f"{PREFIX}region"])
    while process.pid not in process_group.with_word(PREFIX):  # its command line is there a little later
        assert process.poll() is None
    yield process
    process.kill()
    process.wait()


def test_a_dead_owner_s_processes_regions_and_folders_are_removed(tmp_path, shared_memory, orphan) -> None:
    work = make_work_folder(PREFIX)
    (work / "owner").write_text(f"{2**22 + 1} 17 {PREFIX}")
    run = tmp_path / f"inkling-{2**22 + 1}-17"
    run.mkdir()
    told: list[str] = []
    remove_leftovers(tmp_path, told.append)
    assert orphan.wait(timeout=5.0) < 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["shm"]
    assert [path.name for path in shared_memory.iterdir()] == ["inkling_another_region"]
    assert len(told) == 1 and str(2**22 + 1) in told[0]


def test_a_living_owner_keeps_all(tmp_path, shared_memory, orphan) -> None:
    work = make_work_folder(PREFIX)
    run = tmp_path / f"inkling-{orphan.pid}-{process_group.start_time(orphan.pid)}"
    run.mkdir()
    remove_leftovers(tmp_path)
    assert orphan.poll() is None and work.is_dir() and run.is_dir()
    assert len(list(shared_memory.iterdir())) == 2


def test_a_pid_used_again_is_a_dead_owner(tmp_path, orphan) -> None:
    work = make_work_folder(PREFIX)
    (work / "owner").write_text(f"{orphan.pid} 17 inkling_abcdefabcdef_")
    (tmp_path / f"inkling-{orphan.pid}-17").mkdir()
    remove_leftovers(tmp_path)
    assert orphan.poll() is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["shm"]


@pytest.mark.parametrize(
    "owner", ["", "x 17 " + PREFIX, f"{2**22 + 1} 17 python"], ids=["empty", "no pid", "short prefix"]
)
def test_a_record_that_is_none_is_left_alone(tmp_path, owner, monkeypatch) -> None:
    """A short prefix would match the command lines of strangers. Nothing may be killed here even where the check is
    broken: this test looks for no process and sends no signal."""
    asked: list[str] = []
    monkeypatch.setattr(process_group, "with_word", lambda word: asked.append(word) or [])
    monkeypatch.setattr(leftovers.os, "kill", lambda pid, number: pytest.fail("a signal was sent"))
    work = make_work_folder(PREFIX)
    (work / "owner").write_text(owner)
    remove_leftovers(tmp_path)
    assert work.is_dir() and asked == []


def test_folders_of_other_names_are_left_alone(tmp_path) -> None:
    for name in ("inkling-1-2-3", "inkling-a-17", "inkling-triton-1"):
        (tmp_path / name).mkdir()
    remove_leftovers(tmp_path)
    assert len(list(tmp_path.iterdir())) == 4
