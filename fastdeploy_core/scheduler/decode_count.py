"""How many times the rows of a batch decode before the host looks at what they drew.

On a device that computes for microseconds the host's part of a step is a large share of it. Tokens that come
several at a time share that part, and come so much later: by MOST_S at most, going by the step before. What is
computed behind a stop is lost, so a batch begins with few; where steps are queued ahead, which loses twice as
much, with one until some have passed since its last prompts.

On the host's own processors output leaves at intervals that are longer (engine/egress.py), so tokens may come
TIMES_ON_HOST as much later. Others take those processors from a step now and then, and what that makes it longer
says little of the next one: the time that a decode is taken to need grows slowly there.
"""

from __future__ import annotations

import math

MOST_S = 0.003
TIMES_ON_HOST = 2
GROWTH_ON_HOST = 1.25  # from one step to the next


class DecodeCount:
    """Asked of every step whose rows could, told of every step. Output never depends on it."""

    def __init__(self, most: int, begins_after: int = 0, *, on_host: bool = False) -> None:
        """most: what the device takes; 1: never several. begins_after: decodes behind prompts."""
        self.most, self._begins_after = most, begins_after
        self._times, self._growth = (TIMES_ON_HOST, GROWTH_ON_HOST) if on_host else (1, math.inf)
        self._last = 0  # of the step before; 0: it computed prompts
        self._num_since = 0  # decodes since there were prompts
        self._seconds = math.inf  # of a decode, as far as is known since then

    def choose(self, left: int) -> int:
        """For rows of which none may get more than `left` tokens."""
        if self._num_since < self._begins_after:
            return 1
        in_time = int(self._times * MOST_S / self._seconds)
        return max(1, min(self.most, 2 * self._last, in_time, left))

    def note(self, num_decodes: int, seconds: float) -> None:
        """A step took so long. num_decodes: 0 if it computed prompts."""
        self._last = num_decodes
        if not num_decodes:
            self._num_since, self._seconds = 0, math.inf
            return
        self._num_since += num_decodes
        self._seconds = min(max(1e-6, seconds) / num_decodes, self._growth * self._seconds)
