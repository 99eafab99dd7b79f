"""How many tokens of prompts a step may hold, so that nobody waits long for its end.

A step is shared: who arrives waits for its end, who decodes gets one token of it. On a slow device
2,048 tokens of one client's prompt are seconds for everyone. So a step that others share may take
SHARE times what decodes alone take, but LEAST_S (LEAST_QUEUED_S on a device that queues its work:
its small steps are mostly the host's time), and without others for COMPANY_S, ALONE_S. Where
--max-num-batched-tokens takes less, as on most accelerators, nothing is held back."""

from __future__ import annotations

import math
from collections.abc import Callable

from fastdeploy_core.scheduler.step import ScheduledStep

SHARE = 3
LEAST_S, LEAST_QUEUED_S, ALONE_S = 0.02, 0.25, 0.5
COMPANY_S = 1.0
LEAST_TOKENS = 32  # fewer cost almost as much
GROWTH = 1.25  # of the time that decodes are taken to need, from one step to the next


class StepTime:
    """Told of every step, asked before every step with prompts."""

    def __init__(self, clock: Callable[[], float], *, is_queued: bool) -> None:
        self._clock = clock
        self._least_s = LEAST_QUEUED_S if is_queued else LEAST_S
        self._decode_s = math.inf  # of a step without prompts
        self._rate = math.inf  # tokens of prompts in a second
        self._company_until_s = -math.inf
        self._within_s = ALONE_S

    def most_prompt_tokens(self, num_requests: int) -> int:
        """For the next step, beside what decodes. num_requests: unfinished ones."""
        now = self._clock()
        if num_requests > 1:
            self._company_until_s = now + COMPANY_S
        self._within_s = ALONE_S
        if now < self._company_until_s:
            shared_s = SHARE * self._decode_s if self._decode_s < math.inf else 0.0
            self._within_s = min(ALONE_S, max(self._least_s, shared_s))
        return int(max(LEAST_TOKENS, min(self._rate * self._within_s, 2**31)))

    def note(self, step: ScheduledStep, seconds: float) -> None:
        """A step took so long."""
        if step.is_decode and step.num_tokens:
            self._decode_s = min(seconds / step.num_decodes, GROWTH * self._decode_s)
        elif num_prompt_tokens := sum(row.num_tokens for row in step.rows):
            # Of a few tokens in little time only the step's own cost is learnt.
            is_full = 2 * num_prompt_tokens > self._rate * self._within_s
            if is_full or seconds > self._within_s or self._rate == math.inf:
                self._rate = num_prompt_tokens / max(seconds, 1e-6)
