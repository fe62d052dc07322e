"""Compiles kernels for an H200 (sm_90) on a machine without a GPU.

``python -m kernels.cuda.compile [--json] MODULE...`` compiles every entry of each module's ``SERVING`` and prints
registers, spilled bytes, shared memory and the matrix instructions found. Not under TRITON_INTERPRET.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource, CompiledKernel
from triton.runtime.jit import JITFunction

SM90 = GPUTarget("cuda", 90, 32)
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
SHARED_LIMIT = 227 << 10  # bytes of shared memory of one block on sm_90


@dataclass(frozen=True)
class Serving:
    """One configuration that serving launches: the kernel, the types of its arguments and its compile-time values."""

    name: str
    kernel: JITFunction
    signature: Mapping[str, str]  # run-time parameter -> "*bf16", "*fp32", "i32", ...
    constexprs: Mapping[str, object]
    num_warps: int = 4
    num_stages: int = 3
    aligned: tuple[str, ...] = ()  # integer parameters divisible by 16; pointers are always taken as such
    wgmma: bool = False  # its dots have to be wgmma and nothing else
    stack: int = 0  # bytes of a thread's stack that are meant, e.g. sums touched once a segment
    options: Mapping[str, object] = field(default_factory=dict)  # further compiler options, as at the launch


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of one configuration."""

    name: str
    registers: int  # of one thread
    spilled: int  # bytes of one thread's stack: spills and run-time indexed arrays
    shared: int  # bytes of one block
    has_wgmma: bool
    has_mma_sync: bool  # the older, slower matrix instruction, whose sums have other bits
    wants_wgmma: bool
    allowed_stack: int = 0
    serialized: bool = False  # the assembler waits for every single wgmma
    unwaited: bool = False  # launched early, it may store or end before it has waited for the last launch
    late_fence: bool = False  # a wgmma may read shared memory before another warp's stores are ordered before it

    def faults(self) -> list[str]:
        found = []
        if self.spilled > self.allowed_stack:
            found.append(f"{self.name}: {self.spilled} bytes of stack a thread; smaller blocks or more warps")
        if self.shared > SHARED_LIMIT:
            found.append(f"{self.name}: {self.shared} bytes of shared memory, at most {SHARED_LIMIT}; fewer stages")
        if self.wants_wgmma and (not self.has_wgmma or self.has_mma_sync):
            found.append(f"{self.name}: a dot is not wgmma; BLOCK_M a multiple of 64, 4 or 8 warps")
        if self.serialized:
            found.append(f"{self.name}: wgmma are serialized; no product may be in flight at a branch or a copy")
        if self.unwaited:
            found.append(f"{self.name}: launched early, but stores or ends before it waits; begin_launch comes first")
        if self.late_fence:
            found.append(f"{self.name}: no barrier between a fence of stores and their wgmma; two stages or more")
        return found


def compile_kernel(serving: Serving) -> CompiledKernel:
    """The compiled kernel; ``.asm`` holds ttir, ttgir, llir, ptx and cubin. Raises triton's CompilationError."""
    kernel = serving.kernel
    if not isinstance(kernel, JITFunction):
        raise TypeError(f"{serving.name}: {type(kernel).__name__} cannot be compiled; unset TRITON_INTERPRET")
    missing = [n for n in kernel.arg_names if n not in serving.signature and n not in serving.constexprs]
    if missing:
        raise ValueError(f"{serving.name}: no type and no value for {missing}")
    signature = {name: serving.signature.get(name, "constexpr") for name in kernel.arg_names}
    divisible = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*") or name in serving.aligned
    }
    constexprs = {name: serving.constexprs[name] for name in kernel.arg_names if signature[name] == "constexpr"}
    options = {"num_warps": serving.num_warps, "num_stages": serving.num_stages, **serving.options}
    return triton.compile(ASTSource(kernel, signature, constexprs, divisible), target=SM90, options=options)


def inspect(serving: Serving) -> Compiled:
    kernel = compile_kernel(serving)
    ptx = kernel.asm["ptx"]
    usage = _resource_usage(kernel.asm["cubin"])
    return Compiled(
        name=serving.name,
        registers=usage["REG"],
        spilled=usage["STACK"] + usage["LOCAL"],
        shared=kernel.metadata.shared,
        has_wgmma="wgmma.mma_async" in ptx,
        has_mma_sync="mma.sync" in ptx,
        wants_wgmma=serving.wgmma,
        allowed_stack=serving.stack,
        serialized="wgmma" in ptx and _is_serialized(ptx),
        unwaited=bool(serving.options.get("launch_pdl")) and not waits_first(ptx),
        late_fence=has_late_fence(ptx),
    )


def waits_first(ptx: str) -> bool:
    """Whether a kernel waits for the last launch before it stores or ends (``kernels.cuda.early_launch``)."""
    before, found, _ = ptx.partition("griddepcontrol.wait")
    return bool(found) and not re.search(r"\b(st\.global|atom\.|red\.|ret;)", before)


def has_late_fence(ptx: str) -> bool:
    """Whether some wgmma follows stores to shared memory and their fence, but no barrier after that fence.

    Each warp has to fence its own stores before the barrier that lets other warps' wgmma read them. Triton 3.6 places
    barriers and fences apart from each other: a barrier for another buffer between the two hides the need of one.
    """
    stored = fenced = False
    for line in ptx.splitlines():
        if "st.shared" in line or "stmatrix" in line:
            stored, fenced = True, False
        elif "fence.proxy.async" in line:
            fenced = True
        elif "bar.sync" in line:
            stored = stored and not fenced
        elif "wgmma.mma_async" in line and stored and fenced:
            return True
    return False


def _is_serialized(ptx: str) -> bool:
    """Whether ptxas reports (C7510 and its like) that it gave up the asynchrony of wgmma."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [get_ptxas(SM90.arch).path, "-v", "--gpu-name=sm_90a", file.name, "-o", os.devnull]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    return "wgmma.mma_async instructions are serialized" in text


def _resource_usage(cubin: bytes) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(CUOBJDUMP), "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    if len(found) != 3:
        raise RuntimeError(f"cuobjdump printed no resource usage: {text!r}")
    return found


def main(arguments: list[str]) -> None:
    as_json = "--json" in arguments
    for name in (a for a in arguments if a != "--json"):
        for serving in import_module(f"kernels.cuda.{name}").SERVING:
            result = inspect(serving)
            if as_json:
                print(json.dumps(asdict(result)), flush=True)
                continue
            dots = ("wgmma " if result.has_wgmma else "") + ("mma.sync" if result.has_mma_sync else "")
            line = f"{result.registers:4} regs {result.spilled:5} spilled {result.shared:7} shared  {dots:15}"
            print(line, result.name, *result.faults(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
