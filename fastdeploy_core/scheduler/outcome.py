"""Takes in what a step produced: appends tokens, ends sequences, collects deltas for the clients.

With overlap a row may belong to a sequence that has ended or was preempted meanwhile: the token of
an ended one is dropped, that of a preempted one is kept, since it is as good as any other.
"""

from __future__ import annotations

from fastdeploy_core.errors import WorkerError
from fastdeploy_core.types import (
    FinishReason,
    ModelRunnerOutput,
    RequestOutputDelta,
    RequestStatus,
    SequenceDelta,
    SequenceOutput,
)

from .counters import Counters
from .planner import Row, ScheduledStep
from .roster import Roster
from .sequence import RequestState, Sequence

REFUSED = "invalid_request: "
NAN_MESSAGE = "the model produced numbers that are not finite for this request (nan_logits)"


class Outcome:
    """Applies step results to a roster."""

    def __init__(self, roster: Roster, counters: Counters) -> None:
        self._roster = roster
        self._kv = roster.kv
        self._counters = counters
        self._deltas: dict[str, RequestOutputDelta] = {}

    @property
    def num_deltas(self) -> int:
        """Requests with something to tell."""
        return len(self._deltas)

    def discard(self, request_id: str) -> None:
        """Nobody wants to hear of this request any more."""
        self._deltas.pop(request_id, None)

    def take_deltas(self) -> list[RequestOutputDelta]:
        """What clients must be told; one delta per request."""
        deltas, self._deltas = self._deltas, {}
        return list(deltas.values())

    def apply(self, step: ScheduledStep, output: ModelRunnerOutput) -> None:
        """Take in a step's results, row by row."""
        outputs = output.sequences
        if output.step_id != step.output.step_id or len(outputs) != len(step.rows):
            raise WorkerError(
                f"step {step.output.step_id} with {len(step.rows)} rows was answered with step "
                f"{output.step_id} and {len(outputs)} rows"
            )
        for row, result in zip(step.rows, outputs, strict=True):
            seq = row.seq
            if result.seq_id != seq.seq_id:
                raise WorkerError(
                    f"step {output.step_id}: row of sequence {seq.seq_id} was answered with "
                    f"sequence {result.seq_id}"
                )
            seq.num_in_flight -= 1
            if row.sample:
                seq.num_pending -= 1
            status = seq.status
            if status is not RequestStatus.FINISHED:
                self._take(row, result)
            # Ended within _take, it has left already: nothing was in flight any more.
            if status is not RequestStatus.RUNNING and not seq.num_in_flight:
                self._roster.settle(seq)

    def undo(self, step: ScheduledStep) -> None:
        """The step failed or is void: its sequences start again from what they know, and workers
        are told once more whom to forget."""
        self._roster.forget(step.output.finished_seq_ids)
        for row in step.rows:
            seq = row.seq
            seq.num_in_flight -= 1
            seq.num_pending -= row.sample
            if seq.status is not RequestStatus.RUNNING:
                if not seq.num_in_flight:
                    self._roster.settle(seq)
            else:
                self._roster.preempt(seq)

    def fail(self, request: RequestState, message: str, error_type: str) -> None:
        """End a request with an error its client may see."""
        if request.is_finished:
            return
        delta = self._delta_of(request)
        delta.error, delta.error_type, delta.finished = message, error_type, True
        self._roster.finish_request(request, FinishReason.ERROR)
        self._counters.num_finished[FinishReason.ERROR.value] += 1

    def complete_empty(self, request: RequestState) -> None:
        """Answer a request that asks for no token at all."""
        for seq in request.sequences:
            self._end(seq, SequenceDelta(index=seq.index), FinishReason.LENGTH, None)

    def _take(self, row: Row, result: SequenceOutput) -> None:
        seq = row.seq
        request = seq.request
        if result.error is not None:
            self._fail_row(request, result.error)
            return
        tokens = result.token_ids
        if row.sample and not tokens:
            self.fail(request, "the model runner returned no token", "FastDeployError")
            return
        if result.prompt_logprobs is not None and request.wants_prompt_logprobs:
            self._add_prompt_logprobs(request, row, result)
        num_computed = row.start + row.num_tokens
        if row.num_drafts:
            num_computed += len(tokens) - 1 - row.num_drafts
            self._counters.num_draft_tokens += row.num_drafts
            self._counters.num_accepted_draft_tokens += len(tokens) - 1
            if seq.status is RequestStatus.RUNNING:
                seq.num_computed = num_computed
        if not row.sample:
            self._kv.commit(seq.table, seq.token_ids, num_computed)
            return
        if seq.num_output_tokens == 0 and request.followers_wait and seq.index == 0:
            self._roster.release_followers(request)
        reason, stop_reason, num_kept = self._append(seq, tokens)
        if seq.status is RequestStatus.RUNNING and not reason:
            seq.drafts = result.next_draft_token_ids
        if seq.is_suspect and row.start >= seq.num_known_at_start:
            self._roster.set_suspect(seq, False)
        limit = len(seq.token_ids) if self._kv.caches_output else seq.num_prompt_tokens
        self._kv.commit(seq.table, seq.token_ids, min(num_computed, limit))
        delta = SequenceDelta(index=seq.index, token_ids=tokens[:num_kept])
        if result.logprobs is not None:
            delta.logprobs = result.logprobs[:num_kept]
        self._counters.num_generated_tokens += num_kept
        self._roster.arrived.charge(request.tenant, num_kept)
        if reason is None:
            self._delta_of(request).sequences.append(delta)
        else:
            self._end(seq, delta, reason, stop_reason)

    def _fail_row(self, request: RequestState, code: str) -> None:
        """A worker found that one request cannot go on; codes are worker/model_runner.py's."""
        if code.startswith(REFUSED):
            self.fail(request, code.removeprefix(REFUSED), "InvalidRequest")
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

    def _end(
        self, seq: Sequence, delta: SequenceDelta, reason: FinishReason, stop_reason: int | None
    ) -> None:
        request = seq.request
        delta.finish_reason, delta.stop_reason = reason, stop_reason
        whole = self._delta_of(request)
        whole.sequences.append(delta)
        self._roster.finish(seq, reason, stop_reason)
        if request.is_finished:
            whole.finished = True
            self._counters.num_finished[reason.value] += 1

    def _delta_of(self, request: RequestState) -> RequestOutputDelta:
        """The request's delta of this step; the first one carries what is known only once."""
        request_id = request.request_id
        delta = self._deltas.get(request_id)
        if delta is None:
            delta = RequestOutputDelta(
                request_id=request_id,
                position=request.num_deltas,
                attempt=request.request.attempt,
                sequences=[],
            )
            if request.num_deltas == 0:
                delta.num_cached_tokens = request.num_cached_tokens
                delta.queue_s = request.queue_s
                delta.prompt_logprobs = request.prompt_logprobs
            request.num_deltas += 1
            self._deltas[request_id] = delta
        return delta

    @staticmethod
    def _add_prompt_logprobs(request: RequestState, row: Row, result: SequenceOutput) -> None:
        """Chunk [start, start + k) predicts positions start + 1 to start + k; known ones repeat
        after a preemption."""
        found, new = request.prompt_logprobs, result.prompt_logprobs
        assert found is not None and new is not None, "prompt logprobs nobody asked for"
        found.extend(new[len(found) - (row.start + 1) :])
        del found[request.num_prompt_tokens :]
