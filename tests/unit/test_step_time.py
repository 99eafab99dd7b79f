"""A slow device, on a clock of its own: long prompts of others do not hold up a short answer."""

from __future__ import annotations

from typing import Any

import pytest

from fastdeploy_core.engine.core import EngineCore
from fastdeploy_core.engine.step_time import ALONE_S, COMPANY_S, StepTime
from fastdeploy_core.plugins.resolved import ResolvedPlugins
from tests.null_engine import Collector, InlineExecutor, make_config, make_request

LONG, STEP_S = 4000, 0.005


class SlowDevice(InlineExecutor):
    """Steps take virtual time: STEP_S, and so much for each token of a prompt."""

    def __init__(self, config: Any, token_s: float) -> None:
        super().__init__(config)
        self.now, self.token_s, self.times = 0.0, token_s, []

    def submit(self, step: Any) -> Any:
        future = super().submit(step)
        rows = self.steps[-1].rows
        num_tokens = sum(int(n) for n in rows.counts if n > 1)
        seconds = STEP_S + self.token_s * num_tokens
        future.result().execute_s = seconds
        self.now += seconds
        self.times.append(seconds)
        return future


class Engine:
    """One that is asked by clients with long prompts, always two of them unfinished."""

    def __init__(self, token_s: float, num_long: int = 2, **options: Any) -> None:
        config = make_config(
            num_blocks=4000,
            block_size=16,
            max_model_len=8192,
            **{"max_num_batched_tokens": 2048, "overlap": False, **options},
        )
        self.device = SlowDevice(config, token_s)
        self.core = EngineCore(config, ResolvedPlugins([], {}), self.device)
        self.core.scheduler.roster.clock = lambda: self.device.now
        self.core._step_time = StepTime(lambda: self.device.now, is_queued=False)
        self.collector = Collector()
        self.num_sent, self.num_long = 0, num_long

    def step(self) -> None:
        """One step, with new long prompts for those that have ended."""
        unfinished = self.core.scheduler.roster.requests
        while sum(name.startswith("long") for name in unfinished) < self.num_long:
            self.num_sent += 1
            tokens = [4 + (self.num_sent * 7 + i * 5) % 59 for i in range(LONG)]
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
