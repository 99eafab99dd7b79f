"""How many drafts a step asks for: as many as make the batch fastest by what was measured, none at all
where speculation would slow it down. Output never depends on it.

Two things are learned apart: how often the j-th draft is right (the same for every batch size), and how
long a step of so many rows takes with k drafts per row. The speed of k is expected tokens over time.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from functools import partial
from itertools import groupby
from operator import itemgetter
from statistics import median

import numpy as np

# Steps measured at a number of drafts before it is believed. Not counted are the first one after a change,
# since its drafts were asked for under the number before, and the first ones behind a prompt, in whose time
# the device still worked at that.
WARM_UP, WARM_UP_WITHOUT, AFTER_PROMPT = 3, 6, 2
# A number of drafts is tried again after so many steps, then twice as many, as long as nothing changes.
TRY_AGAIN = 128
TRY_AGAIN_AT_MOST = 2048
# Share of the time that trials may cost where drafts turn out not to pay.
TRIAL_SHARE = 0.01
# What another number must promise before it is taken, and what drafts must promise at all: sequences whose
# drafts fare worse than others' end later, which a step's speed does not show.
GAIN, LEAST_GAIN = 1.03, 1.08
# Share that an older step's result keeps with every new one, and when drafts are tried once more.
KEPT, KEPT_FOR_TRIAL = 0.98, 0.05
# Rows that what is expected of a place counts for, beside what was seen there.
PRIOR = 4.0
WINDOW = 15
MOST_NOTED = 32


class Acceptance:
    """How often drafts are right, by place: of rows that could have had a draft there."""

    def __init__(self, most: int) -> None:
        self._right = np.zeros(most)
        self._asked = np.zeros(most)
        self._noted: list[tuple[int, np.ndarray]] = []

    def note(self, asked: int, num_tokens: np.ndarray) -> None:
        """Of a step whose rows could have had so many drafts: the tokens that each row got. Looked at
        when somebody wants to know, many steps at once."""
        self._noted.append((asked, num_tokens))
        if len(self._noted) >= MOST_NOTED:
            self._fold()

    def fade(self, kept: float) -> None:
        """Let older results count less."""
        self._fold()
        self._right *= kept
        self._asked *= kept

    def _fold(self) -> None:
        """Take in what was noted. What is known of places behind fades, so that they are tried again."""
        noted, self._noted = self._noted, []
        places = np.arange(self._asked.size)
        for asked, steps in groupby(noted, key=itemgetter(0)):
            counts = [num_tokens for _, num_tokens in steps]
            rows = np.concatenate(counts)
            kept, is_asked = KEPT ** len(counts), places < asked
            self._right = kept * self._right + (rows[:, None] > places + 1).sum(0) * is_asked
            self._asked = kept * self._asked + rows.size * is_asked

    def expected_tokens(self, number: int) -> float:
        """Tokens of one row in one step with so many drafts. Places of which little is known are
        expected to go on as those before."""
        self._fold()
        tokens, share, ratio = 1.0, 1.0, 0.5
        for place in range(number):
            right = float(self._right[place]) + PRIOR * share * ratio
            found = min(share, right / (float(self._asked[place]) + PRIOR))
            ratio = found / share if share > 0 else 0.0
            share = found
            tokens += share
        return tokens


def _bucket(num_rows: int) -> int:
    """Batch sizes that are taken for one: 1, 2, up to 4, up to 8 and so on."""
    return (num_rows - 1).bit_length()


class StepTimes:
    """Measured seconds of steps of about one batch size, by number of drafts."""

    def __init__(self) -> None:
        self._seconds: defaultdict[int, deque[float]] = defaultdict(partial(deque, maxlen=WINDOW))

    def observe(self, number: int, seconds: float) -> None:
        """One step took so long."""
        self._seconds[number].append(seconds)

    def forget(self, number: int | None = None) -> None:
        """What was measured was on other work; None: for every number."""
        if number is None:
            self._seconds.clear()
        else:
            self._seconds.pop(number, None)

    def count(self, number: int) -> int:
        """Steps remembered."""
        return len(self._seconds.get(number, ()))

    def expected(self, number: int) -> float:
        """Seconds of a step with so many drafts; between and beyond what was measured, along lines."""
        # Without drafts the better ones count: the first steps behind a change are slower than later ones,
        # and a wrong verdict for drafts costs more than one against them.
        known = {n: median(s) if n else sorted(s)[len(s) // 4] for n, s in self._seconds.items()}
        if number in known:
            return known[number]
        below = sorted((n for n in known if n < number), reverse=True)
        above = sorted(n for n in known if n > number)
        if below and above:
            low, high = below[0], above[0]
        elif len(below) > 1:
            low, high = below[1], below[0]
        elif len(above) > 1:
            low, high = above[0], above[1]
        else:
            return next(iter(known.values()))
        slope = (known[high] - known[low]) / (high - low)
        return max(known[low] + slope * (number - low), 0.2 * known[low])


class _Size:
    """What is known of one batch size, and what it does now."""

    def __init__(self, most: int) -> None:
        self.times = StepTimes()
        self.best = most
        self.current = most
        self.left = WARM_UP  # steps until the current number is judged
        self.pause = TRY_AGAIN  # steps between tries
        self.spent: list[float] = []  # seconds of the trial's steps with drafts
        self.tried = most  # drafts of the trial
        self.since = 0
        self.is_trial = True

    @property
    def is_off(self) -> bool:
        """Whether there are no drafts until the next trial."""
        return not (self.best or self.is_trial)

    def turn_off(self) -> None:
        """No drafts until the next trial."""
        self.best = self.current = 0
        self.is_trial = False


class DraftLength:
    """Asked once per step, told of every step that only decoded. Deterministic given what it is told."""

    def __init__(
        self,
        most: int,
        *,
        adaptive: bool = True,
        disable_above: int = 0,
        numbers: Iterable[int] = (),
    ) -> None:
        """numbers: those to choose from, where others cost as much as the next one; empty: up to `most`."""
        self._numbers = (0, *sorted(numbers or range(1, most + 1)))
        self._most, self._adaptive, self._disable_above = most, adaptive, disable_above
        self.acceptance = Acceptance(most)
        self._sizes: dict[int, _Size] = {}
        self._last: tuple[int, int] | None = None
        self._num_unsettled = 0  # steps that are not counted

    def choose(self, num_rows: int) -> int:
        """Drafts to ask for behind a step of so many rows."""
        if not num_rows or (self._disable_above and num_rows > self._disable_above):
            return 0
        if not self._adaptive:
            return self._most
        return self._size(num_rows).current

    def is_off(self, num_rows: int) -> bool:
        """Whether nothing is to be drafted for so many rows for long."""
        if self._disable_above and num_rows > self._disable_above:
            return True
        size = self._sizes.get(_bucket(num_rows))
        return self._adaptive and size is not None and size.is_off

    def observe(self, num_rows: int, asked: int, seconds: float) -> None:
        """A step that only decoded took so long, its drafts asked for with `asked`. seconds 0: its
        time says nothing."""
        if not self._adaptive or not num_rows:
            return
        size, key = self._size(num_rows), (_bucket(num_rows), asked)
        size.since += 1
        if size.is_off:  # costs next to nothing
            if size.since >= size.pause:
                self._begin_trial(size)
            return
        if size.is_trial and asked:
            size.spent.append(seconds)
        if self._last != key:
            self._last, self._num_unsettled = key, max(1, self._num_unsettled)
        settled = not self._num_unsettled
        self._num_unsettled -= not settled
        if settled and seconds > 0:
            size.times.observe(asked, seconds)
        if asked == size.current and (settled or not size.is_trial):
            size.left -= 1
        if size.is_trial:
            if size.left <= 0:
                self._judge(size)
        elif size.since >= size.pause:
            self._begin_trial(size)
        elif size.left <= 0:
            self._judge(size)

    def disturb(self) -> None:
        """A step did more than decode."""
        self._num_unsettled = AFTER_PROMPT

    def _size(self, num_rows: int) -> _Size:
        key = _bucket(num_rows)
        if key not in self._sizes:
            self._sizes[key] = size = _Size(self._most)
            settled = [k for k, other in self._sizes.items() if not other.is_trial]
            nearest = min(settled, key=lambda k: (abs(k - key), k), default=None)
            if nearest is not None and not self._sizes[nearest].best:
                size.turn_off()  # to be tried, but not with the first prompts of such a batch
        return self._sizes[key]

    def _judge(self, size: _Size) -> None:
        """Compare what every number promises; not before doing without drafts has been measured."""
        if size.is_trial and size.times.count(0) < WARM_UP_WITHOUT:
            size.current, size.left = 0, WARM_UP_WITHOUT
            return
        speed = {
            number: self.acceptance.expected_tokens(number) / size.times.expected(number)
            for number in self._numbers
        }
        best = max(speed, key=lambda number: (speed[number], -number))
        if speed[best] < LEAST_GAIN * speed[0]:
            if (
                not size.is_trial
            ):  # steps without were measured some time ago, perhaps on other work
                self._begin_trial(size)
                return
            if size.best:
                size.pause = TRY_AGAIN
            best = size.best = 0
        if speed[best] > GAIN * speed[size.best]:
            size.best, size.pause = best, TRY_AGAIN
        elif size.is_trial:
            size.pause = min(2 * size.pause, TRY_AGAIN_AT_MOST)
        if size.is_trial:
            plain = size.times.expected(0)
            gained = len(size.spent) * self.acceptance.expected_tokens(size.tried)
            extra = sum(size.spent) / plain - gained if plain > 0 else 0.0
            if not size.best:
                size.pause = max(size.pause, int(extra / TRIAL_SHARE))
            size.since, size.spent = 0, []
        size.current, size.is_trial = size.best, False
        size.left = 4 * WARM_UP

    def _begin_trial(self, size: _Size) -> None:
        """Measure once more what is not in use: drafts where there are none, and the other way round."""
        size.is_trial, size.left = True, WARM_UP if not size.best else WARM_UP_WITHOUT
        size.current = 0 if size.best else next(n for n in self._numbers if n >= min(self._most, 2))
        size.tried = size.current
        if size.current:
            self.acceptance.fade(KEPT_FOR_TRIAL)
            size.times.forget()
        else:
            size.times.forget(0)
