"""What the batch scheduler counts for the metrics; every number only grows."""

from __future__ import annotations

from collections import Counter

import numpy as np


class Counters:
    """Plain numbers; written by the engine's thread, read by anybody."""

    def __init__(self) -> None:
        self.num_requests = 0
        self.num_finished: Counter[str] = Counter()  # by finish reason
        self.num_rejected: Counter[str] = Counter()  # by error class
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0
        self.num_prefix_query_tokens = 0
        self.num_prefix_hit_tokens = 0
        self.num_host_hit_tokens = 0
        self.num_drafts = 0  # rows that had drafts, summed over steps
        self.num_draft_tokens = 0
        self.num_accepted_draft_tokens = 0
        self.num_accepted_at = np.zeros(0, dtype=np.int64)  # by place: rows right up to there

    def count_drafts(self, drafted: np.ndarray, accepted: np.ndarray) -> None:
        """Rows had so many drafts, the first `accepted` of which were right."""
        most = int(drafted.max(initial=0))
        if not most:
            return
        if most > self.num_accepted_at.size:
            self.num_accepted_at = np.pad(
                self.num_accepted_at, (0, most - self.num_accepted_at.size)
            )
        self.num_drafts += int((drafted > 0).sum())
        self.num_draft_tokens += int(drafted.sum())
        self.num_accepted_draft_tokens += int(accepted.sum())
        places = np.arange(self.num_accepted_at.size)
        self.num_accepted_at += (accepted[:, None] > places).sum(0)
