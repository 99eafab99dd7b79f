"""What the batch scheduler counts for the metrics; every number only grows."""

from __future__ import annotations

from collections import Counter

from fastdeploy_core.kvcache import PrefixMatch


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
        self.num_draft_tokens = 0
        self.num_accepted_draft_tokens = 0

    def matched(self, num_prompt_tokens: int, match: PrefixMatch) -> None:
        """A prompt was looked up in the prefix cache."""
        self.num_prefix_query_tokens += num_prompt_tokens
        self.num_prefix_hit_tokens += match.num_tokens
        self.num_host_hit_tokens += match.num_host_tokens
