"""The router's own metrics, and those of its instances with a label each."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from .instances import Fleet, Instance

_SAMPLE = re.compile(rb"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{([^\n]*)\})? ([^\s]+)$")
_FAMILY = re.compile(rb"^# (?:HELP|TYPE) ([a-zA-Z_:][a-zA-Z0-9_:]*) [^\n]*$")
_PARTS = re.compile(rb"_(?:bucket|sum|count|total|created)$")
PREFIX = "fastdeploy_router_"


class RouterMetrics:
    """Counters, by instance."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        by_instance = ("instance",)

        def counter(name: str, text: str, labels: tuple[str, ...] = by_instance) -> Counter:
            return Counter(PREFIX + name, text, labels, registry=self._registry)

        self.requests = counter("requests", "answers passed on", ("instance", "status"))
        self.failures = counter("failures", "requests that an instance failed")
        self.retries = counter("retries", "requests tried here after another instance")
        self.migrations = counter("migrations", "streams carried on here")
        self.prefills = counter("prefills", "prompts sent there first", ("instance", "outcome"))
        text = "roles that the router changed"
        self.role_changes = counter("role_changes", text, ("instance", "role", "outcome"))
        self.refused = counter("refused", "requests that no instance could answer", ())
        self.role_demand = Gauge(
            PREFIX + "role_demand",
            "instances that prompts and answers need, as --slo-tpot counts",
            ("role",),
            registry=self._registry,
        )
        self.mixed_share = Gauge(
            PREFIX + "mixed_share",
            "share of prompts that --slo-tpot does not hand over",
            registry=self._registry,
        )

    def render(self, fleet: Fleet) -> bytes:
        """All metrics as Prometheus reads them."""
        return generate_latest(self._registry) + _gauges(fleet) + _of_instances(fleet)


def _gauges(fleet: Fleet) -> bytes:
    now = time.monotonic()
    rows: dict[str, tuple[str, Callable[[Instance], float]]] = {
        "instance_ready": ("1 when probes find it ready", lambda one: int(one.ready)),
        "instance_draining": ("1 while it drains", lambda one: int(one.draining)),
        "breaker_open": (
            "1 while no request may go there",
            lambda one: not one.breaker.allows(now),
        ),
        "requests_in_flight": ("requests of this router there", lambda one: len(one.calls)),
        "queued_tokens": ("prompt tokens sent and not yet computed", lambda one: one.queued_tokens),
        "kv_events_followed": (
            "1 while its KV events are followed",
            lambda one: fleet.events.follows(one.name),
        ),
        "kv_blocks": (
            "cached blocks, by its KV events",
            lambda one: fleet.events.num_blocks(one.name),
        ),
        "prefill_rate": ("prompt tokens a second, estimated", lambda one: one.view.prefill_rate),
    }
    lines: list[str] = []
    for name, (text, value) in rows.items():
        lines += [f"# HELP {PREFIX}{name} {text}", f"# TYPE {PREFIX}{name} gauge"]
        for one in fleet.instances.values():
            lines.append(f'{PREFIX}{name}{{instance="{one.name}"}} {float(value(one))}')
    return ("\n".join(lines) + "\n").encode()


def _of_instances(fleet: Fleet) -> bytes:
    """The newest metrics of all instances, each sample with its instance's name; lines that are no
    metrics are left out."""
    heads: dict[bytes, list[bytes]] = {}
    samples: dict[bytes, list[bytes]] = {}
    for one in fleet.instances.values():
        label = b'instance="' + one.name.encode() + b'"'
        seen: set[bytes] = set()
        for line in one.metrics.split(b"\n"):
            if found := _FAMILY.match(line):
                name = found[1]
                if name not in heads or name in seen:
                    heads.setdefault(name, []).append(line)
                    seen.add(name)
            elif found := _SAMPLE.match(line):
                labels = label + (b"," + found[2] if found[2] else b"")
                name = found[1] if found[1] in heads else _PARTS.sub(b"", found[1])
                samples.setdefault(name, []).append(b"%s{%s} %s" % (found[1], labels, found[3]))
    parts: list[bytes] = []
    for name, lines in samples.items():
        parts += [*heads.get(name, [])[:2], *lines]
    return b"\n".join(parts) + b"\n" if parts else b""
