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
