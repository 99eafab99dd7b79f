"""Structural tags to Lark: answers that are free in some places and follow a format in others.

A tag is a tree of formats, each an object with a `type`; names and meanings are those of XGrammar
0.2 (https://xgrammar.mlc.ai, "Structural Tag"), which vLLM's clients write. The older form, a list
of `structures` and their `triggers`, is one of these formats in other words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from .limits import MAX_REPEAT, MAX_TAGS, refuse
from .literals import Literals

KIND = "structural_tag"
MAX_RULES = 1000
_TEXT: Final = "/(?s:.*)/"
_IN_SLASHES: Final = re.compile(r"\\.|/|\n", re.DOTALL)  # what Lark's /.../ cannot hold, or holds
_ESCAPED: Final = {"/": r"\/", "\n": r"\n"}

# What an answer goes on with after a format: one of these strings; nothing ([]: it ends there);
# or None: the format has to end by itself.
Ends = Sequence[str] | None


def to_lark(
    tag: Any,
    literals: Literals,
    json_options: Callable[[Any], Any],
    text_grammar: Callable[[str], str],
) -> str:
    """The grammar of a tag. json_options: a schema as the library is to read it. text_grammar: Lark
    or EBNF to Lark."""
    writer = _Writer(literals, json_options, text_grammar)
    start = writer.write(_root(tag), [], "format")
    main = "\n".join(["%llguidance {}", f"start: {start}", *writer.rules])
    grammars = [{"name": "structural_tag", "lark_grammar": main}, *writer.grammars]
    return json.dumps({"grammars": grammars})


def _root(tag: Any) -> Any:
    if isinstance(tag, dict) and "format" in tag:
        return tag["format"]
    try:
        tags = [
            {
                "begin": one["begin"],
                "content": {"type": "json_schema", "json_schema": one["schema"]},
                "end": one["end"],
            }
            for one in tag["structures"]
        ]
        return {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}
    except (KeyError, TypeError):
        raise refuse(
            KIND,
            'it must be JSON of the form {"format": {"type": ...}}, or {"structures": [{"begin", '
            '"schema", "end"}], "triggers": [...]}',
        ) from None


class _Writer:
    """Writes the rules of one tag; the names of all end in numbers of their own."""

    def __init__(
        self,
        literals: Literals,
        json_options: Callable[[Any], Any],
        text_grammar: Callable[[str], str],
    ) -> None:
        self.rules: list[str] = []
        self.grammars: list[dict[str, str]] = []  # that rules name with @
        self._literals = literals
        self._json_options = json_options
        self._text_grammar = text_grammar
        self._num_tags = 0

    def write(self, node: Any, ends: Ends, where: str) -> str:
        """An expression for a format and what follows it."""
        if not isinstance(node, dict):
            raise refuse(KIND, f"{where} must be an object with a type")
        kind = node.get("type")
        name = f"_write_{kind}"
        if not isinstance(kind, str) or not hasattr(self, name):
            known = sorted(n.removeprefix("_write_") for n in dir(self) if n.startswith("_write_"))
            raise refuse(KIND, f"{where} has the type {kind!r:.60}; possible: {', '.join(known)}")
        expression: str = getattr(self, name)(node, ends, where)
        return expression

    # -- formats that end by themselves -----------------------------------------------------------

    def _write_const_string(self, node: dict[str, Any], ends: Ends, where: str) -> str:
        return self._then(self._literals.expression(_text(node, "value", where)), ends)

    def _write_json_schema(self, node: dict[str, Any], ends: Ends, where: str) -> str:
        if node.get("style", "json") != "json":
            raise refuse(KIND, f"{where}.style is {node['style']!r:.40}; possible: json")
        schema = node.get("json_schema")
        if not isinstance(schema, dict | bool):
            raise refuse(KIND, f"{where}.json_schema must be an object or a boolean")
        return self._then(self._rule(f"%json {json.dumps(self._json_options(schema))}"), ends)

    def _write_regex(self, node: dict[str, Any], ends: Ends, where: str) -> str:
        pattern = _text(node, "pattern", where)
        self._no_excludes(node, where)
        escaped = _IN_SLASHES.sub(lambda m: _ESCAPED.get(m[0], m[0]), pattern)
        return self._then(self._rule(f"/{escaped}/", "T"), ends)

    def _write_grammar(self, node: dict[str, Any], ends: Ends, where: str) -> str:
        name = f"grammar_{len(self.grammars)}"
        lark = self._text_grammar(_text(node, "grammar", where))
        self.grammars.append({"name": name, "lark_grammar": lark})
        return self._then(f"@{name}", ends)

    def _write_optional(self, node: dict[str, Any], ends: Ends, where: str) -> str:
        return self._repeated(node, "?", ends, where)

    def _write_star(self, node: dict[str, Any], ends: Ends, where: str) -> str:
        return self._repeated(node, "*", ends, where)

    def _write_plus(self, node: dict[str, Any], ends: Ends, where: str) -> str:
        return self._repeated(node, "+", ends, where)

    def _write_repeat(self, node: dict[str, Any], ends: Ends, where: str) -> str:
        least, most = node.get("min", 0), node.get("max", -1)
        if type(least) is not int or type(most) is not int or not 0 <= least <= MAX_REPEAT:
            raise refuse(KIND, f"{where}.min and max must be integers, min 0 to {MAX_REPEAT}")
        if most != -1 and not least <= most <= MAX_REPEAT:
            raise refuse(KIND, f"{where}.max must be -1, or {least} to {MAX_REPEAT}")
        return self._repeated(node, f"{{{least},{'' if most < 0 else most}}}", ends, where)

    def _write_tags_with_separator(self, node: dict[str, Any], ends: Ends, where: str) -> str:
        tags = self._rule(" | ".join(self._tags(node, where)))
        parts = tags
        if not node.get("stop_after_first"):
            between = self._literals.expression(_text(node, "separator", where))
            parts = f"{tags} ({between} {tags})*"
        return self._then(f"({parts})" if node.get("at_least_one") else f"({parts})?", ends)

    # -- formats that pass on what follows them ---------------------------------------------------

    def _write_sequence(self, node: dict[str, Any], ends: Ends, where: str) -> str:
        elements = _list(node, "elements", where)
        parts = [
            self.write(element, None, f"{where}.elements[{i}]")
            for i, element in enumerate(elements[:-1])
        ]
        last = self.write(elements[-1], ends, f"{where}.elements[{len(elements) - 1}]")
        return " ".join([*parts, last])

    def _write_or(self, node: dict[str, Any], ends: Ends, where: str) -> str:
        elements = _list(node, "elements", where)
        return self._rule(
            " | ".join(
                self.write(e, ends, f"{where}.elements[{i}]") for i, e in enumerate(elements)
            )
        )

    def _write_tag(self, node: dict[str, Any], ends: Ends, where: str) -> str:
        begin = self._literals.expression(_text(node, "begin", where))
        return f"{begin} {self._inside(node, ends, where)}"

    # -- formats that go on until something follows -----------------------------------------------

    def _write_any_text(self, node: dict[str, Any], ends: Ends, where: str) -> str:
        return self._free_text(self._excluded(node, where), ends, where)

    def _write_triggered_tags(self, node: dict[str, Any], ends: Ends, where: str) -> str:
        triggers = [t for t in _list(node, "triggers", where) if isinstance(t, str) and t]
        tags = _list(node, "tags", where)
        excluded = self._excluded(node, where)
        rests: dict[str, list[str]] = {}  # what may follow each trigger
        for number, tag in enumerate(tags):
            at = f"{where}.tags[{number}]"
            begin = _text(tag, "begin", at)
            trigger = next((t for t in triggers if begin.startswith(t)), None)
            if trigger is None:
                raise refuse(KIND, f"no trigger starts {at}.begin {begin[:60]!r}")
            trigger = self._literals.whole(begin, len(trigger))
            rest = self._literals.expression(begin[len(trigger) :])
            rests.setdefault(trigger, []).append(f"{rest} {self._inside(tag, None, at)}")
        self._count(len(tags))
        called = " | ".join(
            f"{self._until([trigger], excluded)} {self._rule(' | '.join(ways))}"
            for trigger, ways in rests.items()
        )
        first = ""
        if node.get("at_least_one"):  # it comes at once
            first = self._rule(" | ".join(self._tags(node, where)))
        if node.get("stop_after_first"):
            if first:
                return self._then(first, ends)
            return self._rule(
                f"{self._then(self._rule(called), ends)} | {self._free_text(excluded, ends, where)}"
            )
        rest = self._free_text(excluded, ends, where)
        return f"{first} {self._rule(called)}* {rest}"

    # -- parts of these ---------------------------------------------------------------------------

    def _tags(self, node: dict[str, Any], where: str) -> list[str]:
        tags = _list(node, "tags", where)
        self._count(len(tags))
        return [self._write_tag(tag, None, f"{where}.tags[{i}]") for i, tag in enumerate(tags)]

    def _inside(self, tag: Any, ends: Ends, where: str) -> str:
        """Content and end of a tag, and what follows the tag."""
        given = tag.get("end")
        closing = [given] if isinstance(given, str) else given
        if not isinstance(closing, list) or not all(isinstance(e, str) for e in closing):
            raise refuse(KIND, f"{where}.end must be a string or a list of strings")
        if not closing or not all(closing):  # nothing of its own ends it
            return self.write(tag.get("content"), ends, f"{where}.content")
        return self._then(self.write(tag.get("content"), closing, f"{where}.content"), ends)

    def _repeated(self, node: dict[str, Any], sign: str, ends: Ends, where: str) -> str:
        content = self._rule(self.write(node.get("content"), None, f"{where}.content"))
        return self._then(f"{content}{sign}", ends)

    def _then(self, expression: str, ends: Ends) -> str:
        if not ends:
            return expression
        return f"{expression} {self._rule(' | '.join(map(self._literals.expression, ends)))}"

    def _free_text(self, excluded: str, ends: Ends, where: str) -> str:
        if ends is None:
            raise refuse(
                KIND,
                f"{where} would never end; free text may stand at the end of the answer, or last "
                "in a tag that has an end",
            )
        return self._until(ends, excluded) if ends else self._rule(_TEXT + excluded, "T")

    def _until(self, ends: Sequence[str], excluded: str) -> str:
        """Text up to the first of some strings, and that string."""
        ways = []
        for end in ends:
            before, token, after = self._literals.split(end)
            if token is None:
                text = self._rule(_TEXT + excluded, "T")
                ways.append(self._rule(f"{text} {json.dumps(end)}", "lazy"))
                continue
            text = self._rule(f"({_TEXT}{excluded}) {json.dumps(before)}", "T")
            ways.append(f"{text} {token} {self._literals.expression(after)}")
        return self._rule(" | ".join(ways))

    def _excluded(self, node: dict[str, Any], where: str) -> str:
        words = node.get("excludes") or node.get("excluded_strs") or []
        if not isinstance(words, list) or not all(isinstance(w, str) and w for w in words):
            raise refuse(KIND, f"{where}.excludes must be a list of strings")
        if not words:
            return ""
        return f" & ~({_TEXT} ({' | '.join(map(json.dumps, words))}) {_TEXT})"

    def _no_excludes(self, node: dict[str, Any], where: str) -> None:
        if node.get("excludes"):
            raise refuse(KIND, f"{where}.excludes is possible for any_text and triggered_tags only")

    def _count(self, num_tags: int) -> None:
        self._num_tags += num_tags
        if self._num_tags > MAX_TAGS:
            raise refuse(KIND, f"it has more than {MAX_TAGS} tags")

    def _rule(self, body: str, kind: str = "r") -> str:
        """A rule, terminal ("T") or lazy terminal ("lazy") of its own; its name."""
        name = f"{kind}_{len(self.rules)}"
        if len(self.rules) >= MAX_RULES:
            raise refuse(KIND, f"it needs more than {MAX_RULES} rules")
        self.rules.append(f"{name}{'[lazy]' if kind == 'lazy' else ''}: {body}")
        return name


def _text(node: Any, key: str, where: str) -> str:
    value = node.get(key) if isinstance(node, Mapping) else None
    if not isinstance(value, str):
        raise refuse(KIND, f"{where}.{key} must be a string")
    return value


def _list(node: dict[str, Any], key: str, where: str) -> list[Any]:
    value = node.get(key)
    if not isinstance(value, list) or not value:
        raise refuse(KIND, f"{where}.{key} must be a list with at least one entry")
    return value
