"""What ``synthetic:mini`` in bf16 must reach on one H200, beside the floor that its memory traffic sets."""

from __future__ import annotations

from collections.abc import Sequence

CHECKPOINT = "synthetic:mini"
CONTEXT = "2048"  # of the floors and of the bounds on tokens
# ms of a round at 4.3 TB/s: (batch, drafts)
FLOOR_MS = {
    ("1", "0"): 1.14,
    ("1", "1"): 1.92,
    ("1", "3"): 3.40,
    ("8", "0"): 4.57,
    ("8", "1"): 7.48,
    ("8", "3"): 11.0,
    ("32", "0"): 10.5,
    ("32", "1"): 12.9,
    ("32", "3"): 13.9,
}
PLAIN_TOKENS, PLAIN_STRETCH = 380.0, 440.0  # tokens/s at batch 1
BEST_TOKENS, BEST_STRETCH = 450.0, 540.0
MIN_GAIN = {"8": 1.2, "32": 1.8}  # of the best number of drafts over none
VISIBLE_MS = {"0": 0.7, "drafts": 1.5}  # of a round at batch 1, outside the device
VISIBLE_SHARE = {"8": 0.10, "32": 0.05, "128": 0.05}  # of a round
AUTO_SHARE = 0.97  # of the best fixed number

Row = dict[str, str]


def apply_to(conditions: Row) -> bool:
    """Whether the bounds were stated for what was measured."""
    return conditions["checkpoint"].startswith(CHECKPOINT) and "H200" in conditions["gpu"]


def verdicts(rows: Sequence[Row]) -> list[Row]:
    """The rows of one commit, each with its floor and with the bounds that it decides, passed or missed."""
    return [row | {"floor_ms": _floor(row), "bounds": "; ".join(_bounds(row, rows))} for row in rows]


def _floor(row: Row) -> str:
    floor = FLOOR_MS.get((row["batch"], row["drafts"])) if row["context"] == CONTEXT else None
    return f"{floor:.2f}" if floor else ""


def _bounds(row: Row, rows: Sequence[Row]) -> list[str]:
    if row["error"]:
        return [f"MISSED: {row['error']}"]
    told = _visible(row)
    others = [
        r for r in rows if (r["context"], r["batch"]) == (row["context"], row["batch"]) and not r["error"]
    ]
    fixed = [float(r["tokens_per_s"]) for r in others if r["drafts"] != "auto"]
    rate = float(row["tokens_per_s"])
    if row["drafts"] == "auto":
        return told + ([_at_least("auto over best", rate / max(fixed), AUTO_SHARE)] if fixed else [])
    if row["context"] != CONTEXT:
        return told
    if row["batch"] == "1" and row["drafts"] == "0":
        told.append(_at_least(f"plain tokens/s (stretch {PLAIN_STRETCH:g})", rate, PLAIN_TOKENS))
    if rate == max(fixed):
        if row["batch"] == "1":
            told.append(_at_least(f"best tokens/s (stretch {BEST_STRETCH:g})", rate, BEST_TOKENS))
        plain = [float(r["tokens_per_s"]) for r in others if r["drafts"] == "0"]
        if row["batch"] in MIN_GAIN and plain:
            told.append(_at_least("best over plain", rate / plain[0], MIN_GAIN[row["batch"]]))
    return told


def _visible(row: Row) -> list[str]:
    if not row["visible_ms"]:
        return []
    visible, whole = float(row["visible_ms"]), float(row["round_ms"])
    if row["batch"] == "1":
        return [_at_most("visible ms", visible, VISIBLE_MS["0" if row["drafts"] == "0" else "drafts"])]
    if row["batch"] in VISIBLE_SHARE:
        return [_at_most("visible share", visible / whole, VISIBLE_SHARE[row["batch"]])]
    return []


def _at_least(name: str, value: float, bound: float) -> str:
    return f"{'passed' if value >= bound else 'MISSED'}: {name} {value:.3g} >= {bound:g}"


def _at_most(name: str, value: float, bound: float) -> str:
    return f"{'passed' if value <= bound else 'MISSED'}: {name} {value:.3g} <= {bound:g}"
