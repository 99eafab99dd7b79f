"""KV events: what a subscriber reads equals what the engine's prefix cache holds."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
import zmq
from fd_scale_out.kv_events import KVEvents
from null_engine import VOCAB_SIZE, Collector, make_core, make_request

from fastdeploy_core.config import KVEventsConfig
from fastdeploy_core.config.arguments import build_engine_config
from fastdeploy_core.engine.core import EngineCore
from fastdeploy_core.errors import ConfigError

BLOCK = 4
MODEL = Path(__file__).resolve().parents[3] / "models" / "ernie-tiny"


class Event(msgspec.Struct, array_like=True, tag=True):
    """Arrays, as vLLM's own readers decode them."""


class BlockStored(Event):
    """By the order of its fields."""

    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None


class BlockRemoved(Event):
    """By the order of its fields."""

    block_hashes: list[int | bytes]
    medium: str | None


class AllBlocksCleared(Event):
    """Without any."""


class Batch(msgspec.Struct, array_like=True):
    """What a message holds."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class Reader:
    """A subscriber that knows the wire format alone: arrays as vLLM writes them."""

    def __init__(self, config: KVEventsConfig) -> None:
        self._context = zmq.Context()
        self.events = self._context.socket(zmq.SUB)
        self.events.subscribe(config.topic)
        self.events.connect(config.endpoint)
        self.replay = self._context.socket(zmq.DEALER)
        self.replay.connect(config.replay_endpoint)
        self.tokens: dict[int, list[int]] = {}  # by block's hash, from the prompt's beginning
        self.scopes: dict[int, list[str] | None] = {}  # extra keys of first blocks
        self.next = 0

    def close(self) -> None:
        self._context.destroy(0)

    def take(self, number: bytes, payload: bytes) -> None:
        assert int.from_bytes(number, "big") == self.next
        self.next += 1
        ts, events, rank = msgspec.msgpack.decode(payload)
        assert ts > 0
        assert rank == 0
        for tag, *fields in events:
            if tag == "AllBlocksCleared":
                self.tokens.clear()
            elif tag == "BlockRemoved":
                hashes, medium = fields
                assert medium == "GPU"
                for name in hashes:
                    del self.tokens[name]
            else:
                assert tag == "BlockStored"
                self._store(*fields)

    def _store(
        self, hashes: list[int], parent: int | None, token_ids: list[int], size: int, *rest: Any
    ) -> None:
        _, medium, adapter, *more = (*rest, None, None, None)[:4]
        assert (medium or "GPU", adapter, size) == ("GPU", None, BLOCK)
        assert len(token_ids) == len(hashes) * size
        before = [] if parent is None else self.tokens[parent]
        for place, name in enumerate(hashes):
            assert name not in self.tokens
            self.tokens[name] = before = [*before, *token_ids[place * size : (place + 1) * size]]
            if place == 0 and parent is None:
                self.scopes[name] = more[0] and more[0][0]

    def read(self, timeout_ms: int) -> None:
        """All events that come; batches that a replay has brought before come twice."""
        while self.events.poll(timeout_ms):
            topic, *message = self.events.recv_multipart()
            assert topic == b"kv@one@null"
            if int.from_bytes(message[0], "big") >= self.next:
                self.take(*message)

    def replayed(self, first: int) -> list[tuple[bytes, bytes]]:
        """The batches from this number on, up to the end."""
        self.replay.send_multipart((b"", first.to_bytes(8, "big")))
        found = []
        while True:
            assert self.replay.poll(5000), "no answer to a replay"
            empty, number, payload = self.replay.recv_multipart()
            assert empty == b""
            if number == b"\xff" * 8:
                assert payload == b""
                return found
            found.append((number, payload))


@pytest.fixture
def config(tmp_path: Path) -> KVEventsConfig:
    return KVEventsConfig(
        enable_kv_cache_events=True,
        endpoint=f"ipc://{tmp_path}/events",
        replay_endpoint=f"ipc://{tmp_path}/replay",
        topic="kv@one@null",
    )


@pytest.fixture
def reader(config: KVEventsConfig) -> Iterator[Reader]:
    made = Reader(config)
    yield made
    made.close()


def _cached(core: EngineCore) -> set[int]:
    return {int.from_bytes(key[-8:], "big") for key in core.scheduler.kv.prefix._by_key}


def _run(core: EngineCore, rng: Random, count: int) -> None:
    """Prompts with common beginnings, more of them than the cache has room for."""
    collector = Collector()
    stems = [[rng.randrange(4, VOCAB_SIZE) for _ in range(24)] for _ in range(6)]
    for number in range(count):
        stem = stems[rng.randrange(6)]
        prompt = stem[: rng.randrange(1, 25)] + [rng.randrange(4, 8) for _ in range(9)]
        salt = rng.choice(("", "", "s"))
        core.add(make_request(f"{number}", prompt, max_tokens=rng.randrange(1, 9), cache_salt=salt))
        if rng.random() < 0.5:
            while core.has_work():
                collector.take(core.step())
    while core.has_work():
        collector.take(core.step())


@pytest.mark.parametrize("host_blocks", [0, 12])
@pytest.mark.parametrize("seed", range(3))
def test_events_say_what_the_cache_holds(
    config: KVEventsConfig, reader: Reader, host_blocks: int, seed: int
) -> None:
    core = make_core(num_blocks=24, host_blocks=host_blocks, block_size=BLOCK, events=config)
    _run(core, Random(seed), 40)
    for batch in reader.replayed(0):
        reader.take(*batch)
    assert reader.next > 10
    assert set(reader.tokens) == _cached(core)
    assert len(reader.tokens) <= 24 + host_blocks
    entries = core.scheduler.kv.prefix._by_key.values()
    for entry in entries:
        name = int.from_bytes(entry.key[-8:], "big")
        if entry.parent is None:
            assert reader.scopes[name] == ([entry.scope[0]] if entry.scope[0] else None)
        words = memoryview(entry.tokens).cast("I").tolist()
        assert reader.tokens[name][-BLOCK:] == words
    assert any(entry.parent is not None for entry in entries)
    core.reset_prefix_cache()
    for batch in reader.replayed(reader.next):
        reader.take(*batch)
    assert not reader.tokens
    core.close()


def test_a_subscriber_hears_each_step_and_asks_for_what_it_missed(
    config: KVEventsConfig, reader: Reader
) -> None:
    core = make_core(num_blocks=24, block_size=BLOCK, events=config)
    _run(core, Random(1), 3)
    early = reader.replayed(0)
    for batch in early:
        reader.take(*batch)
    # A PUB socket sends only what comes after a subscription, which is on its way.
    for attempt in range(100):
        core.add(make_request(f"r{attempt}", [5 + attempt % 50] * 13, max_tokens=1))
        while core.has_work():
            core.step()
        if reader.events.poll(50):
            break
    _, number, payload = reader.events.recv_multipart()
    assert (number, payload) in reader.replayed(0)  # the same batch, either way
    for batch in reader.replayed(reader.next):
        reader.take(*batch)
    _run(core, Random(2), 10)
    reader.read(500)
    assert set(reader.tokens) == _cached(core)
    assert reader.replayed(reader.next) == []
    core.close()


def test_replay_goes_back_as_many_batches_as_are_kept(
    config: KVEventsConfig, reader: Reader
) -> None:
    core = make_core(block_size=BLOCK, events=replace(config, buffer_steps=5))
    _run(core, Random(1), 20)
    (first, _), *_, (last, _) = kept = reader.replayed(0)
    assert len(kept) == 5
    assert int.from_bytes(last, "big") - int.from_bytes(first, "big") == 4
    core.close()


def test_records_as_vllm_declares_them_read_it(config: KVEventsConfig, reader: Reader) -> None:
    core = make_core(num_blocks=24, block_size=BLOCK, events=config)
    _run(core, Random(3), 40)
    core.reset_prefix_cache()
    decode = msgspec.msgpack.Decoder(Batch).decode
    events = [one for _, payload in reader.replayed(0) for one in decode(payload).events]
    assert {type(one) for one in events} == {BlockStored, BlockRemoved, AllBlocksCleared}
    stored = [one for one in events if isinstance(one, BlockStored)]
    assert {one.extra_keys[0] for one in stored if one.extra_keys} == {("s",)}
    assert max(len(one.block_hashes) for one in stored) > 1
    core.close()


def test_dynamos_router_finds_what_the_cache_holds() -> None:
    """Its own subscriber, which comes late and asks for a replay, through evictions."""
    reason = "needs ai-dynamo-runtime, which session `dynamo` of nox installs"
    service = pytest.importorskip("dynamo._core", reason=reason).SelectionService()
    ports = []
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            ports.append(taken.getsockname()[1])
    endpoint, replay = (f"tcp://127.0.0.1:{port}" for port in ports)
    config = KVEventsConfig(True, endpoint=f"tcp://*:{ports[0]}", replay_endpoint=replay)
    core = make_core(num_blocks=24, block_size=BLOCK, events=config)
    rng = Random(4)
    stems = [[rng.randrange(4, VOCAB_SIZE) for _ in range(24)] for _ in range(6)]

    def ask(count: int) -> None:
        for number in range(count):
            prompt = [*stems[rng.randrange(6)][: rng.randrange(5, 25)], number % 40 + 4]
            core.add(make_request(f"{number}", prompt, max_tokens=2))
            while core.has_work():
                core.step()

    def cached(prompt: list[int]) -> int:
        kv = core.scheduler.kv
        return kv.match(kv.new_table(), [*prompt, 4]).num_tokens // BLOCK

    async def found(prompt: list[int]) -> int:
        scores = await service.overlap_scores({"model_name": "null", "token_ids": prompt})
        return int(scores["workers"][0]["device_blocks"])

    async def main() -> list[int]:
        ask(20)
        worker = {"worker_id": 1, "model_name": "null", "endpoint": "http://127.0.0.1:1"}
        worker |= {"kv_events_endpoints": {0: endpoint}, "replay_endpoint": replay}
        await service.upsert_worker({**worker, "block_size": BLOCK})
        for attempt in range(100):  # until it is connected, and a batch shows it the gap
            ask(3)
            await asyncio.sleep(0.1)
            expected = [cached(stem) for stem in stems]
            if attempt > 10 and [await found(stem) for stem in stems] == expected:
                return expected
        raise AssertionError(f"{[await found(stem) for stem in stems]}, not {expected}")

    expected = asyncio.run(main())
    service.shutdown()
    core.close()
    assert max(expected) > 0
    assert min(expected) < 6


def test_garbage_is_answered_with_an_end(config: KVEventsConfig, reader: Reader) -> None:
    core = make_core(num_blocks=24, block_size=BLOCK, events=config)
    _run(core, Random(1), 3)
    for garbage in (b"", b"x", b"\xff" * 9):
        reader.replay.send_multipart((b"", garbage))
        assert reader.replay.poll(5000)
        assert reader.replay.recv_multipart() == [b"", b"\xff" * 8, b""]
    assert reader.replayed(0)
    core.close()


def test_an_engine_without_events_opens_nothing() -> None:
    core = make_core()
    assert core.scheduler.kv.prefix.on_change is None
    core.close()


def test_several_engines_have_addresses_of_their_own(tmp_path: Path) -> None:
    config = KVEventsConfig(endpoint="tcp://127.0.0.*:1", replay_endpoint="")
    with pytest.raises(ConfigError, match="choose a free address"):
        KVEvents(config, BLOCK, 0, 0)
    config = KVEventsConfig(endpoint=f"ipc://{tmp_path}/events")
    engines = [KVEvents(config, BLOCK, 0, rank) for rank in range(2)]
    assert {path.name for path in tmp_path.iterdir()} == {"events", "events_dp1"}
    for engine in engines:
        engine.close()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"enable_kv_cache_events": True}, "endpoint"),
        ({"enable_kv_cache_events": True, "endpoint": "5557"}, "tcp://"),
        ({"max_queue_size": 3}, "no option 'max_queue_size'"),
        (
            {"enable_kv_cache_events": True, "publisher": "kafka", "endpoint": "ipc://x"},
            "publisher zmq",
        ),
        ({"enable_kv_cache_events": True, "endpoint": "ipc://x", "hwm": 0}, "above 0"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_engine_config({"model": str(MODEL), "kv_events_config": given})


def test_vllms_json_is_read() -> None:
    given = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:5557"}
    found = build_engine_config({"model": str(MODEL), "kv_events_config": given}).cache.events
    assert found is not None
    assert found.endpoint == "tcp://*:5557"
    off = {**given, "enable_kv_cache_events": False}
    config = build_engine_config({"model": str(MODEL), "kv_events_config": off})
    assert config.cache.events is None
