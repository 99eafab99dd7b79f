"""What the batch scheduler counts for the metrics; every number only grows."""

from __future__ import annotations

from collections import Counter


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
        self.num_accepted_at: list[int] = []  # by place: rows whose first so many drafts were right

    def count_drafts(self, drafted: int, accepted: int) -> None:
        """A row had so many drafts, the first `accepted` of which were right."""
        self.num_drafts += 1
        self.num_draft_tokens += drafted
        self.num_accepted_draft_tokens += accepted
        at = self.num_accepted_at
        at.extend([0] * (drafted - len(at)))
        for place in range(accepted):
            at[place] += 1
