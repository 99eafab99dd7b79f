"""Prometheus metrics under FastDeploy 2.x's names: request timings, and the engine's state at each
scrape.

Each app has its own registry, so two apps in one process never share a counter. Label values come
from closed sets (finish reasons, rejection reasons, route templates), never from clients.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
    multiprocess,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from fastdeploy_core.types.engine import (
    CommonHealth,
    CommonStats,
    EngineHealth,
    EngineInfo,
    EngineStats,
)

if TYPE_CHECKING:
    from fastdeploy_core.types import Request, RequestOutput

PREFIX = "fastdeploy:"
# prometheus_client's own variable; an API server of several sets it before it imports this module.
SHARED_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
FINISH_REASONS = ("stop", "length", "abort", "error")
_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0,
)  # fmt: skip
_TOKENS = tuple(float(2**power) for power in range(18))

# "gauges" and "counters": name -> [help, attribute or function of EngineStats].
_TABLES: Final[dict[str, dict[str, list[str]]]] = json.loads(
    Path(__file__).with_suffix(".json").read_text("utf-8")
)


class _EngineState(Collector):
    """Turns the newest EngineStats into metrics when the registry is scraped. With several engines,
    a series without the label `engine` is about all of them, the others about one each."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._families: dict[str, Metric] = {}  # of the scrape in progress
        self.stats: EngineStats | None = None
        self.health: EngineHealth | None = None
        self.max_num_seqs = 0  # of all engines; 0: not known

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        self._families = {}
        if self.health is not None:
            self._add_health(self.health, {})
        if isinstance(self.health, CommonHealth):
            for engine, health in self.health.engines.items():
                self._add_health(health, {"engine": str(engine)})
        if self.stats is not None:
            self._add_stats(self.stats, {}, self.max_num_seqs)
        if isinstance(self.stats, CommonStats) and isinstance(self.health, CommonHealth):
            largest = self.max_num_seqs // len(self.health.engines)
            for engine, stats in self.stats.engines.items():
                self._add_stats(stats, {"engine": str(engine)}, largest)
        yield from self._families.values()

    def _add_health(self, health: EngineHealth, labels: Mapping[str, str]) -> None:
        self._gauge("engine_ready", "1 when ready", float(health.ready), labels)
        age = health.last_progress_age_s
        self._gauge("engine_last_progress_seconds", "since the engine last moved", age, labels)
        text = "times the engine process was started again"
        self._counter("engine_restarts", text, float(health.num_restarts), labels)

    def _add_stats(self, stats: EngineStats, labels: Mapping[str, str], largest: int) -> None:
        for name, (text, attribute) in _TABLES["gauges"].items():
            self._gauge(name, text, float(getattr(stats, attribute)), labels)
        for name, (text, attribute) in _TABLES["counters"].items():
            self._counter(name, text, float(getattr(stats, attribute)), labels)
        total = max(1, stats.num_blocks_total)
        used = stats.num_blocks_used / total
        self._gauge("gpu_cache_usage_perc", "share of KV blocks in use", used, labels)
        free = stats.num_blocks_free / total
        self._gauge("available_gpu_resource", "share of KV blocks that are free", free, labels)
        asked = max(1, stats.prefix_query_tokens_total)
        rate = stats.prefix_hit_tokens_total / asked
        self._gauge("hit_token_rate", "share of prompt tokens found in a cache", rate, labels)
        if largest:
            self._gauge("max_batch_size", "most sequences in a step", float(largest), labels)
            left = float(max(0, largest - stats.num_running))
            self._gauge("available_batch_size", "places left in the batch", left, labels)
        device_hits = stats.prefix_hit_tokens_total - stats.host_hit_tokens_total
        text = "of the cached prompt tokens, found on the device"
        self._counter("prefix_gpu_cache_token_num", text, float(device_hits), labels)
        self._add_drafts(stats, labels)

    def _add_drafts(self, stats: EngineStats, labels: Mapping[str, str]) -> None:
        name = "spec_decode_num_accepted_tokens_per_pos"
        text = "rows whose first drafts up to this position were right"
        self._family(name, text, "counter")
        for position, count in enumerate(stats.accepted_drafts_at_total):
            self._counter(name, text, float(count), {"position": str(position), **labels})
        rate = stats.accepted_draft_tokens_total / max(1, stats.draft_tokens_total)
        text = "share of draft tokens that were accepted"
        self._gauge("spec_decode_draft_acceptance_rate", text, rate, labels)

    def _family(self, name: str, text: str, kind: str) -> Metric:
        if name not in self._families:
            self._families[name] = Metric(PREFIX + name, text, kind)
        return self._families[name]

    def _gauge(self, name: str, text: str, value: float, labels: Mapping[str, str]) -> None:
        series = {"model_name": self._model_name, **labels}
        self._family(name, text, "gauge").add_sample(PREFIX + name, series, value)

    def _counter(self, name: str, text: str, value: float, labels: Mapping[str, str]) -> None:
        series = {"model_name": self._model_name, **labels}
        self._family(name, text, "counter").add_sample(f"{PREFIX}{name}_total", series, value)


