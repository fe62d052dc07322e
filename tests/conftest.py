"""How the suite spreads over workers (``pytest -n 2 --dist loadgroup``, as ``make test`` calls it)."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A module's tests share a worker, and with it their models; so do all that start servers, which begin first."""
    for item in items:
        group = "server" if item.get_closest_marker("server") else item.nodeid.split("::")[0]
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: item.get_closest_marker("server") is None)
