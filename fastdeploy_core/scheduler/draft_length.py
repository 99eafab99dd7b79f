"""How many drafts a step asks for: as many as make the batch fastest by what was measured, none at all
where speculation would slow it down. Output never depends on it.

Which number is best follows from how often drafts are right and how long steps take; whether there are
drafts at all, from the tokens per second that came out with them and without, everything included.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from .draft_measures import WINDOWS, Acceptance, Load, Pace, RowWatch, StepTimes, TimedStep

# Batch sizes up to this begin with drafts; larger ones have to show first that they gain by them.
SMALL = 8
# Steps that are not counted behind a change of the number, which were planned before it, and decode steps
# behind a prompt whose time says nothing: the device still worked at that.
SETTLE, AFTER_PROMPT = 3, 2
# Steps of a window: enough for so many rows, within bounds. Of a trial that fails at once: no more than these.
ROWS, LEAST_STEPS, MOST_STEPS, FEWEST = 96, 12, 40, 6
# The very first steps with drafts, before it is known what steps are without.
FIRST_STEPS = 4
# What is not in use is tried after so many steps, then twice as many, while nothing changes.
FIRST_TRY, TRY_AGAIN, TRY_AGAIN_AT_MOST = 32, 128, 2048
# Share of the time that trials may cost where drafts turn out not to pay; steps that one costs at least,
# since queues run empty.
TRIAL_SHARE, LEAST_LOST = 0.01, 4.0
# What another number must promise before it is taken; what drafts must bring before they are used, and to
# go on; below what share a trial has failed at once.
GAIN, LEAST_GAIN, KEEP_GAIN, FAILED = 1.03, 1.1, 1.05, 0.8
# How much later than without drafts a batch of equal answers may be complete, which a row decides whose drafts
# fare badly; and as long as it may only have had bad luck.
LATE, LATE_AT_FIRST = 1.0, 1.1
# What older results of acceptance keep when drafts are tried once more.
KEPT_FOR_TRIAL = 0.05


def _bucket(num_rows: int) -> int:
    """Batch sizes that are taken for one: 1, 2, up to 4, up to 8 and so on."""
    return (num_rows - 1).bit_length()


class _Regime:
    """What is known of batches of about one size and one kind of sampling, and what they do now."""

    def __init__(self, num_rows: int, most: int, acceptance: Acceptance) -> None:
        self.num_rows, self.acceptance, self.times = num_rows, acceptance, StepTimes()
        steps = min(MOST_STEPS, max(LEAST_STEPS, ROWS // num_rows))
        # Without drafts every row has one token per step, which is soon known.
        self.load = Load()
        self.pace = [
            Pace(steps if number else LEAST_STEPS, self.load) for number in range(most + 1)
        ]
        self.best = self.current = most
        self.is_trial, self.has_paid = True, False
        self.since, self.pause = 0, TRY_AGAIN  # steps since the last trial, and until the next
        self.num_tried, self.lost_s = 0, 0.0  # numbers in this trial, and what they cost
        self.relief = 1.0  # how many times as fast plain steps are in a small batch
        self.num_unsettled = SETTLE
        self.quiet_until = 0  # steps that are not looked at, since the last trial

    @property
    def is_off(self) -> bool:
        """Whether there are no drafts until the next trial."""
        return not (self.best or self.is_trial)

    def turn_off(self, pause: int) -> None:
        """No drafts until the next trial."""
        self.best = self.current = 0
        self.is_trial, self.pause = False, pause
        self.quiet_until = pause - WINDOWS * LEAST_STEPS

    def decoding(self, number: int) -> float:
        """Expected tokens of a row per second while nothing but decoding happens."""
        return self.acceptance.expected_tokens(number) / self.times.expected(number)

    def speed(self, number: int) -> float:
        """The same with everything that happens; of a number that was not tried, as far as decoding tells."""
        if self.pace[number].is_known:
            return self.pace[number].speed
        known = max(n for n, pace in enumerate(self.pace) if pace.is_known)
        return self.pace[known].speed * self.decoding(number) / self.decoding(known)

    def has_failed(self, number: int) -> bool:
        """Whether the window that is open leaves no hope."""
        own = self.pace[number]
        return own.count > 0 and own.open_speed < FAILED * self.pace[0].speed

    def still_pays(self) -> bool:
        """Whether the number in use is better than none by enough."""
        return self.speed(self.best) >= KEEP_GAIN * self.speed(0)

    def is_fair(self, number: int) -> bool:
        """Whether rows whose drafts fare badly do not pay for the others': a batch of equal answers is not
        complete later than without drafts. A row alone only asks whether drafts pay."""
        own, plain = self.pace[number], self.pace[0]
        if self.num_rows == 1:
            return True
        if not (own.is_known and plain.is_known):
            return True
        # The others are complete by then, and rows that fare badly have done their share.
        late = plain.speed / own.speed + (1 - own.slow_share) / self.relief
        return late <= (LATE if own.is_slow_sure else LATE_AT_FIRST)


class DraftLength:
    """Asked once per step, told of every step. Deterministic given what it is told."""

    def __init__(
        self,
        most: int,
        *,
        adaptive: bool = True,
        disable_above: int = 0,
        numbers: Iterable[int] = (),
        watch: RowWatch | None = None,
    ) -> None:
        """numbers: those to choose from, where others cost as much as the next one; empty: up to `most`."""
        self._numbers = tuple(sorted(numbers or range(1, most + 1)))
        self._most, self._adaptive, self._disable_above = most, adaptive, disable_above
        self._watch = watch
        self._watched: tuple[_Regime, int] | None = None  # whose rows, with so many drafts
        self._acceptance: dict[int, Acceptance] = {}
        self._regimes: dict[tuple[int, int], _Regime] = {}
        self._now: _Regime | None = None  # of the step that was planned last
        self._num_rows, self._kind, self._is_disabled = -1, 0, False
        self._last: _Regime | None = None  # of the step that was told of last
        self._num_behind_prompt = 0

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
        told more of it. Drafts that are off cost next to nothing, and what steps take without is only
        measured again before they are tried."""
        regime = self._now
        if regime is not None:
            regime.load.note(num_tokens / self._num_rows, num_prompt_tokens)
        if regime is not None and regime.since >= regime.quiet_until:
            return False
        if regime is not None:
            regime.since += 1
        return True

    def note(self, asked: int, num_tokens: np.ndarray) -> None:
        """Of a step whose rows could have had so many drafts: the tokens that each row got."""
        if self._now is not None:
            self._now.acceptance.note(asked, num_tokens)

    def observe(
        self, asked: int, num_tokens: int, seconds: float, num_prompt_tokens: int = 0
    ) -> None:
        """A step took so long and gave so many tokens. asked: the drafts that its rows could have had.
        seconds 0: its time says nothing. num_prompt_tokens: that it has computed."""
        regime, is_behind = self._now, self._num_behind_prompt > 0
        is_decode = not num_prompt_tokens
        self._num_behind_prompt = self._num_behind_prompt - is_behind if is_decode else AFTER_PROMPT
        if regime is None:
            return
        if regime is not self._last:
            if self._last is not None and self._last.current != regime.current:
                regime.num_unsettled = SETTLE
            self._last = regime
        regime.since += 1
        if regime.num_unsettled:
            regime.num_unsettled -= 1
            self._begin_window(regime)
            return
        # One without tokens computed prompts, which takes as long whatever there is of drafts.
        if seconds <= 0 or not num_tokens:
            return
        pace = regime.pace[regime.current]
        if is_decode and not is_behind:
            regime.times.observe(asked, seconds)
        step = TimedStep(num_tokens / self._num_rows, seconds, num_prompt_tokens, asked > 0)
        if num_prompt_tokens and not regime.current:
            regime.load.note_plain(step)
        if pace.add(step) or (regime.is_trial and self._is_enough(regime)):
            self._close(regime, regime.current)
            self._decide(regime)
            self._begin_window(regime)

    def _begin_window(self, regime: _Regime) -> None:
        """The next step may be the first one of a window with drafts."""
        number = regime.current
        if not number:
            self._watched = None
        elif self._watch is not None and not regime.num_unsettled:
            is_first = self._watched != (regime, number)
            if is_first or not regime.pace[number].count:
                self._watch.begin(is_first=is_first)
                self._watched = (regime, number)

    def _regime(self, num_rows: int, kind: int) -> _Regime:
        key = (_bucket(num_rows), kind)
        found = self._regimes.get(key)
        if found is None:
            acceptance = self._acceptance.setdefault(kind, Acceptance(self._most))
            found = _Regime(1 << key[0], self._most, acceptance)
            known = [k for k, r in self._regimes.items() if k[1] == kind and not r.is_trial]
            nearest = min(known, key=lambda k: (abs(k[0] - key[0]), k), default=None)
            if nearest is not None and not self._regimes[nearest].best:
                found.turn_off(TRY_AGAIN)  # not with the first prompts of such a batch
            elif num_rows > SMALL:
                found.turn_off(FIRST_TRY)
            self._regimes[key] = found
        return found

    @staticmethod
    def _is_enough(regime: _Regime) -> bool:
        """Whether a trial need not go on with this number for now: nothing is known yet to compare with,
        or it has failed."""
        count = regime.pace[regime.current].count
        if not regime.pace[0].is_known:
            return bool(regime.current) and count >= FIRST_STEPS
        return bool(regime.current) and count >= FEWEST and regime.has_failed(regime.current)

    def _close(self, regime: _Regime, number: int) -> None:
        """A window has ended."""
        pace, plain = regime.pace[number], regime.pace[0]
        if not number:
            pace.close()
        elif plain.is_known:  # else it is gone on with when that is known
            count, slow = pace.count, None
            if self._watch is not None and self._watched == (regime, number):
                slow = self._watch.slow_rows()
            pace.close(slow)
            if regime.is_trial:
                regime.lost_s += pace.lost(plain.speed) * (1 + SETTLE / count)

    def _decide(self, regime: _Regime) -> None:
        """Behind a window."""
        plain_s = [r.times.expected(0) for r in self._regimes.values() if r.times.count(0)]
        if regime.times.count(0):
            regime.relief = max(1.0, regime.times.expected(0) / min(plain_s))
        if regime.is_trial:
            self._judge(regime)
        elif not regime.best:
            if regime.since >= regime.pause:
                self._try(regime, self._first(regime))
        elif not regime.is_fair(regime.best):
            lost_s = WINDOWS * regime.pace[regime.best].lost(regime.pace[0].speed)
            self._try(regime, 0)
            regime.lost_s = lost_s
        elif regime.since >= regime.pause or not regime.still_pays():
            self._try(regime, 0)
        else:
            better = max(filter(regime.is_fair, self._numbers), key=regime.decoding)
            if regime.decoding(better) > GAIN * regime.decoding(regime.best):
                regime.pace[better].forget()
                regime.best = better
                self._ask(regime, better)

    def _first(self, regime: _Regime) -> int:
        """The number that a trial begins with."""
        return next(n for n in self._numbers if n >= min(self._most, 2))

    def _ask(self, regime: _Regime, number: int) -> None:
        if number != regime.current:
            regime.current, regime.num_unsettled = number, SETTLE

    def _try(self, regime: _Regime, number: int) -> None:
        """Measure what is not in use: drafts where there are none, and the other way round."""
        regime.is_trial, regime.num_tried, regime.lost_s = True, 0, 0.0
        if number:
            regime.acceptance.fade(KEPT_FOR_TRIAL)
        for other in range(self._most + 1):
            if other != regime.best:
                regime.pace[other].forget()
            if bool(other) == bool(number):
                regime.times.forget(other)
        self._ask(regime, number)

    def _judge(self, regime: _Regime) -> None:
        """Behind a window of a trial: another one with another number, or its end."""
        if not regime.pace[0].is_known:
            self._ask(regime, 0)
            return
        if not (regime.current or regime.pace[regime.best].is_known):  # it has just begun
            if regime.has_failed(regime.best):
                self._close(regime, regime.best)
                self._conclude(regime, 0)
            else:
                self._ask(regime, regime.best)
            return
        plain, fair = regime.speed(0), [n for n in self._numbers if regime.is_fair(n)]
        best = max(fair, key=regime.decoding, default=0)
        needed = (KEEP_GAIN if regime.has_paid else LEAST_GAIN) * plain
        if best and regime.speed(best) < needed:
            best = max(fair, key=regime.speed)
        if best and regime.speed(best) < needed:
            best = 0
        elif best and not regime.pace[best].is_known and regime.num_tried < len(self._numbers):
            regime.num_tried += 1
            self._ask(regime, best)
            return
        self._conclude(regime, best)

    def _conclude(self, regime: _Regime, best: int) -> None:
        is_same = bool(best) == regime.has_paid
        regime.pause = min(2 * regime.pause, TRY_AGAIN_AT_MOST) if is_same else TRY_AGAIN
        if not best and regime.times.count(0):
            lost_steps = max(LEAST_LOST, regime.lost_s / regime.times.expected(0))
            regime.pause = max(regime.pause, int(lost_steps / TRIAL_SHARE))
        regime.best, regime.has_paid, regime.is_trial, regime.since = best, bool(best), False, 0
        if best:
            regime.quiet_until = 0
            self._ask(regime, best)
        else:
            regime.turn_off(regime.pause)
