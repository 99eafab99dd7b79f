"""How many tokens of prompts a step may hold, so that nobody waits long for its end.

A step is shared: who arrives waits for its end, who decodes gets one token of it. On a slow device
2,048 tokens of one client's prompt are seconds for everyone. So a step that others share may take
SHARE times what decodes alone take, but LEAST_S (LEAST_QUEUED_S on a device that queues its work:
its small steps are mostly the host's time), and without others for COMPANY_S, ALONE_S. Even a small
part of a long prompt may take longer, since each token reads all before it. So steps with parts of
long prompts and steps without take turns, and get equal time. Where --max-num-batched-tokens takes
less than LEAST_QUEUED_S, as on most accelerators, nothing is held back."""

from __future__ import annotations

import math
from collections.abc import Callable

from fastdeploy_core.scheduler.step import FAR, ScheduledStep

SHARE = 3
LEAST_S, LEAST_QUEUED_S, ALONE_S = 0.02, 0.25, 0.5
COMPANY_S = 1.0
LEAST_TOKENS = 32  # fewer cost almost as much
GROWTH = 1.25  # of the time that decodes are taken to need, from one step to the next


class StepTime:
    """Told of every step, asked before every step with prompts."""

    def __init__(self, clock: Callable[[], float], *, is_queued: bool) -> None:
        self._clock, self._is_queued = clock, is_queued
        self._least_s = LEAST_QUEUED_S if is_queued else LEAST_S
        self._decode_s = math.inf  # of a step without prompts
        self._rate = math.inf  # tokens of prompts in a second
        self._company_until_s = -math.inf
        self._within_s = ALONE_S
        self._owed_s = 0.0  # to steps without parts of long prompts

    def most_prompt_tokens(self, num_requests: int) -> tuple[int, bool]:
        """For the next step, beside what decodes; and whether long prompts wait while there is
        anything else. num_requests: unfinished ones."""
        now = self._clock()
        if num_requests > 1:
            self._company_until_s = now + COMPANY_S
        self._within_s = ALONE_S
        if now < self._company_until_s:
            shared_s = SHARE * self._decode_s if self._decode_s < math.inf else 0.0
            self._within_s = min(ALONE_S, max(self._least_s, shared_s))
        number = int(max(LEAST_TOKENS, min(self._rate * self._within_s, 2**31)))
        return number, self._owed_s > 0 and now < self._company_until_s

    def is_awaited(self, step: ScheduledStep) -> bool:
        """Whether none is queued after this one: who comes meanwhile waits for its end alone."""
        return self._within_s < ALONE_S and not self._is_queued and is_part(step)

    def note(self, step: ScheduledStep, seconds: float) -> None:
        """A step took so long."""
        if is_part(step):
            self._owed_s = seconds if seconds > self._least_s else 0.0
        elif self._owed_s:
            self._owed_s = max(0.0, self._owed_s - seconds)
        if step.is_decode and step.num_tokens:
            self._decode_s = min(seconds / step.num_decodes, GROWTH * self._decode_s)
        elif num_prompt_tokens := sum(row.num_tokens for row in step.rows):
            # Of a few tokens in little time only the step's own cost is learnt.
            is_full = 2 * num_prompt_tokens > self._rate * self._within_s
            if is_full or seconds > self._within_s or self._rate == math.inf:
                self._rate = num_prompt_tokens / max(seconds, 1e-6)


def is_part(step: ScheduledStep) -> bool:
    """Whether it computes a part of a long prompt: one that goes on, or that began far before."""
    far = (not row.sample or (row.num_tokens > 1 and row.start >= FAR) for row in step.rows)
    return not step.is_decode and any(far)
