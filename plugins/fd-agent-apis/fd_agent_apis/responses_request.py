"""The body of POST /v1/responses, read into a chat request.

Agents send items and tools that only some servers know, and a refusal would end their session. So
what is unknown is left out and named in the header X-Ignored-Fields; what would change the answer
silently is refused.
"""

from __future__ import annotations

import json
import logging
from typing import Any, ClassVar

from pydantic import Field

from fastdeploy_core.errors import InvalidRequest

from . import checks
from .conversation import Conversation, Part
from .tools import Tool, Tools, shown_name

logger = logging.getLogger(__name__)

# The chat path's fields in this API's words, for errors.
NAMES = {
    "messages": "input",
    "prompt": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "structured_outputs": "text.format",
    "reasoning_effort": "reasoning.effort",
    "logprobs": "top_logprobs",
}
STATELESS = "nothing is stored here; send the whole conversation in input"
_REFUSED = {
    "previous_response_id": f"previous_response_id is not possible: {STATELESS}",
    "conversation": f"conversation is not possible: {STATELESS}",
    "background": "background is not possible: answers are not stored; use stream",
    "prompt": "prompt is not possible: no prompt templates are stored; use instructions and input",
}
PICTURE = '{"type": "input_image", "image_url": "data:image/..."}'
_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_ROLES = ("user", "assistant", "system", "developer")
_LOGPROBS = "message.output_text.logprobs"


class ResponsesRequest(checks.AgentBody):
    """A conversation to be continued. `input` and others of many forms are read further below."""

    also_known: ClassVar[frozenset[str]] = checks.AgentBody.also_known | {
        *("prompt_cache_retention", "prompt_cache_options", "service_tier", "client_metadata"),
        *("stream_options", "moderation"),
    }

    model: str | None = Field(default=None, max_length=256)
    input: Any = None
    instructions: str | None = None
    stream: bool | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    include: list[Any] | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    max_tool_calls: int | None = None  # of tools that a vendor's server runs; here are none
    truncation: str | None = None
    store: bool | None = None  # true is taken, and answered with false
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    prompt: Any = None


def read(
    body: ResponsesRequest, has_thinking: bool, takes_pictures: bool
) -> tuple[dict[str, Any], Conversation, Tools]:
    """Fields of a chat request but for `messages`, the conversation, and the tools."""
    for field, reason in _REFUSED.items():
        if getattr(body, field):
            raise InvalidRequest(reason, param=field)
    conversation, tools = Conversation(takes_pictures), Tools()
    if body.instructions:
        conversation.system([body.instructions])
    _read_tools(body.tools, "tools", tools, conversation)
    _read_input(body.input, conversation, tools)
    if not conversation.messages:
        raise InvalidRequest("input has no message", param="input")
    fields: dict[str, Any] = {
        "model": body.model,
        "stream": bool(body.stream),
        "max_completion_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "parallel_tool_calls": body.parallel_tool_calls,
        "logprobs": bool(body.top_logprobs) or _LOGPROBS in (body.include or ()) or None,
        "top_logprobs": body.top_logprobs or None,
    }
    truncation = checks.one_of(body.truncation or "disabled", ("auto", "disabled"), "truncation")
    if truncation == "auto" and not conversation.shows_pictures:  # they cannot be cut
        fields["truncate_prompt_tokens"] = -1
    choice = _tool_choice(body.tool_choice, tools)
    if tools.functions:
        fields.update(tools=list(tools.functions.values()), tool_choice=choice)
    wanted = _response_format(body.text)
    if choice in ("auto", "none"):  # a forced call has the form of its own schema
        fields["response_format"] = wanted
    fields.update(_thinking(body.reasoning, has_thinking))
    if conversation.messages[-1]["role"] == "assistant" and _is_begun(body.input[-1]):
        fields["continue_final_message"] = True
    return fields, conversation, tools


def _is_begun(item: dict[str, Any]) -> bool:
    """Whether a text of the assistant is to be continued where it ends, as in vLLM."""
    return "role" in item and item.get("status") in ("in_progress", "incomplete")


