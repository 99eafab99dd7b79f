"""A step while it is put together, and what belongs to its rows until its results are taken in."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from fastdeploy_core.types import BatchRows, BlockCopies, EmbeddedSpan, NewSequence, SchedulerOutput

from .columns import Columns
from .sequence import Sequence

_COLUMNS = ("seq_ids", "starts", "counts", "samples", "num_drafts")  # of BatchRows
FAR = 1024  # tokens: after so many, cached or not, even a few of a prompt may take long


class Row(NamedTuple):
    """One row of a step, as its outcome needs it."""

    seq: Sequence
    start: int  # the first token fed
    num_tokens: int
    sample: bool


class Cohort:
    """Sequences that decode together; kept while they stay the same."""

    def __init__(self, seqs: list[Sequence], places: np.ndarray, seq_ids: np.ndarray) -> None:
        self.seqs = seqs
        self.places = places
        self.seq_ids = seq_ids
        requests = [seq.request.request for seq in seqs]
        self.histories: list[list[int]] = [seq.token_ids for seq in seqs]
        self.stop_ids: frozenset[int] = frozenset().union(*{seq.stop_ids for seq in seqs})
        self.request_ids: list[str] = [request.request_id for request in requests]
        self.attempts: list[int] = [request.attempt for request in requests]
        self.tenants: Counter[str] = Counter([request.tenant for request in requests])


class Decodes(NamedTuple):
    """Columns of rows that decode; see BatchRows."""

    num_drafts: np.ndarray
    counts: np.ndarray
    samples: np.ndarray
    num_tokens: int  # of all rows

    @classmethod
    def of(cls, num_drafts: np.ndarray, num_decodes: int = 1) -> Decodes:
        """With so many drafts in all, and so many tokens one after the other."""
        counts = num_decodes + num_drafts
        return cls(num_drafts, counts, num_drafts >= 0, int(counts.sum()))


@lru_cache(maxsize=512)
def even_decodes(num_rows: int, num_drafts: int, num_decodes: int) -> Decodes:
    """Of a step in which every row has so many drafts each time it decodes."""
    return Decodes.of(np.full(num_rows, num_drafts * num_decodes, dtype=np.int64), num_decodes)


NO_COHORT = Cohort([], np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
NO_DECODES = even_decodes(0, 0, 1)


class ScheduledStep(NamedTuple):
    """A step: the message for the workers, and what belongs to its rows, the cohort's first."""

    output: SchedulerOutput
    cohort: Cohort
    drafts: np.ndarray  # how many each of the cohort's rows has beside its newest tokens; the most
    rows: list[Row]  # after them
    num_tokens: int
    asked: int = 0  # drafts that each of its rows could have had
    is_decode: bool = False  # no row computes a prompt
    num_decodes: int = 1  # see SchedulerOutput

    @property
    def num_rows(self) -> int:
        """Sequences in the step."""
        return len(self.cohort.seqs) + len(self.rows)

    def seqs(self) -> list[Sequence]:
        """In the order of the rows."""
        return [*self.cohort.seqs, *(row.seq for row in self.rows)]


def _begun_in(seq: Sequence, first: int, end: int, *, is_new: bool) -> list[EmbeddedSpan]:
    """The spans that begin among these tokens; with `is_new`, also that in which the first lies."""
    return [
        span
        for span in seq.table.embeddings
        if span.start < end
        and (span.start >= first or (is_new and span.start + span.count > first))
    ]


