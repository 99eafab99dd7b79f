"""KV events: what the router takes to be cached is what engines have, whatever gets lost."""

from __future__ import annotations

import asyncio
import os
import signal
from array import array
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import httpx
import msgspec
import pytest
import zmq
import zmq.asyncio
from conftest import MODEL, Router
from fd_router.cached.cached_blocks import EventIndex, token_keys
from fd_router.cached.follower import Follower, Publisher
from fd_router.cached.prefix_index import PrefixIndex
from fd_router.options import parse
from fd_router.policies import InstanceView, RequestView, make_policy
from server_process import CommandProcess, ServerProcess
from server_support import wait_for

from fastdeploy_core.errors import ConfigError

BLOCK = 4
END = b"\xff" * 8


def _keys(tokens: list[int], scope: str = "", size: int = BLOCK) -> tuple[list[bytes]]:
    return (token_keys(array("I", tokens).tobytes(), size, scope),)


def _stored(names: list[Any], parent: Any, tokens: list[int], extra: Any = None) -> list[Any]:
    return ["BlockStored", names, parent, tokens, BLOCK, None, "GPU", None, extra]


# ---------------------------------------------------------------- the index


@pytest.fixture
def index() -> EventIndex:
    made = EventIndex()
    made.begin("a", 0)
    return made


def test_runs_of_blocks_are_found_up_to_the_first_that_is_missing(index: EventIndex) -> None:
    tokens = list(range(12))
    index.apply("a", 0, [_stored([1, 2], None, tokens[:8]), _stored([3], 2, tokens[8:])])
    assert index.cached_tokens("a", _keys([*tokens, 9])) == 12
    assert index.cached_tokens("a", _keys([*tokens[:8], 9, 9, 9, 9])) == 8
    assert index.cached_tokens("a", _keys(tokens[4:])) == 0
    assert index.cached_tokens("a", _keys(tokens[:3])) == 0
    index.apply("a", 0, [["BlockRemoved", [2], "GPU"]])
    assert index.cached_tokens("a", _keys(tokens)) == 4  # the third is there, and unreachable
    index.apply("a", 0, [_stored([2], 1, tokens[4:8])])
    assert index.cached_tokens("a", _keys(tokens)) == 12
    index.apply("a", 0, [["AllBlocksCleared"]])
    assert index.cached_tokens("a", _keys(tokens)) == index.num_blocks("a") == 0


def test_a_salt_and_pictures_separate_prefixes(index: EventIndex) -> None:
    tokens = list(range(8))
    index.apply("a", 0, [_stored([1], None, tokens[:4], [["s"]]), _stored([2], 1, tokens[4:])])
    assert index.cached_tokens("a", _keys(tokens)) == 0
    assert index.cached_tokens("a", _keys(tokens, "s")) == 8
    index.apply("a", 0, [_stored([3], None, tokens[:4]), _stored([4], 3, tokens[4:], [["f0"]])])
    assert index.cached_tokens("a", _keys(tokens)) == 4


def test_hashes_as_numbers_or_as_whole_digests(index: EventIndex) -> None:
    digest = bytes(24) + (7).to_bytes(8, "big")
    index.apply("a", 0, [_stored([digest], None, [1, 2, 3, 4])])
    index.apply("a", 0, [_stored([8], 7, [5, 6, 7, 8])])
    assert index.cached_tokens("a", _keys(list(range(1, 9)))) == 8


def test_a_prefix_that_is_there_twice_stays_until_both_are_removed(index: EventIndex) -> None:
    """An engine's hash may cover tokens after the block, so one prefix can be there twice."""
    index.apply("a", 0, [_stored([1], None, [1, 2, 3, 4]), _stored([2], None, [1, 2, 3, 4])])
    index.apply("a", 0, [["BlockRemoved", [1], "GPU"]])
    assert index.cached_tokens("a", _keys([1, 2, 3, 4])) == 4
    index.apply("a", 0, [["BlockRemoved", [2], "GPU"]])
    assert index.cached_tokens("a", _keys([1, 2, 3, 4])) == 0


def test_engines_of_one_instance_do_not_add_up(index: EventIndex) -> None:
    index.begin("a", 1)
    index.apply("a", 0, [_stored([1], None, [1, 2, 3, 4])])
    index.apply("a", 1, [_stored([1], None, [5, 6, 7, 8]), _stored([2], 1, [1, 2, 3, 4])])
    assert index.cached_tokens("a", _keys([1, 2, 3, 4, 1, 2, 3, 4])) == 4
    assert index.cached_tokens("a", _keys([5, 6, 7, 8, 1, 2, 3, 4])) == 8
    index.forget("a", 1)
    assert index.follows("a")
    assert index.cached_tokens("a", _keys([5, 6, 7, 8])) == 0
    index.forget("a", 0)
    assert not index.follows("a")


