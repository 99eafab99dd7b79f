"""Several engines behind one link: who gets a request, and what happens when one ends."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from fd_scale_out.balance import Balance
from fd_scale_out.common import config_of, total
from fd_scale_out.replicas import Replicas
from null_engine import make_config, make_request

from fastdeploy_core.config import EngineConfig, ParallelConfig
from fastdeploy_core.engine.client import LocalEngine
from fastdeploy_core.engine.processes import wire
from fastdeploy_core.engine.processes.supervisor import Listener
from fastdeploy_core.errors import (
    ConfigError,
    FastDeployError,
    ResourceError,
    Unavailable,
    WorkerError,
)
from fastdeploy_core.plugins.resolve import resolve
from fastdeploy_core.types import RequestOutputDelta, TokenDeltas
from fastdeploy_core.types.engine import (
    CommonHealth,
    CommonStats,
    EngineHealth,
    EngineInfo,
    EngineStats,
)
from fastdeploy_core.types.request import branch_id


class Link:
    """A link that keeps what it is sent; the test plays the engine."""

    def __init__(self, listener: Listener) -> None:
        self.listener = listener
        self.sent: list[wire.ToEngine] = []
        self.is_ready = False

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def send(self, message: wire.ToEngine) -> None:
        if not self.is_ready:
            raise Unavailable("not ready")
        self.sent.append(message)

    def health(self) -> EngineHealth:
        reason = "" if self.is_ready else "it fell"
        return EngineHealth(alive=self.is_ready, ready=self.is_ready, reason=reason, num_restarts=1)

    def come_up(self, **facts: int) -> None:
        self.is_ready = True
        values = {"num_blocks": 10, "max_request_tokens": 100, "max_num_seqs": 4, **facts}
        self.listener.on_ready(
            EngineInfo(
                block_size=4, max_model_len=100, vocab_size=64, max_num_batched_tokens=64, **values
            )
        )

    def fall(self) -> None:
        self.is_ready = False
        self.listener.on_down("it fell")

    def say(self, *deltas: RequestOutputDelta | TokenDeltas) -> None:
        self.listener.on_message(wire.Deltas(list(deltas)))

    def requests(self) -> list[str]:
        return [m.request.request_id for m in self.sent if isinstance(m, wire.Put)]


class Heard(Listener):
    """What the front end is told."""

    def __init__(self) -> None:
        self.infos: list[EngineInfo] = []
        self.deltas: list[RequestOutputDelta | TokenDeltas] = []
        self.stats: list[wire.Stats] = []
        self.lost: list[str] = []
        self.errors: list[FastDeployError] = []

    def on_ready(self, info: EngineInfo) -> None:
        self.infos.append(info)

    def on_message(self, message: wire.Deltas | wire.Stats) -> None:
        if isinstance(message, wire.Stats):
            self.stats.append(message)
        else:
            self.deltas += message.deltas

    def on_down(self, reason: str) -> None:
        raise AssertionError("the engines together never are down: each request is told")

    def on_lost(self, request_ids: list[str]) -> None:
        self.lost += request_ids

    def on_dead(self, error: FastDeployError) -> None:
        self.errors.append(error)


class Group:
    """Replicas of two links."""

    def __init__(self, *, owns_engines: bool = True) -> None:
        self.heard = Heard()
        self.links: list[Link] = []

        def connect(engine: int, listener: Listener) -> Link:
            self.links.append(Link(listener))
            return self.links[-1]

        config = two()
        self.balance = Balance(config)
        self.replicas = Replicas(
            config, connect, self.heard, self.balance, owns_engines=owns_engines
        )

    def put(self, name: str, prompt: list[int]) -> Link:
        """The link that got it."""
        self.replicas.send(wire.Put(make_request(name, prompt)))
        (link,) = [link for link in self.links if name in link.requests()]
        return link


def two(**options: object) -> EngineConfig:
    return replace(make_config(**options), parallel=ParallelConfig(data_parallel_size=2))


@pytest.fixture
def group() -> Group:
    made = Group()
    for link in made.links:
        link.come_up()
    return made


def first(name: str) -> RequestOutputDelta:
    return RequestOutputDelta(request_id=name)


def last(name: str, position: int = 1) -> RequestOutputDelta:
    return RequestOutputDelta(request_id=name, position=position, finished=True)


def test_it_begins_when_all_engines_have_started_and_is_as_large_as_all(group: Group) -> None:
    fresh = Group()
    fresh.links[0].come_up()
    assert fresh.heard.infos == []
    fresh.links[1].come_up(num_blocks=6, max_request_tokens=60)
    (info,) = fresh.heard.infos
    assert (info.num_blocks, info.max_num_seqs, info.max_request_tokens) == (16, 8, 60)


def test_an_engine_that_cannot_start_ends_the_start_with_its_number_and_error() -> None:
    group = Group()
    group.links[0].come_up()
    group.links[1].fall()
    group.links[1].listener.on_dead(ResourceError("no memory"))
    (error,) = group.heard.errors
    assert isinstance(error, ResourceError)
    assert str(error) == "engine 1: no memory"


def test_a_front_end_begins_with_the_engines_that_there_are() -> None:
    group = Group(owns_engines=False)
    group.links[1].come_up()
    assert group.heard.infos == []  # nothing is known of the other one
    group.links[0].listener.on_dead(WorkerError("worn out"))
    assert len(group.heard.infos) == 1
    assert group.heard.errors == []
    assert group.put("r", [1, 2, 3]) is group.links[1]
    group.links[1].fall()
    group.links[1].listener.on_dead(WorkerError("it too"))
    assert [str(error) for error in group.heard.errors] == ["engine 1: it too"]


def test_what_follows_a_request_goes_to_its_engine(group: Group) -> None:
    owner = group.put("r", [1, 2, 3])
    (other,) = [link for link in group.links if link is not owner]
    group.replicas.send(wire.Abort([branch_id("r", 1), "unknown"]))
    group.replicas.send(wire.Abort(["r"]))
    group.replicas.send(wire.Abort(["r"]))  # it is over
    aborts = [m.request_ids for m in owner.sent if isinstance(m, wire.Abort)]
    assert aborts == [[branch_id("r", 1)], ["r"]]
    assert other.sent == []
    assert [group.balance.load(engine) for engine in (0, 1)] == [0, 0]
    group.replicas.send(wire.Drain())
    assert all(isinstance(link.sent[-1], wire.Drain) for link in group.links)


def test_load_counts_from_the_request_to_its_end(group: Group) -> None:
    owner = group.links.index(group.put("r", [1, 2, 3]))
    waiting = group.balance.load(owner)
    group.links[owner].say(first("r"))
    assert 0 < group.balance.load(owner) == waiting - 3
    group.links[owner].say(last("r"))
    assert group.balance.load(owner) == 0


def test_only_requests_that_showed_nothing_run_again_and_once(group: Group) -> None:
    owner = group.put("shown", tokens := [1, 2, 3, 4] * 8)
    other = group.links[1 - group.links.index(owner)]
    owner.say(first("shown"))
    assert group.put("silent", [*tokens, 5]) is owner  # its beginning is there
    bystander = group.put("bystander", [9] * 8)
    assert bystander is other
    owner.fall()
    assert group.heard.lost == ["shown"]
    assert other.requests() == ["bystander", "silent"]
    owner.listener.on_down("said twice")
    assert group.heard.lost == ["shown"]
    assert len(other.sent) == 2
    owner.come_up()
    assert group.put("new", [7, 7]) is owner  # it takes part again
    other.fall()  # the silent one was run again before
    assert group.heard.lost == ["shown", "silent"]
    assert owner.requests() == ["shown", "silent", "new", "bystander"]


def test_a_client_that_leaves_while_its_request_changes_engines_ends_it(group: Group) -> None:
    owner = group.put("r", [1, 2, 3])
    other = group.links[1 - group.links.index(owner)]
    take = other.send

    def send(message: wire.ToEngine) -> None:
        if isinstance(message, wire.Put):  # the abort overtakes the request
            group.replicas.send(wire.Abort(["r"]))
        take(message)

    other.send = send  # type: ignore[method-assign]
    owner.fall()
    assert isinstance(other.sent[-1], wire.Abort)
    assert other.requests() == ["r"]
    assert group.heard.lost == []
    assert [group.balance.load(engine) for engine in (0, 1)] == [0, 0]


def test_late_words_of_an_engine_that_fell_are_not_mixed_into_the_second_run(group: Group) -> None:
    owner = group.put("r", [1, 2, 3])
    other = group.links[1 - group.links.index(owner)]
    owner.fall()
    assert other.requests() == ["r"]
    owner.say(first("r"), last("r"))
    assert group.heard.deltas == []
    other.say(first("r"))
    assert [delta.request_id for delta in group.heard.deltas] == ["r"]


def test_without_any_engine_requests_end_and_new_ones_are_refused(group: Group) -> None:
    group.put("r", [1, 2, 3])
    for link in group.links:
        link.fall()
    assert group.heard.lost == ["r"]
    with pytest.raises(Unavailable):
        group.replicas.send(wire.Put(make_request("s", [1])))
    with pytest.raises(Unavailable):
        group.replicas.send(wire.AskStats(1))
    health = group.replicas.health()
    assert not health.ready
    assert health.reason == "engine 0: it fell; engine 1: it fell"
    assert [group.balance.load(engine) for engine in (0, 1)] == [0, 0]
    group.links[0].come_up()
    assert group.put("s", [1]) is group.links[0]


def test_one_engine_is_enough_to_be_ready(group: Group) -> None:
    group.links[0].fall()
    health = group.replicas.health()
    assert (health.ready, health.reason, health.num_restarts) == (True, "", 2)
    assert isinstance(health, CommonHealth)
    assert {n: each.ready for n, each in health.engines.items()} == {0: False, 1: True}
    assert health.engines[0].reason == "it fell"


def test_numbers_are_sums_with_each_engines_own(group: Group) -> None:
    group.replicas.send(wire.AskStats(7))
    for engine, link in enumerate(group.links):
        assert isinstance(link.sent[-1], wire.AskStats)
        assert group.heard.stats == []
        stats = EngineStats(steps_total=engine + 1, last_step_s=engine + 0.5)
        link.listener.on_message(wire.Stats(7, stats))
    (answer,) = group.heard.stats
    assert isinstance(answer.stats, CommonStats)
    assert (answer.number, answer.stats.steps_total, answer.stats.last_step_s) == (7, 3, 1.5)
    assert {n: each.steps_total for n, each in answer.stats.engines.items()} == {0: 1, 1: 2}


@pytest.mark.parametrize("reason", ["silent", "fallen"])
def test_an_engine_that_does_not_answer_is_left_out_of_the_numbers(
    group: Group, reason: str
) -> None:
    group.replicas.send(wire.AskStats(7))
    group.links[1].listener.on_message(wire.Stats(7, EngineStats(steps_total=2)))
    if reason == "fallen":
        group.links[0].fall()
    deadline = time.monotonic() + 60
    while not group.heard.stats:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (answer,) = group.heard.stats
    assert isinstance(answer.stats, CommonStats)
    assert {n: each.steps_total for n, each in answer.stats.engines.items()} == {1: 2}
    assert answer.stats.steps_total == 2


def test_sums_of_lists_and_tables() -> None:
    one = EngineStats(accepted_drafts_at_total=[3, 1], requests_rejected_total={"QueueFull": 1})
    other = EngineStats(
        accepted_drafts_at_total=[2], requests_rejected_total={"QueueFull": 2, "Aborted": 1}
    )
    summed = total({0: one, 1: other})
    assert summed.accepted_drafts_at_total == [5, 1]
    assert summed.requests_rejected_total == {"QueueFull": 3, "Aborted": 1}


def test_engines_that_share_a_queue_have_names_of_their_own() -> None:
    config = two()
    config = replace(config, request_scheduler=replace(config.request_scheduler, instance="a"))
    each = [config_of(config, rank) for rank in (0, 1)]
    assert [one.request_scheduler.instance for one in each] == ["a-0", "a-1"]
    assert [one.parallel.data_parallel_rank for one in each] == [0, 1]


def test_an_engine_inside_its_callers_process_is_one() -> None:
    config = two()
    with pytest.raises(ConfigError, match=r"fastdeploy serve .* --data-parallel-size 2"):
        LocalEngine(config, resolve(config))
