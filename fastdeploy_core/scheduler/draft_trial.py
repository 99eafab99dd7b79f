"""Numbers of drafts compared: some steps with each in turns, over and over, so that whatever else changes
meanwhile is the same for all of them.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from math import inf, log, sqrt
from statistics import quantiles, variance
from typing import NamedTuple

# Steps of a block, blocks of each number at least and at most, and steps of a block behind which a number may have
# failed at once.
BLOCK, ROUNDS, MOST_ROUNDS, FEWEST = 12, 3, 12, 4
# Where more than this share of the steps have to do with prompts, whose rows outlast such a block, blocks are so
# many steps, and the first ones do not count: their rows began with another number.
OFTEN, LONG_BLOCK, CARRIED_OVER = 0.02, 60, 12
# What drafts must bring before they are used.
LEAST_GAIN = 1.1
# Standard errors that are more than chance, and a gain that is clear behind two blocks.
SURE, CLEAR = 2.0, 1.3
# A number that is slower than this share of the fastest is tried no more: in its first block, behind it, behind
# the next one and so on. Before so many tokens were drawn with it, only if it is slower than bad luck could
# make it.
FAILED, EVIDENCE, NO_LUCK = (0.8, 0.95, 1.0, 1.05), 12, 0.6
# Drafts are hopeless that do not make a step give so many times as many tokens, drawn with them so many: those who ask
# for them, and the step itself, take some of that.
HOPELESS, HOPE = 1.15, 24
# How many times as long as nine in ten others of its kind a step may count.
HELD_UP = 3.0
# What older steps keep with every new one of their share of what is known of the load.
KEPT_LOAD = 0.997
# Weight of the newest step in how often steps have prompts.
LATELY = 1 / 32
# Steps without prompts that one with some may take, until that is known; tokens of a row before prompts come.
PROMPT, FIRST_ANSWER = 8.0, 8.0


class TimedStep(NamedTuple):
    """One step: the tokens that a row got on average, its seconds, and what it was."""

    tokens: float
    seconds: float
    num_prompt_tokens: int
    has_drafts: bool


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
        """None counts for more than HELD_UP times what nine in ten of its kind took at most."""
        taken: defaultdict[tuple[bool, bool], list[float]] = defaultdict(list)
        for step in steps:
            taken[step.num_prompt_tokens > 0, step.has_drafts].append(step.seconds)
        sums = {False: 0.0, True: 0.0}
        for (has_prompts, _), found in taken.items():
            most = HELD_UP * quantiles(found, n=10, method="inclusive")[8] if found[1:] else inf
            sums[has_prompts] += sum(min(seconds, most) for seconds in found)
        return cls(
            sum(step.tokens for step in steps),
            sum(sums.values()),
            sum(step.num_prompt_tokens for step in steps),
            sums[True],
            sum(step.tokens for step in steps if step.num_prompt_tokens),
        )


class Load:
    """The prompts that come with answers, which is what they are whatever the number of drafts. Newer steps
    count more."""

    def __init__(self) -> None:
        # Of all steps, as if there had been some before.
        self._tokens, self._prompt_tokens = FIRST_ANSWER, 0.0
        self._often = 0.0

    def note(self, tokens: float, num_prompt_tokens: int) -> None:
        """One more step: what it gave a row, and what it computed of prompts."""
        self._tokens = KEPT_LOAD * self._tokens + tokens
        self._prompt_tokens = KEPT_LOAD * self._prompt_tokens + num_prompt_tokens
        self._often += LATELY * ((num_prompt_tokens > 0) - self._often)

    @property
    def block(self) -> tuple[int, int]:
        """Steps of a trial's block, and how many of them do not count."""
        return (LONG_BLOCK, CARRIED_OVER) if self._often > OFTEN else (BLOCK, 0)

    def seconds_per_token(self, window: Window, others: Window) -> float:
        """Of a row, at the usual share of prompts: a window may have more or fewer, since requests that
        come together end together, too. Where it has none they cost what they do in the others."""
        decoded, taken = window.tokens - window.prompt_made, window.seconds - window.prompt_seconds
        prompts = window if window.prompt_tokens else others
        if decoded <= 0 or not prompts.prompt_tokens:
            return window.seconds / max(window.tokens, 1e-9)
        share = self._prompt_tokens / self._tokens / prompts.prompt_tokens
        rest = max(0.0, 1 - share * prompts.prompt_made)
        return rest * taken / decoded + share * prompts.prompt_seconds


