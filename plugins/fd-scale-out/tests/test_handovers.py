"""Two engines, one of which computes prompts for the other: whatever happens on the way, answers
are those of one engine, and every block comes back."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from fd_kv_shm.shm import SharedMemoryTransport
from fd_kv_tcp.transport import TcpTransport
from null_engine import (
    Collector,
    InlineExecutor,
    expected_answers,
    make_config,
    make_request,
)

from fastdeploy_core.config import HandoverConfig
from fastdeploy_core.contracts.base import Requirements
from fastdeploy_core.engine.core import EngineCore
from fastdeploy_core.types import Request

TRANSPORTS = {"shm": SharedMemoryTransport, "tcp": TcpTransport}
PROMPT = list(range(4, 50))  # eleven full blocks of four tokens, and two tokens
NUM_BLOCKS = 11


class Resolved:
    """Names one KV transport, and no other driver."""

    speculative = Requirements()

    def __init__(self, transport: str) -> None:
        self._transport = transport

    def load(self, kind: str, name: str = "") -> Any:
        assert kind == "kv_transport"
        return TRANSPORTS[self._transport]


def make_core(transport: str, *, timeout_s: float = 20.0, **options: Any) -> EngineCore:
    options = {"host_blocks": 64, "max_num_batched_tokens": 8, **options}
    handover = HandoverConfig(transport, timeout_s=timeout_s)
    config = replace(make_config(**options), handover=handover)
    return EngineCore(config, Resolved(transport), InlineExecutor(config))


def part(core: EngineCore) -> Any:
    return core._remote


class Two:
    """A prefill engine and a decode engine, stepped in turn."""

    def __init__(self, transport: str, **options: Any) -> None:
        own = {name: options.pop(name) for name in ("prefill", "decode") if name in options}
        self.prefill = make_core(transport, **{**options, **own.get("prefill", {})})
        self.decode = make_core(transport, **{**options, **own.get("decode", {})})
        self.collector, self.dropped = Collector(), Collector()
        self.requests: list[Request] = []

    @property
    def ticket(self) -> str:
        return self.prefill.stats().kv_ticket

    def ask(self, request: Request, *, to: str = "both") -> None:
        name = secrets.token_hex(16)
        orders = {"prefill": f"prefill {name}", "decode": f"decode {name} {self.ticket}"}
        for core, order in orders.items():
            if to in (core, "both"):
                getattr(self, core).add(
                    msgspec.structs.replace(request, handover=orders[order.split()[0]])
                )
        self.requests.append(request)

    def step(self) -> None:
        if self.prefill.has_work():
            self.dropped.take(self.prefill.step())
        if self.decode.has_work():
            self.collector.take(self.decode.step())

    def run(self, timeout_s: float = 20.0, until: Callable[[], bool] | None = None) -> None:
        end_s = time.monotonic() + timeout_s
        while (self.decode.has_work() or self.prefill.has_work()) and not (until and until()):
            self.step()
            assert time.monotonic() < end_s, "it goes on for ever"

    def check(self) -> None:
        """Answers are right and nothing is held any more."""
        for request in self.requests:
            expected = dict(enumerate(expected_answers(request)))
            assert self.collector.tokens[request.request_id] == expected, request.request_id
        for core in (self.prefill, self.decode):
            core.scheduler.check_idle()
            host = core.scheduler.kv.host
            host.check()
            assert not host._leased, "host blocks are leased for ever"

    def close(self) -> None:
        self.decode.close()
        self.prefill.close()


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FD_KV_SECRET", "0123456789abcdef" * 4)


@pytest.fixture(params=["shm", "tcp"])
def two(request: pytest.FixtureRequest) -> Iterator[Two]:
    made = Two(request.param)
    yield made
    made.close()


def test_a_prompt_is_handed_over_with_its_first_token(two: Two) -> None:
    two.ask(make_request("a", PROMPT))
    two.run()
    two.check()
    assert two.collector.first["a"].num_cached_tokens == 4 * NUM_BLOCKS
    assert two.dropped.tokens["a"][0] == two.collector.tokens["a"][0][:1]
    assert two.decode.stats().kv_taken_over_total == two.prefill.stats().kv_handed_over_total == 1
    # The decode engine was fed what lies behind the last full block, and the first token with it.
    fed = two.decode.stats().step_tokens_total
    assert fed == (len(PROMPT) - 4 * NUM_BLOCKS) + 7
