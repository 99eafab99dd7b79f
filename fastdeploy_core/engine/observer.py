"""Tells hook modules what an engine does: start, end of a request, statistics every second."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any

import msgspec

from fastdeploy_core.types import Request, RequestOutputDelta, TokenDeltas
from fastdeploy_core.types.engine import EngineInfo, EngineStats

if TYPE_CHECKING:
    from fastdeploy_core.plugins.manager import HookManager

STATS_INTERVAL_S = 1.0


class _Record:
    """What hooks are told of a request when it ends."""

    def __init__(self, request: Request) -> None:
        self.arrival_s = time.monotonic()
        self.first_token_s = self.queue_s = 0.0
        self.num_prompt = len(request.prompt_token_ids)
        self.num_generated = self.num_cached = 0
        self.traceparent = request.traceparent
        self.reasons: list[str] = []


class Observer:
    """Calls the hooks. Keeps records only of what some hook implements."""

    def __init__(self, hooks: HookManager | None) -> None:
        self._hooks = hooks
        heard = {name for e in hooks.entries for name in hooks.hooks_of(e)} if hooks else set()
        self._wants_requests = "fd_request_finished" in heard
        self._wants_stats = "fd_step_stats" in heard
        self._records: dict[str, _Record] = {}
        self._next_stats_s = 0.0

    def started(self, info: EngineInfo) -> None:
        """The engine is ready."""
        self._notify("fd_engine_started", info=msgspec.to_builtins(info))

    def admitted(self, request: Request) -> None:
        """The engine accepted a request."""
        if self._wants_requests:
            self._records[request.request_id] = _Record(request)

    def delivered(self, outputs: Sequence[RequestOutputDelta | TokenDeltas]) -> None:
        """The engine produced output."""
        if not self._wants_requests:
            return
        for output in outputs:
            if isinstance(output, TokenDeltas):  # more tokens of requests that have had the first
                counts = output.counts or repeat(1)
                for request_id, number in zip(output.request_ids, counts, strict=False):
                    if (record := self._records.get(request_id)) is not None:
                        record.num_generated += number
            elif (record := self._records.get(output.request_id)) is not None:
                self._take(record, output)

    def _take(self, record: _Record, delta: RequestOutputDelta) -> None:
        if delta.queue_s is not None:  # the first one
            record.queue_s, record.num_cached = delta.queue_s, delta.num_cached_tokens or 0
            # The wait began in the engine, somewhat before this record.
            record.arrival_s = min(record.arrival_s, time.monotonic() - record.queue_s)
        for seq in delta.sequences:
            record.num_generated += len(seq.token_ids)
            if seq.finish_reason is not None:
                record.reasons.append(seq.finish_reason.value)
        if record.num_generated and not record.first_token_s:
            record.first_token_s = time.monotonic() - record.arrival_s
        if delta.finished:
            self._finished(delta.request_id, "error" if delta.error else "")

    def aborted(self, request_ids: Sequence[str]) -> None:
        """Requests were aborted."""
        for request_id in request_ids:
            if request_id in self._records:
                self._finished(request_id, "abort")

    def tick(self, stats: Callable[[], EngineStats]) -> None:
        """Called by the core loop; emits statistics when a second has passed."""
        now = time.monotonic()
        if not self._wants_stats or now < self._next_stats_s:
            return
        self._next_stats_s = now + STATS_INTERVAL_S
        found = msgspec.structs.asdict(stats()).items()
        numbers = {name: float(x) for name, x in found if isinstance(x, int | float)}
        self._notify("fd_step_stats", stats=numbers)

    def shutdown(self) -> None:
        """The process is about to end."""
        self._notify("fd_shutdown")

    def _finished(self, request_id: str, reason: str) -> None:
        record = self._records.pop(request_id)
        info = {
            "request_id": request_id,
            "finish_reason": reason or ",".join(record.reasons),
            "num_prompt_tokens": record.num_prompt,
            "num_generated_tokens": record.num_generated,
            "num_cached_tokens": record.num_cached,
            "queue_s": record.queue_s,
            "traceparent": record.traceparent,
            "first_token_s": record.first_token_s,
            "total_s": time.monotonic() - record.arrival_s,
        }
        self._notify("fd_request_finished", info=info)

    def _notify(self, hook: str, **arguments: Any) -> None:
        if self._hooks is not None:
            self._hooks.notify(hook, **arguments)
