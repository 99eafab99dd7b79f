"""The body of POST /v1/chat/completions."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from fastdeploy_core.errors import InvalidRequest

from .common import MAX_TOKEN_IDS, ApiModel, SamplingFields

MAX_MESSAGES = 2048
MAX_TOOLS = 1024
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_TOOL_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
_CHOICES = (
    'tool_choice must be none, auto, required, {"type": "function", "function": {"name": ...}} or '
    '{"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}'
)
# FastDeploy 2.x read template switches from `metadata` and the body; these are still read there.
_METADATA_KWARGS = ("enable_thinking", "thinking_mode")


class _Allowed(ApiModel):
    mode: Literal["auto", "required"]
    tools: list[dict[str, Any]] = Field(min_length=1)


class AllowedTools(ApiModel):
    """A tool_choice that shows the model some of the tools only."""

    type: Literal["allowed_tools"]
    allowed_tools: _Allowed


class ChatCompletionRequest(SamplingFields):
    """A conversation to be continued."""

    messages: Any = None
    max_completion_tokens: int | None = Field(default=None, ge=1)
    max_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=-1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | AllowedTools | dict[str, Any] | None = Field(
        default=None, union_mode="left_to_right"
    )
    parallel_tool_calls: bool | None = None
    enable_thinking: bool | None = None
    reasoning_effort: str | None = Field(default=None, max_length=32)
    include_reasoning: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    disable_chat_template: bool | None = None
    add_special_tokens: bool = False  # a chat template writes them itself
    echo: bool | None = None

    @field_validator("tool_choice", mode="before")
    @classmethod
    def _known_choice(cls, value: Any) -> Any:
        if value == "any":  # Mistral's word
            return "required"
        if not isinstance(value, dict | None) and value not in ("none", "auto", "required"):
            raise InvalidRequest(_CHOICES, param="tool_choice")
        return value

    @field_validator("messages")
    @classmethod
    def _check_messages(cls, value: Any) -> Any:
        if value is None:
            return None
        if not isinstance(value, list) or not value:
            raise InvalidRequest("messages must be a non-empty list", param="messages")
        if all(type(item) is int for item in value):
            if min(value) < 0 or len(value) > MAX_TOKEN_IDS:
                raise InvalidRequest("messages as token ids must be ids", param="messages")
            return value
        if len(value) > MAX_MESSAGES:
            raise InvalidRequest(
                f"messages has {len(value)} entries; at most {MAX_MESSAGES} are possible",
                param="messages",
            )
        for index, message in enumerate(value):
            _check_message(message, f"messages[{index}]")
        return value

    @field_validator("tools")
    @classmethod
    def _check_tools(cls, value: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
        if not value:  # agents send an empty list, too
            return None
        if len(value) > MAX_TOOLS:
            raise InvalidRequest(
                f"tools may have up to {MAX_TOOLS} entries, got {len(value)}", param="tools"
            )
        for index, tool in enumerate(value):
            _check_tool(tool, f"tools[{index}]")
        return value

    @model_validator(mode="after")
    def _rules(self) -> ChatCompletionRequest:
        if self.messages is None and self.prompt_token_ids is None:
            raise InvalidRequest("messages is missing", param="messages")
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs=true", param="top_logprobs")
        if self.logprob_token_ids and not self.logprobs:
            raise InvalidRequest("logprob_token_ids needs logprobs=true", param="logprob_token_ids")
        last = self.messages[-1] if self.messages else None
        if isinstance(last, dict) and last["role"] == "assistant" and last.get("prefix") is True:
            self.continue_final_message = True  # Mistral's and DeepSeek's way to say it
        if self.add_generation_prompt and self.continue_final_message:
            self.add_generation_prompt = "add_generation_prompt" in self.model_fields_set
            if self.add_generation_prompt:
                raise InvalidRequest(
                    "add_generation_prompt and continue_final_message exclude each other",
                    param="continue_final_message",
                )
        self._check_tool_choice()
        return self

    def _check_tool_choice(self) -> None:
        choice = self.tool_choice
        if choice in (None, "none") or (choice == "auto" and not self.tools):
            return
        if not self.tools:
            raise InvalidRequest("tool_choice needs tools", param="tool_choice")
        if isinstance(choice, str):
            return
        allowed = choice.allowed_tools.tools if isinstance(choice, AllowedTools) else [choice]
        shown, names = [_named(tool) for tool in allowed], [_named(tool) for tool in self.tools]
        if wrong := [name for name in shown if name not in names]:
            raise InvalidRequest(
                f"tool_choice names {wrong[0]!r:.80}; tools has {', '.join(names)[:200]}",
                param="tool_choice",
            )
        if isinstance(choice, AllowedTools):
            self.tools = [tool for tool in self.tools if _named(tool) in shown]
            self.tool_choice = choice.allowed_tools.mode

    def named_tool(self) -> str | None:
        """The one function that tool_choice names."""
        return _named(self.tool_choice) if isinstance(self.tool_choice, dict) else None

    def echoed(self, role: str) -> str:
        """What stands before the answer with `echo`: the last message, if it is of this role."""
        if not self.echo or not self.messages or not isinstance(self.messages[-1], dict):
            return ""
        last = self.messages[-1]
        if last["role"] != role:
            return ""
        content = last.get("content") or ""
        if isinstance(content, str):
            return content
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))

    def wants_tools(self) -> bool:
        """Whether the model sees any tools."""
        return bool(self.tools) and self.tool_choice != "none"

    def template_kwargs(self, defaults: dict[str, Any]) -> dict[str, Any]:
        """Values for the chat template: the server's defaults, then the request's."""
        given = {"enable_thinking": self.enable_thinking, **(self.metadata or {})}
        kwargs = {**defaults, **{n: given[n] for n in _METADATA_KWARGS if given.get(n) is not None}}
        if self.reasoning_effort is not None:
            kwargs["reasoning_effort"] = self.reasoning_effort
        kwargs.update(self.chat_template_kwargs or {})
        return kwargs

    def raw_prompt(self) -> str | list[int] | None:
        """The prompt when no template is used: token ids, or the first message unchanged."""
        if self.prompt_token_ids is not None:
            if not self.prompt_token_ids:
                raise InvalidRequest("prompt_token_ids must not be empty", param="prompt_token_ids")
            return self.prompt_token_ids
        if isinstance(self.messages[0], int):
            return list(self.messages)
        if self.disable_chat_template:
            content = self.messages[0].get("content")
            if not isinstance(content, str) or not content:
                raise InvalidRequest(
                    "disable_chat_template needs a first message with text", param="messages"
                )
            return content
        return None


def _named(choice: Any) -> str:
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if choice.get("type", "function") != "function" or not isinstance(name, str):
        raise InvalidRequest(_CHOICES, param="tool_choice")
    return name


def _check_message(message: Any, where: str) -> None:
    if not isinstance(message, dict):
        raise InvalidRequest(f"{where} must be an object", param=where)
    role = message.get("role")
    if role not in ROLES:
        raise InvalidRequest(
            f"{where}.role is {role!r:.40}; possible: {', '.join(ROLES)}", param=f"{where}.role"
        )
    content = message.get("content")
    possible = str | list | dict if role == "tool" else str | list
    if not isinstance(content, possible) and (content is not None or role != "assistant"):
        raise InvalidRequest(
            f"{where}.content must be text or a list of parts", param=f"{where}.content"
        )


def _check_tool(tool: dict[str, Any], where: str) -> None:
    function = tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(function, dict):
        raise InvalidRequest(
            f'{where} must be {{"type": "function", "function": {{...}}}}', param=where
        )
    name = function.get("name")
    if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
        raise InvalidRequest(
            f"{where}.function.name must be 1 to 64 letters, digits, '_', '-' or '.'", param=where
        )
    if not isinstance(function.get("description"), str | None):
        raise InvalidRequest(f"{where}.function.description must be text", param=where)
    if not isinstance(function.get("parameters"), dict | None):
        raise InvalidRequest(f"{where}.function.parameters must be an object", param=where)
