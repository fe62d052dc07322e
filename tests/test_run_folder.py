"""Where the three processes meet, and how they learn that one of them is gone."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from inkling.device_memory import BlockHandle
from inkling.errors import ModelError
from inkling.run_folder import RunFolder, TargetRecord


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder.of_server(tmp_path, os.getpid())
    folder.create()
    return folder


def wait(folder: RunFolder, timeout_s: float = 30.0) -> TargetRecord:
    return folder.wait_for_target(timeout_s, lambda line: None)


def test_the_record_is_private_and_reads_back(folder: RunFolder) -> None:
    record = TargetRecord.create(1 << 30, BlockHandle(64, ipc="ab" * 64, gpu_uuid="GPU-7"))
    folder.publish(record)
    assert wait(folder) == record and len(record.key_words) == 8
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in folder.path.iterdir())


def test_the_waiting_model_fails_with_the_targets_reason(folder: RunFolder) -> None:
    folder.publish_failure("no such tensor")
    with pytest.raises(ModelError, match="failed to load: no such tensor"):
        wait(folder)


def test_the_waiting_model_fails_when_the_target_is_killed_while_loading(folder: RunFolder) -> None:
    target = subprocess.run(
        [sys.executable, "-c", "import os, sys; print(os.getpid())"],
        capture_output=True,
        text=True,
        check=True,
    )
    (folder.path / "target.pid").write_text(target.stdout)
    with pytest.raises(ModelError, match="ended while it loaded"):
        wait(folder)


@pytest.mark.parametrize("other", [{"pid": 2**22 + 1}, {"start_time": "1"}], ids=["gone", "pid used again"])
def test_a_record_that_outlived_its_target_is_refused(folder: RunFolder, other: dict) -> None:
    record = replace(TargetRecord.create(1, BlockHandle(64)), **other)
    folder.publish(record)
    with pytest.raises(ModelError, match=rf"pid {record.pid}\) is ready and gone; restart the server"):
        wait(folder)


def test_waiting_has_a_bound(folder: RunFolder) -> None:
    folder.announce_loading()
    with pytest.raises(ModelError, match="raise load_timeout_s"):
        wait(folder, timeout_s=0.1)


def test_a_folder_that_cannot_be_made_names_the_setting(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="set run_dir to another place"):
        RunFolder.of_server(tmp_path / "file", os.getpid()).create()


def test_a_reused_pid_has_another_folder(tmp_path: Path) -> None:
    name = RunFolder.of_server(tmp_path, os.getpid()).path.name
    assert name.startswith(f"inkling-{os.getpid()}-") and name.count("-") == 2
