"""How many times the rows of a batch decode before the host looks at what they sampled.

On a device that computes for microseconds the host's part of a step is a large share of it. Tokens
that come several at a time share that part, and come so much later: by MOST_S at most, going by the
step before. What is computed after a stop is lost, so a batch begins with few; where steps are
queued ahead, which loses twice as much, with one until some have passed since its last prompts.

On the host's own processors nothing is computed while the host does its part, which is longer where
a model has just gone through their caches. Of n decodes (n - 1) / 2 are lost after a stop on
average and the host's part is paid once, so the least is lost with n = sqrt(BREAK_EVEN_S / what a
decode takes), if they take no longer than MOST_ON_HOST_S together: 20 chunks in a second read as a
flow. Others take those processors from a step now and then, which says little of the next one: the
time that a decode is taken to need grows slowly there."""

from __future__ import annotations

import math

MOST_S = 0.003
BREAK_EVEN_S = 0.2  # 2 * answers of 100 tokens * the host's part of 1 ms
MOST_ON_HOST_S = 0.05
GROWTH_ON_HOST = 1.25  # from one step to the next


def most_at(seconds: float, on_host: bool) -> float:
    """How many decodes that take so long each may come at a time."""
    if on_host:
        return min(math.sqrt(BREAK_EVEN_S / seconds), MOST_ON_HOST_S / seconds)
    return MOST_S / seconds


class DecodeCount:
    """Asked of every step whose rows could, told of every step. Output never depends on it."""

    def __init__(self, most: int, begins_after: int = 0, *, on_host: bool = False) -> None:
        """most: what the device takes; 1: never several. begins_after: decodes after prompts."""
        self.most, self._begins_after = most, begins_after
        self._on_host, self._growth = on_host, GROWTH_ON_HOST if on_host else math.inf
        self._last = 0  # of the step before; 0: it computed prompts
        self._num_since = 0  # decodes since there were prompts
        self._seconds = math.inf  # of a decode, as far as is known since then

    def choose(self, left: int) -> int:
        """For rows of which none may get more than `left` tokens."""
        if self._num_since < self._begins_after:
            return 1
        in_time = int(most_at(self._seconds, self._on_host))
        return max(1, min(self.most, 2 * self._last, in_time, left))

    def note(self, num_decodes: int, seconds: float) -> None:
        """A step took so long. num_decodes: 0 if it computed prompts."""
        self._last = num_decodes
        if not num_decodes:
            self._num_since, self._seconds = 0, math.inf
            return
        self._num_since += num_decodes
        self._seconds = min(max(1e-6, seconds) / num_decodes, self._growth * self._seconds)
