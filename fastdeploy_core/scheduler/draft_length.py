"""How many drafts a step asks for: as many as make the batch fastest by what was measured, none at all
where speculation would slow it down. Output never depends on it.

What counts is tokens per second, prompts and changes of the batch included. Numbers of drafts are compared in
trials (draft_trial.py); between trials only the tokens of a step are watched.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from .draft_trial import CLEAR, LEAST_GAIN, Load, TimedStep, Trial

logger = logging.getLogger(__name__)

# Batch sizes up to this begin with a trial; larger ones have to be in use for some time first.
SMALL = 8
# Steps that are not counted behind a change of the number: up to the first one with it, at most so many.
SETTLE = 8
# What is not in use is tried after so many steps, what has just come into use without a clear gain after a few more,
# then after twice as many, while nothing changes.
FIRST_TRY, CONFIRM, TRY_AGAIN, TRY_AGAIN_AT_MOST = 24, 100, 400, 12800
# What trials may cost, in steps without drafts that could have been done in the time: so much for every step,
# and at most so much at once. So much is left to what has cost more to begin with; one other step counts for no more,
# since any may be held up; two of one block are no accident.
TRIAL_SHARE, MOST_LOST, MOST_BY_ONE = 0.005, 16.0, 8.0
# The same share of steps with drafts that win, and how much of what they have won is kept for trials.
WON_SHARE, MOST_KEPT = 0.05, 160.0
# Steps between trials for each one of a trial, at least.
DUTY = 4
# What drafts must bring to stay in use.
KEEP_GAIN = 1.05
# Steps of which nobody asks or tells while drafts are off, behind each that is told of.
RESTS = 7
# Tokens drawn, and steps at least and at most, behind which it is looked whether drafts are still as often right.
WATCHED, LEAST_STEPS, MOST_STEPS = 96, 12, 48


def _bucket(num_rows: int) -> int:
    """Batch sizes that are taken for one: 1, 2, up to 4, up to 8 and so on."""
    return (num_rows - 1).bit_length()


class _Regime:
    """What is known of batches of about one size and one kind of sampling, and what they do now."""

    def __init__(self, num_rows: int, numbers: tuple[int, ...]) -> None:
        self._num_rows, self._numbers = num_rows, numbers
        self._load = Load()
        self._best = 0  # the number in use between trials
        # Of that number in its trial: how many times as fast as none, and tokens of a row in a step.
        self._gain = self._tokens = 0.0
        self._seen: list[float] = []  # tokens of a row in steps since
        self._num_watched = min(MOST_STEPS, max(LEAST_STEPS, WATCHED // num_rows))
        self._trial: Trial | None = None
        # What trials may cost now, MOST_LOST of it in a round; what must be left behind this one, and for the number
        # in turn.
        self._to_lose, self._floor, self._least = MOST_LOST, 0.0, 0.0
        self._num_dear = 0  # steps of the number in turn that have lost more than MOST_BY_ONE
        self._is_held = False  # whether one waits for that
        self._since, self._pause = 0, FIRST_TRY  # steps since the last trial, and until the next
        self.num_unsettled = SETTLE
        self.current = 0
        self.is_judged = False  # whether a trial has ended

    @property
    def is_off(self) -> bool:
        """Whether there are no drafts until the next trial."""
        return not self._best and (self._trial is None or self._is_held)

    def turn_off(self, pause: int) -> None:
        """No drafts until the next trial."""
        self._best, self._trial, self._since, self._pause = 0, None, 0, pause
        self._is_held = False
        self._ask(0)

    def begin_as(self, other: _Regime) -> None:
        """As batches of another size do. Drafts that pay for more rows do so for fewer, which sizes that a
        batch only passes through while it ends need not try; for more rows they are tried soon."""
        if not other._best:
            self.turn_off(TRY_AGAIN)
            return
        self._best, self._gain, self._tokens = other._best, other._gain, other._tokens
        self._pause = TRY_AGAIN if other._num_rows > self._num_rows else FIRST_TRY
        self._ask(self._best)

    def begin_trial(self) -> None:
        """Compare all numbers. What none takes has to be known first, lest much is lost by drafts."""
        self._begin_round()
        # What has won before is not out for a few steps that were held up, or one text that is hard to guess.
        self._trial = Trial(
            (0, *self._numbers), self._num_rows, self._load, is_hasty=not self._best
        )
        self._ask(self._trial.current)

    def _begin_round(self) -> None:
        self._to_lose = min(MOST_KEPT, self._to_lose)
        self._floor = max(0.0, self._to_lose - MOST_LOST)

    def passes(self, tokens: float, num_prompt_tokens: int) -> bool:
        """See DraftLength.passes."""
        self._load.note(tokens, num_prompt_tokens)
        num_steps = 1 + RESTS * self.is_off
        self._since += num_steps
        share, most = (WON_SHARE, MOST_KEPT) if self._best else (TRIAL_SHARE, MOST_LOST)
        if self._to_lose < most:
            self._to_lose = min(most, self._to_lose + share * num_steps)
        if self._to_lose >= MOST_LOST:
            if self._trial is None and self._since >= self._pause:
                self.begin_trial()
            elif self._trial is not None and self._is_held:
                self._is_held = False
                self._ask(self._trial.current)
        return self.is_off

    def observe(self, asked: int, step: TimedStep) -> None:
        """See DraftLength.observe."""
        trial = self._trial
        if trial is not None and (asked or self.current) and step.seconds > 0:
            lost = trial.lost(step)
            self._num_dear += lost > MOST_BY_ONE
            is_accident = not self.num_unsettled and self._num_dear == 1
            self._to_lose -= min(lost, MOST_BY_ONE) if is_accident else lost
            if self.num_unsettled:
                self._least = min(self._floor, self._to_lose - MOST_BY_ONE)
            is_over = self._to_lose < self._least and self.current and not self._is_held
            if is_over and trial.is_losing:
                trial.drop()
                self._go_on(trial)
                return
        if self.num_unsettled:
            self.num_unsettled = 0 if asked == self.current else self.num_unsettled - 1
            return
        if step.seconds <= 0:
            return
        if trial is None:
            self._watch(asked, step)
        elif not self._is_held and trial.add(step):
            self._go_on(trial)

    def _go_on(self, trial: Trial) -> None:
        """With another number, or without the trial."""
        if trial.is_over:
            self._conclude(trial)
            return
        # A round begins without drafts; until it may, there are as many as before the trial.
        if not trial.current:
            self._is_held = self._to_lose < MOST_LOST
            self._begin_round()
        self._ask(self._best if self._is_held else trial.current)

    def _watch(self, asked: int, step: TimedStep) -> None:
        """What drafts bring changes with what they are worth, which the time of a step does not."""
        if asked != self._best:
            return
        self._seen.append(step.tokens)
        if len(self._seen) == self._num_watched:
            tokens, self._seen = sum(self._seen) / len(self._seen), []
            if self._gain * tokens < KEEP_GAIN * self._tokens:
                self.begin_trial()

    def _conclude(self, trial: Trial) -> None:
        before = self._best
        self._judge(trial)
        logger.debug(
            "up to %d rows: %s; drafts %d -> %d, next trial after %d steps",
            *(self._num_rows, trial, before, self._best, self._pause),
        )

    def _judge(self, trial: Trial) -> None:
        self.is_judged = True
        needed = KEEP_GAIN if self._best else LEAST_GAIN
        best = trial.best(needed)
        if best and not self._best and not trial.is_sure(best):
            self.turn_off(max(CONFIRM, 2 * self._pause, DUTY * trial.num_steps))
            return
        is_same = bool(best) == bool(self._best)
        is_doubtful = best and trial.gain(best) < CLEAR
        first = CONFIRM if is_doubtful else TRY_AGAIN
        pause = min(2 * self._pause, TRY_AGAIN_AT_MOST) if is_same else first
        pause = max(pause, DUTY * trial.num_steps)
        if not best:
            self.turn_off(pause)
            return
        self._best, self._trial, self._since, self._pause = best, None, 0, pause
        self._gain, self._tokens, self._seen = trial.gain(best), trial.tokens(best), []
        self._ask(best)

    def _ask(self, number: int) -> None:
        if number != self.current:
            self.current, self.num_unsettled, self._num_dear = number, SETTLE, 0


class DraftLength:
    """Asked once per step, told of every step. Deterministic given what it is told."""

    def __init__(
        self,
        most: int,
        *,
        adaptive: bool = True,
        disable_above: int = 0,
        numbers: Iterable[int] = (),
    ) -> None:
        """numbers: those to choose from, where others cost as much as the next one; empty: the most, half as
        many, and so on."""
        halved = (most >> n for n in range(most.bit_length()))
        self._numbers = tuple(sorted(numbers or halved, reverse=True))
        self._most, self._adaptive, self._disable_above = most, adaptive, disable_above
        self._regimes: dict[tuple[int, int], _Regime] = {}
        self._now: _Regime | None = None  # of the step that was planned last
        self._num_rows, self._kind, self._is_disabled = -1, 0, False
        self._last: _Regime | None = None  # of the step that was told of last
        self.rests = 0  # further steps without drafts of which nobody need ask or tell

    def choose(self, num_rows: int, kind: int = 0) -> int:
        """Drafts to ask for behind a step of so many rows. Kinds of sampling are learned apart."""
        if num_rows != self._num_rows or kind != self._kind:
            self._num_rows, self._kind, self._now = num_rows, kind, None
            self._is_disabled = not num_rows or 0 < self._disable_above < num_rows
            if self._adaptive and not self._is_disabled:
                self._now = self._regime(num_rows, kind)
        if self._now is not None:
            return self._now.current
        return 0 if self._is_disabled else self._most

    @property
    def is_off(self) -> bool:
        """Whether nothing is to be drafted for long."""
        return self._now.is_off if self._now is not None else self._is_disabled

    def passes(self, num_tokens: int, num_prompt_tokens: int) -> bool:
        """A step was done, which gave so many tokens and computed so many of prompts; whether nobody need be
        told more of it: drafts that are off cost next to nothing."""
        regime = self._now
        if regime is None:
            return True
        is_off = regime.passes(num_tokens / self._num_rows, num_prompt_tokens)
        self.rests = RESTS * is_off
        return is_off

    def observe(
        self, asked: int, num_tokens: float, seconds: float, num_prompt_tokens: int = 0
    ) -> None:
        """A step, or each decode of one, took so long and gave so many tokens. asked: the drafts that its rows could have had.
        seconds 0: its time says nothing. num_prompt_tokens: that it has computed."""
        regime = self._now
        if regime is None:
            return
        if regime is not self._last:
            if self._last is not None and self._last.current != regime.current:
                regime.num_unsettled = SETTLE
            self._last = regime
        step = TimedStep(num_tokens / self._num_rows, seconds, num_prompt_tokens, asked > 0)
        regime.observe(asked, step)

    def _regime(self, num_rows: int, kind: int) -> _Regime:
        key = (_bucket(num_rows), kind)
        found = self._regimes.get(key)
        if found is None:
            found = self._regimes[key] = _Regime(1 << key[0], self._numbers)
            known = [k for k, r in self._regimes.items() if k[1] == kind and r.is_judged]
            nearest = min(known, key=lambda k: (abs(k[0] - key[0]), k), default=None)
            if nearest is not None:
                found.begin_as(self._regimes[nearest])
            elif num_rows <= SMALL:
                found.begin_trial()
        return found
