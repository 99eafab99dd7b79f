"""Hears of engines and requests, where traces go somewhere. Light: imports OpenTelemetry only then.

Without a collector's address fd_request_finished is not implemented, since an engine keeps records
of its requests, at a cost in every step, as soon as anybody asks for them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from fastdeploy_core.contracts.hookspecs import hookimpl

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


def is_wanted() -> bool:
    """Whether OpenTelemetry's variables name a collector, and none turns traces off."""
    is_off = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    is_off |= os.environ.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp"
    return not is_off and any(os.environ.get(name) for name in _ENDPOINTS)


if is_wanted():
    # Here, since a hook is not called again that took long, and these imports can.
    from .spans import Spans

    _spans: Spans | None = None

    @hookimpl
    def fd_engine_started(info: Mapping[str, Any]) -> None:
        """From here on requests have spans."""
        global _spans
        names = info.get("served_names") or [info.get("model_path", "")]
        _spans = Spans(names[0])

    @hookimpl
    def fd_request_finished(info: Mapping[str, Any]) -> None:
        """A span; a thread of OpenTelemetry's sends it later."""
        if _spans is not None:
            _spans.add(info)

    @hookimpl
    def fd_shutdown() -> None:
        """Spans that wait are sent now."""
        if _spans is not None:
            _spans.close()
