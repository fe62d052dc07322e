"""A block of GPU memory in two processes: CUDA IPC by the driver's own calls."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from inkling.device_memory import BlockHandle, export_block, gpu_bytes, map_block, use_gpu
from inkling.errors import ModelError, SettingsError

NUM_BYTES = (1 << 30) + 3 * 256  # no multiple of the driver's granularity; a second one could not be missed

MAP = """
import json, sys, torch
from inkling.device_memory import BlockHandle, map_block, use_gpu
device = use_gpu(0)

def check(block):
    good = bool(block[:1024].view(torch.int32).eq(7).all() & block[-1024:].view(torch.int32).eq(7).all())
    block.view(torch.int32).fill_(9)
    torch.cuda.synchronize()
    return good

assert check(torch.full((1024,), 7, dtype=torch.int32, device=device).view(torch.uint8))  # its kernels are loaded now
before = torch.cuda.mem_get_info()[0]
block = map_block(BlockHandle(**json.loads(sys.argv[1])), device)
assert block.numel() == int(sys.argv[2]) and check(block), block[:8]
print(before - torch.cuda.mem_get_info()[0])
"""


@pytest.mark.gpu
def test_another_process_reads_and_writes_the_same_memory(tmp_path: Path) -> None:
    device = use_gpu(0)
    allocated = torch.cuda.memory_allocated()
    block, handle = export_block(NUM_BYTES, device, tmp_path / "unused")
    assert torch.cuda.memory_allocated() == allocated, "torch copied it"
    assert not bool(block.any()) and not (tmp_path / "unused").exists()
    block.view(torch.int32).fill_(7)
    torch.cuda.synchronize()
    command = [sys.executable, "-c", MAP, json.dumps(asdict(handle)), str(NUM_BYTES)]
    other = subprocess.run(command, capture_output=True, text=True)
    assert other.returncode == 0, other.stderr
    assert int(other.stdout) < NUM_BYTES // 8, "mapping took memory of its own"
    assert bool((block.view(torch.int32) == 9).all())
    del block
    torch.cuda.empty_cache()


@pytest.mark.gpu
def test_a_block_of_another_gpu_or_a_broken_handle_is_refused() -> None:
    device = use_gpu(0)
    _, handle = export_block(256, device, Path("unused"))
    with pytest.raises(ModelError, match="the target runs on GPU GPU-1 and this model on"):
        map_block(replace(handle, gpu_uuid="GPU-1"), device)
    with pytest.raises(ModelError, match="an IPC handle has 64 bytes; the target's has 3"):
        map_block(replace(handle, ipc="00ff00"), device)
    with pytest.raises(ModelError, match="cuIpcOpenMemHandle_v2 failed with "):
        map_block(replace(handle, ipc="00" * 64), device)


@pytest.mark.gpu
def test_a_gpu_that_is_not_there_is_refused_with_the_range() -> None:
    with pytest.raises(SettingsError, match=f"gpu is 99; CUDA shows {torch.cuda.device_count()}"):
        gpu_bytes(99)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_remedy_is_named() -> None:
    with pytest.raises(SettingsError, match="sees no GPU; install a CUDA build and its driver, or use cpu"):
        use_gpu(0)


def test_a_handle_is_plain_json() -> None:
    handle = BlockHandle(64, ipc="ab" * 64, gpu_uuid="GPU-7")
    assert BlockHandle(**json.loads(json.dumps(asdict(handle)))) == handle
