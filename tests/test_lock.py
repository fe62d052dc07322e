"""``constraints.txt`` is the lock of a CPU installation: every distribution, direct or not, in one version."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
EXTRAS = ("server", "test")  # what `make install` takes


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def locked() -> dict[str, str]:
    lines = (line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines())
    pairs = [line.split("==") for line in lines if line]
    assert all(len(pair) == 2 for pair in pairs), "a version that is not exact"
    return {normal(name): version for name, version in pairs}


def needed() -> dict[str, str]:
    """Name -> installed version of everything that the project requires, found from the installed metadata."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    waiting = [Requirement(r) for r in project["dependencies"] + [r for e in EXTRAS for r in optional[e]]]
    found: dict[str, str] = {}
    seen = set()
    while waiting:
        required = waiting.pop()
        key = normal(required.name), frozenset(required.extras)
        if key in seen:
            continue
        seen.add(key)
        try:
            installed = distribution(required.name)
        except PackageNotFoundError:
            continue  # of another platform
        found[key[0]] = installed.version.split("+")[0]  # torch says which build it is
        for requirement in map(Requirement, installed.requires or ()):
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in (*required.extras, "")):
                waiting.append(requirement)
    return found


def test_everything_that_is_installed_is_locked_in_its_version() -> None:
    lock = locked()
    assert {name: version for name, version in needed().items() if lock.get(name) != version} == {}


def test_nothing_else_is_locked() -> None:
    assert set(locked()) - set(needed()) == set()