class Metrics:
    """All metrics of one app."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._name = model_name
        self._state = _EngineState(model_name)
        # Several API servers of one port write their numbers to files; each of them reports the
        # sums.
        if SHARED_FOLDER in os.environ:
            self._scraped = CollectorRegistry()
            multiprocess.MultiProcessCollector(self._scraped)
        else:
            self._scraped = self.registry
        self._scraped.register(self._state)
        self._requests = self._counter("requests_number", "requests received")
        self._success = self._counter("request_success", "finished requests", ["finished_reason"])
        self._rejected = self._counter("requests_rejected", "refused requests", ["reason"])
        self.aborted = self._counter("requests_aborted", "requests whose client left")
        self.in_flight = self._gauge("requests_in_flight", "requests being answered")
        self.loop_lag = self._gauge(
            "loop_lag_seconds", "how late the event loop was last", "livemax"
        )
        self._ttft = self._histogram("time_to_first_token_seconds", "until the first token")
        self._tpot = self._histogram("time_per_output_token_seconds", "per token after the first")
        self._itl = self._histogram("inter_token_latency_seconds", "between two outputs")
        self._e2e = self._histogram("e2e_request_latency_seconds", "of whole requests")
        self._queue = self._histogram("request_queue_time_seconds", "waiting to be scheduled")
        self._inference = self._histogram("request_inference_time_seconds", "after waiting")
        self._decode = self._histogram("request_decode_time_seconds", "after the first token")
        self._prefill = self._histogram("request_prefill_time_seconds", "until the first token")
        self._prompt = self._histogram("request_prompt_tokens", "prompt lengths", _TOKENS)
        self._generated = self._histogram("request_generation_tokens", "answer lengths", _TOKENS)
        self._limit = self._histogram("request_params_max_tokens", "max_tokens asked", _TOKENS)
        self._http = self._counter("http_requests", "HTTP answers", ["path", "status"])
        self._http_s = self._histogram("http_request_duration_seconds", "HTTP answers", _SECONDS)
        # a series that only appears with its first event cannot be watched
        for reason in FINISH_REASONS:
            self._success.labels(model_name, reason)
        self.in_flight.set(0)
        self.loop_lag.set(0.0)

    def rejected(self, reason: str) -> None:
        """A request was refused before any work; `reason` from a closed set."""
        self._rejected.labels(self._name, reason).inc()

    def answered(self, path: str, status: int, seconds: float) -> None:
        """One HTTP answer on a route template."""
        self._http.labels(self._name, path, str(status)).inc()
        self._http_s.observe(seconds)

    def start(self, request: Request) -> RequestTimer:
        """Begin to time one request."""
        self._requests.inc()
        self._prompt.observe(len(request.prompt_token_ids))
        if request.sampling.max_tokens is not None:
            self._limit.observe(request.sampling.max_tokens)
        return RequestTimer(self)

    def render(
        self, stats: EngineStats | None, health: EngineHealth, info: EngineInfo | None
    ) -> bytes:
        """The text that a scrape gets."""
        self._state.stats, self._state.health = stats, health
        if info is not None:
            self._state.max_num_seqs = info.max_num_seqs
        return generate_latest(self._scraped)

    def first_token(self, seconds: float, queue_s: float | None) -> None:
        """A request's first token came."""
        self._ttft.observe(seconds)
        if queue_s is not None:
            self._queue.observe(queue_s)
            self._prefill.observe(max(0.0, seconds - queue_s))

    def next_token(self, seconds: float) -> None:
        """A later output of a request came."""
        self._itl.observe(seconds)

    def finished(
        self, reasons: Sequence[str], num_tokens: int, timer: RequestTimer, now: float
    ) -> None:
        """A request is complete."""
        total = now - timer.started_at
        self._e2e.observe(total)
        self._inference.observe(max(0.0, total - (timer.queue_s or 0.0)))
        self._generated.observe(num_tokens)
        if timer.first_at is not None:
            decode = now - timer.first_at
            self._decode.observe(decode)
            if num_tokens > len(reasons):
                self._tpot.observe(decode / (num_tokens - len(reasons)))
        for reason in reasons:
            known = reason if reason in FINISH_REASONS else "error"
            self._success.labels(self._name, known).inc()

    def _counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Counter:
        """A counter with the model's name as label; further labels are left open."""
        names = ["model_name", *labels]
        counter = Counter(PREFIX + name, text, names, registry=self.registry)
        return counter if labels else counter.labels(self._name)

    def _gauge(
        self, name: str, text: str, over_servers: Literal["livesum", "livemax"] = "livesum"
    ) -> Gauge:
        gauge = Gauge(
            *(PREFIX + name, text, ["model_name"]),
            registry=self.registry,
            multiprocess_mode=over_servers,
        )
        return gauge.labels(self._name)

    def _histogram(self, name: str, text: str, buckets: Sequence[float] = _SECONDS) -> Histogram:
        histogram = Histogram(
            PREFIX + name, text, ["model_name"], buckets=buckets, registry=self.registry
        )
        return histogram.labels(self._name)


class RequestTimer:
    """The moments of one request."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self.started_at = time.monotonic()
        self.first_at: float | None = None
        self.queue_s: float | None = None
        self._last_at = self.started_at
        self.num_tokens = 0
        self._reasons: dict[int, str] = {}

    @property
    def finish_reasons(self) -> str:
        """Why its answers ended, for the log."""
        return "/".join(self._reasons.values()) or "unfinished"

    def observe(self, output: RequestOutput) -> None:
        """New output arrived."""
        now = time.monotonic()
        count = 0
        for answer in output.outputs:
            count += len(answer.token_ids)
            if answer.finish_reason is not None:
                self._reasons[answer.index] = answer.finish_reason
        self.num_tokens += count
        if count and self.first_at is None:
            self.first_at = now
            self.queue_s = output.metrics.queue_s
            self._metrics.first_token(now - self.started_at, self.queue_s)
        elif count:
            self._metrics.next_token(now - self._last_at)
        if count:
            self._last_at = now
        if output.finished:
            self._metrics.finished(list(self._reasons.values()), self.num_tokens, self, now)