def test_events_count_where_they_are_and_what_was_sent_elsewhere() -> None:
    events, sent = EventIndex(), PrefixIndex()
    tokens = list(range(400))
    request = RequestView(400, [b"t0", b"t1"], 200, token_keys=_keys(tokens))
    for name in ("a", "b"):
        sent.record(name, request.prefix_keys)
    policy = make_policy("cache-aware", sent, events)
    views = [InstanceView("a", reported_at=1.0), InstanceView("b", reported_at=1.0)]

    def chosen() -> tuple[str, int]:
        choice = policy.choose(request, views, Random(0), 1.0)
        assert choice.instance is not None
        return choice.instance.name, choice.cached_tokens

    assert chosen() == ("a", 399)
    events.begin("a", 0)  # it has evicted all that was sent there
    assert chosen() == ("b", 399)
    events.begin("b", 0)
    events.apply("a", 0, [_stored(list(range(50)), None, tokens[:200])])
    assert chosen() == ("a", 200)
    events.forget("b", 0)
    assert chosen() == ("b", 399)


# ---------------------------------------------------------------- following


class FakeEngine:
    """A publisher that can lose batches."""

    def __init__(self, folder: Path, kept: int = 100) -> None:
        self.publisher = Publisher("a", f"ipc://{folder}/events", f"ipc://{folder}/replay")
        self.kept = kept
        self.open()

    def open(self) -> None:
        """A process that has published nothing yet."""
        self._context = zmq.Context()
        self.events = self._context.socket(zmq.PUB)
        self.events.bind(self.publisher.endpoint)
        self.replay = self._context.socket(zmq.ROUTER)
        self.replay.bind(self.publisher.replay)
        self.sent: list[tuple[bytes, bytes]] = []
        self.asked: list[int] = []

    def publish(self, *events: list[Any], lose: bool = False) -> None:
        batch = len(self.sent).to_bytes(8, "big"), msgspec.msgpack.encode((1.0, events, 0))
        self.sent.append(batch)
        if not lose:
            self.events.send_multipart((b"", *batch))

    def answer(self) -> None:
        """Replays that are asked for."""
        while self.replay.poll(0):
            name, empty, first = self.replay.recv_multipart()
            self.asked.append(int.from_bytes(first, "big"))
            for number, payload in self.sent[-self.kept :]:
                if number >= first:
                    self.replay.send_multipart((name, empty, number, payload))
            self.replay.send_multipart((name, empty, END, b""))

    def close(self) -> None:
        self._context.destroy(0)


