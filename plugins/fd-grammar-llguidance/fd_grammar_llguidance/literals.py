"""Plain text in grammars, where it may spell tokens that a tokenizer was given beside its
vocabulary, such as <tool_call>.

The library takes such a token by its number only: the same characters in a string would allow the
token and then refuse it.
"""

from __future__ import annotations

import json
import re

from llguidance import LLTokenizer

from .limits import refuse

# The library counts every added token in angle brackets as special, and few others are.
_MARK = re.compile(r"<[^<>\s]{1,64}>|\[[A-Z_/]{1,32}\]")


class Literals:
    """Writes text as Lark for one tokenizer; `kind` names the constraint in errors."""

    def __init__(self, tokenizer: LLTokenizer, kind: str) -> None:
        self._tokenizer = tokenizer
        self._kind = kind

    def expression(self, text: str) -> str:
        """Strings and tokens, one after the other; an empty string for no text."""
        parts = []
        while text:
            before, token, after = self.split(text)
            if token is None:
                parts.append(json.dumps(text))
                break
            parts += [json.dumps(before), token] if before else [token]
            text = after
        return " ".join(parts) or '""'

    def split(self, text: str) -> tuple[str, str | None, str]:
        """The text before its first added token, that token for a rule, and the text after it."""
        for match in _MARK.finditer(text):
            token = self._token(match[0])
            if token is not None:
                return text[: match.start()], f"<[{token}]>", text[match.end() :]
        return text, None, ""

    def whole(self, text: str, length: int) -> str:
        """The first characters of a text, and more where they would cut an added token in two."""
        for match in _MARK.finditer(text):
            if match.start() < length < match.end() and self._token(match[0]) is not None:
                return text[: match.end()]
        return text[:length]

    def _token(self, mark: str) -> int | None:
        ids = self._tokenizer.tokenize_str(mark)
        if len(ids) != 1 or not self._tokenizer.is_special_token(ids[0]):
            return None
        if ids[0] in self._tokenizer.eos_tokens:
            raise refuse(self._kind, f"it spells {mark}, which ends every answer")
        return int(ids[0])
