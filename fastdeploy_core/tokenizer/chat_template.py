"""Chat templates: the sandboxed jinja2 environment, the values that a request may pass, the size
limit of the result.

The model's own template is the operator's choice and renders in this process. A template in a
request is treated as hostile and renders in a process of its own (part `request-templates`). Both
run in the same sandbox.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from fastdeploy_core.errors import InvalidRequest

logger = logging.getLogger(__name__)

MAX_RENDERED_CHARS = 4 * 1024 * 1024
MAX_TEMPLATE_CHARS = 64 * 1024  # of a template in a request
MAX_KWARGS = 32
NEAR = 0.8  # of names that are one misspelt, as difflib compares them
_unread: set[str] = set()  # names that the log told
# Switches that clients send to any model; a template that does not know them ignores them.
COMMON_KWARGS = frozenset(
    {
        "date_string",
        "enable_thinking",
        "reasoning_effort",
        "thinking",
        "thinking_budget",
        "thinking_mode",
        "tool_choice",
    }
)
# Names that the server sets itself; a request that set them would change what is rendered or how.
RESERVED_NAMES = frozenset(
    {
        "add_generation_prompt",
        "add_special_tokens",
        "bos_token",
        "chat_template",
        "continue_final_message",
        "conversation",
        "dict",
        "documents",
        "eos_token",
        "messages",
        "namespace",
        "pad_token",
        "raise_exception",
        "return_dict",
        "return_tensors",
        "strftime_now",
        "tokenize",
        "tokenizer",
        "tools",
        "truncation",
        "unk_token",
    }
)
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning", "thoughts")
_USUAL_ROLES = {"developer": "system", "function": "tool"}
_MARK = "CONTINUE_FINAL_MESSAGE_TAG "


class TemplateRefusal(Exception):
    """A template that cannot be used or refuses the conversation; the message is for clients."""


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %} marks the assistant's part for training; here it only shows its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it this way)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class _Namespace(jinja2.utils.Namespace):
    """jinja's namespace() without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, rest = args[0], args[1:]
        values = dict(*rest, **kwargs)
        for name in values:
            _check_attribute(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError("names in a namespace must not begin with '_'")


class _Dict:
    """dict() for templates: only the call, without the class's attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.exceptions.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja's own filter escapes for HTML, but models were trained on plain JSON.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@functools.cache
def environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """The sandbox, with everything that chat templates of Hugging Face models expect."""
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
        autoescape=False,  # a prompt is not HTML
    )
    env.filters["tojson"] = _tojson
    env.globals.update(
        raise_exception=_raise_exception,
        # local time, as the templates' authors expect
        strftime_now=lambda pattern: datetime.now().strftime(pattern),
        dict=_Dict(),
        namespace=_Namespace,
    )
    return env


class TextParts(list[dict[str, Any]]):
    """Content in parts, for templates that iterate over it. Where a template treats it as text, it
    is its texts, joined by line breaks: many iterate in the messages of users only."""

    def __str__(self) -> str:
        return "\n".join(str(part["text"]) for part in self if "text" in part)

    def __add__(self, other: Any) -> Any:
        return str(self) + other if isinstance(other, str | TextParts) else super().__add__(other)

    def __radd__(self, other: Any) -> Any:
        return other + str(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(str(self), name)  # methods of texts, such as split()


class ChatTemplate:
    """A compiled template. `variables`: the names that the template reads and does not define;
    `reads_parts`: it iterates over the parts of a message's content."""

    def __init__(self, source: str) -> None:
        try:
            tree = environment().parse(source)
            self._compared = frozenset(_compared(tree))  # first: jinja2 then folds constants
            self.variables = frozenset(jinja2.meta.find_undeclared_variables(tree))
            self.reads_parts = _reads_parts(tree)
            self._template = environment().from_string(tree)
        except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError) as error:
            raise TemplateRefusal(f"the chat template is malformed: {_reason(error)}") from error

    def role(self, given: str) -> str:
        """The role that the template shows a message under. Most leave out a message whose role
        they do not know, so a newer or older name of a role is replaced by the usual one."""
        return given if given in self._compared else _USUAL_ROLES.get(given, given)

    def render(self, variables: Mapping[str, Any], max_chars: int = MAX_RENDERED_CHARS) -> str:
        """Render; stops as soon as the text exceeds `max_chars`."""
        pieces: list[str] = []
        length = 0
        try:
            for piece in self._template.generate(**variables):
                length += len(piece)
                if length > max_chars:
                    raise TemplateRefusal(
                        f"the rendered conversation exceeds {max_chars} characters"
                    )
                pieces.append(piece)
        except jinja2.exceptions.SecurityError as error:
            raise TemplateRefusal("the chat template does what the sandbox forbids") from error
        except jinja2.TemplateError as error:
            raise TemplateRefusal(f"the chat template refuses: {_reason(error)}") from error
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise TemplateRefusal(f"the chat template failed: {_reason(error)}") from error
        except (RecursionError, MemoryError) as error:
            raise TemplateRefusal("the chat template needs too much memory") from error
        return "".join(pieces)


