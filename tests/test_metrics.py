"""What is counted is published, documented and shown; request lines say what they should and nothing more."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import threading
from collections import Counter
from pathlib import Path

import pytest

from inkling import errors
from inkling import metrics as published
from inkling.engine.metrics import BOUNDS_S, ERROR_REASONS, EngineMetrics, Histogram, RequestTrace
from inkling.engine.outbox import Chunk
from inkling.errors import InklingError, QueueFullError
from inkling.metrics import FAMILIES, MODEL_LABELS, PREFIX, Publisher, family_of, samples
from inkling.request_log import request_line
from inkling.run_folder import RunFolder
from tests.engine.harness import Bench, FailingClient, request_of, requests_of

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
RULES = DEPLOY / "alerts.yml"
DASHBOARD = DEPLOY / "grafana" / "dashboards" / "inkling.json"


@pytest.fixture
def bench() -> Bench:
    """An engine that answered requests, some of which a stop id ended within accepted drafts."""
    bench = Bench(probability=0.9)
    for number, request in enumerate(requests_of(3, 60, 3)):
        bench.submit(request, stream=number % 2 == 0)
    bench.run()
    bench.check_answers()
    return bench


class Backend:
    """``pb_utils`` with metrics that remember; they belong to the first thread that makes one."""

    def __init__(self, is_on: bool = True):
        self.is_on = is_on
        self.values: dict[tuple[str, tuple], float] = {}
        self.kinds: dict[str, str] = {}
        self.num_calls = 0
        self.dropped: list[str] = []
        self._owner: int | None = None
        backend = self

        class Metric:
            def __init__(self, name: str, labels: dict[str, str]):
                self.name, self.key = name, (name, tuple(sorted(labels.items())))
                assert self.key not in backend.values, "made twice"
                backend.values[self.key] = 0.0

            def increment(self, value: float) -> None:
                backend.touched()
                assert backend.kinds[self.name] == "counter" and value > 0
                backend.values[self.key] += value

            def set(self, value: float) -> None:
                backend.touched()
                assert backend.kinds[self.name] == "gauge"
                backend.values[self.key] = value

            def __del__(self) -> None:
                backend.dropped.append(self.name)

        class MetricFamily:
            COUNTER, GAUGE = "counter", "gauge"

            def __init__(self, name: str, description: str, kind: str):
                self.name = name
                backend.touched()
                assert name not in backend.kinds, "made twice"
                backend.kinds[name] = kind

            def Metric(self, labels: dict[str, str]) -> Metric:  # noqa: N802
                return Metric(self.name, labels)

            def __del__(self) -> None:
                backend.dropped.append(f"family {self.name}")

        self.MetricFamily = MetricFamily

    def touched(self) -> None:
        if not self.is_on:
            raise RuntimeError("metrics are off")
        self._owner = self._owner or threading.get_ident()
        assert threading.get_ident() == self._owner, "a second thread"
        self.num_calls += 1


def run_publisher(backend: Backend, bench: Bench, log_format: str = "text") -> list[str]:
    """Starts and stops a publisher; its lines."""
    output = io.StringIO()
    publisher = Publisher(backend, bench.engine, log_format, restarts=2, output=output)
    publisher.start()
    publisher.stop()
    assert not publisher._thread.is_alive()
    return output.getvalue().splitlines()


def test_counters_are_the_sums_over_the_answers(bench):
    values = {(s.name, s.labels): s.value for s in samples(bench.engine)}
    replies = [reply for _, reply in bench.sent]
    tokens = sum(len(reply.ids) for reply in replies)
    drafted = sum(reply.chunks[-1].total_draft_tokens for reply in replies)
    accepted = sum(reply.chunks[-1].total_accepted_draft_tokens for reply in replies)
    assert 0 < accepted < drafted
    assert values["generation_tokens_total", ()] == tokens
    assert values["spec_decode_num_draft_tokens_total", ()] == drafted
    assert values["spec_decode_num_accepted_tokens_total", ()] == accepted
    at = [v for (name, _), v in values.items() if name == "spec_decode_num_accepted_tokens_per_pos_total"]
    assert sum(at) == accepted and at == sorted(at, reverse=True)
    assert values["spec_decode_num_drafts_total", ()] >= at[0]
    assert values["prompt_tokens_total", ()] == sum(len(request.prompt_ids) for request, _ in bench.sent)
    assert values["e2e_request_latency_seconds_count", ()] == len(replies)
    assert values["inter_chunk_latency_seconds_count", ()] == sum(len(r.chunks) - 1 for r in replies)
    reasons = Counter(reply.finish_reason for reply in replies)
    assert {r: values["request_success_total", (("finished_reason", r),)] for r in reasons} == reasons


def test_running_requests_count_and_nothing_counts_twice(bench):
    before = bench.engine.totals().num_generation_tokens
    request = requests_of(9, 1, 3)[0]
    reply = bench.submit(request)
    seen = []
    while bench.step():
        seen.append(bench.engine.totals().num_generation_tokens - before)
    assert seen == sorted(seen) and 0 < seen[len(seen) // 2] <= len(reply.ids)
    assert bench.engine.totals().num_generation_tokens - before == len(reply.ids)


def test_every_family_is_exported_and_documented(bench):
    exported = {family_of(sample.name) for sample in samples(bench.engine)}
    assert exported == set(FAMILIES)
    row = re.compile(r"^\| `(\w+)` \| (\w+) \| (.*?) ?\| (.+) \|$", re.M)
    documented = {
        (name, kind, tuple(re.findall(r"`(\w+)`", labels)), meaning)
        for name, kind, labels, meaning in row.findall((ROOT / "docs" / "metrics.md").read_text())
    }
    assert documented == {(n, f.kind, f.labels, f.meaning.rstrip(".")) for n, f in FAMILIES.items()}
    for sample in samples(bench.engine):
        family = FAMILIES[family_of(sample.name)]
        labels = (*family.labels, "le") if sample.name.endswith("_bucket") else family.labels
        assert tuple(name for name, _ in sample.labels) == labels
        assert sample.is_gauge == (family.kind == "gauge")


def test_the_publisher_brings_all_values_up_to_date_from_one_thread(bench):
    backend = Backend()
    run_publisher(backend, bench)
    expected = {
        (PREFIX + s.name, tuple(sorted((MODEL_LABELS | dict(s.labels)).items()))): s.value
        for s in samples(bench.engine, restarts=2)
    }
    assert backend.values == pytest.approx(expected)
    first_family = next(i for i, name in enumerate(backend.dropped) if name.startswith("family "))
    assert first_family == len(backend.values), "a family was dropped before its metrics"


def test_what_has_not_changed_costs_no_call(bench):
    backend = Backend()
    publisher = Publisher(backend, bench.engine, "off")
    publisher._publish()
    before = backend.num_calls
    publisher._publish()
    assert backend.num_calls == before


def test_a_counter_never_falls(bench):
    """The rest of steps does, when a model fails within its call; the backend refuses negative increments."""
    publisher = Publisher(Backend(), bench.engine, "off")
    publisher._publish()
    bench.engine.scheduler.lengths.target_s += 1.0
    publisher._publish()


def test_buckets_hold_what_lies_at_or_below_their_bound():
    histogram = Histogram()
    for seconds in (0.0005, BOUNDS_S[0], 0.0011, 499.0, 501.0):
        histogram.observe(seconds)
    buckets = [s for s in published._buckets("x", histogram) if s.name == "x_bucket"]
    counts = {dict(s.labels)["le"]: s.value for s in buckets}
    assert list(counts)[0] == "+Inf" and [counts[b] for b in ("0.001", "0.002", "500.0", "+Inf")] == [
        2,
        3,
        4,
        5,
    ]
    assert list(counts.values()) == sorted(counts.values(), reverse=True)  # larger bounds are published first
    assert histogram.sum == pytest.approx(0.0005 + 0.001 + 0.0011 + 1000)


def test_without_metrics_there_are_still_lines(bench):
    assert len(run_publisher(Backend(is_on=False), bench)) == len(bench.sent)


def test_requests_that_fail_count_by_reason():
    bench = Bench()
    bench.engine._target = FailingClient(bench.engine._target, {1: ("before", ValueError("broken"))})
    bench.submit(requests_of(1, 1, 3)[0])
    bench.run()
    assert bench.engine.metrics.failed["error"] == 1
    bench.engine.metrics.reject(RequestTrace(), QueueFullError("full"))
    assert bench.engine.metrics.rejected["queue_full"] == 1
    assert sum(bench.engine.metrics.finished.values()) == 0
    assert [trace.reason for trace in bench.engine.metrics.ended] == ["error", "queue_full"]


def test_a_cancelled_request_is_a_failure_and_has_no_latency():
    bench = Bench()
    bench.submit(request_of(4, 50))
    (sequence,) = bench.engine._open
    bench.step()
    bench.engine.cancel(sequence)
    bench.run()
    metrics = bench.engine.metrics
    assert metrics.failed["cancelled"] == 1 and sum(metrics.e2e_request_latency.counts) == 0
    assert metrics.ended[0].num_output_tokens == bench.engine.totals().num_generation_tokens > 0


def test_a_request_that_runs_once_more_began_once():
    bench = Bench()
    bench.submit(request_of(4, 50))
    (sequence,) = bench.engine._open
    bench.step()
    bench.engine.metrics.admitted(sequence)
    assert bench.engine.metrics.num_prompt_tokens == 4
    assert sum(bench.engine.metrics.queue_time.counts) == 1


def test_restarts_are_left_in_the_run_folder(tmp_path):
    folder = RunFolder(tmp_path / "run")
    assert folder.restarts() == 0
    folder.note_restarts(3)
    assert folder.restarts() == 3


def test_every_exception_has_a_counted_reason():
    classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, InklingError)]
    assert len(classes) > 8
    assert {c.reason for c in classes} == set(ERROR_REASONS)


def test_time_per_output_token_is_that_of_the_tokens_after_the_first():
    metrics = EngineMetrics(0)
    trace = RequestTrace(arrived=1.0, first_token=3.0, sent=7.0, num_output_tokens=5)
    metrics._ended(trace, Chunk(finish_reason="stop", final=True), 8.0)
    assert metrics.time_per_output_token.sum == 1.0 and metrics.e2e_request_latency.sum == 7.0


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_line_says_what_became_of_a_request(bench, log_format):
    lines = run_publisher(Backend(), bench, log_format)
    assert len(lines) == len(bench.sent)
    answers = Counter((len(request.prompt_ids), len(reply.ids)) for request, reply in bench.sent)
    read = [json.loads(line) if log_format == "json" else read_text(line) for line in lines]
    assert Counter((line["prompt_tokens"], line["output_tokens"]) for line in read) == answers
    assert all(0 <= line["queue_s"] <= line["first_token_s"] <= line["total_s"] for line in read)
    assert all(line["accepted_length"] >= 1 for line in read)


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_request_id_cannot_begin_a_line_of_its_own(log_format):
    line = request_line(RequestTrace('a"\n2026 request id="b"', ended=1.0), log_format)
    assert len(line.splitlines()) == 1
    assert len(request_line(RequestTrace("x" * 10_000, ended=1.0), log_format)) < 600


def test_no_line_when_they_are_off(bench):
    assert run_publisher(Backend(), bench, "off") == []
    assert not bench.engine.metrics.ended, "traces pile up"


def read_text(line: str) -> dict[str, object]:
    assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z request id=", line)
    return {name: json.loads(value) for name, value in re.findall(r'(\w+)=("(?:[^"\\]|\\.)*"|\S+)', line)}


# What deploy/ shows and watches.


def expressions() -> list[str]:
    dashboard = json.loads(DASHBOARD.read_text())
    shown = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    return shown + [" ".join(rule["expr"].split()) for rule in rules()]


def rules() -> list[dict[str, str]]:
    """Name and expression of the alerts, as far as this file's simple YAML needs reading."""
    text = RULES.read_text()
    found = re.findall(r"- alert: (\w+)\n +expr: (?:>-\n((?: {10}.+\n)+)|(.+)\n)", text)
    assert len(found) == text.count("- alert:") > 5
    return [{"alert": name, "expr": folded or plain} for name, folded, plain in found]