def _follow(
    engine: FakeEngine, index: EventIndex, steps: Callable[[Callable[..., Awaitable[None]]], Any]
) -> None:
    """Runs a follower beside the test's steps; until(condition) waits and answers replays."""

    async def until(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                engine.answer()
                await asyncio.sleep(0.01)

    async def main() -> None:
        context = zmq.asyncio.Context()
        task = asyncio.create_task(Follower(context, index, engine.publisher, 0).run())
        try:
            await steps(until)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            context.destroy(0)

    asyncio.run(main())


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[FakeEngine]:
    made = FakeEngine(tmp_path)
    yield made
    made.close()


def _block(name: int) -> list[Any]:
    return _stored([name], None, [name] * BLOCK)


def _known(index: EventIndex, names: int) -> list[int]:
    return [n for n in range(names) if index.cached_tokens("a", _keys([n] * BLOCK))]


def test_a_late_subscriber_gets_what_was_stored_before(engine: FakeEngine) -> None:
    index = EventIndex()
    engine.publish(_block(0))
    engine.publish(_block(1))

    async def steps(until: Any) -> None:
        await until(lambda: _known(index, 9) == [0, 1])
        engine.publish(["BlockRemoved", [0], "GPU"], _block(2))
        await until(lambda: _known(index, 9) == [1, 2])
        assert engine.asked == [0]

    _follow(engine, index, steps)
    assert not index.follows("a")


def test_a_gap_is_filled_by_a_replay(engine: FakeEngine) -> None:
    index = EventIndex()

    async def steps(until: Any) -> None:
        await until(lambda: index.follows("a") and engine.asked == [0])
        engine.publish(_block(0))
        await until(lambda: _known(index, 9) == [0])
        engine.publish(["BlockRemoved", [0], "GPU"], lose=True)
        engine.publish(_block(1), lose=True)
        engine.publish(_block(2))
        await until(lambda: _known(index, 9) == [1, 2])
        assert engine.asked == [0, 1]

    _follow(engine, index, steps)


def test_what_cannot_be_replayed_is_forgotten(engine: FakeEngine) -> None:
    index = EventIndex()
    engine.kept = 2

    async def steps(until: Any) -> None:
        await until(lambda: index.follows("a") and engine.asked == [0])
        engine.publish(_block(0))
        await until(lambda: _known(index, 9) == [0])
        for name in (1, 2, 3):
            engine.publish(_block(name), lose=True)
        engine.publish(_block(4))
        # 0 may have been removed in the batch that nobody has any more.
        await until(lambda: _known(index, 9) == [3, 4])

    _follow(engine, index, steps)


def test_a_lost_engine_is_forgotten_and_another_begins_anew(
    engine: FakeEngine,
) -> None:
    index = EventIndex()

    async def steps(until: Any) -> None:
        engine.publish(_block(0))
        await until(lambda: _known(index, 9) == [0])
        engine.close()
        async with asyncio.timeout(20):
            while index.follows("a"):
                await asyncio.sleep(0.01)
        assert _known(index, 9) == []
        engine.open()
        engine.publish(_block(5))
        await until(lambda: _known(index, 9) == [5])

    _follow(engine, index, steps)


def test_garbage_does_not_end_a_follower(engine: FakeEngine) -> None:
    index = EventIndex()

    async def steps(until: Any) -> None:
        await until(lambda: index.follows("a") and engine.asked == [0])
        engine.publish(_block(0))
        await until(lambda: _known(index, 9) == [0])
        for payload in (b"", b"\xc1", b"\x90", msgspec.msgpack.encode((1.0, [["Other"]], 0))):
            engine.sent.append((len(engine.sent).to_bytes(8, "big"), payload))
            engine.events.send_multipart((b"", *engine.sent[-1]))
        engine.events.send_multipart((b"", b"short"))
        engine.publish(_stored([7], None, [1]))
        engine.publish(_block(3))
        await until(lambda: _known(index, 9) == [3])

    _follow(engine, index, steps)


@pytest.mark.parametrize(
    "word",
    ["b:1=tcp://h:1", "h:1", "h:1=5557", "h:1=tcp://*:1", "h:1=tcp://h:1,tcp://h:2,tcp://h:3"],
)
def test_an_option_that_cannot_work_is_refused(word: str) -> None:
    with pytest.raises(ConfigError, match="instances are: h:1"):
        parse(["--instances", "http://h:1", "--kv-events", word])


# ---------------------------------------------------------------- real engines


def _serve(folder: Path, *more: str) -> ServerProcess:
    config = {
        "enable_kv_cache_events": True,
        "endpoint": f"ipc://{folder}/events",
        "replay_endpoint": f"ipc://{folder}/replay",
    }
    return ServerProcess(
        MODEL,
        *("--block-size", "8"),
        *("--kv-events-config", msgspec.json.encode(config).decode(), *more),
    )


@pytest.mark.parametrize("seed", [1, 2])
def test_hits_by_events_are_the_engines_own(tmp_path: Path, seed: int) -> None:
    """Random prompts with common beginnings, more of them than the cache has room for."""
    more = ("--num-gpu-blocks-override", "40", "--max-model-len", "256", "--swap-space", "0.0002")
    server = _serve(tmp_path, *more[: 6 if seed == 2 else 4])
    index, rng = EventIndex(), Random(seed)
    stems = [[rng.randrange(100, 900) for _ in range(64)] for _ in range(8)]
    publisher = Publisher("a", f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay")
    hits: list[tuple[int, int]] = []

    async def main() -> None:
        context = zmq.asyncio.Context()
        follower = Follower(context, index, publisher, 0)
        task = asyncio.create_task(follower.run())
        replay = context.socket(zmq.DEALER)
        replay.connect(publisher.replay)

        async def caught_up() -> None:
            async with asyncio.timeout(20):
                while True:
                    await replay.send_multipart((b"", (follower._next or 0).to_bytes(8, "big")))
                    _, first, _ = await replay.recv_multipart()
                    if first == END and index.follows("a"):
                        return
                    while first != END:
                        _, first, _ = await replay.recv_multipart()
                    await asyncio.sleep(0.01)

        async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
            for _ in range(60):
                prompt = rng.choice(stems)[: rng.randrange(8, 65)]
                prompt = prompt + [rng.randrange(100, 900) for _ in range(rng.randrange(1, 20))]
                salt = rng.choice(("", "", "", "one"))
                await caught_up()
                expected = min(
                    index.cached_tokens("a", _keys(prompt, salt, 8)), (len(prompt) - 1) // 8 * 8
                )
                body = {"prompt": prompt, "max_tokens": 9, "temperature": 0}
                body |= {"cache_salt": salt} if salt else {}
                answer = await client.post("/v1/completions", json=body)
                assert answer.status_code == 200, answer.text
                details = answer.json()["usage"].get("prompt_tokens_details") or {}
                hits.append((expected, details.get("cached_tokens") or 0))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        context.destroy(0)

    try:
        assert server.url
        asyncio.run(main())
    finally:
        server.stop()
    assert [by_events for by_events, _ in hits] == [own for _, own in hits]
    assert sum(own > 0 for _, own in hits) > 15
    assert sum(own == 0 for _, own in hits) > 5


def _engine_of(server: CommandProcess) -> int:
    """One of the engine processes that a server started."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            words = stat.with_name("cmdline").read_bytes()
        except OSError:
            continue
        if parent == server.process.pid and b"fastdeploy-engine" in words:
            return int(stat.parent.name)
    raise AssertionError("the server has no engine process")


def test_each_engine_of_an_instance_is_followed_and_a_restarted_one_anew(tmp_path: Path) -> None:
    server = _serve(tmp_path, "--data-parallel-size", "2", "--max-model-len", "256")
    index = EventIndex()
    publishers = [
        Publisher("a", f"ipc://{tmp_path}/events{end}", f"ipc://{tmp_path}/replay{end}")
        for end in ("", "_dp1")
    ]

    def blocks() -> list[int]:
        return [len(index._keys.get(("a", engine), ())) for engine in (0, 1)]

    async def until(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0.02)

    async def main() -> None:
        context = zmq.asyncio.Context()
        tasks = [
            asyncio.create_task(Follower(context, index, one, engine).run())
            for engine, one in enumerate(publishers)
        ]

        async def ask(client: httpx.AsyncClient, first: int) -> None:
            body = {"prompt": [first, *range(100, 140)], "max_tokens": 2}
            assert (await client.post("/v1/completions", json=body)).status_code == 200

        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            await asyncio.gather(*(ask(client, first) for first in range(100, 108)))
            await until(lambda: min(blocks()) >= 5)
            os.kill(_engine_of(server), signal.SIGKILL)
            await until(lambda: 0 in blocks())
            assert sum(blocks()) >= 5, "the other engine's blocks were forgotten, too"
            # Those of the engine that is started again come, and nothing of before.
            await until(lambda: len(index._engines["a"]) == 2)
            while min(blocks()) < 5:
                await asyncio.gather(*(ask(client, first) for first in range(200, 208)))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        context.destroy(0)

    try:
        assert server.url
        asyncio.run(asyncio.wait_for(main(), 100))
    finally:
        server.stop()


def test_a_router_sends_prompts_where_their_beginning_is(
    tmp_path: Path, route: Callable[..., Router]
) -> None:
    """Also those that came past it, as text and as a chat; and forgets an engine that died."""
    folders = [tmp_path / "0", tmp_path / "1"]
    for folder in folders:
        folder.mkdir()
    servers = [_serve(folder) for folder in folders]
    try:
        words = [
            f"{one.name}=ipc://{folder}/events,ipc://{folder}/replay"
            for one, folder in zip(servers, folders, strict=True)
        ]
        urls = [one.url for one in servers]
        router = route(urls, "--policy", "cache-aware", "--kv-events", *words).until_ready(2)
        story = "Once upon a time there was a " + "very " * 60 + "old king"
        talk = [{"role": "user", "content": story}]
        bodies = {
            "/v1/completions": {"prompt": story, "max_tokens": 1},
            "/v1/chat/completions": {"messages": talk, "max_tokens": 1},
        }
        asked = zip(servers, bodies.items(), strict=True)
        owners = {path: one.name for one, (path, _) in asked}
        for (path, body), url in zip(bodies.items(), urls, strict=True):
            assert httpx.post(url + path, json=body, timeout=30).status_code == 200
        blocks = "fastdeploy_router_kv_blocks"
        wait_for(lambda: all(router.metric(blocks, instance=o.name) for o in servers), "events")
        counted = "fastdeploy_router_requests_total"
        for path, body in bodies.items():
            before = router.metric(counted, instance=owners[path])
            for _ in range(6):
                answer = httpx.post(router.url + path, json=body, timeout=30)
                assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
            assert router.metric(counted, instance=owners[path]) == before + 6
        servers[0].signal(signal.SIGKILL)
        followed = "fastdeploy_router_kv_events_followed"
        wait_for(lambda: not router.metric(followed, instance=servers[0].name), "the loss")
        assert router.metric(blocks, instance=servers[0].name) == 0
        assert router.metric(followed, instance=servers[1].name) == 1
    finally:
        for one in servers:
            one.stop()