def _reason(error: BaseException) -> str:
    return str(error)[:300] or type(error).__name__


def _compared(tree: jinja2.nodes.Template) -> Iterator[Any]:
    """The constants that the template compares something with."""
    for comparison in tree.find_all(jinja2.nodes.Compare):
        for constant in comparison.find_all(jinja2.nodes.Const):
            yield constant.value


def _reads_parts(tree: jinja2.nodes.Template) -> bool:
    """Whether a loop iterates over message.content, directly or under another name."""
    aliases = {
        node.target.name
        for node in tree.find_all(jinja2.nodes.Assign)
        if isinstance(node.target, jinja2.nodes.Name) and _is_content(node.node)
    }
    return any(
        _is_content(loop.iter)
        or (isinstance(loop.iter, jinja2.nodes.Name) and loop.iter.name in aliases)
        for loop in tree.find_all(jinja2.nodes.For)
    )


def _is_content(node: jinja2.nodes.Node) -> bool:
    if isinstance(node, jinja2.nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, jinja2.nodes.Getitem):
        return isinstance(node.arg, jinja2.nodes.Const) and node.arg.value == "content"
    return False


def check_template_kwargs(
    kwargs: Mapping[str, Any], known: frozenset[str] | None
) -> dict[str, Any]:
    """A request's chat_template_kwargs as plain data. A name that the template does not read has no
    effect, as with vLLM; one that is much like another is refused, since it is misspelt.

    `known`: the names that the template reads; None if unknown (a request's own template).
    """
    if len(kwargs) > MAX_KWARGS:
        raise InvalidRequest(
            f"chat_template_kwargs has {len(kwargs)} entries; at most {MAX_KWARGS} are possible",
            param="chat_template_kwargs",
        )
    possible = None if known is None else (known | COMMON_KWARGS) - RESERVED_NAMES
    for name in kwargs:
        if not isinstance(name, str) or not name.isidentifier() or name.startswith("_"):
            raise InvalidRequest(
                f"chat_template_kwargs has a malformed name: {name!r:.60}",
                param="chat_template_kwargs",
            )
        if name in RESERVED_NAMES:
            raise InvalidRequest(
                f"chat_template_kwargs must not set {name!r}; it is not the template's",
                param="chat_template_kwargs",
            )
        if possible is not None and name not in possible:
            if near := difflib.get_close_matches(name, possible, n=1, cutoff=NEAR):
                raise InvalidRequest(
                    f"chat_template_kwargs sets {name!r:.60}, which the chat template does not "
                    f"read; did you mean {near[0]!r}?",
                    param="chat_template_kwargs",
                )
            if name not in _unread and len(_unread) < MAX_KWARGS:
                _unread.add(name)
                logger.warning(
                    "chat_template_kwargs.%.60s has no effect: the template does not read it", name
                )
    plain: dict[str, Any] = plain_data(dict(kwargs))
    return plain


