"""What the number of drafts is decided by: how often drafts are right, how long steps take, and what comes
out of it all in the end.
"""

from __future__ import annotations

from collections import defaultdict, deque
from functools import partial
from itertools import groupby
from operator import itemgetter
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from .roster import Roster

# Share that an older step's result keeps with every new one.
KEPT = 0.98
# Rows that what is expected of a place counts for, beside what was seen there.
PRIOR = 4.0
LAST = 15
MOST_NOTED = 32
# Windows of steps that count.
WINDOWS = 4
# Share of the rows that fare worse than the one that stands for those that fare badly.
SLOW = 0.03


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


class StepTimes:
    """Measured seconds of steps of about one batch size, by number of drafts."""

    def __init__(self) -> None:
        self._seconds: defaultdict[int, deque[float]] = defaultdict(partial(deque, maxlen=LAST))

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
            return next(iter(known.values()), 1.0)
        slope = (known[high] - known[low]) / (high - low)
        return max(known[low] + slope * (number - low), 0.2 * known[low])


class Window(NamedTuple):
    """Some steps: how many, the tokens that a row got in them, and what they usually take."""

    num_steps: int
    tokens: float
    seconds: float

    @classmethod
    def of(cls, steps: list[tuple[float, float, int]]) -> Window:
        """steps: (tokens of a row, seconds, kind). A step counts as long as half of its kind took at most:
        now and then one is held up by something else."""
        seconds: defaultdict[int, list[float]] = defaultdict(list)
        for _, taken, kind in steps:
            seconds[kind].append(taken)
        total = sum(len(taken) * median(taken) for taken in seconds.values())
        return cls(len(steps), sum(step[0] for step in steps), total)

    @property
    def speed(self) -> float:
        """Tokens of a row per second."""
        return self.tokens / self.seconds


class Pace:
    """Tokens of a row over the seconds of all steps, prompts and changes of the batch included; by windows
    of so many steps, the last few of which count."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._steps: deque[tuple[float, float, int]] = deque(maxlen=WINDOWS * num_steps)
        self._slow: deque[tuple[float, float]] = deque(maxlen=WINDOWS)
        self.count = 0  # steps of the window that is open

    def add(self, tokens: float, seconds: float, kind: int) -> bool:
        """A step gave every row so many tokens; whether the window is full with it."""
        self._steps.append((tokens, seconds, kind))
        self.count += 1
        return self.count >= self._num_steps

    def close(self, slow_tokens: float = 0.0) -> None:
        """The window ends. slow_tokens: what a row got in it that fared badly, 0 if nobody knows."""
        if self.count:
            tokens = self.open.tokens
            self._slow.append((slow_tokens or tokens, tokens))
        self.count = 0

    def forget(self) -> None:
        """What was measured was on other work."""
        self._steps.clear()
        self._slow.clear()
        self.count = 0

    @property
    def is_known(self) -> bool:
        """Whether a window has ended."""
        return bool(self._slow)

    @property
    def open(self) -> Window:
        """The window that is open."""
        return Window.of(list(self._steps)[-self.count :])

    @property
    def speed(self) -> float:
        """Tokens of a row per second."""
        return Window.of(list(self._steps)).speed

    @property
    def slow_speed(self) -> float:
        """The same of a row that fares badly."""
        slow, tokens = map(sum, zip(*self._slow, strict=True))
        return self.speed * slow / tokens


class RowWatch:
    """How many tokens the running rows get while somebody watches."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._places = self._seq_ids = self._known = np.zeros(0, dtype=np.int64)

    def begin(self) -> None:
        """From now on."""
        columns = self._roster.columns
        self._places = self._roster.running_places()
        self._seq_ids, self._known = columns.seq_id[self._places], columns.known[self._places]

    def slow_tokens(self) -> float:
        """What a row got of those that fared badly; 0 where none has been there all the time."""
        columns = self._roster.columns
        stays = columns.seq_id[self._places] == self._seq_ids
        got = (columns.known[self._places] - self._known)[stays]
        return float(np.quantile(got, SLOW)) if got.size else 0.0
