"""Many requests at a time from a few processes: one process of Python clients could not keep a GPU busy.

``ask_all`` is the caller's side. A process (``python -m tests.cuda.promise_clients THREADS``) reads jobs as JSON lines
to the end of its standard input, then asks them, THREADS at a time, and prints each answer as it comes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from inkling.client import stream

ROOT = Path(__file__).parents[2]
ANSWER_S = 120.0  # longest wait for one response


def ask(url: str, inputs: dict[str, Any]) -> dict[str, Any]:
    """Tokens of a request, and how many drafts were verified and accepted for it."""
    ids: list[int] = []
    response: dict[str, Any] = {}
    for response in stream(url, inputs, timeout_s=ANSWER_S):
        ids += response.get("output_ids", [])
    return {
        "ids": ids,
        "drafted": response["total_draft_tokens"],
        "accepted": response["total_accepted_draft_tokens"],
    }


def ask_all(
    jobs: Sequence[dict[str, Any]], processes: int, threads: int, take: Callable[[dict[str, Any]], None]
) -> None:
    """``jobs``: ``key``, ``url``, ``inputs``. ``take`` gets each answer, or its ``error``, with the job's ``key``."""
    command = [sys.executable, "-m", "tests.cuda.promise_clients", str(threads)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    workers = [subprocess.Popen(command, **pipes) for _ in range(processes)]
    answers: SimpleQueue[str | None] = SimpleQueue()

    def serve(worker: subprocess.Popen[str], part: Sequence[dict[str, Any]]) -> None:
        worker.stdin.write("".join(json.dumps(job) + "\n" for job in part))
        worker.stdin.close()
        for line in worker.stdout:
            answers.put(line)
        answers.put(None)

    try:
        for index, worker in enumerate(workers):
            threading.Thread(target=serve, args=(worker, jobs[index::processes]), daemon=True).start()
        for _ in workers:
            while (line := answers.get()) is not None:
                take(json.loads(line))
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def main(threads: int) -> None:
    jobs = [json.loads(line) for line in sys.stdin]
    with ThreadPoolExecutor(threads) as pool:
        keys = {pool.submit(ask, job["url"], job["inputs"]): job["key"] for job in jobs}
        for future in as_completed(keys):
            try:
                answer = future.result()
            except Exception as error:  # of one request; the others go on
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer | {"key": keys[future]}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
