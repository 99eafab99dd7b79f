"""How many drafts a step asks for: the number that gives most tokens per second, none where drafts
would slow the batch down. Output never depends on it.

One number is in use. Now and then another one, or none, is probed: asked for until WINDOW steps had
it, and compared with as many steps before, which met the same machine and text. The faster one is
used. The one it replaces is probed next; a loser waits twice as long each time. A probe ends when
it has lost MOST_LOST steps; the next one waits until that is SHARE of the time."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from statistics import median

from fastdeploy_core.config import SpeculativeConfig

from .step import ScheduledStep

logger = logging.getLogger(__name__)

WINDOW = 32  # newest steps of a number that its averages are of
NEEDED, HELD_UP = 1.02, 3.0  # gain that more drafts need; times the median that a step may count
MOST_LOST = 4.0  # steps of the number in use that a probe may lose
SHARE, WON_SHARE = 0.005, 0.02  # of the time that probes may lose, without drafts in use and with
FIRST, LATER, LONGEST = 24, 400, 12800  # steps before a probe: at first, of a new size, at most
OFTEN = 0.25  # share of steps with prompts above which these count, too


class _Regime:
    """What is known of batches of about one size and one kind of sampling."""

    def __init__(self, numbers: tuple[int, ...], like: _Regime | None) -> None:
        """like: begin with the number in use there, if it has been compared with any."""
        self.is_known: bool = like is not None and like.is_known
        self.used: int = like.used if like is not None else 0
        self.current = self.used  # the number to ask for; another one in a probe
        self._rival: int | None = None  # was in use before, and is probed next
        self._steps = {n: deque[tuple[float, float]](maxlen=WINDOW) for n in numbers}
        self._due = {n: LATER if self.is_known and (n or not self.used) else FIRST for n in numbers}
        self._num_failures = dict.fromkeys(numbers, 0)
        self._asked = -1  # with the step before
        self.count = self.wakes = 0  # decodes: all, and before which nothing has to be observed
        self._began = self._next = 0  # of these, when a probe began and when one may begin
        self._tokens = self._speed = self._lost = 0.0  # before the probe, and steps lost in it

    def observe(self, step: ScheduledStep, tokens: float, seconds: float) -> None:
        """A step gave a row so many tokens. seconds 0: its time says nothing."""
        # The first step that makes drafts is fed none yet.
        says_something = bool(seconds) and step.asked == self._asked == self.current
        self._asked, steps = step.asked, self._steps[self.current]
        if says_something:
            steps.append((tokens / step.num_decodes, seconds / step.num_decodes))
        if self.current == self.used:
            if len(steps) == WINDOW and self.count >= self._began + WINDOW:
                self._consider()
            return
        self._lost += (self._speed * seconds - tokens) / self._tokens if seconds else 0.0
        self._num_silent += not says_something
        if len(steps) == WINDOW or self._num_silent > 2 * WINDOW or self._lost > MOST_LOST:
            self._end_probe(self.current)

    def _consider(self) -> None:
        self._began, number, steps = self.count, self._rival, self._steps
        if number is None:
            number = min(self._due.keys() - {self.used}, key=lambda n: (self._due[n], -n))
            soonest = max(self._due[number], self._next)
            self.wakes = 0 if self.used else soonest - 4 * WINDOW
            if self.count < self.wakes:
                steps[0].clear()  # those right before the probe are compared
            if self.used and steps[0] and _averages(steps[self.used])[1] < _averages(steps[0])[1]:
                number = 0  # the text has become hard to guess
            elif self.count < soonest:
                return
        self._tokens, self._speed = _averages(steps[self.used])
        self.current, self._lost, self._num_silent = number, 0.0, 0
        steps[number].clear()

    def _end_probe(self, probed: int) -> None:
        used, loser, gain, self._rival, self.is_known = self.used, probed, 0.0, None, True
        if len(self._steps[probed]) == WINDOW:
            tokens, speed = _averages(self._steps[probed])
            # No step is quicker for having drafts: what is above the tokens they add is chance.
            gain = (min if probed > used else max)(speed / self._speed, tokens / self._tokens)
        if gain >= (NEEDED if probed else 1.0):
            self.used, self._rival, loser = probed, used, used
        else:
            self._num_failures[used] = 0
        self._num_failures[loser] += 1
        self._due[loser] = self.count + (FIRST << min(self._num_failures[loser], 9))
        lost = max(self._lost, 0.0 if probed else -self._lost)  # with drafts
        self._next = self.count + int(min(lost / (WON_SHARE if used else SHARE), LONGEST))
        self.current, self._began = self.used, self.count
        logger.debug("%s drafts: %.2f times as fast; %s are used", probed, gain, self.used)


def _averages(steps: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Tokens of a row per step, and per second; steps that were held up count for less."""
    tokens, seconds = zip(*steps, strict=True)
    most = HELD_UP * median(seconds)
    return sum(tokens) / len(tokens), sum(tokens) / sum(min(each, most) for each in seconds)


class DraftPolicy:
    """Asked once per step, told of each unless it rests. Deterministic given what it is told."""

    def __init__(self, config: SpeculativeConfig, *, is_captured: bool = False) -> None:
        """is_captured: steps with drafts are captured graphs, of one or of all."""
        self._config, most = config, config.num_speculative_tokens
        numbers = {1, most} if is_captured else {most >> n for n in range(most.bit_length())}
        self._numbers = (*sorted(numbers, reverse=True), 0)
        self._regimes: dict[tuple[int, int], _Regime] = {}
        self._regime: _Regime | None = None  # of the step that was planned last
        self._num_rows, self._had_prompts, self._share = 1, True, 0.0  # share of such steps, lately

    def choose(self, num_rows: int, kind: int = 0) -> int:
        """Drafts to ask for after a step of so many rows whose sampling is of that kind."""
        is_disabled = 0 < self._config.disable_by_batch_size < num_rows
        if is_disabled or not self._config.adaptive_length:
            self._regime = None
            return 0 if is_disabled else self._config.num_speculative_tokens
        self._num_rows, key = num_rows, ((num_rows - 1).bit_length(), kind)  # 1, 2, 3-4, 5-8 rows
        if key not in self._regimes:
            self._regimes[key] = _Regime(self._numbers, self._regime)
        self._regime = self._regimes[key]
        return self._regime.current

    def rests(self, num_decodes: int) -> bool:
        """Whether nothing has to be known of such a step: no probe comes near."""
        if (regime := self._regime) is None:
            return True
        regime.count += num_decodes
        return not regime.current and regime.count < regime.wakes

    def observe(self, step: ScheduledStep, num_tokens: int, seconds: float) -> None:
        """The results of a step came so long after those of the step before it."""
        is_other, self._had_prompts = self._had_prompts or not step.is_decode, not step.is_decode
        self._share += (self._had_prompts - self._share) / WINDOW
        if self._regime is not None:
            is_known = num_tokens and (self._share > OFTEN or not is_other)
            self._regime.observe(step, num_tokens / self._num_rows, seconds if is_known else 0.0)