def plain_data(value: Any, depth: int = 0) -> Any:
    """Rebuild a value from plain JSON types, so that a template gets no object with methods."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if depth > 64:
        raise InvalidRequest("messages and tools must not nest deeper than 64", param="messages")
    if isinstance(value, Mapping):
        return {plain_data(k, depth + 1): plain_data(v, depth + 1) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain_data(item, depth + 1) for item in value]
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int | float):
        return int(value) if isinstance(value, int) else float(value)
    if callable(getattr(value, "model_dump", None)):
        return plain_data(value.model_dump(exclude_none=True), depth + 1)
    raise InvalidRequest(
        f"messages and tools must be plain data, found {type(value).__name__}", param="messages"
    )


def prepare_messages(
    messages: Sequence[Mapping[str, Any]], keep_parts: bool = False, kinds: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Check a conversation and bring it into the form that templates expect.

    Content in parts becomes text (parts joined by line breaks) unless `keep_parts`. Parts of
    `kinds` stay {"type": kind}, for a template that writes something in their place. Arguments of
    earlier tool calls become objects. Reasoning is stored under every name that templates read.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
        raise InvalidRequest("messages must be a list of messages", param="messages")
    prepared = [
        _prepare_message(plain_data(message), i, keep_parts, kinds)
        for i, message in enumerate(messages)
    ]
    if not prepared:
        raise InvalidRequest("messages must not be empty", param="messages")
    return prepared


def _prepare_message(
    given: Any, index: int, keep_parts: bool, kinds: Sequence[str]
) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(given, dict) or not isinstance(given.get("role"), str):
        raise InvalidRequest(f"{where} must be an object with a role", param="messages")
    message: dict[str, Any] = given
    content = message.get("content")
    if content is None and not message.get("tool_calls"):
        content = message["content"] = ""  # the turn ended in its thinking
    if isinstance(content, dict) and message["role"] == "tool":  # as FastDeploy 2.x takes results
        content = message["content"] = json.dumps(content, ensure_ascii=False)
    if isinstance(content, list) and message["role"] == "assistant":
        content = _take_thinking(message, content, where)
    if isinstance(content, list) or (content is None and keep_parts):  # beside calls of tools
        parts = TextParts(_parts(content or [], where, kinds if keep_parts else ()))
        message["content"] = parts if keep_parts else str(parts)
    elif not isinstance(content, str | None):
        raise InvalidRequest(f"{where}.content must be text or a list of parts", param="messages")
    calls = message.get("tool_calls")
    if calls is None:
        message.pop("tool_calls", None)
    elif not isinstance(calls, list):
        raise InvalidRequest(f"{where}.tool_calls must be a list", param="messages")
    else:
        for call in calls:
            _open_arguments(call, where)
    reasoning = next((message[n] for n in _REASONING_NAMES if message.get(n) is not None), None)
    if reasoning is not None:
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message


def _take_thinking(message: dict[str, Any], parts: list[Any], where: str) -> list[Any]:
    """The parts without those of thinking, as Mistral's and Anthropic's clients return them, which
    become the message's reasoning."""
    others, thoughts = [], []
    for part in parts:
        thought = part.get("thinking") if isinstance(part, dict) else None
        if isinstance(thought, list):
            thought = "".join(each["text"] for each in _parts(thought, where, ()))
        if isinstance(thought, str):
            thoughts.append(thought)
        else:
            others.append(part)
    if thoughts:
        message.setdefault("reasoning_content", "".join(thoughts))
    return others


def _parts(parts: list[Any], where: str, kinds: Sequence[str]) -> Iterator[dict[str, Any]]:
    for number, part in enumerate(parts):
        if isinstance(part, str):
            yield {"type": "text", "text": part}
        elif isinstance(part, dict) and isinstance(t := part.get("text", part.get("refusal")), str):
            yield {"type": "text", "text": t}
        elif isinstance(part, dict) and part.get("type") in kinds:
            yield {"type": part["type"]}
        else:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            kind = "text without text" if kind == "text" else kind
            raise InvalidRequest(
                f"{where}.content[{number}] is a part of type {kind!r:.40}; this model takes "
                f"{', '.join(('text', *kinds))}",
                param="messages",
            )


def _open_arguments(call: Any, where: str) -> None:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{where}.tool_calls needs function.name", param="messages")
    arguments = function.get("arguments")
    with contextlib.suppress(ValueError, RecursionError):
        arguments = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
    if not isinstance(arguments, dict):  # broken, as a model may write them
        arguments = {} if arguments is None else {"input": arguments}
    function["arguments"] = arguments


def mark_final_message(messages: list[dict[str, Any]]) -> str:
    """For continue_final_message: append a mark to the last message; returns the message's text."""
    content = messages[-1].get("content")
    if isinstance(content, str):
        messages[-1]["content"] = content + _MARK
        return content
    if isinstance(content, list) and content:
        text = content[-1]["text"]
        content[-1]["text"] = text + _MARK
        return str(text)
    raise InvalidRequest(
        "continue_final_message needs a final message with text", param="continue_final_message"
    )


def cut_at_mark(rendered: str, text: str) -> str:
    """The rendered conversation up to the end of its final message."""
    mark = _MARK.strip()
    end = rendered.rfind(mark)
    if end < 0 or text.strip() not in rendered:
        raise InvalidRequest(
            "continue_final_message: the chat template does not show the final message",
            param="continue_final_message",
        )
    if rendered.startswith(_MARK, end):
        return rendered[:end]
    return rendered[:end].rstrip()  # the template trims messages
