"""The runner of the kernel benchmark, without a GPU: what it selects, and what a failing configuration costs."""

from __future__ import annotations

import csv
import time

from benchmarks import kernels
from benchmarks.kernel_cells.cell import Built, Cell

FIGURES = dict.fromkeys(kernels.FIGURES, 1.0) | {"bound": "", "error": ""}


class OutOfResourcesError(Exception):
    """Like triton's: no RuntimeError."""


def built() -> Built:
    return Built(runs=[lambda: None], check=lambda: None, bytes=1)


def too_large() -> Built:
    raise OutOfResourcesError("out of resource: shared memory, Required: 262144, Hardware limit: 232448")


def test_a_configuration_that_fails_is_a_row_and_the_next_is_measured(monkeypatch, tmp_path):
    cells = [Cell("op", "1 x 2", built, {"wide": too_large, "narrow": built})]
    plan = kernels.Plan("part", (), True, tmp_path / "t.csv", {"read_gbs": 1, "copy_gbs": 1})
    monkeypatch.setattr(kernels, "import_module", lambda _: type("Part", (), {"cells": staticmethod(lambda: cells)}))
    monkeypatch.setattr(kernels, "measure", lambda built, *ceilings: dict(FIGURES))
    kernels._child(plan, [0.0, 0.0, 0.0], time.monotonic() + 60)
    with (tmp_path / "t.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["configuration"] for row in rows] == ["table", "wide", "narrow"]
    assert [bool(row["error"]) for row in rows] == [False, True, False]
    assert "shared memory" in rows[1]["error"]


def test_candidates_narrow_the_run_to_the_cells_that_have_some(monkeypatch, tmp_path):
    cells = [Cell("op", "a", built), Cell("op", "b", built, {"other": built})]
    cells.append(Cell("oq", "c", built, configuration="S1"))
    monkeypatch.setattr(kernels, "import_module", lambda _: type("Part", (), {"cells": staticmethod(lambda: cells)}))

    def names(*only: str, with_candidates: bool = False) -> list[tuple[str, str]]:
        plan = kernels.Plan("part", only, with_candidates, tmp_path / "t.csv", {})
        return [(cell.shape, configuration) for cell, configuration, _ in kernels.points(plan)]

    assert names() == [("a", "table"), ("b", "table"), ("c", "S1")]
    assert names("oq") == [("c", "S1")]
    assert names("oq", "op b") == [("c", "S1"), ("b", "table")]
    assert names(with_candidates=True) == [("b", "table"), ("b", "other")]


def test_the_cost_of_exactness_is_the_largest_ratio_of_a_shape(capsys):
    costs = kernels.Costs()
    rows = (("x free", "S1", 1.02), ("x free", "S4", 1.07), ("x free", "S2", 0.9), ("x", "table", 3))
    for op, configuration, ratio in rows:
        costs.add(dict(FIGURES) | {"op": op, "shape": "8 x 2", "configuration": configuration, "ratio": ratio})
    costs.add(dict(FIGURES) | {"op": "x free", "shape": "8 x 2", "configuration": "S9", "ratio": "", "error": "no"})
    costs.report()
    printed = capsys.readouterr().out
    assert "exact +7.0 % beside S4" in printed and printed.count("\n") == 1
