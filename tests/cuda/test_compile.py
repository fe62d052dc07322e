"""Every serving configuration compiles for sm_90 without a GPU: wgmma where it is promised, and no spills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.cuda import compile as compiler

ROOT = Path(__file__).parents[2]
MODULES = sorted(p.stem for p in (ROOT / "kernels" / "cuda").glob("*.py") if "\nSERVING = " in p.read_text())


@pytest.mark.parametrize("module", MODULES)
def test_serving_configurations_compile_to_wgmma_without_spills(module):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "kernels.cuda.compile", "--json", module]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    results = [compiler.Compiled(**json.loads(line)) for line in done.stdout.splitlines()]
    assert results, f"kernels.cuda.{module} exports an empty SERVING"
    assert not [fault for result in results for fault in result.faults()]


def test_a_spill_too_much_shared_memory_another_matrix_instruction_and_waits_between_them_and_a_late_fence_are_faults():
    good = {"name": "k", "registers": 100, "spilled": 0, "shared": 1024, "has_wgmma": True, "has_mma_sync": False}
    assert not compiler.Compiled(**good, wants_wgmma=True).faults()
    changes = [{"spilled": 8}, {"shared": 1 << 20}, {"has_wgmma": False}]
    changes += [{flag: True} for flag in ("has_mma_sync", "serialized", "late_fence", "unwaited")]
    for change in changes:
        assert len(compiler.Compiled(**(good | change), wants_wgmma=True).faults()) == 1
    assert not compiler.Compiled(**(good | {"has_wgmma": False}), wants_wgmma=False).faults()


def test_a_fence_is_late_where_no_barrier_follows_it():
    store, fence, barrier, product = "st.shared.b32", "fence.proxy.async", "bar.sync 0", "wgmma.mma_async"
    assert compiler.has_late_fence("\n".join([store, barrier, fence, product]))
    assert not compiler.has_late_fence("\n".join([store, fence, barrier, product]))
    assert not compiler.has_late_fence("\n".join([store, fence, barrier, fence, product]))


def test_a_kernel_launched_early_waits_before_it_stores_or_ends():
    begin, wait, store = "griddepcontrol.launch_dependents;", "griddepcontrol.wait;", "st.global.b32 [%rd1], { %r1 };"
    assert compiler.waits_first("\n".join([begin, wait, store, "ret;"]))
    assert not compiler.waits_first("\n".join([begin, store, wait, "ret;"]))
    assert not compiler.waits_first("\n".join(["@%p1 ret;", wait, store]))
    assert not compiler.waits_first("\n".join([begin, store, "ret;"]))


def test_the_cpu_path_does_not_import_triton():
    names = [f"kernels.{p.stem}" for p in sorted((ROOT / "kernels").glob("*.py")) if p.stem != "__init__"]
    names += ["inkling.model.target", "inkling.model.mtp"]
    code = "import sys\n" + "".join(f"import {name}\n" for name in names) + "assert 'triton' not in sys.modules\n"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