def test_dashboard_and_alerts_know_only_documented_metrics_and_labels():
    used = set()
    for expression in expressions():
        for name, matchers in re.findall(r"inkling:(\w+)(?:\{([^}]*)\})?", expression):
            family = FAMILIES.get(family_of(name))
            assert family, f"{name} of {expression}"
            is_part = name.endswith(("_bucket", "_sum", "_count"))
            assert is_part == (family.kind == "histogram"), f"{name} of {expression}"
            assert set(re.findall(r"(\w+)\s*(?:=|!)", matchers)) <= set(family.labels), expression
            used.add(family_of(name))
    assert set(FAMILIES) - used == set(), "shown nowhere"


def test_the_dashboard_has_whole_panels_that_do_not_overlap():
    dashboard = json.loads(DASHBOARD.read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells) and all(x < 24 for x, _ in cells)
    source = re.search(
        r"uid: (\w+)", (DEPLOY / "grafana/provisioning/datasources/prometheus.yml").read_text()
    )[1]
    assert {panel["datasource"]["uid"] for panel in panels} == {source}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Debian: prometheus) is not installed")
def test_promtool_accepts_configuration_alerts_and_every_expression_of_the_dashboard(tmp_path):
    dashboard = json.loads(DASHBOARD.read_text())
    shown = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    recorded = [
        {"record": f"shown:{number}", "expr": expression.replace("$__rate_interval", "1m")}
        for number, expression in enumerate(shown)
    ]
    (tmp_path / "shown.yml").write_text(json.dumps({"groups": [{"name": "shown", "rules": recorded}]}))
    for command in (
        ["config", str(DEPLOY / "prometheus.yml")],
        ["rules", str(RULES)],
        ["rules", str(tmp_path / "shown.yml")],
    ):
        done = subprocess.run(["promtool", "check", *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
