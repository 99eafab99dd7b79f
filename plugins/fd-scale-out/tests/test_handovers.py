"""Two engines, one of which computes prompts for the other: whatever happens on the way, answers
are those of one engine, and every block comes back."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from fd_kv_shm.shm import SharedMemoryTransport
from fd_kv_tcp.transport import TcpTransport
from fd_scale_out.handover import handovers, messages, receiving, sending
from fd_scale_out.handover.ticket import Ticket, make_ticket, read_ticket, shared_secret
from fd_scale_out.receiver_driven import descriptor_decoder, encode
from null_engine import (
    Collector,
    InlineExecutor,
    expected_answers,
    make_config,
    make_request,
)

from fastdeploy_core.config import HandoverConfig
from fastdeploy_core.contracts.base import Requirements
from fastdeploy_core.contracts.kv_transport import (
    CancelResult,
    TransferEvent,
    TransferEventKind,
    TransferPlan,
)
from fastdeploy_core.engine.core import AWAIT_S, EngineCore
from fastdeploy_core.errors import CapabilityError, ConfigError, InvalidRequest
from fastdeploy_core.types import InstanceRole, Request, SequenceDelta

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
        self.ticket_given = ""

    @property
    def ticket(self) -> str:
        return self.ticket_given or self.prefill.stats().kv_ticket

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

    def run(self, timeout_s: float = 60.0, until: Callable[[], bool] | None = None) -> None:
        end_s = time.monotonic() + timeout_s
        while (self.decode.has_work() or self.prefill.has_work()) and not (until and until()):
            self.step()
            assert time.monotonic() < end_s, "it goes on for ever"

    def check(self) -> None:
        """Answers are right and nothing is held any more."""
        self.check_answers()
        for core in (self.prefill, self.decode):
            core.scheduler.check_idle()
            host = core.scheduler.kv.host
            host.check()
            assert not host._leased, "host blocks are leased for ever"

    def check_answers(self) -> None:
        for request in self.requests:
            expected = dict(enumerate(expected_answers(request)))
            assert self.collector.tokens[request.request_id] == expected, request.request_id

    def close(self) -> None:
        self.decode.close()
        self.prefill.close()


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FD_KV_SECRET", "0123456789abcdef" * 4)


@pytest.fixture
def short_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (sending, receiving):
        monkeypatch.setattr(module, "LEASE_S", 0.3)


@pytest.fixture(params=["shm", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def two(transport: str) -> Iterator[Two]:
    made = Two(transport)
    yield made
    made.close()


def test_a_prompt_is_handed_over_with_its_first_token(two: Two) -> None:
    two.ask(make_request("a", PROMPT))
    two.run()
    two.check()
    assert two.collector.first["a"].num_cached_tokens == 0  # as where it was computed
    assert two.dropped.tokens["a"][0] == two.collector.tokens["a"][0][:1]
    assert two.decode.stats().kv_taken_over_total == two.prefill.stats().kv_handed_over_total == 1
    # The decode engine was fed what lies after the last full block, and the first token with it.
    fed = two.decode.stats().step_tokens_total
    assert fed == (len(PROMPT) - 4 * NUM_BLOCKS) + 7


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 1},
        {"eos": True, "max_tokens": 30},
        {"temperature": 1.0, "seed": 5},
        {"temperature": 1.0, "seed": 5, "n": 3},
        {"logprobs": 2},
        {"min_tokens": 6, "eos": True},
        {"stop_token_ids": list(range(60))},
    ],
    ids=lambda fields: ",".join(fields),
)
def test_answers_of_any_kind_are_those_of_one_engine(fields: dict[str, Any]) -> None:
    two = Two("shm")
    for number in range(6):  # prompts of their own, so that first tokens differ
        two.ask(make_request(f"r{number}", [number + 4, *PROMPT], **fields))
    two.run()
    two.check()
    assert two.decode.stats().kv_taken_over_total == 6
    reference = make_core("shm", host_blocks=64)
    alone = Collector()
    for request in two.requests:
        reference.add(request)
    while reference.has_work():
        alone.take(reference.step())
    assert alone.reasons == two.collector.reasons
    reference.close()
    two.close()


def test_first_tokens_bring_their_logprobs() -> None:
    two = Two("shm")
    two.ask(make_request("a", PROMPT, logprobs=3, max_tokens=1))
    two.run()
    (sequence,) = two.collector.first["a"].sequences
    assert sequence.logprobs and len(sequence.logprobs) == 1
    assert two.decode.stats().steps_total == 0, "nothing was left to compute"
    two.close()


@pytest.mark.parametrize("then", ["all comes", "it dies", "the client leaves"])
def test_the_first_token_waits_for_no_block(two: Two, then: str) -> None:
    """The prefill engine's thread that sums blocks stands still, so none is offered: the client has
    its token all the same. Whatever happens next, it keeps it, and the answer is one engine's."""
    own, may_sum = part(two.prefill), threading.Event()
    own.sums.put(may_sum.wait)
    two.ask(make_request("a", PROMPT))
    two.run(until=lambda: "a" in two.collector.tokens)
    assert two.collector.tokens["a"][0] == expected_answers(two.requests[0])[0][:1]
    assert two.decode.scheduler.num_held == 1 and two.decode.stats().steps_total == 0
    assert not part(two.decode)._pulls and not two.decode.stats().kv_taken_over_total
    if then == "it dies":
        own._transport.close()
        while two.decode.has_work():
            two.collector.take(two.decode.step())
        two.check_answers()
        assert two.decode.stats().kv_handover_failures_total == 1
        may_sum.set()
        return
    if then == "the client leaves":
        two.decode.abort([two.requests.pop().request_id])
    may_sum.set()
    two.run()
    two.check()
    assert two.decode.stats().kv_handover_failures_total == 0
    assert two.prefill.stats().kv_handed_over_total == 1


