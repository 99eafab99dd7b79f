"""Adaptive length while steps take now longer, now shorter, as they did on an accelerator: what
pays is used, whatever the noise makes of their times. (What does not pay: test_draft_policy.py.)

step_noise.txt: times of consecutive decode steps without drafts of the demo model on one NVIDIA
H200 beside other programs, in percent of their median: of 1, 32 and 128 rows, a line each.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from statistics import median

import pytest

from fastdeploy_core.scheduler import ScheduledStep
from tests.unit.test_draft_length_under_load import LOADS, Accelerator

NOISE = [
    [int(percent) / 100 for percent in line.split()]
    for line in Path(__file__).with_name("step_noise.txt").read_text("utf-8").splitlines()
]
NUM_SEEDS, ROUNDS = 2, 12


class NoisyAccelerator(Accelerator):
    """Steps take the recorded shares of their time from some place on; `quiet` is what they would
    take."""

    def __init__(self, num_drafts: int, chance: float | None, rows: int, seed: int) -> None:
        super().__init__(num_drafts, chance)
        self._random, self.quiet = Random(seed), 0.0
        self._noise = NOISE[0 if rows < 8 else 1 if rows < 64 else 2]
        self._place = self._random.randrange(len(self._noise))

    def _duration(self, step: ScheduledStep) -> float:
        taken = super()._duration(step)
        self.quiet += taken
        self._place = (self._place + 1) % len(self._noise)
        return taken * self._noise[self._place]


def play(num_drafts: int, chance: float, rows: int, load: str, seed: int) -> float:
    """How many times as fast as without drafts, were it not for noise."""
    worlds = [NoisyAccelerator(number, chance, rows, seed) for number in (num_drafts, 0)]
    for world in worlds:
        for number in range(ROUNDS):
            LOADS[load](world, rows, Random(ROUNDS * seed + number))
    drafting, plain = worlds
    return plain.quiet / drafting.quiet


@pytest.mark.parametrize("rows", [1, 32])
def test_what_pays_is_used(rows: int) -> None:
    found = [play(1, 0.95, rows, "decoding", seed) for seed in range(NUM_SEEDS)]
    assert median(found) > 1.25, found
    assert min(found) > 0.97, found
