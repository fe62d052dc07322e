"""The engine's numbers on Triton's ``/metrics``, and a line for every request that ended.

``FAMILIES`` is all there is to see; ``docs/metrics.md`` documents it. Names follow vLLM's. One thread makes, updates
and drops the metrics, because two threads that touch one metric end the whole server.

A histogram is published as Prometheus reads it, ``_bucket`` counters with an ``le`` label, ``_sum`` and ``_count``.
The server's own histograms take one call (37 us of two processes) for every observation, which is every response of
every request; counters take one for all that has gathered, whatever the traffic.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import Any, Literal, NamedTuple, TextIO

from inkling.engine.loop import Engine
from inkling.engine.metrics import BOUNDS_S, Histogram
from inkling.protocol import ENSEMBLE_MODEL
from inkling.request_log import request_line

_log = logging.getLogger(__name__)

PREFIX = "inkling:"
PERIOD_S = 1.0
MODEL_LABELS = {"model": ENSEMBLE_MODEL, "version": "1"}


class Family(NamedTuple):
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]  # beside model and version; a histogram's buckets also have ``le``
    meaning: str


FAMILIES = {
    "prompt_tokens_total": Family("counter", (), "Prompt tokens of requests that began to run."),
    "generation_tokens_total": Family("counter", (), "Tokens generated."),
    "request_success_total": Family("counter", ("finished_reason",), "Requests answered in full."),
    "request_failure_total": Family("counter", ("reason",), "Queued requests that ended with an error."),
    "request_rejected_total": Family("counter", ("reason",), "Requests refused before they were queued."),
    "num_requests_running": Family("gauge", (), "Requests that the steps work on."),
    "num_requests_waiting": Family("gauge", (), "Requests in the queue, preempted ones included."),
    "num_preemptions_total": Family("counter", (), "Times a request gave its pages back and waited again."),
    "kv_cache_usage_perc": Family("gauge", ("cache",), "Pages that requests hold; 1: all."),
    "prefix_cache_usage_perc": Family("gauge", ("cache",), "Pages kept for later prompts alone; 1: all."),
    "prefix_cache_queries_total": Family("counter", (), "Prompt tokens looked up among cached prefixes."),
    "prefix_cache_hits_total": Family("counter", (), "Prompt tokens found there, and not computed."),
    "spec_decode_num_drafts_total": Family("counter", (), "Drafts (of one or more tokens) verified."),
    "spec_decode_num_draft_tokens_total": Family("counter", (), "Draft tokens verified."),
    "spec_decode_num_accepted_tokens_total": Family("counter", (), "Draft tokens accepted and emitted."),
    "spec_decode_num_accepted_tokens_per_pos_total": Family(
        "counter", ("position",), "The same by place in the draft, the first is 0."
    ),
    "spec_decode_draft_length": Family("gauge", (), "Tokens that a request drafts a step: the chosen N."),
    "time_to_first_token_seconds": Family(
        "histogram",
        (),
        "From a request's arrival until its first token was sent; drawn, if it does not stream.",
    ),
    "time_per_output_token_seconds": Family(
        "histogram", (), "A request's time after its first token, by the number of its further tokens."
    ),
    "inter_chunk_latency_seconds": Family("histogram", (), "Between two responses of a request."),
    "e2e_request_latency_seconds": Family("histogram", (), "From arrival to the last response, if no error."),
    "request_queue_time_seconds": Family("histogram", (), "From arrival until the request first ran."),
    "steps_total": Family("counter", (), "Steps of the engine."),
    "step_seconds_total": Family(
        "counter", ("part",), "Their time: schedule, target and draft (packing and call), rest."
    ),
    "restarts_total": Family("counter", (), "Times that this server replaced one that failed."),
}


class Sample(NamedTuple):
    name: str
    labels: tuple[tuple[str, str], ...]
    value: float
    is_gauge: bool = False


def samples(engine: Engine, restarts: int = 0) -> Iterator[Sample]:
    """The values of all families now. The buckets of a histogram come from the largest down: published in this order,
    they are never seen to fall towards larger bounds."""
    scheduler, metrics = engine.scheduler, engine.metrics
    totals = engine.totals()
    accepted_at = list(accumulate(reversed(totals.accepted[1:])))[::-1]  # a draft's place -> accepted there
    step_s = {
        "schedule": scheduler.pace.schedule_s,
        "target": scheduler.lengths.target_s,
        "draft": scheduler.lengths.draft_s,
    }
    step_s["rest"] = scheduler.pace.step_s - step_s["target"] - step_s["draft"]
    yield from _labelled("request_success_total", "finished_reason", metrics.finished)
    yield from _labelled("request_failure_total", "reason", metrics.failed)
    yield from _labelled("request_rejected_total", "reason", metrics.rejected)
    yield from _labelled("step_seconds_total", "part", step_s)
    yield from _labelled(
        "spec_decode_num_accepted_tokens_per_pos_total", "position", dict(enumerate(accepted_at))
    )
    pools = [pool for pools in scheduler.allocator.pools.values() for pool in pools if pool.num_usable]
    caches = {pool: pool.name.removesuffix(" cache") for pool in pools}
    used = {name: 1 - pool.num_available / pool.num_usable for pool, name in caches.items()}
    kept = {name: pool.num_idle / pool.num_usable for pool, name in caches.items()}
    yield from _labelled("kv_cache_usage_perc", "cache", used, is_gauge=True)
    yield from _labelled("prefix_cache_usage_perc", "cache", kept, is_gauge=True)
    for name, value in {
        "prompt_tokens_total": metrics.num_prompt_tokens,
        "generation_tokens_total": totals.num_generation_tokens,
        "num_preemptions_total": scheduler.num_preemptions,
        "prefix_cache_queries_total": metrics.num_prompt_tokens,
        "prefix_cache_hits_total": metrics.num_cached_tokens,
        "spec_decode_num_drafts_total": sum(totals.accepted),
        "spec_decode_num_draft_tokens_total": totals.num_draft_tokens,
        "spec_decode_num_accepted_tokens_total": sum(accepted_at),
        "steps_total": scheduler.pace.num_steps,
        "restarts_total": restarts,
    }.items():
        yield Sample(name, (), value)
    yield Sample("num_requests_running", (), len(scheduler.running), is_gauge=True)
    yield Sample("num_requests_waiting", (), len(scheduler.waiting), is_gauge=True)
    yield Sample("spec_decode_draft_length", (), scheduler.lengths.num_drafts, is_gauge=True)
    yield from _buckets("time_to_first_token_seconds", metrics.time_to_first_token)
    yield from _buckets("time_per_output_token_seconds", metrics.time_per_output_token)
    yield from _buckets("inter_chunk_latency_seconds", metrics.inter_chunk_latency)
    yield from _buckets("e2e_request_latency_seconds", metrics.e2e_request_latency)
    yield from _buckets("request_queue_time_seconds", metrics.queue_time)


def _labelled(name: str, label: str, values: dict[Any, float], is_gauge: bool = False) -> Iterator[Sample]:
    return (Sample(name, ((label, str(key)),), value, is_gauge) for key, value in values.items())


def _buckets(name: str, histogram: Histogram) -> Iterator[Sample]:
    counts = list(accumulate(histogram.counts))
    yield Sample(f"{name}_count", (), counts[-1])
    yield Sample(f"{name}_sum", (), histogram.sum)
    for bound, count in zip(("+Inf", *map(str, BOUNDS_S[::-1])), reversed(counts), strict=True):
        yield Sample(f"{name}_bucket", (("le", bound),), count)


def family_of(name: str) -> str:
    """The family of a series ``name`` without the prefix: a histogram has three."""
    base = name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count")
    return base if base in FAMILIES and FAMILIES[base].kind == "histogram" else name


class Publisher:
    """A thread that publishes ``samples`` and writes the lines of ``ended`` requests every PERIOD_S, and at the end.

    ``pb_utils``: the module ``triton_python_backend_utils``. With the server's metrics off there are only lines.
    """

    def __init__(
        self, pb_utils: Any, engine: Engine, log_format: str, restarts: int = 0, output: TextIO = sys.stdout
    ):
        self._pb_utils = pb_utils
        self._samples: Callable[[], Iterable[Sample]] = lambda: samples(engine, restarts)
        self._ended = engine.metrics.ended
        self._log_format, self._output = log_format, output
        self._families: dict[str, Any] = {}
        self._series: dict[tuple[str, tuple], Any] = {}
        self._values: dict[tuple[str, tuple], float] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """After the engine's end: what has gathered since the last time is published, too."""
        self._stopping.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            self._publish()
        except Exception as error:  # the server's metrics are off
            _log.warning("no metrics: %s", error)
            self._samples = tuple
        is_last = False
        while not is_last:
            is_last = self._stopping.wait(PERIOD_S)
            try:
                self._publish()
                self._write_lines()
            except Exception:
                _log.exception("metrics or request lines could not be written")
        self._series.clear()  # before their families: the server dies of the other order at times
        self._families.clear()

    def _publish(self) -> None:
        for sample in self._samples():
            key = sample.name, sample.labels
            if key not in self._series:
                self._series[key] = self._make(sample)
                self._values[key] = 0
            before = self._values[key]
            if sample.is_gauge and sample.value != before:
                self._series[key].set(sample.value)
            elif sample.value > before:  # the rest of steps falls when a model fails within its call
                self._series[key].increment(sample.value - before)
            else:
                continue
            self._values[key] = sample.value

    def _make(self, sample: Sample) -> Any:
        families, pb_utils = self._families, self._pb_utils
        if sample.name not in families:
            kind = pb_utils.MetricFamily.GAUGE if sample.is_gauge else pb_utils.MetricFamily.COUNTER
            meaning = FAMILIES[family_of(sample.name)].meaning
            families[sample.name] = pb_utils.MetricFamily(
                name=PREFIX + sample.name, description=meaning, kind=kind
            )
        return families[sample.name].Metric(labels=MODEL_LABELS | dict(sample.labels))

    def _write_lines(self) -> None:
        while self._ended:
            trace = self._ended.popleft()
            if self._log_format != "off":
                print(request_line(trace, self._log_format), file=self._output, flush=True)
