"""Where the three model processes of one server meet: a private folder named after their parent process.

The target writes ``target.json`` when it is ready: the key that private calls carry, its generation number, the size
of the caches, and the handle of the memory that it shares with the draft. The others wait for it and fail with its
reason when it fails. ``drain`` asks the engine to admit nothing more, and holds the seconds that open requests have;
``drained`` answers that none is open. Each of the three keeps a heartbeat (``inkling.liveness``).
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from inkling import process_group
from inkling.device_memory import BlockHandle
from inkling.errors import ModelError
from inkling.protocol import KEY_WORDS

_POLL_S = 0.05
_PROGRESS_S = 5.0


@dataclass(frozen=True)
class TargetRecord:
    """What the target tells the others."""

    key: str  # hex, 4 * KEY_WORDS bytes
    generation: int  # 31 bits
    pid: int
    start_time: str  # of that process: a pid may be used again
    cache_bytes: int  # of all caches: one process decides
    block: BlockHandle  # of the memory shared with the draft

    @classmethod
    def create(cls, cache_bytes: int, block: BlockHandle) -> TargetRecord:
        """Of this process, with a new key and a new generation."""
        key, generation = secrets.token_hex(4 * KEY_WORDS), secrets.randbelow(2**31 - 1) + 1
        return cls(key, generation, os.getpid(), process_group.start_time(os.getpid()), cache_bytes, block)

    @classmethod
    def from_json(cls, text: str) -> TargetRecord:
        values = json.loads(text)
        return cls(**values | {"block": BlockHandle(**values["block"])})

    @property
    def key_words(self) -> np.ndarray:
        """INT32 [8], as every CONTROL tensor carries it."""
        return np.frombuffer(bytes.fromhex(self.key), np.int32)


class RunFolder:
    def __init__(self, path: Path):
        self.path = path
        self.drain = path / "drain"
        self.drained = path / "drained"
        self.shared_block = path / "shared_block"
        self._record = path / "target.json"
        self._failure = path / "target.error"
        self._loading = path / "target.pid"
        self._restarts = path / "restarts"

    @classmethod
    def of_server(cls, root: Path, pid: int) -> RunFolder:
        """The folder of the tritonserver process ``pid``; its start time keeps a reused pid apart."""
        return cls(root / f"inkling-{pid}-{process_group.start_time(pid)}")

    @classmethod
    def of_parent(cls, root: Path) -> RunFolder:
        """The folder of this stub's server."""
        return cls.of_server(root, os.getppid())

    def create(self) -> None:
        """Each of the three processes makes sure of it. Raises ModelError when it cannot be this user's own."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ModelError(
                f"run folder {self.path} cannot be made: {error}; set run_dir to another place"
            ) from error
        if self.path.stat().st_uid != os.getuid():
            raise ModelError(
                f"run folder {self.path} belongs to user {self.path.stat().st_uid}; set run_dir to another place"
            )
        self.path.chmod(0o700)

    def clock(self, model: str) -> Path:
        """Where ``model`` counts the time of its steps (``inkling.step_clock``)."""
        return self.path / f"{model}.clock"

    def note_restarts(self, number: int) -> None:
        """Whoever starts the server says how many failed ones came before it. It may be there before the models."""
        self.create()
        self._write(self._restarts, str(number))

    def restarts(self) -> int:
        try:
            return int(self._restarts.read_text())
        except FileNotFoundError:
            return 0

    def heartbeat(self, model: str) -> Path:
        return self.path / f"{model}.heartbeat"

    def announce_loading(self) -> None:
        """The target says that it loads, and in which process."""
        self._write(self._loading, str(os.getpid()))

    def publish(self, record: TargetRecord) -> None:
        self._write(self._record, json.dumps(asdict(record)))

    def publish_failure(self, reason: str) -> None:
        self._write(self._failure, reason)

    def record(self) -> TargetRecord | None:
        try:
            return TargetRecord.from_json(self._record.read_text())
        except FileNotFoundError:
            return None

    def wait_for_target(self, timeout_s: float, progress: Callable[[str], None]) -> TargetRecord:
        """Blocks until the target is ready. Raises ModelError with its reason, or after ``timeout_s``."""
        start = told = time.monotonic()
        while True:
            if record := self.record():
                if not process_group.is_running(record.pid, record.start_time):
                    raise ModelError(
                        f"inkling_target (pid {record.pid}) is ready and gone; restart the server"
                    )
                return record
            if self._failure.exists():
                raise ModelError(f"inkling_target failed to load: {self._failure.read_text()}")
            if self._loading.exists() and process_group.state(int(self._loading.read_text())) in "ZX":
                raise ModelError(
                    "inkling_target ended while it loaded; see the server's log, and its memory limit"
                )
            now = time.monotonic()
            if now - start > timeout_s:
                raise ModelError(
                    f"inkling_target was not ready after {timeout_s:.0f} s; raise load_timeout_s or see its log"
                )
            if now - told > _PROGRESS_S:
                told = now
                progress(f"waiting for inkling_target, {now - start:.0f} of at most {timeout_s:.0f} s")
            time.sleep(_POLL_S)

    def ask_drain(self, timeout_s: float) -> None:
        self._write(self.drain, str(timeout_s))

    def serve_drain(self, drain: Callable[[float], None]) -> None:
        """Waits for ``ask_drain``, calls ``drain`` with its seconds, and creates ``drained``."""
        while not self.drain.exists():
            time.sleep(_POLL_S)
        drain(float(self.drain.read_text()))
        self.drained.touch(mode=0o600)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def _write(self, file: Path, text: str) -> None:
        """Appears whole, readable by this user alone."""
        partial = file.with_suffix(".partial")
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as stream:
            stream.write(text)
        partial.replace(file)
