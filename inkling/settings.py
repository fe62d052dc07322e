"""One frozen settings object, read by all three models: a TOML file, then environment overrides.

The file is named by ``INKLING_SETTINGS``; every field can be overridden by ``INKLING_<FIELD>``. Unknown keys of
either source are refused. ``inkling serve`` writes the file from its options.
"""

from __future__ import annotations

import os
import tempfile
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from inkling.errors import SettingsError

ENV_PREFIX = "INKLING_"
ENV_FILE = ENV_PREFIX + "SETTINGS"


@dataclass(frozen=True)
class Settings:
    checkpoint: str  # checkpoint directory, or synthetic:NAME?seed=0
    device: str = "cpu"  # cpu | cuda
    gpu: int = 0  # which one of those that CUDA shows, when device is cuda
    dtype: str = "auto"  # auto: float32 on the CPU, bfloat16 on CUDA
    num_draft_tokens: int = -1  # N, drafts verified per step; -1: every depth of the checkpoint
    draft_length: str = "auto"  # auto: at most N, what gives the most tokens per second; fixed: every step N
    max_context: int = 0  # positions of one sequence; 0: the checkpoint's limit, at most 4096
    max_running_sequences: int = 16
    max_tokens_per_step: int = 512  # rows of one target call: decodes first, then prompt chunks
    max_prompt_chunk: int = 0  # rows of one prompt in a step; 0: as many as running answers hardly notice
    max_queued_requests: int = 256  # waiting requests; one more is answered UNAVAILABLE
    cache_bytes: int = 0  # all caches of target and draft together; 0: 1 GiB, or what a GPU has left
    prefix_cache: str = "on"  # on | off: reuse of cached prefixes. Never changes an answer
    prefix_block: int = 256  # positions that a reused prefix is a multiple of; itself a multiple of 64
    cuda_graphs: str = (
        "on"  # on | off: decode and draft steps replayed as CUDA graphs. Never changes an answer
    )
    hidden_transport: str = (
        "ring"  # ring: target and draft map the same memory; dlpack: tensors through the server
    )
    threads: int = 0  # torch threads of target and draft; 0: half of the cores. Part of the promise
    tensor_parallel_size: int = 1
    log_format: str = "text"  # text | json | off: one line for every request at its end
    run_dir: str = ""  # parent of the run folder; empty: the system's temporary directory
    load_timeout_s: int = 1800  # how long the draft waits for the target to load
    step_timeout_s: int = 120  # a step that takes longer hangs: the server gives up

    def __post_init__(self):
        _check(self.checkpoint != "", "checkpoint", self.checkpoint, "a checkpoint directory")
        _check(self.device in ("cpu", "cuda"), "device", self.device, "cpu or cuda")
        _check(
            self.dtype in ("auto", "float32", "bfloat16"), "dtype", self.dtype, "auto, float32 or bfloat16"
        )
        if self.device == "cuda":
            _check(self.dtype != "float32", "dtype", self.dtype, "auto or bfloat16 on cuda")
        _check(self.draft_length in ("fixed", "auto"), "draft_length", self.draft_length, "fixed or auto")
        _check(self.num_draft_tokens >= -1, "num_draft_tokens", self.num_draft_tokens, "-1 or more")
        _check(self.prefix_cache in ("on", "off"), "prefix_cache", self.prefix_cache, "on or off")
        _check(self.cuda_graphs in ("on", "off"), "cuda_graphs", self.cuda_graphs, "on or off")
        transports = ("ring", "dlpack")
        _check(
            self.hidden_transport in transports, "hidden_transport", self.hidden_transport, "ring or dlpack"
        )
        _check(self.log_format in ("text", "json", "off"), "log_format", self.log_format, "text, json or off")
        _check(self.prefix_block > 0, "prefix_block", self.prefix_block, "1 or more")
        _check(self.max_context >= 0, "max_context", self.max_context, "0 or more")
        _check(self.tensor_parallel_size == 1, "tensor_parallel_size", self.tensor_parallel_size, "1 for now")
        for name in ("max_running_sequences", "max_tokens_per_step", "max_queued_requests", "step_timeout_s"):
            _check(getattr(self, name) > 0, name, getattr(self, name), "1 or more")
        for name in ("threads", "load_timeout_s", "max_prompt_chunk", "cache_bytes", "gpu"):
            _check(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")

    @property
    def torch_dtype_name(self) -> str:
        if self.dtype != "auto":
            return self.dtype
        return "float32" if self.device == "cpu" else "bfloat16"

    @property
    def cuda_pool_bytes(self) -> int:
        """The server's own memory on the GPU: calls between models copy their GPU tensors through it, twice on the
        way in and once on the way out, and take memory call by call when it is short. 0: no GPU tensor travels."""
        if self.device == "cpu" or self.hidden_transport == "ring" or self.num_draft_tokens == 0:
            return 0
        widest_row = 16 << 10  # 8192 bf16 states
        return max(64 << 20, 4 * self.max_tokens_per_step * widest_row)

    @property
    def num_threads(self) -> int:
        return self.threads or max(1, (os.cpu_count() or 1) // 2)

    @property
    def run_root(self) -> Path:
        return Path(self.run_dir or tempfile.gettempdir())

    @classmethod
    def load(cls, environ: Mapping[str, str] = os.environ) -> Settings:
        """Settings of the file ``INKLING_SETTINGS`` names, overridden by the environment. Raises SettingsError."""
        values: dict[str, object] = {}
        if file := environ.get(ENV_FILE):
            try:
                values = tomllib.loads(Path(file).read_text())
            except (OSError, tomllib.TOMLDecodeError) as error:
                raise SettingsError(f"{ENV_FILE} is {file!r}: {error}") from error
        for name, text in environ.items():
            if name.startswith(ENV_PREFIX) and name != ENV_FILE:
                values[name.removeprefix(ENV_PREFIX).lower()] = text
        return cls.from_values(values)

    @classmethod
    def from_values(cls, values: Mapping[str, object]) -> Settings:
        known = {f.name: f for f in fields(cls)}
        for name in values:
            if name not in known:
                raise SettingsError(f"unknown setting {name!r}; known are {', '.join(sorted(known))}")
        if "checkpoint" not in values:
            raise SettingsError(
                f"checkpoint is not set; name a directory with --checkpoint, {ENV_PREFIX}CHECKPOINT or {ENV_FILE}"
            )
        return cls(**{name: _typed(name, value, known[name].type) for name, value in values.items()})

    def to_toml(self) -> str:
        def literal(value: object) -> str:
            return (
                str(value)
                if isinstance(value, int)
                else '"' + str(value).replace("\\", "\\\\").replace('"', '\\"') + '"'
            )

        return "".join(f"{f.name} = {literal(getattr(self, f.name))}\n" for f in fields(self))


def _typed(name: str, value: object, type_name: str) -> object:
    if type_name == "str":
        if not isinstance(value, str):
            raise SettingsError(f"{name} is {value!r}; it must be a string")
        return value
    if isinstance(value, bool):
        raise SettingsError(f"{name} is {value!r}; it must be an integer")
    try:
        return int(value)
    except (TypeError, ValueError) as error:
        raise SettingsError(f"{name} is {value!r}; it must be an integer") from error


def _check(holds: bool, name: str, value: object, bound: str) -> None:
    if not holds:
        raise SettingsError(f"{name} is {value!r}; it must be {bound}")
