"""Prompts of models with several groups of layers that one engine computes for another: the blocks
of each group that the prompt's end needs come along, and answers are those of one engine."""

from __future__ import annotations

import secrets
import time
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from fd_kv_shm.shm import SharedMemoryTransport
from fd_kv_tcp.transport import TcpTransport

from fastdeploy_core.config import HandoverConfig
from fastdeploy_core.engine.core import EngineCore
from fastdeploy_core.errors import CapabilityError
from fastdeploy_core.types import Request
from tests.checkpoints import build
from tests.cpu.engine_mixes import Bench, Settings, answers_alone, count_loads, poison
from tests.cpu.test_group_host_tier import make_sessions
from tests.null_engine import Collector

TRANSPORTS = {"shm": SharedMemoryTransport, "tcp": TcpTransport}
SLOW = (pytest.mark.slow, pytest.mark.timeout(900))
CASES = [pytest.param("gpt-oss", "shm", 1)]
CASES += [
    pytest.param(variant, transport, 8, marks=SLOW)
    for variant in ("gpt-oss", "gemma3", "llama4", "qwen3-next", "lfm2")
    for transport in TRANSPORTS
]


class WithTransport:
    """Resolved plugins with a KV transport among them."""

    def __init__(self, resolved: Any, transport: str) -> None:
        self._resolved, self._transport = resolved, transport

    def load(self, kind: str, name: str = "") -> Any:
        if kind == "kv_transport":
            return TRANSPORTS[self._transport]
        return self._resolved.load(kind, name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._resolved, name)


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FD_KV_SECRET", "0123456789abcdef" * 4)


def connect(bench: Bench, transport: str) -> None:
    bench.config = replace(bench.config, handover=HandoverConfig(transport, timeout_s=60.0))
    bench._resolved = WithTransport(bench._resolved, transport)  # type: ignore[assignment]


def play_two(
    prefill: EngineCore, decode: EngineCore, arrivals: list[tuple[int, Request]]
) -> Collector:
    """Each request to both, stepped in turn."""
    collector, dropped, waiting = Collector(), Collector(), sorted(arrivals, key=lambda a: a[0])
    end_s, step = time.monotonic() + 100, 0
    while waiting or prefill.has_work() or decode.has_work():
        assert time.monotonic() < end_s, "it goes on for ever"
        while waiting and waiting[0][0] <= step:
            request, name = waiting.pop(0)[1], secrets.token_hex(16)
            ticket = prefill.stats().kv_ticket
            for core, order in ((prefill, f"prefill {name}"), (decode, f"decode {name} {ticket}")):
                core.add(msgspec.structs.replace(request, handover=order))
        if prefill.has_work():
            dropped.take(prefill.step())
        if decode.has_work():
            collector.take(decode.step())
        step += 1
    return collector


def test_a_model_without_layers_that_need_every_token_is_refused_by_name(
    tmp_path: Path, tensor_library: str
) -> None:
    bench = Bench(build(tmp_path, ["mistral-window"]) / "mistral-window", tensor_library)
    connect(bench, "shm")
    with pytest.raises(CapabilityError, match=r"--kv-transport shm .* has none"):
        bench.engine(Settings(prefix_caching=True, host_blocks=60))


@pytest.mark.parametrize(("variant", "transport", "num_mixes"), CASES)
def test_answers_to_prompts_that_another_engine_computed_are_those_of_one(
    tmp_path: Path,
    tensor_library: str,
    variant: str,
    transport: str,
    num_mixes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkpoint = build(tmp_path, [variant]) / variant
    prefill, decode = Bench(checkpoint, tensor_library), Bench(checkpoint, tensor_library)
    requests, random = make_sessions(Random(4))[: 8 * min(2, num_mixes)], Random(1)
    alone = answers_alone(decode, requests)
    for bench in (prefill, decode):
        connect(bench, transport)
        initialize = bench._executor.initialize_cache

        def poisoned(*sizes: int, to: Any = initialize, own: Bench = bench, **named: Any) -> None:
            to(*sizes, **named)
            poison(own)

        monkeypatch.setattr(bench._executor, "initialize_cache", poisoned)
    loads, num_hit, num_taken = count_loads(decode, monkeypatch), 0, 0
    for mix in range(num_mixes):
        cores = []
        for bench in (prefill, decode):
            settings = Settings(
                prefix_caching=True,
                chunked_prefill=True,
                max_num_batched_tokens=random.choice([8, 17, 40]),
                max_num_seqs=random.choice([2, 4]),
                num_blocks=random.choice([24, 64]),
                host_blocks=60,
                overlap=(mix + len(cores)) % 2 > 0,
            )
            cores.append(bench.engine(settings))
        chosen = random.sample(requests, 8)
        try:
            collector = play_two(*cores, [(random.randrange(20), r) for r in chosen])
            for request in chosen:
                name = request.request_id
                assert name not in collector.errors
                assert collector.answers(name) == alone[name], name
            for bench, core in zip((prefill, decode), cores, strict=True):
                core.scheduler.check_idle()
                core.scheduler.kv.check()
                assert not any(tier._leased for tier in core.scheduler.kv.tiers)
                bench._num_seq_ids = core.scheduler._next_seq_id
            stats = cores[1].stats()
            assert stats.kv_handover_failures_total == 0
            num_taken += stats.kv_taken_over_total
            num_hit += stats.host_hit_tokens_total
        finally:
            for core in cores:
                core.close()
    assert num_taken == 8 * num_mixes
    assert min(loads[0], loads[1]) > num_mixes and num_hit > 4 * 8 * num_mixes
