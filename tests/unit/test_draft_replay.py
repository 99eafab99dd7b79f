"""Adaptive length over steps as an accelerator did them: drafts that make them a fifth faster are
found and kept, although prompts come in between, each of which takes as long as twelve decodes.

step_trace.txt: of the demo model on one NVIDIA H200, `mtp`, eight streams of answers of 256 tokens,
two steps queued ahead: stretches of 72 steps with 0 drafts and with 1 in turns, a line each. Of a
step: microseconds from the results before to its own (0: they say nothing), tokens, and if it has
them tokens of prompts.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from statistics import mean

from tests.unit.test_draft_policy import decode, make_policy, tell

ROWS = 8
# Steps at the begin of a stretch that are still of the number before.
FIRST = 12
Step = tuple[float, int, int]  # seconds, tokens, prompts' tokens


def read() -> dict[int, list[list[Step]]]:
    """Stretches by number of drafts."""
    found: dict[int, list[list[Step]]] = {0: [], 1: []}
    text = Path(__file__).with_name("step_trace.txt").read_text("utf-8")
    for number, *steps in map(str.split, text.splitlines()):
        told = [[int(value) for value in step.split(":")] + [0] for step in steps]
        found[int(number)].append([(1e-6 * step[0], step[1], step[2]) for step in told])
    return found


TRACE = read()


def speed(steps: list[Step]) -> float:
    """Tokens per second."""
    return sum(step[1] for step in steps) / sum(step[0] for step in steps)


PLAIN, DRAFTING = (speed([s for stretch in TRACE[n] for s in stretch[FIRST:]]) for n in (0, 1))


def play(seed: int, seconds: float) -> list[Step]:
    """Steps of so long, as the policy has chosen them; each choice goes on from some stretch of its
    number."""
    policy, random, number, done = make_policy(1), Random(seed), -1, list[Step]()
    place, stretch = 0, list[Step]()
    while seconds > 0:
        asked = policy.choose(ROWS)
        if asked != number or place == len(stretch):
            place = 0 if asked != number else FIRST
            number, stretch = asked, random.choice(TRACE[asked])
        done.append(stretch[place])
        taken, tokens, prompts = stretch[place]
        place, seconds = place + 1, seconds - taken
        tell(policy, decode(asked, has_prompts=prompts > 0), tokens, taken)
    return done


def test_what_pays_is_found_between_prompts() -> None:
    assert DRAFTING > 1.15 * PLAIN, "what there is to be found"
    gains = [speed(play(seed, 4.0)) / PLAIN for seed in range(12)]
    assert mean(gains) > 1 + 0.6 * (DRAFTING / PLAIN - 1), gains
    assert min(gains) > 0.97, gains
