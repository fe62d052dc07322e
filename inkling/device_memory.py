"""One flat block of memory that the target makes and the draft maps: a file's pages on the CPU, CUDA IPC on a GPU.

A handle holds plain fields, so that JSON carries it and reading one runs nothing. The CUDA driver is called directly:
a block of its own has a handle for exactly its bytes, and no allocator, reference counter or setting of one plays in.
"""

from __future__ import annotations

import ctypes
import importlib.util
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from inkling.errors import ModelError, SettingsError
from inkling.memory import format_bytes

_IPC_HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag there is


@dataclass(frozen=True)
class BlockHandle:
    """What another process needs to map the block."""

    num_bytes: int
    file: str = ""  # on the CPU: the mapped file
    ipc: str = ""  # on a GPU: the driver's handle, hex
    gpu_uuid: str = ""  # the physical GPU, whatever index a process sees it under


def use_gpu(index: int) -> torch.device:
    """Makes GPU ``index`` this thread's device. Raises SettingsError when there is no such GPU, or no Triton."""
    if importlib.util.find_spec("triton") is None:
        raise SettingsError(
            "device is 'cuda' and triton is not installed; install inkling-triton[cuda], or use cpu"
        )
    count = torch.cuda.device_count()
    if count == 0:
        build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
        raise SettingsError(
            f"device is 'cuda' and torch {torch.__version__}, built for {build}, sees no GPU; install a CUDA build and "
            "its driver, or use cpu"
        )
    if index >= count:
        raise SettingsError(f"gpu is {index}; CUDA shows {count}, so it must be from 0 to {count - 1}")
    torch.cuda.set_device(index)
    torch.zeros(1, device="cuda")  # makes the context current for the driver calls below
    return torch.device("cuda", index)


def gpu_bytes(index: int) -> int:
    """Memory of a GPU. Raises SettingsError like ``use_gpu``."""
    return torch.cuda.get_device_properties(use_gpu(index)).total_memory


def host_bytes() -> int:
    """Memory that this machine, or this container, can still give without swapping."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(lines["MemAvailable"].split()[0]) << 10
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")  # cgroup v2
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        available = min(available, int(text) - int(used.read_text()))
    return available


def check_host_memory(cache_bytes: int) -> None:
    """Pages of caches come when they are first written: a machine that has too few would kill the server under load.
    Raises SettingsError."""
    if cache_bytes > (available := host_bytes()):
        raise SettingsError(
            f"the caches take {format_bytes(cache_bytes)} and {format_bytes(available)} of memory are available; lower "
            "cache_bytes, max_running_sequences or max_context"
        )


def export_block(num_bytes: int, device: torch.device, file: Path) -> tuple[Tensor, BlockHandle]:
    """A new block, uint8 [num_bytes], zero, and its handle. It lives as long as this process.

    ``file``: what backs it on the CPU; it is made with mode 0600.
    """
    if device.type == "cpu":
        file.touch(mode=0o600)
        return _mapped_file(file, num_bytes), BlockHandle(num_bytes, file=str(file))
    driver = _Driver()
    address = driver.allocate(num_bytes)
    block = _at_address(address, num_bytes, device).zero_()
    return block, BlockHandle(num_bytes, ipc=driver.export(address).hex(), gpu_uuid=_uuid(device))


def map_block(handle: BlockHandle, device: torch.device) -> Tensor:
    """Another process's block, uint8 [num_bytes]. Raises ModelError when it is not on ``device``."""
    if device.type == "cpu":
        if not handle.file:
            raise ModelError(
                "the target's memory is on a GPU and this model runs on the CPU; give both one device"
            )
        return _mapped_file(Path(handle.file), handle.num_bytes)
    if handle.gpu_uuid != _uuid(device):
        raise ModelError(
            f"the target runs on GPU {handle.gpu_uuid or '(none)'} and this model on {_uuid(device)}; "
            "start both with the same settings and CUDA_VISIBLE_DEVICES"
        )
    return _at_address(_Driver().open(bytes.fromhex(handle.ipc)), handle.num_bytes, device)


def _mapped_file(file: Path, num_bytes: int) -> Tensor:
    return torch.from_file(str(file), shared=True, size=num_bytes, dtype=torch.uint8)


def _uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


class _Address:
    """Device memory as torch.as_tensor takes it (CUDA array interface, version 3)."""

    def __init__(self, address: int, num_bytes: int):
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _at_address(address: int, num_bytes: int, device: torch.device) -> Tensor:
    block = torch.as_tensor(_Address(address, num_bytes), device=device)
    if block.data_ptr() != address:
        raise ModelError(f"torch copied the block at {address:#x} on {device} instead of taking it as it is")
    return block


class _IpcHandle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_byte * _IPC_HANDLE_BYTES)]


class _Driver:
    """The four driver calls; each raises ModelError with the driver's own words. Needs a current context."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")

    def allocate(self, num_bytes: int) -> int:
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        return address.value

    def export(self, address: int) -> bytes:
        handle = _IpcHandle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        if len(handle) != _IPC_HANDLE_BYTES:
            raise ModelError(f"an IPC handle has {_IPC_HANDLE_BYTES} bytes; the target's has {len(handle)}")
        address = ctypes.c_uint64()
        flags = ctypes.c_uint(_LAZY_PEER_ACCESS)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), _IpcHandle.from_buffer_copy(handle), flags)
        return address.value

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(status, ctypes.byref(text))
            raise ModelError(f"{name} failed with {status}: {(text.value or b'').decode()}")
