"""The answer of POST /v1/responses: a response object, and the events that lead to it.

The object is made of the items that the events have shown, so the two cannot differ.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

from fastdeploy_core.serving.http.errors import ApiError
from fastdeploy_core.serving.openai.chat import Piece
from fastdeploy_core.serving.openai.usage import Usage

from .blocks import Block, Step
from .responses_request import NAMES, ResponsesRequest
from .tools import Tool, Tools

Event = dict[str, Any]


class ResponseWriter:
    """Shows one answer. `call_id`: the id of the HTTP call, `model`: the name that is answered."""

    names: Mapping[str, str] = NAMES

    def __init__(self, body: ResponsesRequest, tools: Tools, call_id: str, model: str) -> None:
        self._tools = tools
        self._id = call_id.removeprefix("resp_")
        self._number = 0
        self._num_logprobs = 0  # of the block that is being shown
        self._items: list[dict[str, Any]] = []
        self._usage: Usage | None = None
        self._response = _echo(body, tools, f"resp_{self._id}", model)
        self.is_cut = False

    def begin(self, usage: Usage) -> Iterator[Event]:
        """The response without output, twice: it was made, and it is being worked on."""
        for name in ("created", "in_progress"):
            yield self._event(name, response={**self._response, "output": []})

    def step(self, step: Step) -> Iterator[Event]:
        """A block is an output item, with one part if it is thinking or text."""
        what, block, text = step
        if block.kind == "call":
            yield from self._call(what, block, text)
        else:
            yield from self._text(what, block, text)

    def idle(self) -> Iterator[Event]:
        """This API has no event for it."""
        return iter(())

    def end(self, last: Piece) -> Iterator[Event]:
        """The whole response."""
        if not self._items:  # clients read the text of an answer from a message
            for what in ("start", "stop"):
                yield from self.step((what, Block("text", 0), ""))
        self._usage = last.usage
        status = "incomplete" if self.is_cut else "completed"
        if self.is_cut:
            self._response["incomplete_details"] = {"reason": "max_output_tokens"}
        self._response.update(status=status, output=self._items, usage=_usage(last.usage))
        if times := last.usage.times():
            self._response["metrics"] = times
        yield self._event(status, response=self._response)

    def failed(self, error: ApiError) -> Event:
        """The response so far, with the error."""
        reason = {"code": "server_error", "message": error.message}
        self._response.update(status="failed", output=self._items, error=reason)
        return self._event("failed", response=self._response)

    def whole(self) -> dict[str, Any]:
        """The response."""
        return self._response

    def _event(self, name: str, /, **fields: Any) -> Event:
        event = {"type": f"response.{name}", "sequence_number": self._number, **fields}
        self._number += 1
        return event

    def _item_id(self, prefix: str, block: Block) -> str:
        return f"{prefix}_{self._id}_{block.index}"

    def _done(self, block: Block, item: dict[str, Any]) -> Event:
        item = {**item, "status": "incomplete" if self.is_cut else "completed"}
        self._items.append(item)
        return self._event("output_item.done", output_index=block.index, item=item)

    def _text(self, what: str, block: Block, text: str) -> Iterator[Event]:
        is_thinking = block.kind == "thinking"
        name = "reasoning_text" if is_thinking else "output_text"
        item_id = self._item_id("rs" if is_thinking else "msg", block)
        place = {"item_id": item_id, "output_index": block.index, "content_index": 0}
        if what == "start":
            item = _text_item(is_thinking, item_id, [])
            item["status"] = "in_progress"
            yield self._event("output_item.added", output_index=block.index, item=item)
            part = _part(Block(block.kind, block.index))
            yield self._event("content_part.added", **place, part=part)
            self._num_logprobs = 0
        elif what == "more":
            more = {} if is_thinking else {"logprobs": block.logprobs[self._num_logprobs :]}
            self._num_logprobs = len(block.logprobs)
            yield self._event(f"{name}.delta", **place, delta=text, **more)
        else:
            part, more = _part(block), {} if is_thinking else {"logprobs": block.logprobs}
            yield self._event(f"{name}.done", **place, text=block.text, **more)
            yield self._event("content_part.done", **place, part=part)
            yield self._done(block, _text_item(is_thinking, item_id, [part]))

    def _call(self, what: str, block: Block, text: str) -> Iterator[Event]:
        tool = self._tools.given(block.name)
        item_id = self._item_id("ctc" if tool.is_custom else "fc", block)
        place = {"item_id": item_id, "output_index": block.index}
        name = "custom_tool_call_input" if tool.is_custom else "function_call_arguments"
        if what == "start":
            item = {**_call_item(tool, item_id, block.call_id, ""), "status": "in_progress"}
            yield self._event("output_item.added", output_index=block.index, item=item)
        elif what == "more":
            if not tool.is_custom:
                yield self._event(f"{name}.delta", **place, delta=text)
        else:
            given = _input_of(block.text) if tool.is_custom else block.text or "{}"
            if tool.is_custom:  # the text is known when its JSON is complete
                yield self._event(f"{name}.delta", **place, delta=given)
                yield self._event(f"{name}.done", **place, input=given)
            else:
                if not block.text:
                    yield self._event(f"{name}.delta", **place, delta=given)
                yield self._event(f"{name}.done", **place, name=tool.name, arguments=given)
            yield self._done(block, _call_item(tool, item_id, block.call_id, given))


def _part(block: Block) -> dict[str, Any]:
    if block.kind == "thinking":
        return {"type": "reasoning_text", "text": block.text}
    part = {"type": "output_text", "text": block.text, "annotations": []}
    return {**part, "logprobs": block.logprobs}


def _text_item(is_thinking: bool, item_id: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
    if is_thinking:
        item: dict[str, Any] = {"type": "reasoning", "id": item_id, "summary": []}
        return {**item, "content": parts, "encrypted_content": None}
    return {"type": "message", "id": item_id, "role": "assistant", "content": parts}


def _call_item(tool: Tool, item_id: str, call_id: str, given: str) -> dict[str, Any]:
    kind, field = (
        ("custom_tool_call", "input") if tool.is_custom else ("function_call", "arguments")
    )
    item = {"type": kind, "id": item_id, "call_id": call_id, "name": tool.name, field: given}
    if tool.namespace is not None:
        item["namespace"] = tool.namespace
    return item


def _input_of(arguments: str) -> str:
    """The text that a custom tool is called with; what is not the expected JSON is passed on."""
    try:
        given = json.loads(arguments)["input"]
    except (ValueError, RecursionError, KeyError, TypeError):
        return arguments
    return given if isinstance(given, str) else arguments


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.num_prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.num_cached_tokens,
            "cache_write_tokens": 0,
        },
        "output_tokens": usage.num_completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens},
        "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
    }


def _echo(body: ResponsesRequest, tools: Tools, response_id: str, model: str) -> dict[str, Any]:
    """What the response says of its request."""
    reasoning = body.reasoning or {}
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {key: reasoning.get(key) for key in ("effort", "summary")},
        "service_tier": "default",
        "store": False,
        "temperature": body.temperature,
        "text": {"format": {"type": "text"}, **(body.text or {})},
        "tool_choice": body.tool_choice or "auto",
        "tools": tools.echo(),
        "top_logprobs": body.top_logprobs or 0,
        "top_p": body.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
        "safety_identifier": body.safety_identifier,
        "prompt_cache_key": body.prompt_cache_key,
        "metadata": body.metadata or {},
    }