class StepBuilder:
    """Collects one step after the other within a token budget."""

    def __init__(self, columns: Columns, max_num_tokens: int, max_encode_tokens: int = 0) -> None:
        self._columns = columns
        self._max_num_tokens, self._max_encode_tokens = max_num_tokens, max_encode_tokens
        self._cohort = NO_COHORT
        # Rows of the step before, if they can simply go on: every one sampled, none had drafts.
        self._last_seq_ids = NO_COHORT.seq_ids
        self._asked = 0  # drafts asked for with the step before
        self.step_id = -1
        self.begin()

    def begin(self) -> None:
        """Start over with an empty step."""
        self.budget = self._max_num_tokens
        self.num_prefills = 0
        self._num_encoded = 0  # vectors of pictures that the step makes, at most
        self.is_stalled = False  # a running sequence got no room: nobody new may start
        self.has_drafts = False  # rows are fed drafts
        self._has_cohort = False
        self._num_decodes = 1
        self._decodes = NO_DECODES
        self._starts = NO_COHORT.places
        self._rows: list[Row] = []
        self._new: list[NewSequence] = []
        self._new_blocks: dict[int, list[int]] = {}  # by seq_id
        self._number = self.step_id + 1

    @property
    def is_empty(self) -> bool:
        """Whether nothing is in it yet."""
        return not self._rows and not self._has_cohort

    def holds(self, seq: Sequence) -> bool:
        """Whether the sequence is in the step."""
        return int(self._columns.step[seq.place]) == self._number

    def put_decodes(
        self,
        seqs: list[Sequence],
        places: np.ndarray,
        drafts: np.ndarray | int = 0,
        num_decodes: int = 1,
    ) -> None:
        """Rows for sequences that decode, of their newest token and at most so many drafts each
        time, one number if it is the same for all; once per step. They are its first rows.
        num_decodes: see SchedulerOutput; above 1 every row has as many drafts."""
        columns = self._columns
        if places is not self._cohort.places:
            seq_ids = columns.seq_id[places]
            if not np.array_equal(seq_ids, self._cohort.seq_ids):
                self._cohort = Cohort(seqs.copy(), places, seq_ids)
        self._has_cohort, self._num_decodes = True, num_decodes
        self.has_drafts = not isinstance(drafts, int) or drafts > 0
        if isinstance(drafts, int):
            self._decodes = even_decodes(len(seqs), drafts, num_decodes)
        else:
            self._decodes = Decodes.of(drafts)
        # In short, since it is done in every step: `x[places] += 1` takes numpy twice as long.
        self._starts = starts = columns.computed[places]
        columns.computed[places] = starts + self._decodes.counts
        columns.pending[places] = columns.pending[places] + num_decodes
        columns.in_flight[places] = columns.in_flight[places] + 1
        columns.step[places] = self._number
        self.budget -= self._decodes.num_tokens

    def within_encoding(self, seq: Sequence, start: int, num_tokens: int, *, is_new: bool) -> int:
        """How many of these tokens the step takes without making more vectors than it may: it ends
        before a picture for which there is no room. is_new: the workers do not have the sequence,
        so neither the picture in which it begins. One picture fits into a step without any."""
        num = self._num_encoded
        for span in _begun_in(seq, start, start + num_tokens, is_new=is_new):
            if num and num + span.count > self._max_encode_tokens:
                return max(0, span.start - start)
            num += span.count
        return num_tokens

    def put(self, seq: Sequence, num_tokens: int, *, is_new: bool = False) -> None:
        """A row of its own."""
        start = seq.num_computed
        if seq.table.embeddings:
            spans = _begun_in(seq, start, start + num_tokens, is_new=is_new)
            self._num_encoded += sum(span.count for span in spans)
        end, at_start = start + num_tokens, seq.num_known_at_start
        if start < at_start:
            self.num_prefills += 1
        sample = end >= at_start
        self._rows.append(Row(seq, start, num_tokens, sample))
        seq.num_computed = end
        seq.num_pending += sample
        seq.num_in_flight += 1
        self._columns.step[seq.place] = self._number
        self.budget -= num_tokens

    def put_new(self, seq: Sequence, num_tokens: int) -> None:
        """A row of a sequence that the workers do not know."""
        request = seq.request.request
        self._new.append(
            NewSequence(
                seq_id=seq.seq_id,
                token_ids=seq.token_ids.copy(),
                num_prompt_tokens=seq.num_prompt_tokens,
                block_ids=seq.table.interleaved(),
                sampling=request.sampling,
                seed=seq.seed,
                eos_token_ids=request.eos_token_ids,
                grammar=request.grammar,
                grammar_backend=request.grammar_backend,
                grammar_start=request.grammar_start,
                extras=request.extras,
            )
        )
        self.put(seq, num_tokens, is_new=True)

    def add_blocks(self, seq: Sequence, blocks: list[int]) -> None:
        """The sequence got these for its row."""
        self._new_blocks.setdefault(seq.seq_id, []).extend(blocks)

    def finish(
        self, forgotten: list[int], copies: BlockCopies, max_drafts: int = 0, *, fills: bool = False
    ) -> ScheduledStep:
        """The step. max_drafts: wanted after it. fills: drafters keep what the step computes for
        drafts that later steps want; otherwise, where it wants none itself, they miss it. That
        costs some accepted drafts, and the output nothing."""
        cohort, columns = self._cohort if self._has_cohort else NO_COHORT, self._columns
        message = SchedulerOutput(
            step_id=self._number,
            finished_seq_ids=forgotten,
            new_sequences=self._new,
            copies=copies,
            num_decodes=self._num_decodes,
        )
        if self._rows or self.has_drafts or self.is_empty or not self._is_last(cohort):
            message.rows = self._columns_of(cohort)
            goes_on = not self.has_drafts and bool(message.rows.samples.all())
            self._last_seq_ids = message.rows.seq_ids if goes_on else NO_COHORT.seq_ids
        step = ScheduledStep(
            message,
            cohort,
            self._decodes.num_drafts,
            self._rows,
            self._max_num_tokens - self.budget,
            self._asked if self.has_drafts else 0,
            not self.num_prefills,
            self._num_decodes,
        )
        if self._new_blocks:
            blocks = self._new_blocks
            seq_ids = cohort.seq_ids if message.rows is None else message.rows.seq_ids
            row_of = dict(zip(seq_ids.tolist(), range(seq_ids.size), strict=True))
            message.new_block_ids = {row_of[n]: new for n, new in blocks.items() if n in row_of}
        if max_drafts or self._asked:
            columns.asked[cohort.places] = max_drafts
            for row in self._rows:
                columns.asked[row.seq.place] = max_drafts * row.sample
        self.step_id = self._number
        if cohort.seqs or max_drafts:  # drafts outlast a step of prompts alone
            self._asked = max_drafts
        if max_drafts or fills:
            message.max_drafts = max_drafts
        return step

    def _is_last(self, cohort: Cohort) -> bool:
        """Whether the cohort is all that the step before had."""
        seq_ids, last = cohort.seq_ids, self._last_seq_ids
        if seq_ids is not last and np.array_equal(seq_ids, last):
            self._last_seq_ids = seq_ids
        return seq_ids is self._last_seq_ids

    def _columns_of(self, cohort: Cohort) -> BatchRows:
        """Explicit rows for a message: the cohort's, then the others."""
        rows, (num_drafts, counts, samples, _) = self._rows, self._decodes
        columns = (cohort.seq_ids, self._starts, counts, samples, num_drafts)
        if not rows:  # the same arrays as long as the sequences are the same
            return BatchRows(**dict(zip(_COLUMNS, columns, strict=True)))
        seqs, starts, num_tokens, sampled = zip(*rows, strict=True)
        single = BatchRows.of([seq.seq_id for seq in seqs], starts, num_tokens, sampled)
        if not cohort.seqs:
            return single
        named = zip(_COLUMNS, columns, strict=True)
        return BatchRows(**{n: np.concatenate((own, getattr(single, n))) for n, own in named})
