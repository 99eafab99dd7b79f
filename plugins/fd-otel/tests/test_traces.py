"""A real server's spans, as a collector on this machine receives them over OTLP/HTTP."""

from __future__ import annotations

import gzip
import runpy
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from server_process import serving
from server_support import write_null_model

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
LIMIT_S = 60


class Collector(BaseHTTPRequestHandler):
    """Keeps what is sent to it."""

    received: list[ExportTraceServiceRequest]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        self.received.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.fixture
def collector() -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    kind = type("One", (Collector,), {"received": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", kind.received
        server.shutdown()


def values(attributes: Any) -> dict[str, Any]:
    """A span's or a resource's attributes."""
    found = {}
    for one in attributes:
        kind = one.value.WhichOneof("value")
        value = getattr(one.value, kind)
        found[one.key] = [v.string_value for v in value.values] if kind == "array_value" else value
    return found


def test_a_request_has_a_span_below_the_clients(
    collector: tuple[str, list[ExportTraceServiceRequest]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url, received = collector
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "shop")
    body = {"prompt": "x", "max_tokens": 4, "ignore_eos": True}
    parents = [f"00-{TRACE}-{SPAN}-01", "", f"00-{TRACE}-{SPAN}-00", "nonsense"]
    model = write_null_model(tmp_path)
    with serving(model, "--device", "null") as server:
        for number, parent in enumerate(parents):
            headers = {"traceparent": parent, "x-request-id": f"call-{number}"}
            answer = httpx.post(
                f"{server.url}/v1/completions", json=body, headers=headers, timeout=LIMIT_S
            )
            assert answer.status_code == 200, answer.text
    groups = [group for request in received for group in request.resource_spans]
    assert {values(group.resource.attributes)["service.name"] for group in groups} == {"shop"}
    spans = [s for group in groups for scope in group.scope_spans for s in scope.spans]
    whole = {
        values(s.attributes)["gen_ai.response.id"].rpartition("-")[0]: s
        for s in spans
        if s.name.startswith("text_completion ")
    }
    # The client of the third one has decided that it is not sampled.
    assert set(whole) == {"call-0", "call-1", "call-3"}
    assert whole["call-0"].trace_id.hex() == TRACE
    assert whole["call-0"].parent_span_id.hex() == SPAN
    assert not whole["call-1"].parent_span_id and not whole["call-3"].parent_span_id
    for span in whole.values():
        said = values(span.attributes)
        assert said["gen_ai.usage.output_tokens"] == 4
        assert said["gen_ai.usage.input_tokens"] >= 1
        assert said["gen_ai.response.finish_reasons"] == ["length"]
        below = [s for s in spans if s.parent_span_id == span.span_id]
        assert [s.name for s in below] == ["queue", "prefill", "decode"]
        assert below[0].start_time_unix_nano == span.start_time_unix_nano
        assert below[-1].end_time_unix_nano == span.end_time_unix_nano
        for before, after in pairwise(below):
            assert before.end_time_unix_nano == after.start_time_unix_nano


def test_a_collector_that_is_away_ends_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with serving(write_null_model(tmp_path), "--device", "null") as server:
        body = {"prompt": "x", "max_tokens": 4}
        for _ in range(5):
            answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=LIMIT_S)
            assert answer.status_code == 200


@pytest.mark.parametrize("address", ["", "http://127.0.0.1:9"])
def test_requests_are_watched_only_for_a_collector(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine keeps a record of each request where anybody implements the hook."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
    assert ("fd_request_finished" in runpy.run_module("fd_otel.hooks")) is bool(address)
