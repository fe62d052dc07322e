"""The load report: figures of a known profile, and one tiny run of everything with the real perf_analyzer."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from benchmarks.load_report import (
    LENGTHS,
    SAMPLING,
    Bounds,
    check_texts,
    figures,
    mixed_requests,
    percentile,
)
from benchmarks.perf_analyzer import Answer, read_profile
from tests.make_targets import make

ROOT = Path(__file__).parents[1]
PROMPTS = [entry["text"] for entry in json.loads((ROOT / "demo" / "prompts.json").read_text())]


def answer(start: float, times: list[float], tokens: list[int], prompt: str = "a", text: str = "b") -> Answer:
    return Answer(prompt, start, tuple(times), tuple(tokens), text)


def test_figures_of_two_known_answers():
    answers = [answer(0.0, [0.1, 0.2, 0.4], [1, 4, 2]), answer(1.0, [1.5, 2.0], [3, 1], "c")]
    row = figures("streams", 2, answers, Bounds(0.4, 0.1))
    assert row == {
        "load": "streams",
        "value": "2",
        "requests": 2,
        "tokens_per_s": "5.5",  # 11 tokens from 0 to 2 s
        "requests_per_s": "1.00",
        "ttft_p50_ms": "100.0",
        "ttft_p99_ms": "500.0",
        "tpot_p50_ms": "50.0",  # 0.3 s for 6 tokens
        "tpot_p99_ms": "500.0",
        "gap_p50_ms": "200.0",  # of 100, 200, 500
        "gap_p99_ms": "500.0",
        "goodput": "0.50",  # the second is late
    }


def test_an_answer_in_one_response_has_no_time_per_token():
    assert answer(0.0, [0.1], [4]).time_per_output_token is None
    assert Bounds(0.2, 0.0).hold(answer(0.0, [0.1], [4]))


@pytest.mark.parametrize(("share", "expected"), [(0.0, 1), (0.5, 2), (0.51, 3), (0.99, 4), (1.0, 4)])
def test_percentiles_are_values_that_were_seen(share, expected):
    assert percentile([4, 1, 3, 2], share) == expected


def test_a_profile_is_read_as_perf_analyzer_writes_it(tmp_path):
    """Recorded from 2.48.0: numbers as raw bytes, in escapes or not; other outputs empty."""
    response = b'{"seed":"\xd2.\xb0","num_output_tokens":"%b","text_output":"%b"}'
    outputs = [
        response % (rb"\u0001\u0000\u0000\u0000", "é".encode()),
        response % (b"\xc8\\u0000\\u0000\\u0000", b"x"),
    ]
    profile = (
        b'{"experiments":[{"experiment":{"mode":"concurrency","value":1},"requests":[{"timestamp":1000000000,'
    )
    profile += (
        b'"request_inputs":{"text_input":"p","stream":true},"response_timestamps":[1500000000,1750000000],'
    )
    profile += b'"response_outputs":[' + b",".join(outputs) + b"]}]}]}"
    (tmp_path / "profile.json").write_bytes(profile)
    assert read_profile(tmp_path / "profile.json") == [
        Answer("p", 1.0, (1.5, 1.75), (1, 200), "é".encode().decode("latin-1") + "x")
    ]


def test_another_text_at_another_load_ends_the_run():
    texts: dict[str, str] = {}
    check_texts([answer(0, [1], [1]), answer(0, [1], [1], "c", "d")], texts)
    check_texts([answer(0, [1], [1])], texts)
    with pytest.raises(SystemExit, match="the answer to 'c' differs between loads"):
        check_texts([answer(0, [1], [1], "c", "e")], texts)


def test_requests_mix_all_lengths_with_all_kinds_of_sampling():
    requests = mixed_requests(PROMPTS)["data"]
    kinds = {
        (r["max_tokens"][0], *(n for n in ("temperature", "num_draft_tokens") if n in r)) for r in requests
    }
    assert len(kinds) == len(LENGTHS) * (len(SAMPLING) - 1)  # two of them have a temperature
    assert all("seed" in request for request in requests if "temperature" in request)
    assert len({request["text_input"][0] for request in requests}) == len(requests)


@pytest.mark.server
def test_a_tiny_run_ends_with_table_rows_and_picture(tmp_path):
    sizes = "--concurrency 1,3 --rates 5 --num-requests 4 --rounds 1 --num-prompts 1"
    said = make(tmp_path, "load", LOAD=f"{sizes} --agreement 9 --out {tmp_path}")
    with (tmp_path / "load_report.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    found = [(row["load"], float(row["value"]), int(row["requests"])) for row in rows]
    assert found == [("streams", 1, 4), ("streams", 3, 6), ("poisson", 5, 5)]
    for row in rows:
        assert float(row["tokens_per_s"]) > 0
        assert 0 < float(row["ttft_p50_ms"]) <= float(row["ttft_p99_ms"])
        assert f"| {row['tokens_per_s']} |" in said
    assert "one stream, medians of 1: benchmarks.cpu " in said
    assert (tmp_path / "load_report.png").read_bytes().startswith(b"\x89PNG")
