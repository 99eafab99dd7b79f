"""Which thread runs the steps of a single rank: the executor's own only where a step waits for
another."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest

from fastdeploy_core.engine.core import EngineCore
from fastdeploy_core.engine.processes import worker_process
from fastdeploy_core.plugins.resolved import ResolvedPlugins
from fastdeploy_core.types import RequestOutputDelta, SchedulerOutput
from fastdeploy_testing.null_worker import NullPending, NullWorker
from tests.null_engine import make_config, make_request


class WatchedWorker(NullWorker):
    """Notes who launches steps."""

    threads: set[int]

    def launch(self, step: SchedulerOutput) -> Any:
        self.threads.add(threading.get_ident())
        return super().launch(step)


@pytest.mark.parametrize(
    ("overlap", "asynchronous", "is_own"),
    [(False, False, True), (False, True, True), (True, True, True), (True, False, False)],
)
def test_only_steps_that_block_and_overlap_are_handed_over(
    monkeypatch: pytest.MonkeyPatch, overlap: bool, asynchronous: bool, is_own: bool
) -> None:
    WatchedWorker.threads = set()
    monkeypatch.setattr(worker_process, "make_worker", lambda config, *_: WatchedWorker(config))
    core = EngineCore(
        make_config(null={"overlap": overlap, "asynchronous": asynchronous}),
        ResolvedPlugins([], {}),
    )
    core.add(make_request("a", [5, 6, 7], max_tokens=5))
    while core.has_work():
        core.step()
    core.close()
    assert core.info.overlap is overlap
    assert (WatchedWorker.threads == {threading.get_ident()}) is is_own
    assert len(WatchedWorker.threads) == 1


class HeldWorker(NullWorker):
    """Its steps end when the test says so."""

    held: list[NullPending]

    def launch(self, step: SchedulerOutput) -> NullPending:
        pending = super().launch(step)
        pending.ready_s = math.inf
        self.held.append(pending)
        return pending


def test_steps_are_begun_while_the_device_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as may be ahead, with what has been added by then; nothing is waited for."""
    HeldWorker.held = []
    monkeypatch.setattr(worker_process, "make_worker", lambda config, *_: HeldWorker(config))
    core = EngineCore(make_config(), ResolvedPlugins([], {}))
    assert not core.begin()
    assert not core.is_busy()
    begun = []
    for name in ("a", "b", "c"):
        core.add(make_request(name, [5, 6, 7], max_tokens=1))
        begun.append(core.begin())
    assert begun == [True, True, False]
    assert core.is_busy()
    assert not core.scheduler.outcome.has_deltas
    told = list[str]()
    while core.has_work():
        core.begin()
        for pending in HeldWorker.held:
            pending.ready_s = 0.0
        assert not core.is_busy()
        for delta in core.step():
            assert isinstance(delta, RequestOutputDelta)
            told.append(delta.request_id)
    core.close()
    assert told == ["a", "b", "c"]


class StruckWorker(NullWorker):
    """Ctrl-C is pressed once while its fifth step is launched, or is waited for."""

    where, num_launched = "", 0

    def launch(self, step: SchedulerOutput) -> NullPending:
        type(self).num_launched += 1
        pending, wait = super().launch(step), NullPending.wait
        if self.num_launched == 5 and self.where == "launch":
            raise KeyboardInterrupt
        if self.num_launched == 5:

            def strike() -> Any:
                pending.wait = lambda: wait(pending)  # type: ignore[method-assign]
                raise KeyboardInterrupt

            pending.wait = strike  # type: ignore[method-assign]
        return pending


@pytest.mark.parametrize("where", ["launch", "wait"])
def test_an_engine_whose_caller_was_interrupted_loses_nothing(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """As in a notebook: what ran is aborted or goes on, and no block stays behind."""
    monkeypatch.setattr(StruckWorker, "where", where)
    monkeypatch.setattr(StruckWorker, "num_launched", 0)
    monkeypatch.setattr(worker_process, "make_worker", lambda config, *_: StruckWorker(config))
    core = EngineCore(make_config(), ResolvedPlugins([], {}))
    requests = [make_request(name, [5, 6, n], max_tokens=12) for n, name in enumerate("abc")]
    for request in requests:
        core.add(request)
    with pytest.raises(KeyboardInterrupt):
        while core.has_work():
            core.step()
    core.abort(["b"])
    deltas = list[RequestOutputDelta]()
    while core.has_work():
        deltas += [delta for delta in core.step() if isinstance(delta, RequestOutputDelta)]
    assert {delta.request_id for delta in deltas if delta.finished} == {"a", "c"}
    assert not any(delta.error for delta in deltas)
    core.scheduler.check_idle()
    core.close()


class WorkerOfContract10(NullWorker):
    """As a device's own worker was written before files of the host tier had names."""

    def initialize_cache(  # type: ignore[override]
        self, num_blocks: int, num_host_blocks: int = 0
    ) -> None:
        super().initialize_cache(num_blocks, num_host_blocks)


def test_a_devices_own_worker_of_contract_1_0_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        worker_process, "make_worker", lambda config, *_: WorkerOfContract10(config)
    )
    core = EngineCore(make_config(), ResolvedPlugins([], {}))
    core.add(make_request("a", [5, 6, 7], max_tokens=5))
    deltas = []
    while core.has_work():
        deltas += core.step()
    core.close()
    assert deltas
