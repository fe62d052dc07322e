"""Speed of the CUDA kernels: ``python -m benchmarks.kernels [--only OP] [--candidates]``, from the repository root.

Each cell first passes its correctness gate, then is timed by replaying a CUDA graph over rotating buffers, beside
cuBLAS or torch where one does the same; the ceilings are measured in the same run. A row is written as it comes. Cells
run in a child process: one that hangs or breaks the device costs itself alone.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.kernel_cells.cell import Built, Cell
from benchmarks.results import append_rows, git_commit

TABLE = Path(__file__).with_suffix(".csv")
PARTS = ("rows", "products", "attention", "experts", "layers")
START_S = 60  # a child's start: imports, the CUDA context, the cells


@dataclass(frozen=True)
class Plan:
    """What a child measures, and under which conditions."""

    part: str
    only: tuple[str, ...]
    with_candidates: bool
    table: Path
    conditions: dict[str, object]


def main(
    only: Annotated[list[str] | None, typer.Option(help="parts or beginnings of 'op shape', in turn")] = None,
    candidates: Annotated[
        bool, typer.Option(help="cells with other configurations alone, and these too")
    ] = False,
    table: Annotated[Path, typer.Option(help="CSV file the rows are appended to")] = TABLE,
    commit: Annotated[str, typer.Option(help="shown in the rows; default: git describe")] = "",
    minutes: Annotated[float, typer.Option(help="no cell starts later than this")] = 60.0,
) -> None:
    """Times the kernels of every part and appends the rows to a table."""
    if not torch.cuda.is_available():
        raise typer.BadParameter("no CUDA device: kernels are timed on a GPU")
    deadline = time.monotonic() + 60 * minutes
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        read, copy = pool.apply(_ceilings)
    conditions = {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit or git_commit(),
        "gpu": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "triton": import_module("triton").__version__,
        "read_gbs": round(read / 1e9),
        "copy_gbs": round(copy / 1e9),
    }
    print(", ".join(f"{name} {value}" for name, value in conditions.items()), flush=True)
    header = f"{'us':>9} {'GB/s':>6} {'%read':>5} {'%copy':>5} {'TF/s':>6} {'ref us':>8} {'ratio':>5}"
    print(f"{'op':20} {'shape':34} {'configuration':22} {header}", flush=True)
    for part in PARTS:
        if (Path(__file__).parent / "kernel_cells" / f"{part}.py").exists():
            plan = Plan(part, tuple(only or ()), candidates, table, conditions)
            _measure_part(context, plan, deadline)


def _ceilings() -> tuple[float, float]:
    from benchmarks.kernel_cells.ceilings import ceilings

    return ceilings()


def points(plan: Plan) -> list[tuple[Cell, str, Callable[[], Built]]]:
    """(cell, configuration, its build) in the order of measuring."""

    def turn(cell: Cell) -> int:
        """Place in ``plan.only`` of what the cell is wanted for; beyond it: of nothing."""
        wanted = (o == plan.part or f"{cell.op} {cell.shape}".startswith(o) for o in plan.only)
        return next((i for i, is_wanted in enumerate(wanted) if is_wanted), len(plan.only))

    cells = import_module(f"benchmarks.kernel_cells.{plan.part}").cells()
    found = []
    for cell in sorted(cells, key=turn):
        is_wanted = not plan.only or turn(cell) < len(plan.only)
        if is_wanted and (cell.candidates or not plan.with_candidates):
            found.append((cell, cell.configuration, cell.build))
            if plan.with_candidates:
                found += [(cell, name, build) for name, build in cell.candidates.items()]
    return found


def _measure_part(context: multiprocessing.context.SpawnContext, plan: Plan, deadline: float) -> None:
    """Children one after another until every point is done; a new one begins after the point that ended the last."""
    progress = context.Array(
        "d", [0.0, START_S, 0.0]
    )  # the point in work, the seconds it may take, whether it began
    while True:
        progress[2] = 0.0
        child = context.Process(target=_child, args=(plan, progress, deadline))
        begun, seen = time.monotonic(), progress[0]
        child.start()
        while child.is_alive():
            child.join(0.2)
            if progress[0] != seen:
                begun, seen = time.monotonic(), progress[0]
            if time.monotonic() - begun > progress[1]:
                print(f"{plan.part}: point {int(progress[0])} took more than {progress[1]:.0f} s", flush=True)
                child.kill()
                child.join()
        if child.exitcode == 0:
            return
        print(f"{plan.part}: a child ended at point {int(progress[0])} with {child.exitcode}", flush=True)
        if not progress[2]:
            return  # its cells could not be made
        progress[0] += 1
        progress[1] = START_S


def _child(plan: Plan, progress: list[float], deadline: float) -> None:
    todo, costs = points(plan), Costs()
    for index in range(int(progress[0]), len(todo)):
        if time.monotonic() > deadline:
            print(f"{plan.part}: out of time, {len(todo) - index} points not measured", flush=True)
            break
        cell, configuration, build = todo[index]
        progress[1] = cell.timeout_s + (START_S if index == int(progress[0]) else 0)
        progress[0], progress[2] = index, 1.0
        row = {"op": cell.op, "shape": cell.shape, "configuration": configuration}
        try:
            row |= measure(build(), float(plan.conditions["read_gbs"]), float(plan.conditions["copy_gbs"]))
        except Exception as error:  # also triton's: out of shared memory, no compilation
            row |= dict.fromkeys(FIGURES, "") | {"error": f"{type(error).__name__}: {error}"[:300]}
        append_rows(plan.table, plan.conditions, [row])
        print(_line(row), flush=True)
        costs.add(row)
        torch.cuda.empty_cache()
        if row["error"] and ("CUDA error" in row["error"] or "illegal" in row["error"]):
            os._exit(3)  # the context is broken: the next child carries on
    costs.report()


class Costs:
    """What row-exactness costs a shape: the largest ratio over the free launches, timed beside the committed one."""

    def __init__(self) -> None:
        self.largest: dict[tuple[str, str], dict[str, object]] = {}

    def add(self, row: dict[str, object]) -> None:
        key = (str(row["op"]), str(row["shape"]))
        if key[0].endswith(" free") and not row["error"]:
            self.largest[key] = max(self.largest.get(key, row), row, key=lambda r: float(r["ratio"]))

    def report(self) -> None:
        for (op, shape), row in self.largest.items():
            cost = f"exact {100 * (float(row['ratio']) - 1):+.1f} %"
            print(f"{op:20} {shape:34} {cost} beside {row['configuration']}  {row['bound']}", flush=True)


FIGURES = ("us", "gbs", "percent_of_read", "percent_of_copy", "tflops", "reference_us", "ratio", "bound")


def measure(built: Built, read_gbs: float, copy_gbs: float) -> dict[str, object]:
    """The row of one configuration; AssertionError when its gate fails."""
    from benchmarks.kernel_cells.ceilings import seconds_per_run

    built.check()
    groups = [built.runs] if built.baseline is None else [built.runs, built.baseline]
    seconds, *reference = seconds_per_run(groups)
    gbs = built.bytes / seconds / 1e9
    return {
        "us": round(seconds * 1e6, 2),
        "gbs": round(gbs),
        "percent_of_read": round(100 * gbs / read_gbs, 1),
        "percent_of_copy": round(100 * gbs / copy_gbs, 1),
        "tflops": round(built.flops / seconds / 1e12, 1),
        "reference_us": round(reference[0] * 1e6, 2) if reference else "",
        "ratio": round(reference[0] / seconds, 3) if reference else "",  # above 1: faster than the reference
        "bound": built.bound,
        "error": "",
    }


def _line(row: dict[str, object]) -> str:
    head = f"{row['op']:20} {row['shape']:34} {row['configuration']:22} "
    if row["error"]:
        return head + str(row["error"])
    figures = f"{row['us']:9} {row['gbs']:6} {row['percent_of_read']:5} {row['percent_of_copy']:5} {row['tflops']:6} "
    return head + figures + f"{row['reference_us']:>8} {row['ratio']:>5}  {row['bound']}"


if __name__ == "__main__":
    typer.run(main)
