"""POST /v1/completions: prompts in, continuations out, whole or as chunks.

Choices are ordered by prompt, then by n. `best_of` samples more than are returned and keeps the
most likely ones per token.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from fastdeploy_core.engine.input import build_request
from fastdeploy_core.serving.state import ServerState
from fastdeploy_core.types import CompletionOutput, Request, RequestOutput

from .generation import merge, run
from .logprobs import CompletionLogprobs, Position, TokenNames, prompt_logprobs
from .schemas.completion import CompletionRequest
from .usage import Call, Envelope, Usage, request_options

KIND = "text_completion"


@dataclass(slots=True)
class _Choice:
    """One answer to one prompt, while it is collected or streamed."""

    logprobs: CompletionLogprobs
    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    positions: list[Position] = field(default_factory=list)
    end: CompletionOutput | None = None

    @property
    def likelihood(self) -> float:
        """Mean log-probability of its tokens, which best_of compares."""
        values = [p[t].logprob for p, t in zip(self.positions, self.token_ids, strict=True)]
        return sum(values) / max(1, len(values))


class CompletionJob:
    """One text completion call."""

    def __init__(self, state: ServerState, body: CompletionRequest, call: Call) -> None:
        self._state = state
        self._body = body
        self._call = call
        self._envelope = Envelope("cmpl", call, state.check_model(body.model))
        self._n = body.n or 1
        self._prompts = body.prompts()
        self._requests: list[Request] = []
        self._prompt_texts: list[str] = []
        as_ids = body.return_tokens_as_token_ids
        if as_ids is None:
            as_ids = state.config.return_tokens_as_token_ids
        self._names = TokenNames(state.tokenizer, as_ids)
        self.stream = bool(body.stream)
        self.num_requests = len(self._prompts)

    async def prepare(self) -> None:
        """Tokenize the prompts, compile the grammar."""
        if self._call.is_short:
            self.make_requests()
        else:
            await self._state.threads.run(self._call.tenant, self.make_requests)
        for request in self._requests:
            await self._state.add_grammar(request)

    def make_requests(self) -> None:
        """The engine requests, but for their grammar."""
        body, state = self._body, self._state
        best_of = body.best_of or self._n
        wanted: dict[str, Any] = {"n": best_of, "structured_outputs": body.constraint()}
        if body.logprobs is not None or best_of > self._n:
            wanted["logprobs"] = body.logprobs or 0
        if body.echo and body.logprobs is not None:
            wanted["prompt_logprobs"] = body.logprobs
        # With max_tokens=0 no token is returned, but a prompt's own logprobs need one step.
        wanted["max_tokens"] = 16 if body.max_tokens is None else max(1, body.max_tokens)
        sampling = body.sampling(state.default_sampling, **wanted)
        options = request_options(state, body, self._call, body.add_special_tokens)
        self._requests = [
            build_request(
                prompt, sampling, tokenizer=state.tokenizer, limits=state.limits, options=options
            )
            for prompt in self._prompts
        ]
        if body.echo:
            self._prompt_texts = [
                prompt
                if isinstance(prompt, str) and body.truncate_prompt_tokens is None
                else state.tokenizer.decode(request.prompt_token_ids)
                for prompt, request in zip(self._prompts, self._requests, strict=True)
            ]

    async def complete(self) -> dict[str, Any]:
        """The whole answer."""
        usage = self._usage()
        collected = [self._new_choices(request.sampling.n) for request in self._requests]
        prompts: list[Any] = [None] * len(self._requests)
        async with aclosing(self._outputs()) as outputs:
            async for number, output in outputs:
                usage.add(output)
                prompts[number] = prompts[number] or output.prompt_logprobs
                for part in output.outputs:
                    choice = collected[number][part.index]
                    choice.pieces.append(part.text)
                    choice.token_ids.extend(part.token_ids)
                    choice.positions.extend(part.logprobs or [])
                    choice.end = part
        choices: list[dict[str, Any]] = []
        for number, answers in enumerate(collected):
            if len(answers) > self._n:
                answers = sorted(answers, key=lambda a: a.likelihood, reverse=True)[: self._n]
            for answer in answers:
                choices.append(self._choice(len(choices), number, answer, prompts[number]))
        if self._body.max_tokens == 0:
            usage.num_completion_tokens = 0
        return self._envelope(KIND, choices, usage)

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """The chunks of a streamed answer, then usage if it was asked for."""
        usage = self._usage()
        at_end, continuous = self._body.include_usage(self._state.config.force_include_usage)
        shown = usage if continuous else None
        choices: dict[int, _Choice] = {}
        prompts: list[Any] = [None] * len(self._requests)
        async with aclosing(self._outputs()) as outputs:
            async for number, output in outputs:
                prompts[number] = prompts[number] or output.prompt_logprobs
                for part in output.outputs:
                    index = number * self._n + part.index
                    if index not in choices:
                        (choices[index],) = self._new_choices(1)
                        if self._body.echo:
                            echo = self._echo_chunk(index, number, prompts[number], choices[index])
                            yield self._envelope(KIND, [echo], shown)
                usage.add(output)
                if self._body.max_tokens == 0:
                    usage.num_completion_tokens = 0
                for part in output.outputs:
                    index = number * self._n + part.index
                    entry = self._chunk(index, number, choices[index], part)
                    if entry is not None:
                        yield self._envelope(KIND, [entry], shown)
        if at_end:
            yield self._envelope(KIND, [], usage)

    def _outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        default = self._state.config.stream_interval
        size = self._body.chunk_tokens(default) if self.stream else 1
        return merge([run(self._state, r, chunk_tokens=size) for r in self._requests])

    def _usage(self) -> Usage:
        one = len(self._requests) == self._requests[0].sampling.n == 1
        timed = self._state.config.enable_per_request_metrics and one
        return Usage(sum(len(r.prompt_token_ids) for r in self._requests), timed=timed)

    def _new_choices(self, count: int) -> list[_Choice]:
        top = -1 if self._body.logprob_token_ids else self._body.logprobs or 0
        return [_Choice(CompletionLogprobs(top, self._names)) for _ in range(count)]

    def _choice(
        self, index: int, number: int, answer: _Choice, prompt: list[Any] | None
    ) -> dict[str, Any]:
        body, end = self._body, answer.end
        text, token_ids, positions = "".join(answer.pieces), answer.token_ids, answer.positions
        finish_reason = end.finish_reason if end is not None else None
        if body.max_tokens == 0:
            text, token_ids, positions, finish_reason = "", [], [], "length"
        shown = self._prompt_texts[number] + text if body.echo else text
        choice = _entry(index, shown, finish_reason)
        choice["stop_reason"] = end.stop_reason if end is not None else None
        if end is not None and end.pooled is not None:
            choice["routed_experts"] = end.pooled.decode()
        prompt_ids = self._requests[number].prompt_token_ids
        if body.logprobs is not None:
            before = (list(prompt or []), prompt_ids) if body.echo else ([], [])
            choice["logprobs"] = answer.logprobs.render(
                [*before[0], *positions], [*before[1], *token_ids]
            )
        asked = body.prompt_logprobs is not None
        choice["prompt_logprobs"] = prompt_logprobs(prompt) if prompt and asked else None
        if body.return_token_ids:
            choice.update(prompt_token_ids=prompt_ids, token_ids=token_ids)
            choice["completion_token_ids"] = token_ids
        return choice

    def _echo_chunk(
        self, index: int, number: int, prompt: list[Any] | None, choice: _Choice
    ) -> dict[str, Any]:
        entry = _entry(index, self._prompt_texts[number], None)
        if self._body.logprobs is not None and prompt is not None:
            prompt_ids = self._requests[number].prompt_token_ids
            entry["logprobs"] = choice.logprobs.render(prompt, prompt_ids)
        return entry

    def _chunk(
        self, index: int, number: int, choice: _Choice, part: CompletionOutput
    ) -> dict[str, Any] | None:
        body = self._body
        token_ids, text, reason = part.token_ids, part.text, part.finish_reason
        if body.max_tokens == 0:
            token_ids, text, reason = [], "", "length" if part.finished else None
        carries_tokens = body.logprobs is not None or bool(body.return_token_ids)
        if not text and reason is None and not (carries_tokens and token_ids):
            return None
        entry = _entry(index, text, reason)
        if reason is not None:
            entry["stop_reason"] = part.stop_reason
        if body.logprobs is not None and token_ids:
            entry["logprobs"] = choice.logprobs.render(part.logprobs or [], token_ids)
        if body.return_token_ids:
            if not choice.token_ids:
                entry["prompt_token_ids"] = self._requests[number].prompt_token_ids
            entry["token_ids"] = entry["completion_token_ids"] = token_ids
        choice.token_ids.extend(token_ids)
        return entry


def _entry(index: int, text: str, reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}
