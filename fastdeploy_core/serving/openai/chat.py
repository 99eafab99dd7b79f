"""POST /v1/chat/completions: a conversation in, answers out, whole or as chunks."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastdeploy_core.contracts.model import MediaPart
from fastdeploy_core.contracts.small import ParsedDelta
from fastdeploy_core.engine.input import build_request, grammar_start
from fastdeploy_core.engine.media import num_media_tokens, take_media
from fastdeploy_core.errors import InvalidRequest, PluginNotFound
from fastdeploy_core.parsers.answer import AnswerReader, TextParser, shown_tokens, thinking_ahead
from fastdeploy_core.plugins.drivers import part
from fastdeploy_core.serving.state import ServerState
from fastdeploy_core.tokenizer.special_text import MarkedText
from fastdeploy_core.types import CompletionOutput, Request, RequestOutput, StructuredOutputsParams

from .answer import Answer, tool_call_deltas
from .generation import run
from .logprobs import TokenNames, chat_logprobs, prompt_logprobs
from .schemas.chat import ChatCompletionRequest
from .usage import Call, Envelope, Usage, request_options

CHUNK = "chat.completion.chunk"
_PROMPT_TAIL_TOKENS = 64  # enough for a reasoning parser to see whether thinking has begun


@dataclass(slots=True)
class Piece:
    """What a step added to an answer; `usage` counts all steps so far."""

    said: ParsedDelta
    usage: Usage
    finish_reason: str | None
    stop_reason: str | int | None
    logprobs: dict[str, Any] | None


class ChatJob:
    """One chat completion call."""

    def __init__(self, state: ServerState, body: ChatCompletionRequest, call: Call) -> None:
        self._state = state
        self._body = body
        self._call = call
        self._envelope = Envelope("chatcmpl", call, state.check_model(body.model))
        self._kwargs = body.template_kwargs(dict(state.config.default_chat_template_kwargs))
        as_ids = body.return_tokens_as_token_ids
        if as_ids is None:
            as_ids = state.config.return_tokens_as_token_ids
        self._names = TokenNames(state.tokenizer, as_ids)
        self._messages, self._parts = body.messages, list[MediaPart]()
        self._kinds: Sequence[str] = () if state.media is None else state.media.kinds
        if body.messages is not None and (self._kinds or body.mm_processor_kwargs):
            taken = take_media(body.messages, self._kinds, body.mm_processor_kwargs)
            self._messages, self._parts = taken
        self._constraint: StructuredOutputsParams | None = None
        self._echoed = body.echoed(state.config.response_role)
        self._prompt_tail = ""
        self._request: Request | None = None
        self.stream = bool(body.stream)
        self.num_requests = 1

    async def prepare(self) -> None:
        """Render, tokenize, compile the grammar."""
        body, state, tenant = self._body, self._state, self._call.tenant
        if self._parts:
            render = state.template_threads if body.chat_template is not None else state.threads
            prompt = await render.run(tenant, self.render)
            request = await state.media_threads.run(tenant, self.make_request, prompt)
        elif body.chat_template is not None:
            prompt = await state.template_threads.run(tenant, self.render)
            request = await state.threads.run(tenant, self.make_request, prompt)
        elif self._call.is_short and not isinstance(prompt := self.render(), MarkedText):
            request = self.make_request(prompt)
        else:
            request = await state.threads.run(tenant, lambda: self.make_request(self.render()))
        await state.add_grammar(request)
        if state.reasoning_parser is not None:
            end = request.prompt_token_ids[-_PROMPT_TAIL_TOKENS:]
            self._prompt_tail = state.tokenizer.decode(end)
            if request.grammar is not None:
                thinking = thinking_ahead(state.reasoning_parser, self._prompt_tail, self._kwargs)
                request.grammar_start = grammar_start(thinking, state.tokenizer)
        self._request = request

    def make_request(self, prompt: str | list[int]) -> Request:
        """The engine request, but for its grammar."""
        body, state = self._body, self._state
        self._constraint = self._find_constraint()
        limit = body.max_completion_tokens or body.max_tokens
        wanted: dict[str, Any] = {} if limit is None else {"max_tokens": limit}
        if body.logprobs:
            wanted["logprobs"] = body.top_logprobs or 0
        sampling = body.sampling(
            state.default_sampling, structured_outputs=self._constraint, **wanted
        )
        own = body.add_special_tokens or body.raw_prompt() is not None
        options = request_options(state, body, self._call, own)
        options.media_parts = self._parts
        return build_request(
            prompt, sampling, tokenizer=state.tokenizer, limits=state.limits, options=options
        )

    def render(self) -> str | list[int]:
        """The conversation as a prompt."""
        body = self._body
        raw = body.raw_prompt()
        if raw is not None:
            return raw
        if body.chat_template is not None and self._state.render_template is None:
            raise InvalidRequest(
                "chat_template is not taken from requests by this server "
                "(--trust-request-chat-template)",
                param="chat_template",
            )
        return self._state.tokenizer.apply_chat_template(
            self._messages,
            body.tools if body.wants_tools() else None,
            body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            documents=body.documents,
            template_kwargs=self._kwargs,
            chat_template=body.chat_template,
            render=self._state.render_template,
            kinds=self._kinds,
        )

    def token_ids(self) -> list[int]:
        """The prompt's ids, also of one that is too long to be answered."""
        prompt = self.render()
        if self._parts or not isinstance(prompt, str):  # a picture's are known once it is read
            return self.make_request(prompt).prompt_token_ids
        self._state.limits.check_text(prompt, "prompt")
        return self._state.tokenizer.encode(prompt, self._body.add_special_tokens)

    async def complete(self) -> dict[str, Any]:
        """The whole answer."""
        usage, answers = self._begin()
        ends: dict[int, CompletionOutput] = {}
        tokens: dict[int, list[int]] = {index: [] for index in answers}
        positions: dict[int, list[Any]] = {index: [] for index in answers}
        first_logprobs = None
        async with aclosing(self._outputs()) as outputs:
            async for output in outputs:
                usage.add(output)
                first_logprobs = first_logprobs or output.prompt_logprobs
                for part in output.outputs:
                    answers[part.index].push(part.text, len(part.token_ids), part.finished)
                    tokens[part.index].extend(part.token_ids)
                    positions[part.index].extend(part.logprobs or [])
                    ends[part.index] = part
        choices = [
            self._choice(answers[index], ends[index], tokens[index], positions[index])
            for index in sorted(answers)
        ]
        usage.num_reasoning_tokens = sum(a.num_reasoning_tokens for a in answers.values())
        body = self._envelope("chat.completion", choices, usage)
        body["prompt_logprobs"] = first_logprobs and prompt_logprobs(first_logprobs)
        if self._body.return_token_ids:
            body["prompt_token_ids"] = self._prompt_ids()
        return body

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """The chunks of a streamed answer: roles, deltas, then usage if it was asked for."""
        usage, answers = self._begin()
        at_end, continuous = self._body.include_usage(self._state.config.force_include_usage)
        shown = usage if continuous else None
        begun: set[int] = set()
        async with aclosing(self._outputs()) as outputs:
            async for output in outputs:
                for part in output.outputs if len(begun) < len(answers) else ():
                    if part.index not in begun:
                        begun.add(part.index)
                        yield self._first_chunk(part.index, shown)
                usage.add(output)
                for part in output.outputs:
                    chunk = self._chunk(answers[part.index], part, shown)
                    if chunk is not None:
                        yield chunk
        if at_end:
            usage.num_reasoning_tokens = sum(a.num_reasoning_tokens for a in answers.values())
            yield self._envelope(CHUNK, [], usage)

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """The answer of a call for one choice as it is made, for APIs of other shapes."""
        usage, answers = self._begin()
        async with aclosing(self._outputs()) as outputs:
            async for output in outputs:
                usage.add(output)
                for part in output.outputs:
                    answer = answers[part.index]
                    said = answer.push(part.text, len(part.token_ids), part.finished)
                    usage.num_reasoning_tokens = answer.num_reasoning_tokens
                    reason = answer.finish_reason(part.finish_reason)
                    logprobs = self._logprobs(part.logprobs or [], part.token_ids)
                    yield Piece(said, usage, reason, part.stop_reason, logprobs)

    def _begin(self) -> tuple[Usage, dict[int, Answer]]:
        num = self._engine_request().sampling.n
        max_calls = 1 if self._body.parallel_tool_calls is False else None
        answers = {index: Answer(self._parser(), max_calls) for index in range(num)}
        timed = self._state.config.enable_per_request_metrics and num == 1
        media = num_media_tokens(self._engine_request())
        return Usage(len(self._prompt_ids()), media, timed=timed), answers

    def _parser(self) -> TextParser:
        body, state = self._body, self._state
        reasoning, tool = state.reasoning_parser, state.tool_parser
        if self._constraint is not None:  # the grammar leaves no room for tool tags
            named, is_required = body.named_tool(), body.tool_choice == "required"
            tool = _forced_tools().reader(named, is_required) if named or is_required else None
            if self._engine_request().grammar_start is None:  # nor for thinking
                reasoning = None
        elif not body.wants_tools():
            tool = None
        return AnswerReader(
            reasoning,
            tool,
            prompt_text=self._prompt_tail,
            chat_template_kwargs=self._kwargs,
            tools=body.tools,
        )

    def _find_constraint(self) -> StructuredOutputsParams | None:
        body = self._body
        asked = body.constraint()
        named = body.named_tool()
        if named is None and body.tool_choice != "required":
            return asked
        if asked is not None:
            raise InvalidRequest(
                "tool_choice required or named already constrains the answer; give no "
                "response_format or structured_outputs with it",
                param="tool_choice",
            )
        many = body.parallel_tool_calls is not False
        forced: StructuredOutputsParams = _forced_tools().constraint(body.tools or [], named, many)
        return forced

    def _outputs(self) -> AsyncGenerator[RequestOutput, None]:
        state = self._state
        visible = shown_tokens(state.reasoning_parser, state.tool_parser)
        default = self._state.config.stream_interval
        size = self._body.chunk_tokens(default) if self.stream else 1
        return run(state, self._engine_request(), visible, size)

    def _engine_request(self) -> Request:
        if self._request is None:
            raise RuntimeError("prepare() comes first")
        return self._request

    def _prompt_ids(self) -> list[int]:
        return self._engine_request().prompt_token_ids

    def _choice(
        self, answer: Answer, end: CompletionOutput, token_ids: list[int], positions: list[Any]
    ) -> dict[str, Any]:
        said = answer.collected
        if end.finish_reason == "length":
            said.unfinished_calls_to_text()
        content = self._echoed + said.content
        message: dict[str, Any] = {
            "role": self._state.config.response_role,
            "content": content if content or not said.calls else None,
            "refusal": None,
        }
        if said.reasoning and self._body.include_reasoning is not False:
            message.update(reasoning_content=said.reasoning, reasoning=said.reasoning)
        if said.calls:
            message["tool_calls"] = said.tool_calls()
        choice: dict[str, Any] = {
            "index": end.index,
            "message": message,
            "logprobs": self._logprobs(positions, token_ids),
            "finish_reason": answer.finish_reason(end.finish_reason),
            "stop_reason": end.stop_reason,
        }
        if end.pooled is not None:
            choice["routed_experts"] = end.pooled.decode()
        if self._body.return_token_ids:
            choice["token_ids"] = token_ids
            message["prompt_token_ids"] = self._prompt_ids()
            message["completion_token_ids"] = token_ids
        return choice

    def _logprobs(self, positions: list[Any], token_ids: list[int]) -> dict[str, Any] | None:
        if not self._body.logprobs or not token_ids:
            return None
        top = -1 if self._body.logprob_token_ids else self._body.top_logprobs or 0
        return chat_logprobs(positions, token_ids, top, self._names)

    def _first_chunk(self, index: int, usage: Usage | None) -> dict[str, Any]:
        delta: dict[str, Any] = {"role": self._state.config.response_role, "content": self._echoed}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        chunk = self._envelope(CHUNK, [choice], usage)
        if self._body.return_token_ids:
            chunk["prompt_token_ids"] = delta["prompt_token_ids"] = self._prompt_ids()
        return chunk

    def _chunk(
        self, answer: Answer, part: CompletionOutput, usage: Usage | None
    ) -> dict[str, Any] | None:
        """The chunk of a step, None when there is nothing to show yet."""
        said = answer.push(part.text, len(part.token_ids), part.finished)
        delta: dict[str, Any] = {}
        if said.content:
            delta["content"] = said.content
        if said.reasoning and self._body.include_reasoning is not False:
            delta.update(reasoning_content=said.reasoning, reasoning=said.reasoning)
        if said.tool_calls:
            delta["tool_calls"] = tool_call_deltas(said.tool_calls)
        carries_tokens = bool(self._body.logprobs or self._body.return_token_ids)
        if not delta and not part.finished and not (carries_tokens and part.token_ids):
            return None
        choice: dict[str, Any] = {
            "index": part.index,
            "delta": delta,
            "logprobs": self._logprobs(part.logprobs or [], part.token_ids),
            "finish_reason": answer.finish_reason(part.finish_reason),
        }
        if part.finished:
            choice["stop_reason"] = part.stop_reason
        if self._body.return_token_ids:
            choice["token_ids"] = delta["completion_token_ids"] = part.token_ids
        return self._envelope(CHUNK, [choice], usage)


def _forced_tools() -> Any:
    """What is known of tool calls that a grammar forces: a part of the core in fd-parsers."""
    try:
        return part("forced-tools", "tool_choice required, or of a named function,")
    except PluginNotFound as error:
        raise InvalidRequest(str(error), param="tool_choice") from None
