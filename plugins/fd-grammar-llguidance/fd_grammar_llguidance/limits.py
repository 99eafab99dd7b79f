"""Limits on the cost of a constraint, checked in linear time before compilation.

These checks bound what reaches the grammar library. The core's limits on the time and memory of the
compiling process bound everything else.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fastdeploy_core.errors import InvalidRequest
from fastdeploy_core.types import StructuredOutputsParams

MAX_CHOICES = 1000
MAX_ALTERNATIONS = 2000
MAX_REPEAT = 10_000  # of one {m,n}
MAX_REPEAT_PRODUCT = 100_000  # of nested {m,n}
MAX_REF_CHAIN = 64
MAX_TAGS = 64


@dataclass(frozen=True, slots=True)
class Limits:
    """The operator's limits, from the options of GrammarBackend.compile."""

    max_source_bytes: int
    max_depth: int

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Limits:
        """Those given, else the defaults of --structured-outputs-config."""
        return cls(
            int(options.get("max_source_bytes", 16 * 1024)), int(options.get("max_depth", 64))
        )


def refuse(kind: str, why: str) -> InvalidRequest:
    """The error that a client gets for a constraint that is not possible."""
    return InvalidRequest(
        f"structured_outputs.{kind} cannot be used: {why}", param=f"structured_outputs.{kind}"
    )


def check(params: StructuredOutputsParams, limits: Limits) -> str:
    """Return the constraint as one text (JSON where it is not text), or raise InvalidRequest."""
    kind, value = params.kind, getattr(params, params.kind)
    if kind == "choice":
        _check_choice(value)
    if isinstance(value, dict):
        _check_depth(kind, _depth(value), limits)
    source = value if isinstance(value, str) else _dump(kind, value)
    try:
        num_bytes = len(source.encode())
    except UnicodeEncodeError:
        raise refuse(kind, "it holds characters that are no valid Unicode") from None
    if num_bytes > limits.max_source_bytes:
        raise refuse(
            kind, f"it has {num_bytes} bytes; at most {limits.max_source_bytes} are possible"
        )
    if kind == "regex":
        check_regex(kind, source, limits)
    elif kind == "grammar":
        check_grammar(kind, source, limits)
    elif kind in ("json", "structural_tag"):
        _check_json(kind, source, limits)
    return source


def parse_json(kind: str, text: str, limits: Limits) -> Any:
    """Parse client JSON: bounded depth, no NaN or Infinity."""
    _check_depth(kind, _text_depth(text), limits)
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise refuse(kind, "it is not valid JSON") from None


def check_regex(kind: str, pattern: str, limits: Limits) -> None:
    """Check nesting, alternatives and repetition counts of a regular expression."""
    _check_brackets(kind, pattern, limits)
    if pattern.count("|") > MAX_ALTERNATIONS:
        raise refuse(kind, f"the expression has more than {MAX_ALTERNATIONS} alternatives")
    _check_repeats(kind, pattern)


def check_grammar(kind: str, source: str, limits: Limits) -> None:
    """Check nesting, alternatives and repetition counts of a Lark or EBNF grammar."""
    _check_brackets(kind, source, limits)
    if source.count("|") > MAX_ALTERNATIONS:
        raise refuse(kind, f"it has more than {MAX_ALTERNATIONS} alternatives")
    _check_repeats(kind, source)


def _no_constant(name: str) -> Any:
    raise ValueError(name)


