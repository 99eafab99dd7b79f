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
# What older steps keep with every new one of their share of what is known of the load.
KEPT_LOAD = 0.997
# Tokens of a row before prompts come, until that is known.
FIRST_ANSWER = 64.0
# How many times as long as others of its kind a step may count.
HELD_UP = 3.0
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


class TimedStep(NamedTuple):
    """One step: the tokens that a row got on average, its seconds, and what it was."""

    tokens: float
    seconds: float
    num_prompt_tokens: int
    has_drafts: bool


class Load:
    """The prompts that come with answers, which is what they are whatever the number of drafts. Newer steps
    count more."""

    def __init__(self) -> None:
        # Of all steps, as if there had been some before.
        self._tokens, self._prompt_tokens = FIRST_ANSWER, 0.0
        self._plain: deque[TimedStep] = deque(maxlen=LAST)  # with prompts, without drafts

    def note(self, tokens: float, num_prompt_tokens: int) -> None:
        """One more step: what it gave a row, and what it computed of prompts."""
        self._tokens = KEPT_LOAD * self._tokens + tokens
        self._prompt_tokens = KEPT_LOAD * self._prompt_tokens + num_prompt_tokens

    def note_plain(self, step: TimedStep) -> None:
        """What a step with prompts takes where there are no drafts."""
        self._plain.append(step)

    def seconds_per_token(self, window: Window) -> float:
        """Of a row, at the usual share of prompts. A window may have more or fewer, since requests that
        come together end together, too; where it has none they cost what they do without drafts."""
        decoded, taken = window.tokens - window.prompt_made, window.seconds - window.prompt_seconds
        prompts = window if window.prompt_tokens else Window.of(list(self._plain))
        if decoded <= 0 or not prompts.prompt_tokens:
            return window.seconds / window.tokens
        share = self._prompt_tokens / self._tokens / prompts.prompt_tokens
        rest = max(0.0, 1 - share * prompts.prompt_made)
        return rest * taken / decoded + share * prompts.prompt_seconds


class Window(NamedTuple):
    """Some steps: the tokens that a row got in them, and what they take if nothing holds them up; of those
    among them that have prompts, the prompts' tokens, the seconds, and what a row got."""

    tokens: float
    seconds: float
    prompt_tokens: int
    prompt_seconds: float
    prompt_made: float

    @classmethod
    def of(cls, steps: list[TimedStep]) -> Window:
        """None counts for more than HELD_UP times what half of its kind took at most."""
        taken: defaultdict[tuple[bool, bool], list[float]] = defaultdict(list)
        for step in steps:
            taken[step.num_prompt_tokens > 0, step.has_drafts].append(step.seconds)
        sums = {False: 0.0, True: 0.0}
        for (has_prompts, _), found in taken.items():
            most = HELD_UP * median(found)
            sums[has_prompts] += sum(min(seconds, most) for seconds in found)
        return cls(
            sum(step.tokens for step in steps),
            sum(sums.values()),
            sum(step.num_prompt_tokens for step in steps),
            sums[True],
            sum(step.tokens for step in steps if step.num_prompt_tokens),
        )


class SlowRows(NamedTuple):
    """Rows whose drafts fare badly: of what a row got on average, the share that one of them got, over so
    many windows up to now."""

    share: float
    num_windows: int


class Pace:
    """Tokens of a row over the seconds of all steps, prompts and changes of the batch included; by windows
    of so many steps, the last few of which count."""

    def __init__(self, num_steps: int, load: Load) -> None:
        self._num_steps, self._load = num_steps, load
        self._steps: deque[TimedStep] = deque(maxlen=WINDOWS * num_steps)
        self._sizes: deque[int] = deque(maxlen=WINDOWS)  # steps of windows that have ended
        self.count = 0  # steps of the window that is open
        # Of what a row got on average, the share of one whose drafts fare badly; whether that is known for
        # so many steps that it is not by chance.
        self.slow_share, self.is_slow_sure = 1.0, False

    def add(self, step: TimedStep) -> bool:
        """One more step; whether the window is full with it."""
        self._steps.append(step)
        self.count += 1
        return self.count >= self._num_steps

    def close(self, slow: SlowRows | None = None) -> None:
        """The window ends."""
        if self.count:
            self._sizes.append(self.count)
            self.slow_share = 1.0 if slow is None else slow.share
            self.is_slow_sure = slow is not None and slow.num_windows >= WINDOWS
        self.count = 0

    def forget(self) -> None:
        """What was measured was on other work."""
        self._steps.clear()
        self._sizes.clear()
        self.count = 0

    @property
    def is_known(self) -> bool:
        """Whether a window has ended."""
        return bool(self._sizes)

    @property
    def speed(self) -> float:
        """Tokens of a row per second."""
        return 1 / self._load.seconds_per_token(self._last(len(self._steps)))

    @property
    def open_speed(self) -> float:
        """The same in the window that is open."""
        return 1 / self._load.seconds_per_token(self._last(self.count))

    def lost(self, plain_speed: float) -> float:
        """Seconds that a row whose drafts fare badly has lost in the window that ended last, by what prompts
        there were or by what there usually are: rather too many than too few."""
        window = self._last(self._sizes[-1])
        usual = self._load.seconds_per_token(window) * window.tokens
        return max(window.seconds, usual) - self.slow_share * window.tokens / plain_speed

    def _last(self, num_steps: int) -> Window:
        return Window.of(list(self._steps)[-num_steps:])


class RowWatch:
    """How many tokens the running rows get while somebody watches."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        # Places, sequences and their numbers of tokens at the beginning of each of the last windows.
        self._begun: deque[tuple[np.ndarray, np.ndarray, np.ndarray]] = deque(maxlen=WINDOWS)

    def begin(self, *, is_first: bool) -> None:
        """A window of steps begins; the first one, or right behind another."""
        if is_first:
            self._begun.clear()
        columns, places = self._roster.columns, self._roster.running_places()
        self._begun.append((places, columns.seq_id[places], columns.known[places]))

    def slow_rows(self) -> SlowRows | None:
        """The window ends. They are looked for among rows that have been there all the time, for as long
        as at least half of all have been."""
        columns = self._roster.columns
        for number, (places, seq_ids, known) in enumerate(self._begun):
            stays = columns.seq_id[places] == seq_ids
            if 2 * np.count_nonzero(stays) >= max(1, places.size):
                got = (columns.known[places] - known)[stays]
                share = float(np.quantile(got, SLOW)) / max(1.0, float(got.mean()))
                return SlowRows(share, len(self._begun) - number)
        return None
