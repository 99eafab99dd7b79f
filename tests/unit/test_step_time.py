"""A slow device, on a clock of its own: long prompts of others do not hold up a short answer."""

from __future__ import annotations

from typing import Any

import pytest

from fastdeploy_core.engine.core import EngineCore
from fastdeploy_core.engine.step_time import ALONE_S, COMPANY_S, StepTime, is_part
from fastdeploy_core.plugins.resolved import ResolvedPlugins
from tests.null_engine import Collector, InlineExecutor, make_config, make_request

LONG, STEP_S = 4000, 0.005


class SlowDevice(InlineExecutor):
    """Steps take virtual time: STEP_S, so much for each token of a prompt, and so much more for
    each token that it has been computed of before."""

    def __init__(self, config: Any, token_s: float, before_s: float = 0.0) -> None:
        super().__init__(config)
        self.now, self.token_s, self.before_s, self.times = 0.0, token_s, before_s, []

    def submit(self, step: Any) -> Any:
        future = super().submit(step)
        rows = self.steps[-1].rows
        num_tokens = sum(int(n) for n in rows.counts if n > 1)
        seconds = STEP_S + self.token_s * num_tokens
        seconds += sum(
            self.before_s * s for s, n in zip(rows.starts, rows.counts, strict=True) if n > 1
        )
        future.result().execute_s = seconds
        self.now += seconds
        self.times.append(seconds)
        return future


class Engine:
    """One that is asked by clients with long prompts, always two of them unfinished; each its own,
    or all the same, of which the cache knows all but the end."""

    def __init__(
        self,
        token_s: float,
        num_long: int = 2,
        before_s: float = 0.0,
        *,
        is_cached: bool = False,
        **options: Any,
    ) -> None:
        config = make_config(
            num_blocks=4000,
            block_size=16,
            max_model_len=8192,
            **{"max_num_batched_tokens": 2048, "overlap": False, **options},
        )
        self.device = SlowDevice(config, token_s, before_s)
        self.core = EngineCore(config, ResolvedPlugins([], {}), self.device)
        self.core.scheduler.roster.clock = lambda: self.device.now
        self.core._step_time = StepTime(lambda: self.device.now, is_queued=False)
        self.collector = Collector()
        self.num_sent, self.num_long, self.is_cached = 0, num_long, is_cached

    def step(self) -> None:
        """One step, with new long prompts for those that have ended."""
        unfinished = self.core.scheduler.roster.requests
        while sum(name.startswith("long") for name in unfinished) < self.num_long:
            self.num_sent += 1
            number = 0 if self.is_cached else self.num_sent
            tokens = [4 + (number * 7 + i * 5) % 59 for i in range(LONG)]
            self.core.add(make_request(f"long{self.num_sent}", tokens, max_tokens=1))
        self.collector.take(self.core.step())

    def answer_s(self, name: str, size: int = 20) -> float:
        """Virtual seconds until a short question has its four tokens."""
        self.core.add(make_request(name, [5 + i % 50 for i in range(size)], max_tokens=4))
        began = self.device.now
        while name in self.core.scheduler.roster.requests:
            self.step()
        return self.device.now - began


@pytest.mark.parametrize("token_s", [0.0002, 0.001, 0.005])
@pytest.mark.parametrize("num_long", [2, 6])
def test_long_prompts_of_others_do_not_hold_up_a_short_answer(
    token_s: float, num_long: int
) -> None:
    quiet = Engine(token_s, num_long=0)
    quiet.answer_s("first")
    alone_s = quiet.answer_s("second")
    engine = Engine(token_s, num_long)
    engine.answer_s("first")  # it learns what a token takes
    seconds = [engine.answer_s(f"hi{number}") for number in range(30)]
    longest_s = max(20 * token_s, 0.02, 3 * STEP_S)
    # Its prompt has to be computed, and waits for a step; each of its tokens takes a step.
    assert max(seconds) < alone_s + 8 * (STEP_S + max(32 * token_s, longest_s))
    assert engine.num_sent >= num_long


def test_long_prompts_come_to_their_end_beside_many_short_ones() -> None:
    engine = Engine(0.001, num_long=1)
    for number in range(400):
        engine.answer_s(f"hi{number}")
    # At least half of what is computed of prompts is of the long one.
    assert engine.num_sent >= 2


def test_two_long_prompts_of_one_length_run_one_after_the_other() -> None:
    engine = Engine(0.001, num_long=4)
    for _ in range(300):
        engine.step()
        assert len(engine.core.scheduler.roster.prefilling()) <= 1


def test_who_is_alone_gets_large_steps() -> None:
    engine = Engine(0.0001, num_long=1)
    for _ in range(20):
        engine.step()
    assert max(engine.device.times) == pytest.approx(STEP_S + 2048 * 0.0001)


def test_a_step_is_long_alone_and_short_in_company() -> None:
    engine = Engine(0.001, num_long=1)

    def end_of(count: int) -> float:
        for _ in range(count):
            engine.step()
        return engine.device.times[-1]

    assert end_of(8) == pytest.approx(ALONE_S, rel=0.2)
    engine.answer_s("hi")
    assert end_of(1) < 0.1
    began = engine.device.now
    while engine.device.now < began + COMPANY_S / 2:
        assert end_of(1) < 0.1
    assert end_of(20) == pytest.approx(ALONE_S, rel=0.2)


BEFORE_S = 0.1 / LONG  # a part of a long prompt takes twenty decodes, however few tokens it has


@pytest.mark.parametrize("is_cached", [False, True])
def test_whoever_answers_waits_for_one_part_of_a_long_prompt_not_for_one_a_token(
    is_cached: bool,
) -> None:
    quiet = Engine(0.0005, num_long=0)
    quiet.answer_s("first")
    alone_s = quiet.answer_s("second")
    engine = Engine(0.0005, before_s=BEFORE_S, is_cached=is_cached)
    engine.answer_s("first")
    while engine.num_sent < 4:  # from the third on they are cached
        engine.step()
    longest_s = STEP_S + 32 * 0.0005 + 0.1
    for number in range(60):
        assert engine.answer_s(f"hi{number}") < alone_s + 1.2 * longest_s
        engine.step()
    assert engine.num_sent >= 4 + 26 * is_cached


def test_half_of_the_time_is_the_long_prompts() -> None:
    engine = Engine(0.0005, num_long=1, before_s=BEFORE_S)
    engine.core.add(make_request("decodes", [5, 6, 7], max_tokens=2000))
    while engine.num_sent < 3:
        engine.step()
    parts = [seconds for seconds in engine.device.times if seconds > 2 * STEP_S]
    assert 0.4 < sum(parts) / sum(engine.device.times) < 0.6


@pytest.mark.parametrize("is_queued", [False, True])
def test_no_step_is_queued_behind_a_part_of_a_long_prompt(is_queued: bool) -> None:
    """Unless steps are so short that queueing them is what keeps the device busy."""
    engine = Engine(0.0005, before_s=BEFORE_S, overlap=True)
    engine.core._step_time = StepTime(lambda: engine.device.now, is_queued=is_queued)
    submit, is_behind = engine.device.submit, list[bool]()

    def watched(message: Any) -> Any:
        is_behind.append(any(is_part(step) for step, _ in engine.core._in_flight))
        return submit(message)

    engine.device.submit = watched
    for _ in range(100):
        engine.step()
    assert any(is_behind) == is_queued
