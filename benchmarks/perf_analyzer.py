"""NVIDIA's perf_analyzer: where the program comes from, one run of it, and what its exported profile says.

The program (BSD licence) lies in the wheels of tritonclient up to 2.48.0 and nowhere else on PyPI; pip fetches that
wheel once. The two libraries it needs beside the system's lie in the nvidia-pytriton wheel under hashed names.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path

from benchmarks.results import ROOT
from inkling.protocol import ENSEMBLE_MODEL

VERSION = "2.48.0"
WHEEL_SHA256 = "7074885798e8a711fedaf94d6dd77f310973fe2ebf29fb2837db350a43e2d6a5"
CACHE = ROOT / ".cache" / f"perf_analyzer-{VERSION}"
LIBRARIES = {"libb64.so.0d": "libb64-*.so.0d", "libcudart.so.12": "libcudart-*.so.12*"}
TIMEOUT_S = 600  # of one run


@dataclass(frozen=True)
class Answer:
    """One request as its client saw it."""

    prompt: str  # text_input, or the ids as the profile has them
    start: float  # seconds, like all times here
    times: tuple[float, ...]  # of each response
    tokens: tuple[int, ...]  # in each response
    text: str  # bytes as latin-1

    @property
    def num_tokens(self) -> int:
        return sum(self.tokens)

    @property
    def time_to_first_token(self) -> float:
        return self.times[0] - self.start

    @property
    def time_per_output_token(self) -> float | None:
        """Of the tokens after the first response; None when there are none."""
        later = self.num_tokens - self.tokens[0]
        return (self.times[-1] - self.times[0]) / later if later else None

    @property
    def gaps(self) -> list[float]:
        return [late - early for early, late in zip(self.times, self.times[1:], strict=False)]


def install(cache: Path = CACHE) -> Path:
    """The folder with the program and links to its libraries; fetched when it is not there."""
    if cache.is_dir():
        return cache
    cache.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache.parent) as name:
        folder = Path(name) / "new"
        folder.mkdir()
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        source = ["--platform", "manylinux1_x86_64", "--dest", name, f"tritonclient=={VERSION}"]
        subprocess.run([*pip, *source], check=True)
        (wheel,) = Path(name).glob("*.whl")
        if (found := hashlib.sha256(wheel.read_bytes()).hexdigest()) != WHEEL_SHA256:
            sys.exit(f"{wheel.name} has sha256 {found}; it must be {WHEEL_SHA256}")
        with zipfile.ZipFile(wheel) as archive:
            program = f"tritonclient-{VERSION}.data/data/bin/perf_analyzer"
            (folder / "perf_analyzer").write_bytes(archive.read(program))
        (folder / "perf_analyzer").chmod(0o755)
        packaged = Path(distribution("nvidia-pytriton").locate_file("nvidia_pytriton.libs"))
        for plain, hashed in LIBRARIES.items():
            (library,) = packaged.glob(hashed)
            (folder / plain).symlink_to(library)
        folder.rename(cache)
    return cache


def run(url: str, data: Path, load: Sequence[str], num_requests: int) -> list[Answer]:
    """Sends ``num_requests`` requests of ``data``, in turn, to the gRPC address ``url``; answers by their start.

    ``load``: perf_analyzer's options that say when a request is sent. Ends the run when one is not answered.
    """
    folder = install()
    with tempfile.TemporaryDirectory() as name:
        profile = Path(name) / "profile.json"
        command = [
            "env",
            f"LD_LIBRARY_PATH={folder}",
            str(folder / "perf_analyzer"),
            "-m",
            ENSEMBLE_MODEL,
            "-u",
            url,
            "-i",
            "grpc",
        ]
        command += ["--streaming", "--async", "--input-data", str(data), *load]
        command += ["--request-count", str(num_requests), "--profile-export-file", str(profile)]
        command += ["-f", str(Path(name) / "report.csv")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        if done.returncode:
            said = done.stderr + done.stdout  # the reason stands first, before pages of usage
            sys.exit(f"perf_analyzer ended with {done.returncode}: {said[:1000]}")
        answers = read_profile(profile)
    if len(answers) != num_requests:
        sys.exit(f"perf_analyzer was answered {len(answers)} of {num_requests} requests")
    return answers


def read_profile(file: Path) -> list[Answer]:
    """Numbers of outputs stand there as strings of their raw bytes, and texts as bytes: latin-1 keeps both."""
    profile = json.loads(file.read_bytes().decode("latin-1"), strict=False)
    (experiment,) = profile["experiments"]
    answers = []
    for request in experiment["requests"]:
        outputs = request["response_outputs"]
        inputs = request["request_inputs"]
        answers.append(
            Answer(
                prompt=str(inputs.get("text_input") or inputs.get("input_ids")),
                start=request["timestamp"] / 1e9,
                times=tuple(t / 1e9 for t in request["response_timestamps"]),
                tokens=tuple(_int32(output["num_output_tokens"]) for output in outputs),
                text="".join(output["text_output"] for output in outputs),
            )
        )
    return sorted(answers, key=lambda answer: answer.start)


def _int32(raw: str) -> int:
    return int.from_bytes(raw.encode("latin-1"), "little", signed=True)
