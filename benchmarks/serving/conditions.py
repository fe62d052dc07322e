"""What a row was measured on and with."""

from __future__ import annotations

from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version

import torch

from benchmarks.results import git_commit, processor


def conditions(checkpoint: str, device: str, dtype: str, commit: str) -> dict[str, str]:
    """``device``: cpu or cuda. ``commit``: empty for git's own word."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit or git_commit(),
        "checkpoint": checkpoint,
        "gpu": torch.cuda.get_device_name(0) if device == "cuda" else "none",
        "processor": processor(),
        "dtype": dtype,
        "torch": torch.__version__,
    }


def installed(package: str) -> str:
    """Its version; empty where it is not there."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
