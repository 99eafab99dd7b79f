"""From the engine's token ids to what a user sees: text, stop strings, logprobs, finish reasons.

The offline API and the server both use it, so both give the same answer. Tokens are taken one by
one: it makes no difference how many arrive together (one, or several after speculation).
"""

from __future__ import annotations

import codecs
import time
from collections.abc import Iterable
from dataclasses import replace

from fastdeploy_core.tokenizer import IncrementalDetokenizer, StopStringMatcher, Tokenizer
from fastdeploy_core.types import (
    CompletionOutput,
    DraftStats,
    FinishReason,
    Logprob,
    Request,
    RequestMetrics,
    RequestOutput,
    RequestOutputDelta,
    SequenceDelta,
    SpeculateMetrics,
    TokenDeltas,
    TokenLogprobs,
    branch_id,
)


class _Sequence:
    """One of the n answers of a request, while it grows."""

    def __init__(
        self, request: Request, index: int, tokenizer: Tokenizer | None, visible: frozenset[int]
    ) -> None:
        params = request.sampling
        self.output = CompletionOutput(index=index)
        names_tokens = bool(params.logprob_token_ids)
        self._logprobs = _LogprobReader(tokenizer if params.detokenize else None, names_tokens)
        if params.logprobs is not None:
            self.output.cumulative_logprob = 0.0
            self.output.logprobs = []
        self._pieces: list[str] = []
        self._min_tokens = params.min_tokens
        self._include_stop = params.include_stop_str_in_output
        self._stop_ids = {*request.eos_token_ids, *(params.stop_token_ids or [])}
        self._detokenizer: IncrementalDetokenizer | None = None
        self._matcher: StopStringMatcher | None = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = IncrementalDetokenizer(
                tokenizer,
                request.prompt_token_ids,
                skip_special_tokens=params.skip_special_tokens,
                visible_token_ids=visible,
            )
            if params.stop_strings:
                self._matcher = StopStringMatcher(params.stop_strings, self._include_stop)

    @property
    def finished(self) -> bool:
        return self.output.finish_reason is not None

    @property
    def may_be_late(self) -> bool:
        """Whether the text can be made once all tokens have arrived, instead of token by token."""
        return self._matcher is None and self.output.logprobs is None

    def take(self, delta: SequenceDelta) -> tuple[int, str]:
        """Take a delta; returns the number of tokens taken (0 after a stop string) and new text."""
        token_ids, known = delta.token_ids, self.output.token_ids
        first, stop = len(known), None
        pieces: list[str] = []
        if self._matcher is None:
            known += token_ids
            if self._detokenizer is not None:
                shown = token_ids[:-1] if self._ends_silently(delta) else token_ids
                pieces.append(self._detokenizer.push(shown))
        else:
            stop = self._take_until_stop(delta, pieces)
        taken = len(known) - first
        if delta.logprobs is not None:
            for entry in delta.logprobs[:taken]:
                self._add_logprobs(entry)
        self.output.pooled = delta.pooled
        if delta.finish_reason is not None or stop is not None:
            self._finish(delta, stop, pieces)
        text = pieces[0] if len(pieces) == 1 else "".join(pieces)
        if text:
            self._pieces.append(text)
        return taken, text

    def _ends_silently(self, delta: SequenceDelta) -> bool:
        """Whether the last token ends the answer and so is not part of its text."""
        return (
            delta.finish_reason is FinishReason.STOP
            and not self._include_stop
            and bool(delta.token_ids)
            and delta.token_ids[-1] in self._stop_ids
        )

    def _take_until_stop(self, delta: SequenceDelta, pieces: list[str]) -> str | None:
        """Detokenize token by token, because a stop string may end the answer after any of them."""
        assert self._detokenizer is not None, "stop strings are found in text"
        num_shown = len(delta.token_ids) - self._ends_silently(delta)
        for number, token_id in enumerate(delta.token_ids):
            self.output.token_ids.append(token_id)
            if number < num_shown:
                stop = self._show(self._detokenizer.push((token_id,)), pieces)
                if stop is not None:
                    return stop
        return None

    def _finish(self, delta: SequenceDelta, stop: str | None, pieces: list[str]) -> None:
        if stop is None:
            stop = self._end(pieces)
        if stop is not None:
            self.output.finish_reason, self.output.stop_reason = FinishReason.STOP.value, stop
        elif delta.finish_reason is not None:
            self.output.finish_reason = delta.finish_reason.value
            self.output.stop_reason = delta.stop_reason

    def text(self) -> str:
        """Everything shown so far."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def _show(self, text: str, pieces: list[str]) -> str | None:
        if self._matcher is None:
            pieces.append(text)
            return None
        # As in vLLM: a stop string within the first min_tokens tokens does not end the answer.
        match = len(self.output.token_ids) > self._min_tokens
        shown, stop = self._matcher.push(text, match)
        pieces.append(shown)
        return stop

    def _end(self, pieces: list[str]) -> str | None:
        if self._detokenizer is None:
            return None
        stop = self._show(self._detokenizer.finish(), pieces)
        if stop is None and self._matcher is not None:
            pieces.append(self._matcher.finish())
        return stop

    def _add_logprobs(self, entry: TokenLogprobs) -> None:
        if self.output.logprobs is not None:
            self.output.logprobs.append(self._logprobs.read(entry))
            self.output.cumulative_logprob = (
                self.output.cumulative_logprob or 0.0
            ) + entry.logprobs[0]


class RequestState:
    """One request in progress; made by OutputProcessor.add."""

    def __init__(
        self,
        request: Request,
        prompt_text: str | None,
        is_whole: bool,
        tokenizer: Tokenizer | None,
        visible: frozenset[int],
    ) -> None:
        self.request = request
        self.prompt_text = prompt_text
        self.is_whole = is_whole
        self.metrics = RequestMetrics(arrival_time=request.arrival_time_s)
        self.drafts = DraftStats()
        self.num_cached_tokens: int | None = None
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self.next_position = 0
        self.error: str | None = None
        self.error_type = ""
        self.sequences = [
            _Sequence(request, index, tokenizer, visible) for index in range(request.sampling.n)
        ]
        self.finished = False  # all sequences have finished
        # Tokens that are only detokenized at the end, because no caller needs text before it.
        self.late: list[int] | None = None
        if is_whole and len(self.sequences) == 1 and self.sequences[0].may_be_late:
            self.late = []

    def note_drafts(self, drafts: DraftStats) -> None:
        """Add the draft counts of a sequence that has ended."""
        total = self.drafts
        total.add(drafts)
        accepted, steps = total.num_accepted, total.num_steps
        self.metrics.speculate_metrics = SpeculateMetrics(
            accepted_tokens=accepted,
            rejected_tokens=total.num_drafts - accepted,
            accept_ratio=accepted / max(1, total.num_drafts),
            average_accept_length=1 + accepted / max(1, steps),
            accepted_tokens_per_head=list(total.accepted_at),
            accept_ratio_per_head=[count / max(1, steps) for count in total.accepted_at],
        )

    def whole(self) -> RequestOutput:
        """The output so far."""
        outputs = []
        for sequence in self.sequences:
            output, text = sequence.output, sequence.text()
            logprobs = None if output.logprobs is None else list(output.logprobs)
            ids = list(output.token_ids)
            outputs.append(replace(output, text=text, token_ids=ids, logprobs=logprobs))
        whole = self._output(outputs, self.prompt_logprobs)
        # a copy: the caller may keep this output next to later ones
        whole.metrics = replace(self.metrics)
        return whole

    def newest(
        self, changes: Iterable[tuple[_Sequence, int, str]], prompt_logprobs: bool
    ) -> RequestOutput:
        """The output of this step only."""
        outputs = []
        for sequence, taken, text in changes:
            whole = sequence.output
            first = len(whole.token_ids) - taken
            logprobs = None if whole.logprobs is None else whole.logprobs[first:]
            outputs.append(
                CompletionOutput(
                    whole.index,
                    text,
                    whole.token_ids[first:],
                    whole.cumulative_logprob,
                    logprobs,
                    whole.finish_reason,
                    whole.stop_reason,
                    pooled=whole.pooled,
                )
            )
        return self._output(outputs, self.prompt_logprobs if prompt_logprobs else None)

    def _output(
        self,
        outputs: list[CompletionOutput],
        prompt_logprobs: list[dict[int, Logprob] | None] | None,
    ) -> RequestOutput:
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self.prompt_text,
            prompt_token_ids=self.request.prompt_token_ids,
            outputs=outputs,
            finished=self.finished,
            prompt_logprobs=prompt_logprobs,
            metrics=self.metrics,
            num_cached_tokens=self.num_cached_tokens,
            error=self.error,
            error_type=self.error_type,
        )


class OutputProcessor:
    """Turns deltas of token ids into outputs, for any number of requests. Not thread safe."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._states: dict[str, RequestState] = {}

    def __len__(self) -> int:
        return len(self._states)

    def add(
        self,
        request: Request,
        prompt_text: str | None = None,
        *,
        is_whole: bool = False,
        visible_tokens: Iterable[str] = (),
    ) -> RequestState:
        """Expect deltas of this request; is_whole: it is shown once, when it has finished.
        `visible_tokens`: special tokens that stay in the text because a parser reads them."""
        visible: frozenset[int] = frozenset()
        if self._tokenizer is not None:
            ids = (self._tokenizer.token_to_id(token) for token in visible_tokens)
            visible = frozenset(token_id for token_id in ids if token_id is not None)
        state = RequestState(request, prompt_text, is_whole, self._tokenizer, visible)
        self._states[request.request_id] = state
        return state

    def collect(self, tokens: TokenDeltas) -> list[RequestOutputDelta]:
        """Store tokens that need no text yet; returns deltas of other requests, for `process`."""
        now, states, others = time.time(), self._states, []
        columns = zip(tokens.request_ids, tokens.positions, tokens.pieces(), strict=True)
        for number, (request_id, position, piece) in enumerate(columns):
            state = states.get(request_id)
            if state is None or state.late is None or state.next_position != position:
                others.append(tokens.delta(number, piece))
                continue
            state.late += piece
            state.next_position += 1
            state.metrics.last_token_time = now
        return others

    def process(self, delta: RequestOutputDelta) -> tuple[RequestOutput | None, list[str]]:
        """The new output (None: nothing to show yet), and the ids that the engine must abort.

        Deltas of unknown requests and repeated deltas are ignored.
        """
        state = self._states.get(delta.request_id)
        if state is None or delta.position < state.next_position:
            return None, []
        state.next_position = delta.position + 1
        self._note(state, delta)
        changes: list[tuple[_Sequence, int, str]] = []
        stopped: list[int] = []  # sequences that a stop string ended
        if state.late:
            late, state.late = state.late, []
            state.sequences[0].take(SequenceDelta(token_ids=late))
        for part in delta.sequences:
            sequence = state.sequences[part.index]
            if part.drafts is not None:
                state.note_drafts(part.drafts)
            if sequence.finished:
                continue
            taken, text = sequence.take(part)
            if taken or text or sequence.finished:
                changes.append((sequence, taken, text))
            if sequence.finished and part.finish_reason is None:
                stopped.append(part.index)
        if delta.error is not None:
            state.error, state.error_type = delta.error, delta.error_type.partition(":")[0]
        if delta.error is not None or delta.finished:
            reason = FinishReason.ERROR if delta.error is not None else FinishReason.ABORT
            for sequence in state.sequences:
                if not sequence.finished:
                    ending = SequenceDelta(index=sequence.output.index, finish_reason=reason)
                    changes.append((sequence, *sequence.take(ending)))
        finished = state.finished = all(sequence.finished for sequence in state.sequences)
        if finished:
            state.metrics.finished_time = time.time()
            del self._states[delta.request_id]
        # Sequences that a stop string ended: the engine does not know of it and must be told.
        aborts: list[str] = []
        if finished and not delta.finished:
            aborts = [delta.request_id]
        elif not finished and stopped:
            aborts = [branch_id(delta.request_id, index) for index in stopped]
        output = None
        if state.is_whole:
            output = state.whole() if finished else None
        elif changes or delta.prompt_logprobs is not None:
            output = state.newest(changes, delta.prompt_logprobs is not None)
        return output, aborts

    def remove(self, request_id: str) -> None:
        """Forget a request (its client left); unknown ids are ignored."""
        self._states.pop(request_id, None)

    def _note(self, state: RequestState, delta: RequestOutputDelta) -> None:
        now = time.time()
        for part in delta.sequences:
            if part.token_ids:
                state.metrics.first_token_time = state.metrics.first_token_time or now
                state.metrics.last_token_time = now
                break
        if delta.queue_s is not None:
            state.metrics.queue_s = delta.queue_s
        if delta.num_cached_tokens is not None:
            state.num_cached_tokens = delta.num_cached_tokens
        if delta.prompt_logprobs is not None:
            request = state.request
            reader = _LogprobReader(self._tokenizer if request.sampling.detokenize else None)
            state.prompt_logprobs = []
            for entry in delta.prompt_logprobs:
                if entry is None:  # the first token
                    reader.skip(request.prompt_token_ids[0])
                state.prompt_logprobs.append(None if entry is None else reader.read(entry))


