"""Find a Triton server and fit its python backend to the running interpreter.

Two installations are known: the one inside the ``nvidia-pytriton`` distribution (server 2.51.0, one stub for
each Python version, none of them in place), and a ``tritonserver`` on PATH, which brings its own backends and
stub (the NGC images). Nothing in site-packages is changed: the packaged server's backend folder is rebuilt
from symbolic links wherever the caller says.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from inkling.errors import InklingError

PACKAGED_SERVER_VERSIONS = {"0.7.0": "2.51.0"}  # the server inside a release of nvidia-pytriton
FIRST_NUMPY_2_SERVER = (2, 52)  # NGC 24.11: pybind11 2.12 in the stub
STUB_NAME = "triton_python_backend_stub"


class ServerError(InklingError):
    """The server cannot be started, or ended on its own. The message says why and what to do."""


class ServerLostError(ServerError):
    """A server that was ready can serve no more; another start may."""


@dataclass(frozen=True)
class Installation:
    executable: Path
    packaged_root: Path | None = None  # pytriton/tritonserver; None: the server on PATH has its own backends
    server_version: str = ""  # empty: not known

    def link_backends(self, folder: Path) -> Path | None:
        """Fill ``folder`` with links that form a backend directory; None when the server needs none."""
        if self.packaged_root is None:
            return None
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        stub = self.packaged_root / "python_backend_stubs" / version / STUB_NAME
        if not stub.is_file():
            known = ", ".join(sorted(p.name for p in stub.parent.parent.iterdir()))
            raise ServerError(f"the packaged server has no python stub for Python {version}; it has {known}")
        python_backend = folder / "python"
        python_backend.mkdir(parents=True)
        for file in (self.packaged_root / "backends" / "python").iterdir():
            if file.is_file() and file.name != STUB_NAME:
                (python_backend / file.name).symlink_to(file)
        (python_backend / STUB_NAME).symlink_to(stub)
        return folder

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """``environ`` for the server. The stub takes the site-packages of the ``python3`` first on PATH."""
        bin_dir = Path(sys.executable).parent
        if not (bin_dir / "python3").exists():
            raise ServerError(f"{bin_dir} has no python3; run inkling in the environment it is installed in")
        changed = dict(environ)
        changed["PATH"] = _first(str(bin_dir), environ.get("PATH"))
        changed["PYTHONDONTWRITEBYTECODE"] = "1"
        changed["OMP_WAIT_POLICY"] = "passive"  # target and draft take turns on the same cores
        if self.packaged_root is not None:  # its stubs link libpython without saying where it lies
            libraries = sysconfig.get_config_var("LIBDIR")
            changed["LD_LIBRARY_PATH"] = _first(libraries, environ.get("LD_LIBRARY_PATH"))
        return changed


def find_installation(environ: Mapping[str, str]) -> Installation:
    """The packaged server, or the one on PATH. Raises ServerError when there is none."""
    spec = importlib.util.find_spec("pytriton")
    if spec is not None and spec.origin is not None:
        root = Path(spec.origin).parent / "tritonserver"
        if (executable := root / "bin" / "tritonserver").is_file():
            version = PACKAGED_SERVER_VERSIONS.get(metadata.version("nvidia-pytriton"), "")
            return Installation(executable, root, version)
    if found := shutil.which("tritonserver", path=environ.get("PATH")):
        return Installation(Path(found), server_version=environ.get("TRITON_SERVER_VERSION", ""))
    raise ServerError("no Triton server: install inkling-triton[server], or put tritonserver on PATH")


def check_numpy(numpy_version: str, server_version: str) -> None:
    """Refuse numpy 2 with a stub that predates it: arrays would arrive and leave broken, without an error."""
    if int(numpy_version.split(".")[0]) < 2 or not server_version:
        return
    if tuple(int(part) for part in server_version.split(".")[:2]) < FIRST_NUMPY_2_SERVER:
        raise ServerError(
            f"numpy is {numpy_version}; the python stub of server {server_version} predates numpy 2 and "
            "corrupts its arrays. Install numpy<2, or use server 2.52 (24.11) or later"
        )


def model_repository() -> Path:
    """The folder of the three models: beside this package in a checkout, under ``share`` of a wheel."""
    checkout = Path(__file__).parents[1] / "model_repository"
    # not sys.prefix: Debian's and Ubuntu's own Python has /usr there and installs below /usr/local
    installed = Path(sysconfig.get_path("data")) / "share" / "inkling-triton" / "model_repository"
    for folder in (checkout, installed):
        if folder.is_dir():
            return folder
    raise ServerError(f"no model repository in {checkout} or {installed}; reinstall inkling-triton")


def _first(entry: str | None, path: str | None) -> str:
    return ":".join(part for part in (entry, path) if part)