def test_an_answer_of_one_token_waits_for_no_block(two: Two) -> None:
    own, may_sum = part(two.prefill), threading.Event()
    own.sums.put(may_sum.wait)
    two.ask(make_request("a", PROMPT, max_tokens=1))
    two.run(until=lambda: "a" in two.collector.finished)
    may_sum.set()
    two.run()
    two.check()
    assert two.decode.stats().kv_taken_over_total == two.prefill.stats().kv_handed_over_total == 1


def test_who_asks_during_the_prompts_only_step_has_its_token_with_it(transport: str) -> None:
    two = Two(transport, max_num_batched_tokens=256)  # the whole prompt at once
    own, request = part(two.prefill), make_request("a", PROMPT)
    settle = own.settle

    def ask_meanwhile(step_id: int, *, is_done: bool) -> None:
        while len(own._transport._events) < 2:  # how it is reached, and what it wants
            two.decode.step()
        settle(step_id, is_done=is_done)

    own.settle = ask_meanwhile
    two.ask(request)
    while "a" not in two.dropped.tokens:
        two.dropped.take(two.prefill.step())
    own.settle = settle
    while "a" not in two.collector.tokens:  # and nobody steps the prefill engine
        two.collector.take(two.decode.step())
    assert not two.decode.stats().kv_handover_failures_total
    two.run()
    two.check()
    two.close()


