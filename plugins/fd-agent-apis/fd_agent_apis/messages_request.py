"""The bodies of POST /v1/messages and /v1/messages/count_tokens, read into a chat request.

Agents send blocks and tools that only some servers know, and a refusal would end their session. So
what is unknown is left out and named in the header X-Ignored-Fields; what would change the answer
silently is refused.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from typing import Any, ClassVar

from pydantic import Field

from fastdeploy_core.errors import InvalidRequest

from . import checks
from .conversation import Conversation, Part
from .tools import Tool, Tools, shown_name

logger = logging.getLogger(__name__)

# The chat path's fields in this API's words, for errors.
NAMES = {
    "messages": "messages",
    "prompt": "messages",
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "structured_outputs": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
}
# Claude Code begins its system text with a line whose last number changes with each prompt: nothing
# after it would be found in the prefix cache.
_BILLING = "x-anthropic-billing-header:"
PICTURE = '{"type": "image", "source": {"type": "base64", "media_type": ..., "data": ...}}'
# "ctx" and "msg": of releases of Claude Code
_ROLES = {role: role for role in ("user", "assistant", "system")} | {"ctx": "user", "msg": "user"}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class CountRequest(checks.AgentBody):
    """A conversation to be counted."""

    also_known: ClassVar[frozenset[str]] = checks.AgentBody.also_known | {
        *("metadata", "context_management", "service_tier", "container", "cache_control"),
        *("safeguards", "inference_geo"),
    }

    model: str | None = Field(default=None, max_length=256)
    messages: Any = None
    system: Any = None
    tools: list[Any] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None  # of older clients: output_config.format
    mcp_servers: list[Any] | None = None


class MessagesRequest(CountRequest):
    """A conversation to be continued. Fields of many forms are read further below."""

    max_tokens: int = Field(ge=1)
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None


def read(
    body: CountRequest, has_thinking: bool, takes_pictures: bool
) -> tuple[dict[str, Any], Conversation, Tools]:
    """Fields of a chat request but for `messages`, the conversation, and the tools."""
    if body.mcp_servers:
        raise InvalidRequest(
            f"mcp_servers is not possible: {checks.CALLS_NONE}", param="mcp_servers"
        )
    conversation, tools = Conversation(takes_pictures), Tools()
    if body.system is not None:
        texts = _texts(body.system, "system", conversation)
        conversation.system([text for text in texts if not text.startswith(_BILLING)])
    _read_tools(body.tools, tools, conversation)
    _read_messages(body.messages, conversation)
    fields: dict[str, Any] = {"model": body.model}
    if isinstance(body, MessagesRequest):
        fields.update(
            stream=bool(body.stream),
            max_completion_tokens=body.max_tokens,
            stop=body.stop_sequences or None,
            temperature=body.temperature,
            top_p=body.top_p,
        )
        budget = _thinking_budget(body.thinking, body.max_tokens)
        if has_thinking:
            fields["thinking_token_budget"] = budget
    choice, is_parallel = _tool_choice(body.tool_choice, tools)
    if tools.functions:
        fields.update(tools=list(tools.functions.values()), tool_choice=choice)
        fields["parallel_tool_calls"] = is_parallel
    config = body.output_config or {}
    wanted = _response_format(config.get("format") or body.output_format)
    if choice in ("auto", "none"):  # a forced call has the form of its own schema
        fields["response_format"] = wanted
    if config.get("effort") is not None:
        fields["reasoning_effort"] = checks.name(config["effort"], "output_config.effort")
    fields.update(_thinking_switch(body.thinking, has_thinking))
    if conversation.messages[-1]["role"] == "assistant":  # to be continued where it ends
        if conversation.messages[-1].get("tool_calls"):
            raise InvalidRequest(
                "messages ends with a tool_use block; a tool_result must follow", param="messages"
            )
        fields["continue_final_message"] = True
    return fields, conversation, tools


def _ignore(conversation: Conversation, where: str, kind: Any) -> None:
    logger.debug("%s of type %.40r has no effect here", where, kind)
    conversation.ignored.append(where)


def _texts(content: Any, where: str, conversation: Conversation) -> list[str]:
    """The texts of a content where a picture has no place: itself or its blocks."""
    texts: list[str] = []
    for place, block in _blocks(content, where):
        kind = checks.name(block.get("type"), f"{place}.type")
        if kind == "text":
            texts.append(checks.text(block.get("text"), f"{place}.text"))
        else:
            _refuse_or_ignore(kind, place, conversation)
    return texts


def _blocks(content: Any, where: str) -> Iterable[tuple[str, dict[str, Any]]]:
    """The blocks of a content, each with its place; a text is one."""
    if isinstance(content, str):
        return [(where, {"type": "text", "text": content})]
    if not isinstance(content, list):
        raise InvalidRequest(f"{where} must be text or a list of blocks", param=where)
    return checks.records(content, where)


def _part(block: dict[str, Any], where: str, conversation: Conversation) -> list[Part]:
    """What a user or a tool says or shows in a block; nothing if it has no effect here."""
    kind = checks.name(block.get("type"), f"{where}.type")
    if kind == "text":
        return [checks.text(block.get("text"), f"{where}.text")]
    if kind == "image" and conversation.takes_pictures:
        source = checks.record(block.get("source"), f"{where}.source")
        field, begin = "url", ""
        if checks.one_of(source.get("type"), ("base64", "url"), f"{where}.source.type") != "url":
            field = "data"
            media = checks.name(source.get("media_type"), f"{where}.source.media_type")
            begin = f"data:{media};base64,"
        return [checks.picture(source.get(field), f"{where}.source.{field}", begin)]
    if kind == "search_result":
        return _document(block.get("title"), block, where, conversation)
    if kind == "document":
        source = checks.record(block.get("source"), f"{where}.source")
        if source.get("type") in ("text", "content"):
            return _document(block.get("title"), source, f"{where}.source", conversation)
    _refuse_or_ignore(kind, where, conversation, PICTURE)
    return []


def _document(
    title: Any, source: dict[str, Any], where: str, conversation: Conversation
) -> list[Part]:
    """What a document of text or something found says, below its title."""
    parts: list[Part] = []
    if source.get("type") == "text":
        parts.append(checks.text(source.get("data"), f"{where}.data"))
    else:
        for place, block in _blocks(source.get("content"), f"{where}.content"):
            parts += _part(block, place, conversation)
    texts = [title] if isinstance(title, str) else []
    texts += [part for part in parts if isinstance(part, str)]
    return ["\n".join(texts), *(part for part in parts if not isinstance(part, str))]


def _refuse_or_ignore(kind: str, where: str, conversation: Conversation, shown: str = "") -> None:
    checks.refuse_what_is_not_text(kind, where, shown if conversation.takes_pictures else "")
    _ignore(conversation, where, kind)


def _read_messages(given: Any, conversation: Conversation) -> None:
    if not isinstance(given, list) or not given:
        raise InvalidRequest("messages must be a list of messages, not empty", param="messages")
    for where, message in checks.records(given, "messages"):
        role = checks.one_of(message.get("role"), tuple(_ROLES), f"{where}.role")
        content, place = message.get("content"), f"{where}.content"
        if role == "system":
            conversation.system(_texts(content, place, conversation))
        elif _ROLES[role] == "user":
            _user(content, place, conversation)
        else:
            _assistant(content, place, conversation)
    if all(message["role"] == "system" for message in conversation.messages):
        raise InvalidRequest("messages has no message of a user", param="messages")


def _user(content: Any, where: str, conversation: Conversation) -> None:
    """Results of tools come first, as the calls before them want it."""
    parts: list[Part] = []
    num_results = 0
    for place, block in _blocks(content, where):
        if block.get("type") == "tool_result":
            num_results += 1
            _result(block, place, conversation)
        else:
            parts += _part(block, place, conversation)
    if parts or not num_results:
        conversation.user(parts)


def _result(block: dict[str, Any], where: str, conversation: Conversation) -> None:
    call_id = checks.name(block.get("tool_use_id"), f"{where}.tool_use_id")
    content = block.get("content")
    parts: list[Part] = []
    for place, inner in [] if content is None else _blocks(content, f"{where}.content"):
        parts += _part(inner, place, conversation)
    texts = [part for part in parts if isinstance(part, str)]
    # chat templates have no mark for it
    if block.get("is_error") and not "".join(texts[:1]).lower().startswith("error"):
        pictures = [part for part in parts if not isinstance(part, str)]
        parts = ["Error: " + "\n".join(texts), *pictures]
    conversation.result(call_id, parts)


def _assistant(content: Any, where: str, conversation: Conversation) -> None:
    conversation.said("")  # a turn of its own, even if nothing of it is known
    for place, block in _blocks(content, where):
        kind = checks.name(block.get("type"), f"{place}.type")
        if kind == "text":
            conversation.said(checks.text(block.get("text"), f"{place}.text"))
        elif kind == "thinking":  # any signature will do
            conversation.thought(checks.text(block.get("thinking"), f"{place}.thinking"))
        elif kind == "tool_use":
            call_id = checks.name(block.get("id"), f"{place}.id")
            name = checks.name(block.get("name"), f"{place}.name")
            given = checks.record(block.get("input"), f"{place}.input")
            arguments = json.dumps(given, ensure_ascii=False)
            conversation.call(call_id, shown_name(name), arguments)
        else:
            _refuse_or_ignore(kind, place, conversation)


def _read_tools(given: Any, tools: Tools, conversation: Conversation) -> None:
    for place, tool in checks.records(given, "tools"):
        kind = tool.get("type")
        if kind not in (None, "custom", "function"):  # the API's own, which this server has not
            _ignore(conversation, place, kind)
            continue
        name = checks.name(tool.get("name"), f"{place}.name")
        description = tool.get("description")
        if description is not None:
            checks.text(description, f"{place}.description")
        schema = checks.record(tool.get("input_schema"), f"{place}.input_schema")
        tools.add(Tool(name), description, schema)


def _tool_choice(given: dict[str, Any] | None, tools: Tools) -> tuple[Any, bool | None]:
    """tool_choice and parallel_tool_calls of the chat path."""
    if given is None:
        return "auto", None
    kinds = (*_CHOICES, "tool")
    kind = checks.one_of(given.get("type"), kinds, "tool_choice.type")
    is_parallel = False if given.get("disable_parallel_tool_use") is True else None
    if kind in ("any", "tool") and not tools.functions:
        raise InvalidRequest(
            f"tool_choice of type {kind} needs tools that this server can show to the model",
            param="tool_choice",
        )
    if kind != "tool":
        return _CHOICES[kind], is_parallel
    name = shown_name(checks.name(given.get("name"), "tool_choice.name"))
    if name not in tools.functions:
        raise InvalidRequest(
            f"tool_choice.name is {name!r:.80}; tools has {', '.join(tools.functions)[:200]}",
            param="tool_choice.name",
        )
    return {"type": "function", "function": {"name": name}}, is_parallel


def _response_format(given: Any) -> dict[str, Any] | None:
    if given is None:
        return None
    wanted, where = checks.record(given, "output_config.format"), "output_config.format"
    checks.one_of(wanted.get("type"), ("json_schema",), f"{where}.type")
    schema = checks.record(wanted.get("schema"), f"{where}.schema")
    return {"type": "json_schema", "json_schema": {"name": "response", "schema": schema}}


def _thinking_budget(given: dict[str, Any] | None, max_tokens: int) -> int | None:
    """A budget as large as max_tokens is lowered, so that there is room for an answer."""
    if given is None or given.get("type") != "enabled":
        return None
    budget = given.get("budget_tokens")
    if type(budget) is not int or budget < 1:
        raise InvalidRequest(
            f"thinking.budget_tokens must be a number of tokens, got {budget!r:.40}",
            param="thinking.budget_tokens",
        )
    return min(budget, max_tokens - 1)


def _thinking_switch(given: dict[str, Any] | None, has_thinking: bool) -> dict[str, Any]:
    if given is None:
        return {}
    kinds = ("enabled", "adaptive", "disabled")
    thinks = checks.one_of(given.get("type"), kinds, "thinking.type") != "disabled"
    if thinks and not has_thinking:  # it would come out as text
        return {}
    return {"chat_template_kwargs": {"enable_thinking": thinks, "thinking": thinks}}
