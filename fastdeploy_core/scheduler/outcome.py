"""Takes in what a step produced: appends tokens, ends sequences, collects deltas for the clients.

With overlap a row may belong to a sequence that has ended or was preempted meanwhile: the token of
an ended one is dropped, that of a preempted one is kept, since it is as good as any other.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from itertools import compress, repeat

import numpy as np

from fastdeploy_core.errors import WorkerError
from fastdeploy_core.types import (
    FinishReason,
    ModelRunnerOutput,
    RequestOutputDelta,
    RequestStatus,
    SequenceDelta,
    TokenDeltas,
    TokenLogprobs,
)
from fastdeploy_core.types.engine import EngineStats

from .results import StepResults
from .roster import Roster
from .sequence import RequestState, Sequence
from .step import Cohort, Row, ScheduledStep

REFUSED = "InvalidRequest:"
NAN_MESSAGE = "the model produced numbers that are not finite for this request (nan_logits)"


class Outcome:
    """Applies step results to a roster."""

    def __init__(self, roster: Roster, counters: EngineStats) -> None:
        self._roster = roster
        self._kv = roster.kv
        self._counters = counters
        self._given: list[RequestOutputDelta | TokenDeltas] = []
        self._deltas: dict[str, RequestOutputDelta] = {}  # after these

    @property
    def has_deltas(self) -> bool:
        """Whether there is something to tell."""
        return bool(self._deltas or self._given)

    def discard(self, request_id: str) -> None:
        """Nobody wants to hear of this request any more."""
        self._deltas.pop(request_id, None)

    def take_deltas(self) -> list[RequestOutputDelta | TokenDeltas]:
        """What clients must be told; the deltas of a request are in order."""
        deltas = [*self._given, *self._deltas.values()]
        self._given.clear()
        self._deltas.clear()
        return deltas

    def apply(self, step: ScheduledStep, output: ModelRunnerOutput) -> None:
        """Take in a step's results."""
        results = StepResults(output)
        if output.step_id != step.output.step_id or not results.is_of(step.num_rows):
            raise WorkerError(
                f"step {step.output.step_id} with {step.num_rows} rows was answered with step "
                f"{output.step_id}, rows of {output.counts} tokens, {output.token_ids.size} in all"
            )
        self._given += self._deltas.values()
        self._deltas.clear()
        if step.cohort.seqs:
            self._apply_cohort(step, results)
        for number, row in enumerate(step.rows, len(step.cohort.seqs)):
            seq = row.seq
            seq.num_in_flight -= 1
            seq.num_pending -= row.sample
            status = seq.status
            if status is not RequestStatus.FINISHED:
                self._take(row, results, number)
            # Ended within _take, it has left already: nothing was in flight any more.
            if status is not RequestStatus.RUNNING and not seq.num_in_flight:
                self._roster.settle(seq)

    def _apply_cohort(self, step: ScheduledStep, results: StepResults) -> None:
        """Rows that decoded. Nearly all only get longer; the others are taken one by one."""
        columns, cohort = self._roster.columns, step.cohort
        places, num_rows = cohort.places, len(cohort.seqs)
        known, counts = columns.known[places], results.leading_counts(num_rows)
        grown = known + counts
        columns.in_flight[places] = columns.in_flight[places] - 1
        columns.pending[places] = columns.pending[places] - step.num_decodes
        only_grows = (
            columns.is_plain[places]
            & (grown < columns.limit[places])
            & (grown <= columns.commit_at[places])
        )
        if results.has_counts:
            only_grows &= counts > 0
        results.clear_others(only_grows)
        tokens = results.leading_tokens(num_rows)
        if not cohort.stop_ids.isdisjoint(tokens):
            stops = [token in cohort.stop_ids for token in tokens]
            only_grows[np.repeat(np.arange(num_rows), counts)[stops]] = False
        chosen = None if np.count_nonzero(only_grows) == num_rows else only_grows
        if step.num_decodes > 1 or np.count_nonzero(step.drafts):
            most = step.drafts + step.num_decodes  # it was planned with the most that could come
            columns.computed[places] = columns.computed[places] - (most - counts)
        if (drafts := results.drafts(num_rows)) is not None:
            fed, accepted = drafts
            columns.tally.note(places, fed if chosen is None else fed * chosen, accepted)
        self._grow(cohort, tokens, counts if results.has_counts else None, grown, chosen)
        if chosen is not None:
            others = np.flatnonzero(~chosen).tolist()
            self._take_others(cohort, results, (known - 1).tolist(), others)

    def _take_others(
        self, cohort: Cohort, results: StepResults, starts: list[int], numbers: list[int]
    ) -> None:
        """Rows of the cohort with more to them. starts: where what they were fed began."""
        drafts = results.drafts(len(cohort.seqs))
        fared = None if drafts is None else np.stack(drafts, 2)  # [decodes, rows, fed and accepted]
        # Before any of them is taken: one that fails takes the others of its request along.
        was_running = [cohort.seqs[number].status is RequestStatus.RUNNING for number in numbers]
        for number, ran in zip(numbers, was_running, strict=True):
            seq = cohort.seqs[number]
            if seq.status is not RequestStatus.FINISHED:
                row = Row(seq, starts[number], len(results.tokens_of(number)), True)
                self._take(row, results, number, () if fared is None else fared[:, number].tolist())
            # One that ran until this very step has left already if it ended with it.
            if not ran and not seq.num_in_flight:
                self._roster.settle(seq)

    def _grow(
        self,
        cohort: Cohort,
        tokens: list[int],
        counts: np.ndarray | None,
        grown: np.ndarray,
        chosen: np.ndarray | None,
    ) -> None:
        """The tokens of chosen rows of a cohort, one each without `counts`. grown: how many tokens
        of each sequence are known with them."""
        columns, places = self._roster.columns, cohort.places
        histories, request_ids, attempts = cohort.histories, cohort.request_ids, cohort.attempts
        numbers = None if counts is None else counts.tolist()
        if chosen is not None:
            by_token = chosen if counts is None else np.repeat(chosen, counts)
            tokens, places, grown = list(compress(tokens, by_token)), places[chosen], grown[chosen]
            numbers = None if numbers is None else list(compress(numbers, chosen))
            histories = list(compress(histories, chosen))
            request_ids = list(compress(request_ids, chosen))
            attempts = list(compress(attempts, chosen))
        if not tokens:
            return
        deltas = columns.deltas[places]
        given = TokenDeltas(request_ids, deltas.tolist(), attempts, tokens, numbers)
        columns.deltas[places] = deltas + 1
        columns.known[places] = grown
        if numbers is None:
            deque(map(list.append, histories, tokens), maxlen=0)
        else:
            deque(map(list.extend, histories, given.pieces()), maxlen=0)
        self._charge(cohort, len(tokens), numbers, chosen)
        self._counters.generation_tokens_total += len(tokens)
        self._given.append(given)

    def _charge(
        self, cohort: Cohort, total: int, numbers: list[int] | None, chosen: np.ndarray | None
    ) -> None:
        """`total` tokens came for the chosen rows, so many for each."""
        tenants: Mapping[str, int] = cohort.tenants
        if len(tenants) == 1:
            tenants = dict.fromkeys(tenants, total)
        elif numbers is not None or chosen is not None:
            seqs = cohort.seqs if chosen is None else compress(cohort.seqs, chosen)
            tenants = shares = Counter[str]()
            for seq, number in zip(seqs, numbers or repeat(1), strict=False):
                shares[seq.request.tenant] += number
        for tenant, number in tenants.items():
            self._roster.arrived.charge(tenant, number)

    def undo(self, step: ScheduledStep) -> None:
        """The step failed or is void: its sequences start again from what they know, and workers
        are told once more whom to forget."""
        self._roster.forgotten += step.output.finished_seq_ids
        sampled = [step.num_decodes] * len(step.cohort.seqs) + [int(r.sample) for r in step.rows]
        for seq, number in zip(step.seqs(), sampled, strict=True):
            seq.num_in_flight -= 1
            seq.num_pending -= number
            if seq.status is not RequestStatus.RUNNING:
                if not seq.num_in_flight:
                    self._roster.settle(seq)
            else:
                self._roster.preempt(seq)

    def fail(self, request: RequestState, message: str, error_type: str) -> None:
        """End a request with an error its client may see."""
        if not request.num_unfinished:
            return
        delta = self._delta_of(request)
        delta.error, delta.error_type, delta.finished = message, error_type, True
        self._roster.finish_request(request)
        self._counters.requests_finished_total[FinishReason.ERROR.value] += 1

    def complete_empty(self, request: RequestState) -> None:
        """Answer a request that asks for no token at all."""
        for seq in request.sequences:
            self._end(seq, SequenceDelta(index=seq.index), FinishReason.LENGTH)

    def end_branch(self, request: RequestState, index: int) -> None:
        """Nobody wants more of this sequence; the others of its request go on."""
        if index < len(request.sequences):
            seq = request.sequences[index]
            if seq.status is not RequestStatus.FINISHED:
                self._end(seq, SequenceDelta(index=index), FinishReason.ABORT)

    def take_first(self, request: RequestState, delta: RequestOutputDelta) -> None:
        """Who computed the prompt of a request that is held has also chosen its first token."""
        seq, (first,) = request.sequences[0], delta.sequences
        request.num_cached_tokens = delta.num_cached_tokens
        request.queue_s = self._roster.clock() - request.arrival_s
        first.finish_reason, first.stop_reason, _ = self._append(seq, first.token_ids)
        seq.columns.known[seq.place] = len(seq.token_ids)
        self._give(seq, first)

    def _take(
        self, row: Row, results: StepResults, number: int, drafts: Iterable[tuple[int, int]] = ()
    ) -> None:
        """The row of this number. drafts: that it was fed each time, and how many were accepted."""
        seq, output, tokens = row.seq, results.output, results.tokens_of(number)
        request, error = seq.request, output.errors.get(number)
        if error is not None and not tokens:
            self._fail_row(request, error)
            return
        if row.sample and not tokens:
            self.fail(request, "the model runner returned no token", "FastDeployError")
            return
        if number in output.prompt_logprobs and request.wants_prompt_logprobs:
            self._add_prompt_logprobs(request, row, output.prompt_logprobs[number])
        num_computed = row.start + row.num_tokens
        if not row.sample:
            self._commit(seq, num_computed, num_computed)
            return
        if seq.num_output_tokens == 0 and request.followers_wait and seq.index == 0:
            self._roster.release_followers(request)
        reason, stop_reason, num_kept = self._append(seq, tokens)
        seq.columns.known[seq.place] = len(seq.token_ids)
        if drafts:
            self._count_drafts_of(seq, drafts, num_kept if reason else None)
        if seq.is_suspect and row.start >= seq.num_known_at_start:
            self._roster.set_suspect(seq, False)
        limit = len(seq.token_ids) if self._kv.caches_output else seq.num_prompt_tokens
        self._commit(seq, min(num_computed, limit), num_computed)
        delta = SequenceDelta(index=seq.index, token_ids=tokens[:num_kept])
        delta.finish_reason, delta.stop_reason = reason, stop_reason
        delta.pooled = output.pooled.get(number) if reason else None
        if number in output.logprobs:
            delta.logprobs = output.logprobs[number][:num_kept]
        self._give(seq, delta)
        if error is not None and reason is None:  # after these tokens
            self._fail_row(request, error)

    def _count_drafts_of(
        self, seq: Sequence, drafts: Iterable[tuple[int, int]], num_kept: int | None
    ) -> None:
        """num_kept: of a sequence that ended; drafts after its end were neither right nor wrong."""
        for drafted, right in drafts:
            left = drafted if num_kept is None else max(0, num_kept)
            seq.columns.tally.add(seq.place, min(drafted, left), min(right, left))
            num_kept = None if num_kept is None else num_kept - right - 1

    def _commit(self, seq: Sequence, num_tokens: int, num_certain: int) -> None:
        self._kv.commit(seq.table, seq.token_ids, num_tokens)
        self._kv.let_go(seq.table, num_certain)
        seq.commit_at = self._kv.next_commit(seq.table, seq.num_prompt_tokens)

    def _fail_row(self, request: RequestState, code: str) -> None:
        """A worker found that one request cannot go on; codes are worker/model_runner.py's."""
        if code.startswith(REFUSED):
            self.fail(request, *code.split(": ", 1)[::-1])
        else:
            self.fail(request, NAN_MESSAGE if code == "nan_logits" else code, "FastDeployError")

    def _append(
        self, seq: Sequence, tokens: list[int]
    ) -> tuple[FinishReason | None, int | None, int]:
        """Append tokens up to the first that ends the sequence: (why, stop token id, how many)."""
        known = seq.token_ids
        for count, token in enumerate(tokens, 1):
            if len(known) >= seq.max_total_tokens:  # it asked for no token, only for the prompt's
                return FinishReason.LENGTH, None, count - 1
            known.append(token)
            if token in seq.stop_ids and len(known) >= seq.min_total_tokens:
                named = token in (seq.request.request.sampling.stop_token_ids or ())
                return FinishReason.STOP, token if named else None, count
            if len(known) >= seq.max_total_tokens:
                return FinishReason.LENGTH, None, count
        return None, None, len(tokens)

    def _give(self, seq: Sequence, delta: SequenceDelta) -> None:
        """Tokens for the client, the last ones where the delta has a finish_reason."""
        self._counters.generation_tokens_total += len(delta.token_ids)
        self._roster.arrived.charge(seq.request.tenant, len(delta.token_ids))
        if delta.finish_reason is None:
            self._delta_of(seq.request).sequences.append(delta)
        else:
            self._end(seq, delta, delta.finish_reason)

    def _end(self, seq: Sequence, delta: SequenceDelta, reason: FinishReason) -> None:
        request = seq.request
        delta.finish_reason, delta.drafts = reason, seq.draft_stats()
        whole = self._delta_of(request)
        whole.sequences.append(delta)
        self._roster.finish(seq)
        if not request.num_unfinished:
            whole.finished = True
            self._counters.requests_finished_total[reason.value] += 1

    def _delta_of(self, request: RequestState) -> RequestOutputDelta:
        """The request's delta of this step; the first one carries what is known only once."""
        request_id = request.request_id
        delta = self._deltas.get(request_id)
        if delta is None:
            delta = RequestOutputDelta(
                request_id=request_id,
                position=self._next_position(request),
                attempt=request.request.attempt,
                sequences=[],
            )
            if delta.position == 0:
                delta.num_cached_tokens = request.num_cached_tokens
                delta.queue_s = request.queue_s
                delta.prompt_logprobs = request.prompt_logprobs
            self._deltas[request_id] = delta
        return delta

    def _next_position(self, request: RequestState) -> int:
        """Counts deltas; those of a single sequence are counted where columns can do it, too."""
        if len(request.sequences) > 1:
            request.num_deltas += 1
            return request.num_deltas - 1
        place, deltas = request.sequences[0].place, self._roster.columns.deltas
        deltas[place] += 1
        return int(deltas[place]) - 1

    @staticmethod
    def _add_prompt_logprobs(request: RequestState, row: Row, new: list[TokenLogprobs]) -> None:
        """Chunk [start, start + k) predicts positions start + 1 to start + k; known ones repeat
        after a preemption."""
        found = request.prompt_logprobs
        assert found is not None, "prompt logprobs nobody asked for"
        found.extend(new[len(found) - (row.start + 1) :])
        del found[len(request.request.prompt_token_ids) :]
