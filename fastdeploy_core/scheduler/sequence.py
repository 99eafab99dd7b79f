"""A request in the engine and its sequences (n > 1: several), with where each one stands.

Plain state. The batch scheduler changes it; nobody else does.
"""

from __future__ import annotations

from fastdeploy_core.kvcache import BlockTable, ForkSource
from fastdeploy_core.types import DraftStats, Request, RequestStatus, TokenLogprobs

from .columns import Columns

# Kinds of sampling whose steps differ in what they cost; a batch is of the greatest of its rows'
# kinds. OTHER may depend on what only the host knows.
GREEDY, RANDOM, OTHER = 0, 1, 2


class _Number:
    """A sequence's own number in a column."""

    def __init__(self, column: str) -> None:
        self._column = column

    def __get__(self, seq: Sequence, owner: type) -> int:
        return int(getattr(seq.columns, self._column)[seq.place])

    def __set__(self, seq: Sequence, value: int) -> None:
        getattr(seq.columns, self._column)[seq.place] = value


class Sequence:
    """One branch of a request.

    `token_ids` holds what is known. Overlap runs ahead of that: `num_computed` counts tokens fed in
    all submitted steps, `num_pending` the sampled tokens that are still on their way.
    """

    num_computed = _Number("computed")
    num_pending = _Number("pending")
    num_in_flight = _Number("in_flight")
    num_known_at_start = _Number("at_start")
    room = _Number("room")
    commit_at = _Number("commit_at")  # computed tokens that fill the next block

    def __init__(
        self,
        seq_id: int,
        index: int,
        request: RequestState,
        table: BlockTable,
        seed: int,
        max_total_tokens: int,
        columns: Columns,
    ) -> None:
        sampling = request.request.sampling
        self.seq_id = seq_id
        self.index = index
        self.request = request
        self.table = table
        self.seed = seed
        self.token_ids = list(request.request.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.max_total_tokens = max_total_tokens
        # Masks forbid ends below min_tokens, but for that of a grammar that allows nothing else.
        least = sampling.min_tokens if request.request.grammar is None else 0
        self.min_total_tokens = self.num_prompt_tokens + least
        self.stop_ids = frozenset(sampling.stop_token_ids or ()) | (
            frozenset() if sampling.ignore_eos else frozenset(request.request.eos_token_ids)
        )
        self.status = RequestStatus.WAITING
        # Order of seniority, fixed at the first admission: (priority, admission number, index).
        self.rank: tuple[int, int, int] = (0, 0, index)
        self.is_suspect = False  # was in a step that failed: runs alone until it has passed
        self.columns = columns
        self.place = columns.take(seq_id)
        columns.known[self.place] = self.num_prompt_tokens
        columns.limit[self.place] = max_total_tokens
        self.show_plain()

    def show_plain(self) -> None:
        """Say in the columns what else than its tokens a result of this sequence may hold."""
        request = self.request.request
        sampling = request.sampling
        tells_tokens = sampling.n == 1 and sampling.logprobs is None and not self.is_suspect
        is_running = self.status is RequestStatus.RUNNING
        self.columns.is_plain[self.place] = tells_tokens and is_running
        kind = GREEDY if sampling.is_greedy else RANDOM
        if not (tells_tokens and sampling.is_unconstrained and request.grammar is None):
            kind = OTHER
        self.columns.kind[self.place] = kind

    def draft_stats(self) -> DraftStats | None:
        """How its drafts fared; None: there were none."""
        columns, place = self.columns, self.place
        columns.tally.fold()
        if not columns.draft_steps[place]:
            return None
        found = columns.accepted_at[place].tolist()
        return DraftStats(int(columns.draft_steps[place]), int(columns.drafted[place]), found)

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens that are known."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_prefill(self) -> bool:
        """Whether it has yet to be fed what it started with."""
        return self.num_computed < self.num_known_at_start


class RequestState:
    """One request and what is collected for its client."""

    def __init__(self, request: Request, arrival_s: float) -> None:
        self.request = request
        self.tenant = request.tenant
        self.arrival_s = arrival_s  # monotonic
        self.deadline_s = None if request.deadline_s is None else arrival_s + request.deadline_s
        self.sequences: list[Sequence] = []
        self.num_unfinished = 0
        self.admission = -1  # number of the first admission of a sequence of it
        self.followers_wait = False  # sequences 1 to n-1 wait for the prompt that 0 computes
        self.fork_source: ForkSource | None = None
        # The whole prompt, first entry None, filled chunk by chunk; None when not asked for.
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        if request.sampling.prompt_logprobs is not None:
            self.prompt_logprobs = [None]
        self.num_cached_tokens: int | None = None
        self.queue_s: float | None = None
        self.num_deltas = 0  # with several sequences; else Columns.deltas counts them

    @property
    def request_id(self) -> str:
        """The request's own id."""
        return self.request.request_id

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether prompt log-probabilities are still to be computed."""
        found = self.prompt_logprobs
        return found is not None and len(found) < len(self.request.prompt_token_ids)
