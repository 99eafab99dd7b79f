"""Converts client constraints to grammar text for llguidance (its Lark dialect and its JSON-schema
compiler).

GBNF / EBNF grammars (`root ::= ...`) are converted; Lark grammars (`start: ...`) are taken as they
are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from llguidance import LLMatcher, StructTag
from llguidance.gbnf_to_lark import any_to_lark

from fastdeploy_core.types import StructuredOutputsParams

from .limits import MAX_TAGS, refuse

# Between JSON tokens a weak model may emit blanks for ever; indentation needs only a few.
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,48}"

_SCHEMA_KEYS = ("items", "additionalItems", "contains", "propertyNames", "if", "then", "else")
_LIST_KEYS = ("anyOf", "oneOf", "prefixItems")
_MAP_KEYS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def to_grammar(params: StructuredOutputsParams, source: str, options: Mapping[str, Any]) -> str:
    """The grammar text. `source` is the result of limits.check(). Options: disable_any_whitespace
    (False), disable_additional_properties (True: objects that list properties take no others)."""
    kind = params.kind
    if kind == "json":
        return _json_grammar(json.loads(source), options)
    if kind == "json_object":
        return _json_grammar({"type": "object"}, options)
    if kind == "regex":
        return LLMatcher.grammar_from_regex(source)
    if kind == "choice":
        choices = json.loads(source)
        return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(c) for c in choices))
    if kind == "grammar":
        return _text_grammar(source)
    return _structural_tag(source, options)


def _json_grammar(schema: Any, options: Mapping[str, Any]) -> str:
    schema = _close(schema) if options.get("disable_additional_properties", True) else schema
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_overrides(options))


def _overrides(options: Mapping[str, Any]) -> Any:
    if options.get("disable_any_whitespace", False):
        return {"whitespace_flexible": False}
    return {"whitespace_pattern": WHITESPACE}


def _close(schema: Any) -> Any:
    """Set additionalProperties: false in every object that lists properties and does not set it.

    A schema with allOf stays open: its branches describe one object together.
    """
    if "allOf" in json.dumps(schema) or not isinstance(schema, dict):
        return schema
    return _close_node(schema)


def _close_node(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    closed = dict(node)
    for key in _SCHEMA_KEYS:
        if key in node:
            closed[key] = _close_node(node[key])
    for key in _LIST_KEYS:
        if isinstance(node.get(key), list):
            closed[key] = [_close_node(item) for item in node[key]]
    for key in _MAP_KEYS:
        if isinstance(node.get(key), dict):
            closed[key] = {name: _close_node(item) for name, item in node[key].items()}
    if isinstance(node.get("additionalProperties"), dict):
        closed["additionalProperties"] = _close_node(node["additionalProperties"])
    open_words = {"additionalProperties", "patternProperties", "unevaluatedProperties", "$ref"}
    if "properties" in node and not open_words & node.keys():
        closed["additionalProperties"] = False
    return closed


def _text_grammar(source: str) -> str:
    if not re.search(r"^\s*[\w-]+\s*::=", source, re.MULTILINE):
        return LLMatcher.grammar_from_lark(source)
    try:
        return LLMatcher.grammar_from_lark(any_to_lark(source))
    except Exception as error:  # the converter has no error class of its own
        raise refuse("grammar", f"it is no valid EBNF ({str(error)[:200]})") from None


def _structural_tag(source: str, options: Mapping[str, Any]) -> str:
    tag = json.loads(source)
    try:
        structures, triggers = tag["structures"], tag["triggers"]
        begins = [(str(s["begin"]), s["schema"], str(s["end"])) for s in structures]
        triggers = [str(t) for t in triggers if t]
    except (KeyError, TypeError):
        raise refuse(
            "structural_tag",
            'it must be JSON of the form {"structures": [{"begin", "schema", "end"}], '
            '"triggers": [...]}',
        ) from None
    if not 0 < len(begins) <= MAX_TAGS or not triggers:
        raise refuse("structural_tag", f"it needs 1 to {MAX_TAGS} structures and a trigger")
    tags = []
    for begin, schema, end in begins:
        trigger = next((t for t in triggers if begin.startswith(t)), None)
        if trigger is None:
            raise refuse("structural_tag", f"no trigger starts the structure {begin[:60]!r}")
        body = _close(schema) if options.get("disable_additional_properties", True) else schema
        if isinstance(body, dict):
            body = {**body, "x-guidance": _overrides(options)}
        tags.append(StructTag(trigger=trigger, begin=begin, grammar=body, end=end))
    try:
        return LLMatcher.grammar_from_lark(StructTag.to_grammar(tags, assume_special=False))
    except ValueError as error:
        raise refuse("structural_tag", str(error)[:200]) from None