class _LogprobReader:
    """Log-probabilities of successive tokens in vLLM's form, with the text of each token. A
    character that several tokens spell is the text of the last of them."""

    def __init__(self, tokenizer: Tokenizer | None, names_tokens: bool = False) -> None:
        self._tokenizer = tokenizer  # None: no texts are wanted
        self._has_ranks = not names_tokens  # of alternatives
        self._begun = b""  # bytes of a character that is not complete

    def read(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        """Token id to Logprob, the token itself first, then the alternatives."""
        result: dict[int, Logprob] = {}
        rest = b""
        for place, (token_id, logprob) in enumerate(
            zip(entry.token_ids, entry.logprobs, strict=True)
        ):
            if token_id in result:
                continue  # the token itself among the alternatives
            text, begun = self._text(token_id)
            if place == 0:
                rest = begun
            rank = entry.rank if place == 0 else place if self._has_ranks else None
            result[token_id] = Logprob(logprob, rank, text)
        self._begun = rest
        return result

    def skip(self, token_id: int) -> None:
        """A token without log-probabilities."""
        self._begun = self._text(token_id)[1]

    def _text(self, token_id: int) -> tuple[str | None, bytes]:
        """The token's text, and the beginning of a character at its end."""
        if self._tokenizer is None:
            return None, b""
        text = self._tokenizer.token_text(token_id)
        if "\ufffd" not in text:
            return text, b""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(self._begun + self._tokenizer.token_bytes(token_id))
        return text, decoder.getstate()[0]