def _read_input(given: Any, conversation: Conversation, tools: Tools) -> None:
    if isinstance(given, str):
        conversation.user([given])
        return
    if not isinstance(given, list):
        raise InvalidRequest("input must be text or a list of items", param="input")
    for where, item in checks.records(given, "input"):
        kind = item.get("type")
        if kind is None and "role" in item:
            kind = "message"
        if kind == "message":
            _message(item, where, conversation)
        elif kind == "reasoning":
            _reasoning(item, where, conversation)
        elif kind in ("function_call", "custom_tool_call"):
            _call(item, where, conversation)
        elif kind in ("function_call_output", "custom_tool_call_output"):
            call_id = checks.name(item.get("call_id"), f"{where}.call_id")
            output = _parts(item.get("output"), f"{where}.output", conversation)
            conversation.result(call_id, output)
        elif kind == "additional_tools":
            _read_tools(item.get("tools"), f"{where}.tools", tools, conversation)
        elif kind == "item_reference":
            raise InvalidRequest(f"{where} is an item_reference: {STATELESS}", param=where)
        else:
            checks.refuse_what_is_not_text(kind, where)
            checks.name(kind, f"{where}.type")
            _ignore(conversation, where, kind)


def _ignore(conversation: Conversation, where: str, kind: Any) -> None:
    logger.debug("%s of type %.40r has no effect here", where, kind)
    conversation.ignored.append(where)


def _message(item: dict[str, Any], where: str, conversation: Conversation) -> None:
    role = checks.one_of(item.get("role"), _ROLES, f"{where}.role")
    content, place = item.get("content"), f"{where}.content"
    if role == "user":
        conversation.user(_parts(content, place, conversation))
        return
    texts = _texts(content, place, conversation)
    if role == "assistant":
        conversation.said("".join(texts))
    else:
        conversation.system(texts)


def _texts(content: Any, where: str, conversation: Conversation) -> list[str]:
    """The texts of a content where a picture has no place: itself or its parts."""
    found = _parts(content, where, conversation, may_show=False)
    return [part for part in found if isinstance(part, str)]


def _parts(
    content: Any, where: str, conversation: Conversation, may_show: bool = True
) -> list[Part]:
    """The texts and pictures of a content: itself or its parts."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise InvalidRequest(f"{where} must be text or a list of parts", param=where)
    texts: list[Part] = []
    for place, part in checks.records(content, where):
        kind = part.get("type")
        if kind in _TEXT_PARTS:
            texts.append(checks.text(part.get("text"), f"{place}.text"))
        elif kind == "refusal":
            texts.append(checks.text(part.get("refusal"), f"{place}.refusal"))
        elif kind == "input_image" and may_show and conversation.takes_pictures:
            texts.append(checks.picture(part.get("image_url"), f"{place}.image_url"))
        else:
            shown = PICTURE if may_show and conversation.takes_pictures else ""
            checks.refuse_what_is_not_text(kind, place, shown)
            checks.name(kind, f"{place}.type")
            _ignore(conversation, place, kind)
    return texts


def _reasoning(item: dict[str, Any], where: str, conversation: Conversation) -> None:
    """Thinking comes back as it was sent; without its text (encrypted), nothing is known of it."""
    field = "content" if item.get("content") else "summary"
    texts = _texts(item.get(field) or [], f"{where}.{field}", conversation)
    if texts:
        conversation.thought("\n".join(texts))
    else:
        _ignore(conversation, where, "reasoning without text")


def _call(item: dict[str, Any], where: str, conversation: Conversation) -> None:
    call_id = checks.name(item.get("call_id"), f"{where}.call_id")
    name = checks.name(item.get("name"), f"{where}.name")
    if item["type"] == "custom_tool_call":
        given = checks.text(item.get("input"), f"{where}.input")
        arguments = json.dumps({"input": given}, ensure_ascii=False)
    else:
        arguments = checks.text(item.get("arguments"), f"{where}.arguments")
    namespace = item.get("namespace")
    if namespace is not None:
        checks.text(namespace, f"{where}.namespace")
    conversation.call(call_id, shown_name(name, namespace), arguments)


def _read_tools(
    given: Any, where: str, tools: Tools, conversation: Conversation, namespace: str | None = None
) -> None:
    for place, tool in checks.records(given, where):
        kind = checks.name(tool.get("type"), f"{place}.type")
        if kind == "mcp":  # its calls would be a part of the answer
            raise InvalidRequest(f"{place} is of type mcp: {checks.CALLS_NONE}", param=place)
        if kind not in ("function", "custom", "namespace"):
            _ignore(conversation, place, kind)
            continue
        name = checks.name(tool.get("name"), f"{place}.name")
        if kind == "namespace":
            _read_tools(tool.get("tools"), f"{place}.tools", tools, conversation, name)
            continue
        description = tool.get("description")
        if description is not None:
            checks.text(description, f"{place}.description")
        parameters = tool.get("parameters")
        if parameters is not None:
            checks.record(parameters, f"{place}.parameters")
        if kind == "custom":
            description = _with_format(description, tool.get("format"), f"{place}.format")
        tools.add(Tool(name, namespace, kind == "custom"), description, parameters)


def _with_format(description: str | None, given: Any, where: str) -> str | None:
    """A custom tool's grammar is shown to the model, since no grammar is enforced in a call."""
    wanted = {} if given is None else checks.record(given, where)
    if wanted.get("type") != "grammar":
        return description
    definition = checks.text(wanted.get("definition"), f"{where}.definition")
    lines = [description, f"The input follows this {wanted.get('syntax')} grammar:", definition]
    return "\n".join(line for line in lines if line)


