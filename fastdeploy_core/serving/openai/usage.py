"""Token counts of a call, and the request options that body and server set together."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fastdeploy_core.engine.input import RequestOptions
from fastdeploy_core.plugins import drivers
from fastdeploy_core.serving.openai.schemas.common import SamplingFields
from fastdeploy_core.serving.state import ServerState
from fastdeploy_core.types import RequestMetrics, RequestOutput, SpeculateMetrics


class Usage:
    """Counts tokens as outputs arrive."""

    def __init__(
        self, num_prompt_tokens: int, media: Mapping[str, int] | None = None, *, timed: bool = False
    ) -> None:
        """timed: times are shown too, of the one answer to the one prompt."""
        self.num_prompt_tokens, self.timed = num_prompt_tokens, timed
        self.media = media or {}  # of these, in whose places pictures and videos stand
        self.num_completion_tokens = 0
        self.num_reasoning_tokens = 0
        # by request, because each output repeats the request's own number
        self._cached: dict[str, int] = {}
        self._drafts: dict[str, SpeculateMetrics] = {}  # by request, for the same reason
        self._finished: RequestMetrics | None = None

    def add(self, output: RequestOutput) -> None:
        """New output of one of the call's requests."""
        for part in output.outputs:
            self.num_completion_tokens += len(part.token_ids)
        if output.num_cached_tokens is not None:
            self._cached[output.request_id] = output.num_cached_tokens
        self._finished = output.metrics if output.finished else None
        if output.metrics.speculate_metrics is not None:
            self._drafts[output.request_id] = output.metrics.speculate_metrics

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that the prefix cache held."""
        return sum(self._cached.values())

    def times(self) -> dict[str, float | None] | None:
        """vLLM's metrics of a finished answer, if its times are shown."""
        told = self._finished
        if not self.timed or told is None or not told.first_token_time or not told.last_token_time:
            return None
        begun = told.arrival_time + (told.queue_s or 0.0)
        decode_s, all_s = told.last_token_time - told.first_token_time, told.last_token_time - begun
        num_later = self.num_completion_tokens - 1
        return {
            "time_to_first_token_ms": 1e3 * max(0.0, told.first_token_time - begun),
            "generation_time_ms": 1e3 * decode_s,
            "queue_time_ms": None if told.queue_s is None else 1e3 * told.queue_s,
            "mean_itl_ms": 1e3 * decode_s / num_later if num_later > 0 else None,
            "tokens_per_second": self.num_completion_tokens / all_s if all_s > 0 else None,
        }

    def render(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        usage: dict[str, Any] = {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_completion_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens, **self.media},
        }
        details = {}
        if self.num_reasoning_tokens:
            details["reasoning_tokens"] = self.num_reasoning_tokens
        if self._drafts:
            drafts = self._drafts.values()
            details["accepted_prediction_tokens"] = sum(d.accepted_tokens for d in drafts)
            details["rejected_prediction_tokens"] = sum(d.rejected_tokens for d in drafts)
        if details:
            usage["completion_tokens_details"] = details
        return usage


@dataclass(frozen=True, slots=True)
class Call:
    """What is known of an API call besides its body."""

    id: str
    tenant: str = ""
    timeout_s: float | None = None
    # a body so short that all work for it takes less than passing it to a thread
    is_short: bool = False
    passed: Mapping[str, Any] = field(default_factory=dict)  # see RequestOptions


class Envelope:
    """What the parts of one answer have in common. Its id is that of its call, which also shows in
    the header and in logs."""

    def __init__(self, prefix: str, call: Call, model: str) -> None:
        self._id = f"{prefix}-{call.id.removeprefix(f'{prefix}-')}"
        self._model = model
        self._created = int(time.time())

    def __call__(
        self, kind: str, choices: list[dict[str, Any]], usage: Usage | None = None
    ) -> dict[str, Any]:
        """A whole answer or a chunk; with `usage`, it says how many tokens there are so far."""
        body: dict[str, Any] = {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }
        if usage is not None:
            body["usage"] = usage.render()
            if times := usage.times():
                body["metrics"] = times
        return body


def request_options(
    state: ServerState, body: SamplingFields, call: Call, add_special_tokens: bool
) -> RequestOptions:
    """What body, call and server decide about a call's engine requests."""
    # Its adapter, unless it was unloaded meanwhile.
    extras = state.adapters.get(state.check_model(body.model))
    if body.routed_experts is not None:
        extras = drivers.part("routed-experts", "routed_experts")(body.routed_experts, extras)
    limits = [t for t in (state.config.request_timeout_s, call.timeout_s) if t is not None]
    return RequestOptions(
        add_special_tokens=add_special_tokens,
        truncation=body.truncation(),
        priority=body.priority or 0,
        deadline_s=min(limits, default=None),
        tenant=call.tenant,
        cache_salt=body.cache_salt or "",
        salt_scope="" if state.config.share_prefix_cache else call.tenant,
        log_id=call.id,
        media=state.media,
        passed=call.passed,
        extras=extras,
    )
