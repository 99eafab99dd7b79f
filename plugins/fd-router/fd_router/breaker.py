"""A circuit breaker: keeps requests from an instance that fails, and lets one try it again."""

from __future__ import annotations

from typing import Literal

State = Literal["closed", "open", "half-open"]

FAILURES = 3  # one after the other open it
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0


class Breaker:
    """Closed: requests pass. Open: none do, for a pause that doubles with each failed trial. After
    it, half-open: one request passes, and its end decides.

    Times are seconds of one clock, which the caller reads.
    """

    def __init__(self) -> None:
        self._failures = 0
        self._pause_s = FIRST_PAUSE_S
        self._open_until: float | None = None
        self._trial = False

    def state(self, now: float) -> State:
        """What it lets pass."""
        if self._open_until is None:
            return "closed"
        return "open" if now < self._open_until else "half-open"

    def allows(self, now: float) -> bool:
        """Whether a request may go to the instance."""
        state = self.state(now)
        return state == "closed" or (state == "half-open" and not self._trial)

    def begin(self, now: float) -> None:
        """A request goes to the instance."""
        self._trial = self.state(now) == "half-open"

    def succeeded(self) -> None:
        """A request was answered."""
        self._failures = 0
        self._pause_s = FIRST_PAUSE_S
        self._open_until = None
        self._trial = False

    def failed(self, now: float) -> None:
        """A request found the instance dead, silent or talking nonsense."""
        self._failures += 1
        if self._open_until is None:
            if self._failures >= FAILURES:
                self._open_until = now + self._pause_s
        elif now >= self._open_until:  # the trial; older requests may fail after it opened
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            self._open_until = now + self._pause_s
            self._trial = False

    def left(self) -> None:
        """A request ended without saying anything of the instance: its client went away."""
        self._trial = False
