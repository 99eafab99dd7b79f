"""How many times the rows of a batch decode before the host looks at what they drew.

On a device that computes for microseconds the host's part of a step is a large share of it. Tokens that come
several at a time share that part, and come so much later: by MOST_S at most, going by the step before. What is
computed behind a stop is lost, so a batch begins with few.
"""

from __future__ import annotations

import math

MOST_S = 0.003


class DecodeCount:
    """Asked of every step whose rows could, told of every step. Output never depends on it."""

    def __init__(self, most: int) -> None:
        """most: what the device takes; 1: never several."""
        self.most = most
        self._last = 0  # of the step before; 0: it computed prompts
        self._seconds = math.inf  # of each of its decodes

    def choose(self, left: int) -> int:
        """For rows of which none may get more than `left` tokens."""
        in_time = int(MOST_S / self._seconds)
        return max(1, min(self.most, 2 * self._last, in_time, left))

    def note(self, num_decodes: int, seconds: float) -> None:
        """A step took so long. num_decodes: 0 if it computed prompts."""
        self._last, self._seconds = num_decodes, max(1e-6, seconds) / max(1, num_decodes)