class Trial:
    """`current` says how many drafts the next steps ask for, until `is_over`."""

    def __init__(
        self, numbers: tuple[int, ...], num_rows: int, load: Load, *, is_hasty: bool = True
    ) -> None:
        """numbers: in the order of their turns; 0 is one of them. is_hasty: what is slower fails before ROUNDS."""
        self._is_hasty = is_hasty
        self._num_rows, self._load = num_rows, load
        self._blocks: dict[int, list[list[TimedStep]]] = {number: [] for number in numbers}
        self._turns = deque(numbers)
        self._size, self._carried_over = load.block
        self._count = 0  # steps of the block
        self._num_first = 0  # of those that do not count
        # What is known of the steps of a number; of those without drafts, when its last block was complete.
        self._windows: dict[int, Window] = {}
        self.is_over = False  # whether nothing is left to compare, or nothing would change by it
        self._plain = Window(0.0, 0.0, 0, 0.0, 0.0)

    @property
    def current(self) -> int:
        """The number in turn."""
        return self._turns[0]

    def _is_over(self) -> bool:
        if len(self._turns) == 1:
            return True
        num_blocks = min(map(self._num_blocks, self._turns))
        if not ROUNDS <= num_blocks < MOST_ROUNDS:
            return num_blocks >= MOST_ROUNDS
        best, *others = sorted(filter(None, self._turns), key=self.gain, reverse=True)
        if not self.is_sure(best):
            most = log(max(1e-9, self.gain(best))) + SURE * self.error(best)
            return most < log(LEAST_GAIN)
        # Where drafts win, it costs little to find out how many are best.
        return all(self.gain(other) < 1 or self._beats(best, other) for other in others)

    def __str__(self) -> str:
        """What was measured."""
        return ", ".join(
            f"{number} drafts {self.ratio(number):.3f} +-{self.error(number):.3f} "
            f"({self.tokens(number):.2f} tokens, {len(self._steps(number))} steps)"
            for number, blocks in sorted(self._blocks.items())
            if blocks
        )

    def add(self, step: TimedStep) -> bool:
        """One more step; whether another number is in turn with it, or none."""
        if self._num_first < self._carried_over:
            self._num_first += 1
            return False
        number, blocks = self.current, self._blocks[self.current]
        if not self._count:
            blocks.append([])
        blocks[-1].append(step)
        self._windows.pop(number, None)
        self._count += 1
        if self._count == self._size:
            self._count = 0
            if not number:
                self._plain = self._window(0)
            self._turns.rotate(-1)
            self._give_up(self._turns)
        elif self._count == FEWEST and self._is_hasty:
            self._give_up([number])
        else:
            return False
        if self.current != number:
            self._count = self._num_first = 0
        self.is_over = self._is_over()
        return self.is_over or self.current != number

    def lost(self, step: TimedStep) -> float:
        """Steps without drafts that could have been done in the time that a step with some, or between such, has
        lost; below 0 if it has won."""
        plain = self._plain
        decoded, taken = plain.tokens - plain.prompt_made, plain.seconds - plain.prompt_seconds
        if decoded <= 0 or taken <= 0:
            decoded, taken = plain.tokens, plain.seconds
        if decoded <= 0 or taken <= 0:
            return 0.0
        each = taken / decoded  # seconds per token; what prompts take is what is above that
        due = step.tokens * each
        if step.num_prompt_tokens and plain.prompt_tokens:
            more = plain.prompt_seconds - plain.prompt_made * each
            due += max(0.0, more) * step.num_prompt_tokens / plain.prompt_tokens
        elif step.num_prompt_tokens:  # none to compare it with
            due = max(due, min(step.seconds, PROMPT * each))
        return (step.seconds - due) / each

    @property
    def is_losing(self) -> bool:
        """Whether the number in turn has not been faster than none, all its blocks together."""
        return not self._steps(self.current) or self.ratio(self.current) < 1

    def drop(self) -> None:
        """The number in turn has cost enough: go on without it, with none if that is still in question."""
        self._turns.popleft()
        if 0 in self._turns:
            self._turns.rotate(-self._turns.index(0))
        self._count = self._num_first = 0
        self.is_over = self._is_over()

    def _give_up(self, numbers: Iterable[int]) -> None:
        """Go on without those of them that have failed. Fewer drafts give no more tokens: if some gave next
        to none, fewer will not."""
        known = [n for n in self._turns if self._num_blocks(n)]
        best = max(known, key=self.ratio, default=-1)
        for number in tuple(numbers):
            if best >= 0 and number != best and self._has_failed(number, best):
                least = 1 if number and self._is_hopeless(number) else number
                self._turns = deque(n for n in self._turns if n == best or not least <= n <= number)

    def _has_failed(self, number: int, best: int) -> bool:
        steps, num_blocks = self._steps(number), self._num_blocks(number)
        # Prompts between steps with drafts say nothing by themselves.
        if 2 * sum(step.has_drafts or not number for step in steps) < FEWEST:
            return False
        if number and (self._is_hasty or num_blocks >= ROUNDS) and self._is_slow(number):
            return True
        # Two blocks are too little to win by, unless by much.
        least_blocks = 2 if self.gain(best) > CLEAR * self.gain(number) else ROUNDS
        if not best or min(num_blocks, self._num_blocks(best)) < least_blocks:
            return False
        return self._beats(best, number)

    def _is_slow(self, number: int) -> bool:
        """Whether a number fails by itself."""
        num_tokens = len(self._steps(number)) * self._num_rows
        if num_tokens >= HOPE and self._is_hopeless(number):
            return True
        least = FAILED[min(self._num_blocks(number), ROUNDS)]
        return self.ratio(number) < (least if num_tokens >= EVIDENCE else NO_LUCK)

    def _is_hopeless(self, number: int) -> bool:
        return self.tokens(number) < HOPELESS * self.tokens(0)

    def _steps(self, number: int) -> list[TimedStep]:
        return [step for block in self._blocks[number] for step in block]

    def _window(self, number: int) -> Window:
        if number not in self._windows:
            self._windows[number] = Window.of(self._steps(number))
        return self._windows[number]

    @property
    def num_steps(self) -> int:
        """Steps that have counted."""
        return sum(len(self._steps(number)) for number in self._blocks)

    def _num_blocks(self, number: int) -> int:
        """Complete ones."""
        return sum(len(block) >= self._size for block in self._blocks[number])

    def ratio(self, number: int) -> float:
        """How many times as fast as without drafts."""
        own, plain = self._window(number), self._window(0)
        return self._load.seconds_per_token(plain, own) / self._load.seconds_per_token(own, plain)

    def gain(self, number: int) -> float:
        """`ratio`, but no more than the tokens that drafts add: no step is quicker for having some, so what is
        above that is chance."""
        return min(self.ratio(number), self.tokens(number) / max(self.tokens(0), 1e-9))

    def error(self, number: int) -> float:
        """Standard error of the logarithm of its ratio, as far as blocks differ."""
        return sqrt(self._squared_error(0) + self._squared_error(number))

    def _squared_error(self, number: int) -> float:
        whole = self._window(number)
        windows = [Window.of(block) for block in self._blocks[number] if len(block) >= self._size]
        found = [self._load.seconds_per_token(w, whole) for w in windows if w.tokens and w.seconds]
        return variance(map(log, found)) / len(found) if len(found) > 1 else inf

    def _beats(self, number: int, other: int) -> bool:
        error = sqrt(self._squared_error(number) + self._squared_error(other))
        return log(max(1e-9, self.gain(number)) / max(1e-9, self.gain(other))) > SURE * error

    def is_sure(self, number: int) -> bool:
        """Whether it is faster than none by more than chance."""
        return log(max(1e-9, self.gain(number))) > SURE * self.error(number)

    def tokens(self, number: int) -> float:
        """Of a row in a step; where there are any without prompts, whose rows may get none, in one of these."""
        steps = [step for step in self._steps(number) if step.has_drafts == (number > 0)]
        steps = [step for step in steps if not step.num_prompt_tokens] or steps
        return sum(step.tokens for step in steps) / max(1, len(steps))

    def best(self, needed: float) -> int:
        """The fastest number, if it is so many times as fast as none; else 0."""
        best = max(filter(None, self._turns), key=self.gain, default=0)
        return best if best and self.gain(best) >= needed else 0
