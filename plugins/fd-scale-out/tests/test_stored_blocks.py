"""Blocks kept outside the engine: whatever a store does, the answers are the same and no block is
lost."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from null_engine import (
    Collector,
    InlineExecutor,
    expected_answers,
    make_config,
    make_request,
)

from fastdeploy_core.contracts.base import Requirements
from fastdeploy_core.engine.core import EngineCore
from fastdeploy_core.errors import CapabilityError

PROMPT = list(range(4, 34))  # seven full blocks of four tokens, and two tokens


class MemoryStore:
    """A store that keeps bytes in a dictionary; `before` may delay a call or make it fail."""

    name = "memory"
    contract = (1, 2)

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.before: Callable[[str], Any] = lambda call: None
        self.num_closed = 0

    def find(self, names: Sequence[str]) -> int:
        self.before("find")
        return next((i for i, name in enumerate(names) if name not in self.kept), len(names))

    def get(self, name: str, parts: Sequence[memoryview]) -> bool:
        self.before("get")
        data = self.kept.get(name, b"")
        if len(data) != sum(part.nbytes for part in parts):
            return False
        for part in parts:
            part[:], data = data[: part.nbytes], data[part.nbytes :]
        return True

    def put(self, name: str, parts: Sequence[memoryview]) -> None:
        self.before("put")
        self.kept[name] = b"".join(parts)

    def close(self) -> None:
        self.num_closed += 1


class Resolved:
    """Names one store, and no other driver."""

    speculative = Requirements()

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    def load(self, kind: str, name: str = "") -> Any:
        assert kind == "kv_store"
        return lambda options: self._store


def make_core(
    store: MemoryStore, *, timeout_s: float = 5.0, host_blocks: int = 32, **options: Any
) -> EngineCore:
    config = make_config(host_blocks=host_blocks, **options)
    cache = replace(config.cache, kv_store="memory", kv_store_timeout_s=timeout_s)
    config = replace(config, cache=cache)
    return EngineCore(config, Resolved(store), InlineExecutor(config))


def answer(core: EngineCore, *requests: Any, timeout_s: float = 60.0) -> Collector:
    collector, end_s = Collector(), time.monotonic() + timeout_s
    for request in requests:
        core.add(request)
    while core.has_work():
        collector.take(core.step())
        assert time.monotonic() < end_s, "the engine goes on for ever"
    for request in requests:
        assert collector.tokens[request.request_id] == dict(enumerate(expected_answers(request))), (
            request.request_id
        )
    core.scheduler.check_idle()
    return collector


def cached(collector: Collector, name: str) -> int:
    return int(collector.first[name].num_cached_tokens or 0)


def filled() -> MemoryStore:
    """A store that knows PROMPT and its answer."""
    store = MemoryStore()
    core = make_core(store)
    answer(core, make_request("first", PROMPT))
    core.close()
    assert store.num_closed == 1
    assert len(store.kept) == 9  # 30 tokens and 7 of the answer's 8, in blocks of 4
    return store


def test_another_engine_finds_what_one_has_computed() -> None:
    core = make_core(filled())
    assert cached(answer(core, make_request("again", PROMPT)), "again") == 28
    longer = make_request("longer", [*PROMPT, *range(40, 50)])
    assert cached(answer(core, longer), "longer") == 28
    assert core.stats().kv_store_read_blocks_total == 7


def test_part_of_a_prompt_is_cached_and_the_next_part_is_stored() -> None:
    core = make_core(filled())
    answer(core, make_request("start", PROMPT[:13]))
    assert core.stats().kv_store_read_blocks_total == 3
    assert cached(answer(core, make_request("all", PROMPT)), "all") == 28
    assert core.stats().kv_store_read_blocks_total == 7


def test_salt_separates_stored_blocks() -> None:
    core = make_core(filled())
    salted = make_request("salted", PROMPT, cache_salt="another tenant")
    assert cached(answer(core, salted), "salted") == 0


def test_what_differs_in_the_model_has_other_names() -> None:
    store = filled()
    names = set(store.kept)
    core = make_core(store, null={"step_s": 1e-6})  # another config.json
    answer(core, make_request("other", PROMPT))
    core.close()
    assert len(store.kept) == 2 * len(names)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        lambda data: bytes([data[0] ^ 1]) + data[1:],
        lambda data: data[:-8],
        lambda data: data + bytes(8),
        lambda data: b"",
        lambda data: bytes(len(data)),
    ],
)
def test_a_damaged_block_and_what_follows_is_computed(damage: Callable[[bytes], bytes]) -> None:
    store = filled()
    core = make_core(store)
    third = _names_in_order(store)[2]
    store.kept[third] = damage(good := store.kept[third])
    assert cached(answer(core, make_request("again", PROMPT)), "again") == 8
    core.close()
    assert store.kept[third] == good  # computed anew, so written anew


def test_blocks_that_changed_names_are_not_taken() -> None:
    """The content is whole and its checksum right, but it is another block's."""
    store = filled()
    names = _names_in_order(store)
    store.kept[names[1]], store.kept[names[2]] = store.kept[names[2]], store.kept[names[1]]
    assert cached(answer(make_core(store), make_request("again", PROMPT)), "again") == 4


def _names_in_order(store: MemoryStore) -> list[str]:
    """Of the blocks of PROMPT: a block's header has its group, its key, then its parent's."""
    at = 16 + len(b"FastDeploy KV block 2") + 1
    parents = {data[at + 32 : at + 64].hex(): name for name, data in store.kept.items()}
    names, key = [], bytes(32).hex()
    while key in parents:
        names.append(parents[key])
        key = names[-1]
    return names


