"""Adaptive length where steps are queued ahead of their results, as on an accelerator, over a clock
that only steps move: neither a server's load nor steady decoding takes longer than without, be it
the device that takes the time or a host to which every end of a sequence is work; nor does one
batch of equal answers, if they are the recorded ones. (One with rows that never have a right draft
does: it ends with these.)

ngram_acceptance.txt: of answers of 256 tokens by the demo model (copying, reciting, plain copy), a
line each: how many of five n-gram drafts are right after the first token, the second and so on.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from random import Random
from statistics import median

import numpy as np
import pytest

from fastdeploy_core.config import BatchConfig, SpeculativeConfig
from fastdeploy_core.kvcache import KVCacheManager
from fastdeploy_core.scheduler import BatchScheduler, ScheduledStep
from fastdeploy_core.scheduler.settings import SchedulerSettings
from fastdeploy_core.types import ModelRunnerOutput, SamplingParams
from tests.null_engine import make_request, worker_info

# Milliseconds of a decode step by rows, without drafts and with so many, about what a small model
# takes on an accelerator; of a step with prompts; of the host per step.
ROWS = (1, 8, 32, 128)
PLAIN = (0.20, 0.225, 0.29, 0.46)
WITH_DRAFTS = {1: (0.22, 0.26, 0.34, 0.6), 3: (0.255, 0.36, 0.5, 0.7), 5: (0.265, 0.365, 0.49, 1.0)}
PROMPT, EACH_PROMPT, HOST = 0.33, 0.02, 0.11
# The same of a busy host: per step and per row of it, with drafts; what is more where the rows are
# others than in the step before; with prompts; per sequence that ends.
BUSY = {False: (0.15, 0.002), True: (0.2, 0.0034)}
CHANGED = {False: (0.15, 0.0012), True: (0.2, 0.0015)}
BUSY_PROMPT, BUSY_END = (0.45, 0.08), 0.04
RECORDED = [
    [int(right) for right in line]
    for line in Path(__file__).with_name("ngram_acceptance.txt").read_text("utf-8").split()
]
DEPTH = 2
ROUNDS = 5
LARGE = [pytest.param(rows, marks=pytest.mark.slow) for rows in (32, 128)]


class Accelerator:
    """Two steps in flight; a request's drafts are right with a chance of its own, or as they were
    once."""

    def __init__(
        self,
        num_drafts: int,
        chance: float | None = None,
        *,
        is_busy: bool = False,
        hopeless: int = 0,
    ) -> None:
        """chance: None: RECORDED. is_busy: the host, which is behind the device otherwise.
        hopeless: of four requests, those without a right draft."""
        self.now = self.free_at = 0.0
        self.num_made = self._number = 0
        self._random, self._chance, self._is_busy = Random(3), chance, is_busy
        self._hopeless = hopeless
        self._chances: dict[str, float] = {}
        self._last: list[str] = []
        self._in_flight: deque[tuple[ScheduledStep, float]] = deque()
        settings = SchedulerSettings(
            1024,
            BatchConfig(max_num_seqs=ROWS[-1], max_num_batched_tokens=4096),
            worker_info(captures_drafts=num_drafts > 0, captures_drafting=num_drafts > 0),
            SpeculativeConfig("mtp", num_drafts) if num_drafts else None,
        )
        self.scheduler = BatchScheduler(settings, KVCacheManager(12000, 16), lambda: self.now)

    def add(self, length: int) -> None:
        """A request whose answer is so long."""
        self._number += 1
        request = make_request(f"r{self._number}", [1, 2, 3], max_tokens=length)
        request.sampling = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
        chance = self._random.gauss(self._chance or 0.0, 0.2)
        self._chances[request.request_id] = min(0.98, max(0.05, chance))
        self.scheduler.add(request)

    def step(self) -> None:
        """As EngineCore.step does it."""
        while len(self._in_flight) < DEPTH and (step := self.scheduler.schedule()) is not None:
            self.now += self._host_time(step)
            self.free_at = max(self.now, self.free_at) + self._duration(step)
            self._in_flight.append((step, self.free_at))
        step, done_at = self._in_flight.popleft()
        self.now = max(self.now, done_at) + HOST / 2
        right = [
            self._right(seq.request.request_id, len(seq.token_ids), number)
            for seq, number in zip(step.cohort.seqs, step.drafts.tolist(), strict=True)
        ]
        counts = 1 + np.array(right + [0] * len(step.rows), dtype=np.int64)
        fed = np.concatenate((step.drafts, np.zeros(len(step.rows), dtype=np.int64)))
        self.num_made += int(counts.sum())
        num_requests = self.scheduler.num_requests
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
        self.now += self._is_busy * BUSY_END * (num_requests - self.scheduler.num_requests)

    def _host_time(self, step: ScheduledStep) -> float:
        """Before a step is queued; as much as HOST says after it."""
        names, has_drafts = step.cohort.request_ids, bool(step.drafts.any())
        costs = [BUSY[has_drafts]] if self._is_busy else []
        if names != self._last:
            costs.append(CHANGED[has_drafts])
        self._last = names
        taken = sum(each + by_row * len(names) for each, by_row in costs if self._is_busy)
        if step.rows and self._is_busy:
            taken += BUSY_PROMPT[0] + BUSY_PROMPT[1] * len(step.rows)
        return max(HOST, taken) - HOST / 2

    def _duration(self, step: ScheduledStep) -> float:
        decoding = len(step.cohort.seqs)
        width = int(step.drafts.max(initial=0))
        costs = WITH_DRAFTS[min(n for n in WITH_DRAFTS if n >= width)] if width else PLAIN
        taken = float(np.interp(decoding, ROWS, costs))
        if not step.is_decode:
            taken = PROMPT + EACH_PROMPT * len(step.rows) + (taken - 0.15) * (decoding > 0)
        return taken * self._random.uniform(0.97, 1.06)

    def _right(self, name: str, num_known: int, number: int) -> int:
        if self._chance is None:
            answer = RECORDED[int(name[1:]) % len(RECORDED)]
            is_hopeless = int(name[1:]) % 4 >= 4 - self._hopeless
            return 0 if is_hopeless else min(number, answer[(num_known - 4) % len(answer)])
        count = 0
        while count < number and self._random.random() < self._chances[name]:
            count += 1
        return count

    def serve(self, lengths: list[int], at_once: int) -> float:
        """A closed loop; tokens per millisecond."""
        began, waiting = self.now, deque(lengths)
        while waiting or self.scheduler.has_work():
            while waiting and self.scheduler.num_requests < at_once:
                self.add(waiting.popleft())
            self.step()
        return sum(lengths) / (self.now - began)

    def decode(self, num_rows: int, num_tokens: int) -> float:
        """While all answers grow; tokens per millisecond."""
        for _ in range(num_rows):
            self.add(900)
        while self.scheduler.stats().num_waiting or self.now == 0.0:
            self.step()
        began, made = self.now, self.num_made
        while self.num_made - made < num_rows * num_tokens:
            self.step()
        speed = (self.num_made - made) / (self.now - began)
        self.scheduler.abort(list(self.scheduler.roster.requests))
        while self.scheduler.has_work() or self._in_flight:
            self.step()
        return speed


LOADS = {
    "whole": lambda world, rows, random: world.serve(
        [random.randrange(8, 36) for _ in range(max(32, 3 * rows))], rows
    ),
    "long": lambda world, rows, random: world.serve([200] * max(4, rows), rows),
    "decoding": lambda world, rows, random: world.decode(rows, 200),
}


@pytest.mark.parametrize(("num_drafts", "chance"), [(5, 0.72), (5, 0.3), (3, 0.72), (1, 0.9)])
@pytest.mark.parametrize("rows", [1, 8, *LARGE[:1]])
@pytest.mark.parametrize("load", ["whole", "decoding"])
def test_no_load_is_slower_than_without(
    load: str, rows: int, num_drafts: int, chance: float
) -> None:
    plain, drafting, ratios = Accelerator(0), Accelerator(num_drafts, chance), []
    for number in range(1 + ROUNDS):
        speeds = [LOADS[load](world, rows, Random(number)) for world in (drafting, plain)]
        ratios.append(speeds[0] / speeds[1])
    assert median(ratios[1:]) > 0.97, ratios
    if chance > 0.7 and (load == "decoding" or rows == 1):
        assert median(ratios[1:]) > 1.2, "what pays is used"


@pytest.mark.parametrize("is_busy", [False, True])
@pytest.mark.parametrize("rows", [1, 8, *LARGE])
@pytest.mark.parametrize("load", LOADS)
def test_recorded_answers_lose_nothing(load: str, rows: int, is_busy: bool) -> None:
    """Nearly each of them ends with a step of its own, and runs are short: all rounds together, the
    trials of the first ones included, take no longer than without."""
    plain, drafting = Accelerator(0, is_busy=is_busy), Accelerator(5, is_busy=is_busy)
    times, ratios = [0.0, 0.0], []
    for number in range(8):
        speeds = [LOADS[load](world, rows, Random(number)) for world in (drafting, plain)]
        ratios.append(speeds[0] / speeds[1])
        times = [total + 1 / speed for total, speed in zip(times, speeds, strict=True)]
    assert times[1] / times[0] > (1.5 if load == "decoding" else 0.97), ratios
    assert median(ratios[1:]) > 0.97, ratios


@pytest.mark.parametrize("rows", [8, *LARGE[:1]])
@pytest.mark.parametrize("hopeless", [1, 2, 4])
def test_a_lasting_load_with_hopeless_answers_loses_nothing(rows: int, hopeless: int) -> None:
    """Of some thousand steps; the sixteen that trials may cost to begin with are two percent of
    those."""
    random = Random(1)
    lengths = [random.randrange(8, 36) for _ in range(48 * rows)]
    plain, drafting = Accelerator(0), Accelerator(5, hopeless=hopeless)
    assert drafting.serve(lengths, rows) > 0.97 * plain.serve(lengths, rows)


def test_an_answer_that_is_now_and_then_hopeless_keeps_its_drafts() -> None:
    """One row at a time, every fourth answer without a right draft: the others go on as they did,
    most of them."""
    times = [0.0, 0.0]
    for length in (150, 200, 250):
        for which, world in enumerate((Accelerator(0), Accelerator(5, hopeless=1))):
            world.serve([length] * 30, 1)
            times[which] += world.now
    assert times[0] / times[1] > 1.05