def _dump(kind: str, value: Any) -> str:
    try:
        return json.dumps(value, allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        raise refuse(kind, "it is not valid JSON") from None


def _check_choice(choices: Any) -> None:
    if not isinstance(choices, list) or not 0 < len(choices) <= MAX_CHOICES:
        raise refuse("choice", f"it must be a list of 1 to {MAX_CHOICES} strings")
    if not all(isinstance(c, str) and c for c in choices):
        raise refuse("choice", "every choice must be a non-empty string")


def _check_depth(kind: str, depth: int, limits: Limits) -> None:
    if depth > limits.max_depth:
        raise refuse(kind, f"it nests {depth} levels deep; at most {limits.max_depth} are possible")


def _depth(value: Any) -> int:
    """Nesting of dicts and lists, without recursion."""
    deepest, stack = 0, [(value, 1)]
    while stack:
        node, depth = stack.pop()
        deepest = max(deepest, depth)
        children = (
            node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
        )
        stack.extend((child, depth + 1) for child in children if isinstance(child, dict | list))
    return deepest


def _text_depth(text: str) -> int:
    """Bracket depth of JSON text; brackets in strings do not count."""
    depth = deepest = 0
    in_string = escaped = False
    for char in text:
        if in_string:
            if escaped:
                escaped = False
            elif char == "\\":
                escaped = True
            elif char == '"':
                in_string = False
        elif char == '"':
            in_string = True
        elif char in "{[":
            depth += 1
            deepest = max(deepest, depth)
        elif char in "}]":
            depth -= 1
    return deepest


def _check_brackets(kind: str, pattern: str, limits: Limits) -> None:
    depth = deepest = 0
    escaped = False
    for char in pattern:
        if escaped:
            escaped = False
        elif char == "\\":
            escaped = True
        elif char == "(":
            depth += 1
            deepest = max(deepest, depth)
        elif char == ")":
            depth -= 1
    _check_depth(kind, deepest, limits)


def _repeats(pattern: str) -> Iterator[tuple[int, int, int]]:
    """(position, length, largest count) of every {m}, {m,} and {m,n}."""
    start = pattern.find("{")
    while start >= 0:
        end = pattern.find("}", start)
        if end < 0:
            return
        body = pattern[start + 1 : end]
        if len(body) <= 40 and body.replace(",", "", 1).replace(" ", "").isdigit():
            counts = [int(part) for part in body.split(",") if part.strip().isdigit()]
            yield start, end - start + 1, max(counts, default=0)
        start = pattern.find("{", start + 1)


def _check_repeats(kind: str, pattern: str) -> None:
    """Check repetition counts; nested ones multiply: ((a{100}){100}){100}."""
    repeats = {start: (length, count) for start, length, count in _repeats(pattern)}
    if not repeats:
        return
    products, index, closed, escaped = [1], 0, 1, False
    while index < len(pattern):
        if not escaped and index in repeats:
            length, count = repeats[index]
            if count > MAX_REPEAT:
                raise refuse(kind, f"it repeats {count} times; at most {MAX_REPEAT} are possible")
            product = closed * max(count, 1)
            if product > MAX_REPEAT_PRODUCT:
                raise refuse(kind, f"nested repetitions exceed {MAX_REPEAT_PRODUCT} in all")
            products[-1] = max(products[-1], product)
            index, closed = index + length, 1
            continue
        char, was_escaped = pattern[index], escaped
        escaped = char == "\\" and not was_escaped
        closed = 1
        if not was_escaped and char == "(":
            products.append(1)
        elif not was_escaped and char == ")" and len(products) > 1:
            closed = products.pop()  # multiplied by a repetition right after the group
            products[-1] = max(products[-1], closed)
        index += 1


def _check_json(kind: str, source: str, limits: Limits) -> None:
    root = parse_json(kind, source, limits)
    if kind == "json" and not isinstance(root, dict | bool):
        raise refuse(kind, "a JSON schema must be an object or a boolean")
    stack = [root]
    while stack:
        node = stack.pop()
        if isinstance(node, list):
            stack.extend(node)
        elif isinstance(node, dict):
            stack.extend(node.values())
            if isinstance(node.get("$ref"), str):
                _check_reference(kind, root, node["$ref"])
            if isinstance(node.get("pattern"), str):
                check_regex(kind, node["pattern"], limits)
            if kind == "structural_tag" and isinstance(node.get("grammar"), str):
                check_grammar(kind, node["grammar"], limits)
            patterns = node.get("patternProperties")
            for pattern in patterns if isinstance(patterns, dict) else ():
                check_regex(kind, pattern, limits)


def _check_reference(kind: str, root: Any, reference: str) -> None:
    """Allow only references within the schema, and no endless chain of references."""
    for _ in range(MAX_REF_CHAIN):
        if not reference.startswith("#"):
            raise refuse(kind, "$ref may only point into the same schema (start with #)")
        target = root
        for part in reference[1:].strip("/").split("/") if len(reference) > 1 else ():
            name = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(target, dict) or name not in target:
                return  # an anchor, or a wrong pointer, which the grammar library reports
            target = target[name]
        if not isinstance(target, dict) or set(target) - {"$ref", "$defs", "definitions", "title"}:
            return
        if not isinstance(target.get("$ref"), str):
            return
        reference = target["$ref"]
    raise refuse(kind, "a $ref leads back to itself without describing anything")
