"""Spans of finished requests, by OpenTelemetry's conventions for generative AI."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

OPERATION = "text_completion"  # of an engine, which sees a prompt's tokens whatever was called
_NS = 1_000_000_000


class Spans:
    """Of one engine. The service's name is OTEL_SERVICE_NAME, else fastdeploy."""

    def __init__(self, model: str) -> None:
        self._model = model
        named = Resource({SERVICE_NAME: "fastdeploy"}).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=Resource.create().merge(named))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("fastdeploy")
        self._propagator = TraceContextTextMapPropagator()

    def add(self, info: Mapping[str, Any]) -> None:
        """What fd_request_finished says: its span under that of the client's traceparent, with the
        times that it waited, read its prompt and wrote its answer below it."""
        end = time.time_ns()
        begin = end - int(info["total_s"] * _NS)
        reasons = [reason for reason in info["finish_reason"].split(",") if reason]
        span = self._tracer.start_span(
            f"{OPERATION} {self._model}",
            context=self._propagator.extract({"traceparent": info["traceparent"]}),
            kind=SpanKind.SERVER,
            start_time=begin,
            attributes={
                "gen_ai.operation.name": OPERATION,
                "gen_ai.provider.name": "fastdeploy",
                "gen_ai.request.model": self._model,
                "gen_ai.response.id": info["request_id"],
                "gen_ai.response.finish_reasons": reasons,
                "gen_ai.usage.input_tokens": info["num_prompt_tokens"],
                "gen_ai.usage.output_tokens": info["num_generated_tokens"],
                "gen_ai.usage.cache_read.input_tokens": info["num_cached_tokens"],
            },
        )
        if "error" in reasons:
            span.set_attribute("error.type", "error")
            span.set_status(Status(StatusCode.ERROR))
        below = set_span_in_context(span)
        moments = [begin, begin + int(info["queue_s"] * _NS)]
        if info["first_token_s"]:
            moments += [begin + int(info["first_token_s"] * _NS), end]
        for name, start, stop in zip(
            ("queue", "prefill", "decode"), moments, moments[1:], strict=False
        ):
            self._tracer.start_span(name, below, start_time=start).end(max(start, stop))
        span.end(end)

    def close(self) -> None:
        """Send what waits, within OTEL_EXPORTER_OTLP_TRACES_TIMEOUT."""
        self._provider.shutdown()
