"""Adaptive length in the batch scheduler, over a clock that only steps move: requests come and go,
prompts take their time, and with drafts the whole never takes longer than without."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from fastdeploy_core.config import BatchConfig, SpeculativeConfig
from fastdeploy_core.kvcache import KVCacheManager
from fastdeploy_core.scheduler import BatchScheduler
from fastdeploy_core.scheduler.settings import SchedulerSettings
from fastdeploy_core.types import ModelRunnerOutput, SamplingParams
from tests.null_engine import make_request, worker_info

NUM_DRAFTS = 3
PROMPT_S, STEP_S = 0.004, 0.001


class Device:
    """Answers steps; one with drafts takes longer, and each draft is right with the same chance."""

    def __init__(
        self, num_drafts: int, *, chance: float, cost: float, most_tokens: int = 512
    ) -> None:
        self.now, self.num_tokens, self._random = 0.0, 0, Random(3)
        self._chance, self._cost = chance, cost
        self.scheduler = BatchScheduler(
            SchedulerSettings(
                512,
                BatchConfig(max_num_seqs=16, max_num_batched_tokens=most_tokens),
                worker_info(),
                SpeculativeConfig("ngram", num_drafts) if num_drafts else None,
            ),
            KVCacheManager(2000, 16),
            clock=lambda: self.now,
        )

    def serve(self, lengths: list[int], at_once: int) -> float:
        """Answers of these lengths, so many at a time; tokens per second."""
        scheduler, waiting = self.scheduler, list(enumerate(lengths))
        began, made = self.now, sum(lengths)
        while waiting or scheduler.has_work():
            while waiting and scheduler.num_requests < at_once:
                number, length = waiting.pop(0)
                params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
                request = make_request(f"{began}-{number}", [1, 2, 3], max_tokens=length)
                request.sampling = params
                scheduler.add(request)
            self._step()
        return made / (self.now - began)

    def _step(self) -> None:
        step = self.scheduler.schedule()
        assert step is not None
        fed = np.concatenate((step.drafts, np.zeros(len(step.rows), dtype=np.int64)))
        counts = np.array([1 + self._right(number) for number in fed.tolist()], dtype=np.int64)
        most = max(0, step.output.max_drafts)
        drafted = max(int(fed.max(initial=0)), most)
        self.now += STEP_S * (1 + self._cost * drafted) * self._random.uniform(0.97, 1.03)
        self.now += PROMPT_S * (not step.is_decode)
        self.scheduler.update(
            step,
            ModelRunnerOutput(
                step_id=step.output.step_id,
                token_ids=np.full(int(counts.sum()), 7, dtype=np.int64),
                counts=counts,
                num_drafts=fed[None],
                num_accepted=counts[None] - 1,
            ),
        )
        self.scheduler.take_deltas()

    def _right(self, number: int) -> int:
        count = 0
        while count < number and self._random.random() < self._chance:
            count += 1
        return count


def answers(seed: int, number: int) -> list[int]:
    random = Random(seed)
    return [random.randrange(20, 220) for _ in range(number)]


@pytest.mark.parametrize("at_once", [1, 8, 16])
@pytest.mark.parametrize(
    ("chance", "cost"), [(0.0, 0.3), (0.1, 0.05), (0.3, 0.5), (0.6, 0.4), (0.9, 0.1), (0.95, 0.3)]
)
def test_the_whole_is_never_slower_than_without(chance: float, cost: float, at_once: int) -> None:
    """Over three servers' lives: which answers end together, and so have prompts of one step
    follow, is luck."""
    times = [0.0, 0.0]
    for seed in range(3):
        lengths = answers(seed, 8 + 2 * at_once)
        for which, number in enumerate((0, NUM_DRAFTS)):
            device = Device(number, chance=chance, cost=cost)
            device.serve(lengths, at_once)
            times[which] += device.now
    ratio = times[0] / times[1]
    assert ratio > 0.97
    gain = max(sum(chance**n for n in range(k + 1)) / (1 + cost * k) for k in range(NUM_DRAFTS + 1))
    if gain > 1.3:
        assert ratio > 1 + 0.4 * (gain - 1), "what pays is used, although prompts take a part"


def test_it_goes_off_and_comes_back_with_the_text() -> None:
    device = Device(NUM_DRAFTS, chance=0.0, cost=0.3)
    device.serve(answers(1, 40), 4)
    policy = device.scheduler._policy
    assert policy.choose(4) == 0
    device._chance = 0.95
    device.serve(answers(2, 80), 4)
    assert policy.choose(4)