@pytest.mark.parametrize("call", ["find", "get", "put"])
def test_a_failing_store_costs_one_warning(call: str, caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore() if call == "put" else filled()

    def fail(what: str) -> None:
        if what == call:
            raise OSError(28, "No space left on device")

    store.before = fail
    core = make_core(store)
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            answer(core, make_request(f"r{number}", [*PROMPT[:20], 40 + number]))
            answer(core, make_request(f"s{number}", [50 + number, *PROMPT]))
        core.close()
    warnings = [r.getMessage() for r in caplog.records if "KV store" in r.getMessage()]
    assert len(warnings) == 1 and "No space left on device" in warnings[0]
    assert core.stats().kv_store_failures_total >= 1


@pytest.mark.parametrize("call", ["find", "get"])
def test_a_store_that_hangs_is_waited_for_no_longer_than_asked(call: str) -> None:
    store, go_on = filled(), threading.Event()
    store.before = lambda what: what == call and go_on.wait(600)
    core = make_core(store, timeout_s=0.2)
    started = time.monotonic()
    assert cached(answer(core, make_request("late", PROMPT)), "late") == 0
    assert 0.2 <= time.monotonic() - started < 60
    host = core.scheduler.kv.host
    host.check()
    core._remote._timeout_s = 600.0  # nobody waits for a store that hangs already
    assert cached(answer(core, make_request("next", [9, *PROMPT])), "next") == 0
    go_on.set()  # what comes late belongs to nobody's answer, and is given back
    deadline = time.monotonic() + 60
    while host._ownerless and time.monotonic() < deadline:
        answer(core, make_request(f"n{time.monotonic_ns()}", [3, 5]))
    assert not host._ownerless
    core.close()


def test_others_run_while_a_request_waits_for_its_blocks() -> None:
    store, go_on = filled(), threading.Event()
    store.before = lambda what: what == "get" and go_on.wait(600)
    core = make_core(store)
    collector = Collector()
    core.add(make_request("waits", PROMPT))
    core.add(make_request("runs", [9, 8, 7]))
    while "runs" not in collector.finished:
        collector.take(core.step())
    assert "waits" not in collector.first and core.has_work()
    go_on.set()
    while core.has_work():
        collector.take(core.step())
    assert cached(collector, "waits") == 28
    assert collector.tokens["waits"][0] == expected_answers(make_request("", PROMPT))[0]


def test_a_request_that_is_aborted_while_it_waits_leaves_nothing_behind() -> None:
    store, go_on = filled(), threading.Event()
    store.before = lambda what: what == "get" and go_on.wait(600)
    core = make_core(store)
    core.add(make_request("gone", PROMPT))
    for _ in range(3):
        core.step()
    core.abort(["gone"])
    go_on.set()
    while core.has_work():
        assert not core.step()
    core.scheduler.check_idle()
    assert cached(answer(core, make_request("next", PROMPT)), "next") == 28


def test_prompt_logprobs_are_computed_not_fetched() -> None:
    core = make_core(filled())
    found = answer(core, make_request("asks", PROMPT, prompt_logprobs=0))
    assert cached(found, "asks") == 0 and core.stats().kv_store_read_blocks_total == 0


def test_a_store_without_a_host_tier_is_refused() -> None:
    with pytest.raises(CapabilityError, match=r"--kv-store memory .*prefix cache, which is off"):
        make_core(MemoryStore(), prefix_caching=False)


@pytest.mark.parametrize("seed", range(20))
def test_any_mix_of_requests_and_failures_gives_the_same_answers(seed: int) -> None:
    """Small pools, so that blocks are evicted, preempted and fetched again all the time."""
    random, store = Random(seed), MemoryStore()
    lock = threading.Lock()

    def misbehave(call: str) -> None:
        with lock:
            dice, pause = random.random(), random.random() * 0.003
        time.sleep(pause)
        if dice < 0.1:
            raise OSError("the store has a bad day")

    store.before = misbehave
    for _ in range(2):  # the second engine starts with what the first has left
        core = make_core(
            store,
            timeout_s=random.choice([0.002, 0.05, 5.0]),
            host_blocks=random.choice([3, 8, 40]),
            num_blocks=random.choice([14, 40]),
            overlap=bool(random.getrandbits(1)),
        )
        requests = []
        for number in range(25):
            stem = [4 + random.randrange(2)] * random.randrange(1, 25)
            tail = [random.randrange(4, 60) for _ in range(random.randrange(3))]
            length = random.randrange(1, 12)
            n = random.choice([1, 1, 1, 2])
            sampling = {"n": n, "seed": 1, "temperature": float(n > 1)}
            name = f"r{number}"
            requests.append(make_request(name, stem + tail, max_tokens=length, **sampling))
        waiting, collector = list(requests), Collector()
        end_s = time.monotonic() + 120
        while waiting or core.has_work():
            while waiting and random.random() < 0.4:
                core.add(waiting.pop())
            collector.take(core.step())
            assert time.monotonic() < end_s
        for request in requests:
            expected = dict(enumerate(expected_answers(request)))
            assert collector.tokens[request.request_id] == expected
        core.close()
        core.scheduler.check_idle()
        assert not core.scheduler.kv.host._leased