def test_who_leaves_is_forgotten_before_anything_is_waited_for(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, waits, waited_for = part(two.decode), handovers.connection.wait, list[str]()

    def wait(files: list[int], *more: Any) -> Any:
        if own._wake in files:
            waited_for.extend(own._by_request)
        return waits(files, *more)

    monkeypatch.setattr(handovers.connection, "wait", wait)
    two.ask(make_request("a", PROMPT), to="decode")
    two.decode.step()
    assert waited_for == ["a"]
    two.decode.abort(["a"])
    while two.decode.has_work():
        two.decode.step()
    assert waited_for == ["a"]


def test_an_engine_with_something_else_to_do_does_not_wait_for_blocks(two: Two) -> None:
    waits: list[float] = []
    ready = part(two.decode).ready

    def noted(wait_s: float) -> Any:
        waits.append(wait_s)
        return ready(wait_s)

    part(two.decode).ready = noted
    two.ask(make_request("a", PROMPT), to="decode")
    two.decode.step()
    two.decode._building["b"] = Future()  # what its grammar needs
    two.decode.step()
    assert waits == [AWAIT_S, 0.0]
    two.decode._building.clear()
    two.decode.abort(["a"])


@pytest.mark.parametrize("where", ["prefill", "decode", "both"])
def test_part_of_the_prompt_is_known_already(two: Two, where: str) -> None:
    for core in (two.prefill, two.decode):
        if where == "both" or core is getattr(two, where, None):
            core.add(make_request("before", PROMPT[:24], max_tokens=1))
            while core.has_work():
                core.step()
    two.ask(make_request("a", PROMPT))
    two.run()
    two.check()
    assert two.decode.stats().kv_taken_over_total == 1


def test_a_prompt_that_both_know_still_brings_a_first_token(two: Two) -> None:
    for name in ("a", "b"):
        two.ask(make_request(name, PROMPT))
        two.run()
    two.check()
    assert two.decode.stats().kv_taken_over_total == 2


def test_equal_prompts_at_the_same_time(two: Two) -> None:
    for number in range(5):
        two.ask(make_request(f"r{number}", PROMPT))
    two.run()
    two.check()
    assert two.prefill.stats().kv_handed_over_total == 5


def test_salts_separate_prompts() -> None:
    two = Two("shm")
    two.ask(make_request("a", PROMPT, cache_salt="one tenant"))
    two.run()
    two.decode.add(make_request("b", PROMPT, cache_salt="another"))
    two.run()
    assert two.collector.first["b"].num_cached_tokens == 0
    two.close()


@pytest.mark.parametrize("num_steps", range(14))
def test_the_prefill_engine_dies_at_any_step(
    monkeypatch: pytest.MonkeyPatch, transport: str, num_steps: int
) -> None:
    """What has come is used; the rest is computed at once, and not after a timeout."""
    monkeypatch.setattr(receiving, "LEASE_S", 600.0)
    two = Two(transport, timeout_s=600.0)
    two.ask(make_request("a", PROMPT))
    for _ in range(num_steps):
        two.step()
    part(two.prefill)._transport.close()  # as its process's end does
    end_s = time.monotonic() + 60
    while two.decode.has_work():
        two.collector.take(two.decode.step())
        assert time.monotonic() < end_s
    request = two.requests[0]
    assert two.collector.tokens["a"] == dict(enumerate(expected_answers(request)))
    assert not two.decode.scheduler.kv.host._leased
    two.close()


@pytest.mark.parametrize("num_steps", range(10))
def test_the_decode_engine_dies_at_any_step(
    short_lease: None, transport: str, num_steps: int
) -> None:
    two = Two(transport)
    two.ask(make_request("a", PROMPT))
    for _ in range(num_steps):
        two.step()
    part(two.decode)._transport.close()
    end_s = time.monotonic() + 60
    while two.prefill.has_work():
        two.prefill.step()
        assert time.monotonic() < end_s
    two.prefill.scheduler.check_idle()
    assert not two.prefill.scheduler.kv.host._leased
    two.prefill.close()


@pytest.mark.parametrize("who", ["prefill", "decode"])
@pytest.mark.parametrize("num_steps", range(0, 10))
def test_a_client_leaves_in_any_state(who: str, num_steps: int) -> None:
    two = Two("shm")
    two.ask(make_request("a", PROMPT))
    two.ask(make_request("b", [9, *PROMPT]))
    for _ in range(num_steps):
        two.step()
    getattr(two, who).abort(["a"])
    if who == "decode":
        two.requests.pop(0)
    two.run()
    two.check()
    two.close()


def test_a_process_may_have_more_than_a_thousand_files_open() -> None:
    two = Two("tcp")
    own = part(two.decode)
    try:
        high = fcntl.fcntl(own._wake, fcntl.F_DUPFD, 1500)
    except OSError:
        two.close()
        pytest.skip("this process may not")
    own._wake, low = high, own._wake
    os.close(low)
    two.ask(make_request("a", PROMPT))
    two.run()
    two.check()
    two.close()


def test_an_engine_that_says_nothing_is_not_waited_for(short_lease: None, transport: str) -> None:
    two = Two(transport, timeout_s=600.0)
    two.ask(make_request("a", PROMPT))
    two.step()
    started = time.monotonic()
    while two.decode.has_work():  # the prefill engine is stuck in a step
        two.collector.take(two.decode.step())
    assert 0.2 < time.monotonic() - started < 60
    two.run()
    two.check()
    two.close()


def test_a_prompt_that_never_reaches_the_prefill_engine(transport: str) -> None:
    """Its queue may be full or long: it says so when it has time."""
    two = Two(transport, timeout_s=2.4)
    two.ask(make_request("a", PROMPT), to="decode")
    end_s = time.monotonic() + 60
    while two.decode.has_work():
        two.collector.take(two.decode.step())
        two.dropped.take(two.prefill.step())
        assert time.monotonic() < end_s
    two.check()
    assert two.decode.stats().kv_handover_failures_total == 1
    two.close()


def test_a_step_that_fails_while_a_prompt_is_computed(transport: str) -> None:
    two = Two(transport, prefill={"faults": ({"kind": "raise", "step": 3},)})
    two.ask(make_request("a", PROMPT))
    two.run()
    two.check()
    two.close()


@pytest.mark.parametrize("who", ["prefill", "decode"])
@pytest.mark.parametrize("host_blocks", [1, 3, 8])
def test_too_little_host_memory_costs_time_only(who: str, host_blocks: int) -> None:
    two = Two("shm", **{who: {"host_blocks": host_blocks}})
    for number in range(4):
        two.ask(make_request(f"r{number}", [number + 4, *PROMPT]))
    two.run()
    two.check()
    two.close()


def test_a_block_that_changed_on_its_way_is_not_used(transport: str) -> None:
    two = Two(transport)
    own, numbers = part(two.prefill), itertools.count()
    real = own.checksums
    own.checksums = lambda blocks: [one ^ (next(numbers) == 4) for one in real(blocks)]
    two.ask(make_request("a", PROMPT))
    two.run()
    two.check()
    assert two.decode.stats().kv_handover_failures_total == 1
    two.close()


def test_other_models_and_other_secrets_compute_for_themselves(
    short_lease: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    two = Two("tcp", decode={"null": {"step_s": 1e-6}})  # another config.json
    two.ask(make_request("a", PROMPT))
    two.run()
    assert two.decode.stats().kv_handover_failures_total == 1
    assert "model revision" in caplog.text
    two.close()
    two = Two("tcp")
    monkeypatch.setenv("FD_KV_SECRET", "another secret of thirty-two characters")
    stranger = make_core("tcp")
    two.decode, own = stranger, two.decode
    two.ask(make_request("a", PROMPT))
    two.run()
    assert "signed with another secret" in caplog.text
    own.close()
    two.close()


def test_orders_that_make_no_sense_are_refused() -> None:
    core = make_core("shm")
    for text in ("prefill", "prefill x", "decode " + "0" * 32, "take " + "0" * 32, "x" * 20000):
        request = msgspec.structs.replace(make_request("a", PROMPT), handover=text)
        with pytest.raises(InvalidRequest, match="X-KV-Handover"):
            core.add(request)
    ticket = core.stats().kv_ticket
    for wrong in ("", "?", ticket[:-4], "A" + ticket[1:], ticket[::-1], "é"):
        with pytest.raises(InvalidRequest):
            read_ticket(shared_secret(), "shm", wrong)
    found = read_ticket(shared_secret(), "shm", ticket)
    assert found.descriptor == part(core)._transport.descriptor()
    with pytest.raises(InvalidRequest, match="--kv-transport shm"):
        read_ticket(shared_secret(), "tcp", ticket)
    core.close()


def test_a_secret_of_this_user_is_made_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("FD_KV_SECRET")
    monkeypatch.setenv("FD_CACHE_DIR", str(tmp_path))
    with ThreadPoolExecutor(8) as pool:
        found = {future.result() for future in [pool.submit(shared_secret) for _ in range(32)]}
    assert len(found) == 1 and len(found.pop()) >= 32
    assert [path.name for path in tmp_path.iterdir()] == ["kv-secret"]
    (tmp_path / "kv-secret").chmod(0o644)
    with pytest.raises(ConfigError, match="owner alone"):
        shared_secret()
    monkeypatch.setenv("FD_KV_SECRET", "short")
    with pytest.raises(ConfigError, match="openssl rand"):
        shared_secret()


def test_a_host_tier_is_needed() -> None:
    with pytest.raises(CapabilityError, match=r"--kv-transport shm .*prefix cache, which is off"):
        make_core("shm", prefix_caching=False)


def test_the_role_changes_while_prompts_are_handed_over(transport: str) -> None:
    """What is under way ends; what comes meanwhile is computed where it is answered."""
    two = Two(transport)
    two.ask(make_request("a", PROMPT))
    two.step()
    old = two.ticket
    two.prefill.set_role(InstanceRole.DECODE)
    two.step()
    assert not two.prefill.stats().kv_role, "it drains"
    name = secrets.token_hex(16)
    late = msgspec.structs.replace(make_request("b", [9, *PROMPT]), handover=f"decode {name} {old}")
    two.decode.add(late)
    two.requests.append(late)
    two.run()
    two.check()
    stats = two.prefill.stats()
    assert stats.kv_role == "decode" and stats.kv_ticket not in ("", old)
    assert two.decode.stats().kv_taken_over_total == 1
    two.prefill, two.decode = two.decode, two.prefill  # and the other way round
    two.collector, two.dropped, two.requests = Collector(), Collector(), []
    two.ask(make_request("c", [8, *PROMPT]))
    two.run()
    two.check()
    assert two.decode.stats().kv_taken_over_total == 1
    two.close()


def test_notes_that_someone_else_makes_up_change_nothing() -> None:
    """10,000 changed notes, from a third instance that knows the secret: a handover belongs to the
    two that began it."""
    two, random = Two("shm"), Random(7)
    two.ask(make_request("a", PROMPT))
    names = list(part(two.decode)._receiving)
    notes: list[Any] = [
        messages.Want(names[0], 5, 0, NUM_BLOCKS, bytes(32)),
        messages.Have(names[0], 1, 0, [1, 2, 3], [4, 5, 6]),
        messages.First(names[0], 1, SequenceDelta(token_ids=[9]), 0),
        messages.Commit(names[0], 1, 0),
        messages.Accept(names[0], 1),
        messages.Abort(names[0], 1, "no"),
        messages.Aborted(names[0], 1),
        messages.Alive(names[0], 1),
        messages.Hello(b"descriptor"),
    ]
    for number in range(10_000):
        data = bytearray(messages.encode(random.choice(notes)))
        for _ in range(random.randrange(4)):
            data[random.randrange(len(data))] = random.randrange(256)
        event = TransferEvent(TransferEventKind.NOTE, "shm-stranger", note=bytes(data))
        for core in (two.prefill, two.decode):
            part(core)._on_event(event)
        if number % 500 == 0:
            two.step()
    two.run()
    two.check()
    assert two.decode.stats().kv_taken_over_total == 1
    two.close()


@pytest.mark.parametrize("seed", range(16))
def test_any_mix_of_requests_gives_the_answers_of_one_engine(seed: int) -> None:
    """Small pools, so that blocks are evicted, preempted and handed over again all the time; and
    some who leave."""
    random = Random(seed)

    def options() -> dict[str, Any]:
        return {
            "host_blocks": random.choice([2, 12, 40]),
            "num_blocks": random.choice([16, 40]),
            "overlap": bool(random.getrandbits(1)),
        }

    two = Two(random.choice(["shm", "tcp"]), prefill=options(), decode=options())
    waiting: list[Request] = []
    for number in range(25):
        stem = [4 + random.randrange(2)] * random.randrange(1, 25)
        tail = [random.randrange(4, 60) for _ in range(random.randrange(12))]
        n = random.choice([1, 1, 1, 2])
        sampling = {"n": n, "seed": 1, "temperature": float(n > 1)}
        length = random.randrange(1, 12)
        waiting.append(make_request(f"r{number}", stem + tail, max_tokens=length, **sampling))
    left: set[str] = set()
    end_s = time.monotonic() + 60
    while waiting or two.decode.has_work() or two.prefill.has_work():
        while waiting and random.random() < 0.3:
            request = waiting.pop()
            if random.random() < 0.7:
                two.ask(request)
            else:
                two.decode.add(request)
                two.requests.append(request)
        if two.requests and random.random() < 0.02:
            gone = random.choice(two.requests).request_id
            two.decode.abort([gone])
            left.add(gone)
        two.step()
        assert time.monotonic() < end_s
    two.requests = [r for r in two.requests if r.request_id not in left]
    two.check()
    two.close()


class Unsafe(SharedMemoryTransport):
    """Cannot stop a transfer, and needs a moment, or more, to fence a peer."""

    num_fences, hangs = 3, True

    def submit(self, peer: str, plan: TransferPlan) -> None:
        if not self.hangs:
            super().submit(peer, plan)

    def cancel(self, transfer_id: int) -> CancelResult:
        super().cancel(transfer_id)
        return CancelResult.UNSAFE

    def fence(self, peer: str) -> bool:
        self.num_fences -= 1
        return self.num_fences <= 0 and super().fence(peer)


# A twentieth of the host blocks may wait: more than the prompt has, or none.
@pytest.mark.parametrize(("num_fences", "host_blocks"), [(3, 1024), (10**9, 16)])
def test_blocks_that_may_still_be_written_to_are_kept(
    monkeypatch: pytest.MonkeyPatch, num_fences: int, host_blocks: int
) -> None:
    """Until the peer is fenced; where they are too many, until the transport is opened anew."""
    monkeypatch.setitem(TRANSPORTS, "unsafe", Unsafe)
    monkeypatch.setattr(Unsafe, "num_fences", num_fences)
    two = Two("unsafe", decode={"host_blocks": host_blocks})
    own = part(two.decode)
    epoch, was_kept = own._transport.epoch, False
    two.ask(make_request("a", PROMPT))
    two.run(until=lambda: bool(own._pulls))
    assert own._pulls
    two.decode.abort(["a"])
    two.requests.clear()
    end_s = time.monotonic() + 60
    while two.decode.has_work() or two.prefill.has_work():
        was_kept = was_kept or bool(own._quarantine)
        two.step()
        assert time.monotonic() < end_s
    assert was_kept == (num_fences == 3)
    assert (own._transport.epoch != epoch) == (num_fences > 3)
    two.check()
    monkeypatch.setattr(Unsafe, "hangs", False)
    two.ask(make_request("b", PROMPT))
    two.run()
    two.check()
    assert two.decode.stats().kv_taken_over_total == 1
    two.close()


def test_bytes_that_come_are_a_word_of_who_sends_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slow network notes wait long behind the blocks."""
    monkeypatch.setitem(TRANSPORTS, "unsafe", Unsafe)
    two = Two("unsafe")
    own = part(two.decode)
    two.ask(make_request("a", PROMPT))
    two.run(until=lambda: bool(own._pulls))
    (transfer_id, (receiving, *_)), *_ = own._pulls.items()
    before = receiving._lease_s
    kind = TransferEventKind.PROGRESS
    own._on_event(TransferEvent(kind, receiving.peer, transfer_id))
    assert receiving._lease_s > before
    assert transfer_id in own._pulls
    two.close()


def test_an_instance_that_cannot_answer_any_more_is_told_the_way_again() -> None:
    """The prefill engine loses the connection by which it speaks; the other one does not."""
    two = Two("tcp")
    two.ask(make_request("a", PROMPT))
    two.run()
    transport = part(two.prefill)._transport
    for peer in list(transport._peers.values()):
        transport.lose(peer, "a test")
    two.ask(make_request("b", [9, *PROMPT]))
    two.run()
    two.check()
    assert two.decode.stats().kv_taken_over_total == 2
    two.close()


class Between:
    """What bytes to a port pass through, which may hold, slow or spoil them."""

    def __init__(self, port: int) -> None:
        self.holds = threading.Event()
        self.pause_s, self.spoils = 0.0, -1  # spoils: the piece of a connection that is changed
        self._there = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._there))
                for ends in ((client, server), (server, client)):
                    threading.Thread(target=self._pass, args=ends, daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        number = 0
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(2048)):
                while self.holds.is_set():
                    time.sleep(0.01)
                time.sleep(self.pause_s)
                if number == self.spoils:
                    data[len(data) // 2] ^= 1
                number += 1
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def apart() -> Iterator[tuple[Two, Between]]:
    """Two engines over TCP; what the decode engine asks of the other one passes through a
    Between."""
    two = Two("tcp")
    there = descriptor_decoder.decode(part(two.prefill)._transport.descriptor())
    between = Between(int(there.address.rpartition(":")[2]))
    there.address = f"127.0.0.1:{between.port}"
    ticket = Ticket("tcp", encode(there), part(two.prefill)._layout)
    two.ticket_given = make_ticket(shared_secret(), ticket)
    yield two, between
    between.holds.clear()
    between.close()
    two.close()


@pytest.mark.parametrize("num_steps", [1, 4, 7, 10])
def test_a_network_that_is_cut_and_heals(
    monkeypatch: pytest.MonkeyPatch, apart: tuple[Two, Between], num_steps: int
) -> None:
    """The prompt is computed within seconds, and nothing that was on its way lands later."""
    monkeypatch.setattr(sending, "LEASE_S", 0.5)
    two, between = apart
    two.ask(make_request("a", PROMPT))
    for _ in range(num_steps):
        two.step()
    between.holds.set()
    started = time.monotonic()
    while two.decode.has_work():
        two.step()
        assert time.monotonic() - started < 60
    two.check_answers()
    view, _ = part(two.decode)._memory.ranks[0]
    before = bytes(view)
    between.holds.clear()
    time.sleep(0.3)
    assert bytes(view) == before, "bytes came late"
    two.run()
    two.check()


def test_a_slow_network_is_waited_for(apart: tuple[Two, Between]) -> None:
    """While it moves. Others decode meanwhile."""
    two, between = apart
    between.pause_s = 0.05
    two.decode.add(other := make_request("other", [7, 7, 7], max_tokens=40))
    two.requests.append(other)
    two.ask(make_request("a", PROMPT))
    two.run()
    two.check()
    assert two.collector.order == ["other", "a"]
    assert two.decode.stats().kv_taken_over_total == 1


@pytest.mark.parametrize("piece", range(0, 12, 2))
def test_bytes_that_change_on_their_way(
    monkeypatch: pytest.MonkeyPatch, apart: tuple[Two, Between], piece: int
) -> None:
    """Of the greeting, of a message or of a block: the connection ends, and the prompt is
    computed."""
    monkeypatch.setattr(sending, "LEASE_S", 0.5)
    two, between = apart
    between.spoils = piece
    two.ask(make_request("a", PROMPT))
    two.run()
    two.check()


def test_hundreds_who_leave_at_once(transport: str) -> None:
    two = Two(transport, host_blocks=256, num_blocks=128)
    for number in range(200):
        two.ask(make_request(f"r{number}", [number % 50 + 4, *PROMPT]))
        if number % 3 == 0:
            two.step()
        two.decode.abort([two.requests.pop().request_id])
        if number % 5 == 0:
            two.prefill.abort([f"r{number}"])
    two.run()
    two.ask(make_request("stays", PROMPT))
    two.run()
    two.check()
    two.close()
