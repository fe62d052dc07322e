"""One line for each request at its end: who, how much, how long, why. Never what was asked or answered."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from typing import Any

from inkling.engine.metrics import RequestTrace

MAX_ID = 128  # characters of a request id that a line shows


def request_line(trace: RequestTrace, log_format: str) -> str:
    """``text``: ``TIME request key=value ...``; ``json``: one object with the same keys, ``time`` and ``event``."""
    ended = datetime.fromtimestamp(time.time() - (time.monotonic() - trace.ended), UTC)
    stamp = ended.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    fields = request_fields(trace)
    if log_format == "json":
        return json.dumps({"time": stamp, "event": "request", **fields})
    shown = " ".join(f"{name}={json.dumps(value)}" for name, value in fields.items())
    return f"{stamp} request {shown}"


def request_fields(trace: RequestTrace) -> dict[str, Any]:
    """Durations are seconds from the request's arrival; absent: it did not get that far."""
    num_steps = trace.num_output_tokens - trace.num_accepted_tokens  # each gives one token beside its drafts
    fields = {
        "id": trace.request_id[:MAX_ID],
        "reason": trace.reason,
        "prompt_tokens": trace.num_prompt_tokens,
        "cached_tokens": trace.num_cached_tokens,
        "output_tokens": trace.num_output_tokens,
        "draft_tokens": trace.num_draft_tokens,
        "accepted_tokens": trace.num_accepted_tokens,
        "accepted_length": round(trace.num_output_tokens / num_steps, 2) if num_steps else 0,
    }
    times = {"queue_s": trace.admitted, "first_token_s": trace.first_token, "total_s": trace.ended}
    return fields | {name: round(at - trace.arrived, 6) for name, at in times.items() if at}