def _tool_choice(given: Any, tools: Tools) -> Any:
    """tool_choice of the chat path; `allowed_tools` leaves only those in `tools`."""
    if given is None or isinstance(given, str):
        choice = checks.one_of(given or "auto", ("auto", "none", "required"), "tool_choice")
    else:
        wanted = checks.record(given, "tool_choice")
        kind = wanted.get("type")
        if kind != "allowed_tools":
            name = _named(wanted, tools, "tool_choice")
            return {"type": "function", "function": {"name": name}}
        modes = ("auto", "required")
        choice = checks.one_of(wanted.get("mode"), modes, "tool_choice.mode")
        allowed = checks.records(wanted.get("tools"), "tool_choice.tools")
        tools.keep({_named(tool, tools, where) for where, tool in allowed})
    if choice == "required" and not tools.functions:
        raise InvalidRequest(
            "tool_choice is required, and there is no tool that this server can show to the model; "
            "give tools of type function, custom or namespace",
            param="tool_choice",
        )
    return choice


def _named(wanted: dict[str, Any], tools: Tools, where: str) -> str:
    kind = checks.one_of(wanted.get("type"), ("function", "custom"), f"{where}.type")
    name = shown_name(checks.name(wanted.get("name"), f"{where}.name"), wanted.get("namespace"))
    if name not in tools.functions:
        raise InvalidRequest(
            f"{where} names the {kind} {name!r:.80}; tools has {', '.join(tools.functions)[:200]}",
            param=where,
        )
    return name


def _response_format(given: dict[str, Any] | None) -> dict[str, Any] | None:
    wanted = (given or {}).get("format")
    if wanted is None:
        return None
    wanted = checks.record(wanted, "text.format")
    kinds = ("text", "json_object", "json_schema")
    kind = checks.one_of(wanted.get("type"), kinds, "text.format.type")
    if kind != "json_schema":
        return {"type": kind}
    schema = checks.record(wanted.get("schema"), "text.format.schema")
    name = checks.name(wanted.get("name", "response"), "text.format.name")
    return {"type": kind, "json_schema": {"name": name, "schema": schema}}


def _thinking(given: dict[str, Any] | None, has_thinking: bool) -> dict[str, Any]:
    """reasoning.effort goes to the chat template; it also turns thinking on or off."""
    effort = (given or {}).get("effort")
    if effort is None:
        return {}
    checks.name(effort, "reasoning.effort")
    thinks = effort not in ("none", "minimal")
    if thinks and not has_thinking:  # it would come out as text
        return {"reasoning_effort": effort}
    switches = {"enable_thinking": thinks, "thinking": thinks}
    return {"reasoning_effort": effort, "chat_template_kwargs": switches}
