"""Converts client constraints to grammar text for llguidance (its Lark dialect and its JSON-schema
compiler).

GBNF / EBNF grammars (`root ::= ...`) are converted; Lark grammars (`start: ...`) are taken as they
are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from fastdeploy_core.types import StructuredOutputsParams

from . import tags
from .limits import refuse
from .literals import Literals

# Between JSON tokens a weak model may emit blanks for ever; indentation needs only a few.
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,48}"

# An end before the line break that ends the text, as FastDeploy 2.x's documents print it: to
# Python's and other libraries it is true there, llguidance refuses it.
_LINE_END = re.compile(r"(?<!\\)\$(?=(\\n|\n)$)")

_SCHEMA_KEYS = ("items", "additionalItems", "contains", "propertyNames", "if", "then", "else")
_LIST_KEYS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAP_KEYS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
# Formats of texts that llguidance knows; it refuses others.
_FORMATS = {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown"}
_FORMATS |= {"uri", "uuid"}


def to_grammar(
    params: StructuredOutputsParams,
    source: str,
    options: Mapping[str, Any],
    tokenizer: LLTokenizer,
) -> str:
    """The grammar text. `source` is the result of limits.check(). Options: disable_any_whitespace
    (False), disable_additional_properties (True: objects that list properties take no others)."""
    kind = params.kind
    literals = Literals(tokenizer, kind)
    if kind == "json":
        return _json_grammar(json.loads(source), options)
    if kind == "json_object":
        return _json_grammar({"type": "object"}, options)
    if kind == "regex":
        return LLMatcher.grammar_from_regex(_LINE_END.sub("", source))
    if kind == "choice":
        choices = json.loads(source)
        return LLMatcher.grammar_from_lark(
            "start: " + " | ".join(map(literals.expression, choices))
        )
    if kind == "grammar":
        return LLMatcher.grammar_from_lark(_text_grammar(kind, source))
    return tags.to_lark(
        json.loads(source),
        literals,
        partial(_schema_with_options, options),
        partial(_text_grammar, kind),
    )


def _json_grammar(schema: Any, options: Mapping[str, Any]) -> str:
    schema = _prepared(schema, options)
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_overrides(options))


def _schema_with_options(options: Mapping[str, Any], schema: Any) -> Any:
    schema = _prepared(schema, options)
    return {**schema, "x-guidance": _overrides(options)} if isinstance(schema, dict) else schema


def _overrides(options: Mapping[str, Any]) -> Any:
    if options.get("disable_any_whitespace", False):
        return {"whitespace_flexible": False}
    return {"whitespace_pattern": WHITESPACE}


def _prepared(schema: Any, options: Mapping[str, Any]) -> Any:
    """The schema as llguidance takes it: formats that it does not know are left out, since to JSON
    Schema they are notes; so is uniqueItems, which a grammar cannot say and readers check; and an
    object that lists its properties takes no others, unless it says so with additionalProperties.

    A schema with allOf stays open: its branches describe one object together.
    """
    is_closed = options.get("disable_additional_properties", True)
    return _node(schema, schema, is_closed and "allOf" not in json.dumps(schema))


def _node(node: Any, root: Any, is_closed: bool) -> Any:
    if not isinstance(node, dict):
        return node
    node = _with_listed_names(node, root)
    made = dict(node)
    made.pop("uniqueItems", None)
    for key in _SCHEMA_KEYS:
        if key in node:
            made[key] = _node(node[key], root, is_closed)
    for key in _LIST_KEYS:
        if isinstance(node.get(key), list):
            made[key] = [_node(item, root, is_closed) for item in node[key]]
    for key in _MAP_KEYS:
        if isinstance(node.get(key), dict):
            made[key] = {name: _node(item, root, is_closed) for name, item in node[key].items()}
    if isinstance(node.get("additionalProperties"), dict):
        made["additionalProperties"] = _node(node["additionalProperties"], root, is_closed)
    if isinstance(node.get("format"), str) and node["format"] not in _FORMATS:
        del made["format"]
    open_words = {"additionalProperties", "patternProperties", "unevaluatedProperties", "$ref"}
    if is_closed and "properties" in node and not open_words & node.keys():
        made["additionalProperties"] = False
    return made


def _with_listed_names(node: dict[str, Any], root: Any) -> dict[str, Any]:
    """propertyNames that are listed, as pydantic writes them for dict[Literal[...], ...], become
    properties, of which none is required."""
    names = node.get("propertyNames")
    if isinstance(names, dict) and isinstance(names.get("$ref"), str):
        names = _target(names["$ref"], root)
    listed = names.get("enum") if isinstance(names, dict) else None
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        return node
    if {"properties", "patternProperties"} & node.keys():
        return node
    made = {key: value for key, value in node.items() if key != "propertyNames"}
    made["properties"] = dict.fromkeys(listed, node.get("additionalProperties", {}))
    return {**made, "additionalProperties": False}


def _target(reference: str, root: Any) -> Any:
    """What a reference such as #/$defs/Color points to; None if it is elsewhere."""
    found = root if reference.startswith("#/") else None
    for part in reference.split("/")[1:]:
        found = found.get(part) if isinstance(found, dict) else None
    return found


def _text_grammar(kind: str, source: str) -> str:
    if not re.search(r"^\s*[\w-]+\s*::=", source, re.MULTILINE):
        return source
    try:
        return str(any_to_lark(source))
    except Exception as error:  # the converter has no error class of its own
        raise refuse(kind, f"it is no valid EBNF ({str(error)[:200]})") from None
