"""Special tokens in users' text are text.

A chat template writes special tokens such as <|im_end|> around what users write, and a tokenizer
cannot tell theirs apart: a user could end a turn and begin another. So each special token of a user
gets a mark before the template sees it. What is marked after rendering is the users', all other
special tokens are the template's.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
from typing import Any

import tokenizers


class MarkedText(str):
    """A prompt in which users wrote special tokens; `marked` is the same text with marks."""

    marked: str

    def end(self, size: int, last: bool) -> MarkedText:
        """About so many characters of one end, for encode(); the text is not cut."""
        piece = MarkedText(self)
        piece.marked = self.marked[-size:] if last else self.marked[:size]
        return piece


class SpecialText:
    """Marks and encodes the special tokens of one tokenizer. Thread safe."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        # One character cannot be marked; such tokens (line breaks of some models) stay as they are.
        added = backend.get_added_tokens_decoder().values()
        special = {token.content for token in added if token.special and len(token.content) > 1}
        longest_first = sorted(special, key=lambda text: (-len(text), text))
        # Digits pass every filter of a template. A user who guesses the mark gains nothing: it only
        # makes special tokens text.
        self._mark = str(10**19 + secrets.randbelow(9 * 10**19))
        nonce = secrets.token_hex(16)  # who guessed this could write special tokens
        self._spelling = {text: f"<{nonce}:{i}>" for i, text in enumerate(longest_first)}
        self._special = re.compile("|".join(map(re.escape, longest_first)) or r"\Z\A.")
        firsts = "".join(sorted({re.escape(text[0]) for text in special}))
        self._first = re.compile(f"[{firsts}]" if firsts else r"\Z\A.")
        # A template may join two texts of users into one special token.
        self._beginnings = tuple({text[:n] for text in special for n in range(1, len(text))})
        self._twin: tokenizers.Tokenizer | None = None
        self._lock = threading.Lock()

    def mark(self, value: Any) -> Any:
        """The same JSON value with a mark in each special token that its texts and keys hold."""
        if isinstance(value, str) and self._first.search(value):
            while self._special.search(value):  # again, since special tokens may overlap
                value = self._special.sub(lambda m: m[0][0] + self._mark + m[0][1:], value)
            return value + self._mark if value.endswith(self._beginnings) else value
        if isinstance(value, dict):
            return {self.mark(key): self.mark(each) for key, each in value.items()}
        if isinstance(value, list):
            return type(value)(map(self.mark, value))
        return value

    def unmark(self, rendered: str) -> str:
        """The rendered prompt as it reads; a MarkedText if it holds marks."""
        if self._mark not in rendered:
            return rendered
        text = MarkedText(rendered.replace(self._mark, ""))
        text.marked = rendered
        return text

    def encode(self, text: MarkedText, add_special_tokens: bool) -> list[int]:
        """Token ids; only special tokens without a mark become special ids."""
        own = self._special.sub(lambda m: self._spelling[m[0]], text.marked)
        plain = own.replace(self._mark, "")
        with self._lock:
            twin = self._twin = self._twin or self._make_twin()
        (encoding,) = twin.encode_batch_fast([plain], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def _make_twin(self) -> tokenizers.Tokenizer:
        """The same tokenizer with other spellings of its special tokens, so that the usual ones are
        text to it. Few prompts need it, so it is made for the first one."""
        new = self._spelling
        state = json.loads(self._backend.to_str())
        for token in state["added_tokens"]:
            token["content"] = new.get(token["content"], token["content"])
        model = state["model"]
        vocab = model["vocab"]
        if isinstance(vocab, dict):
            model["vocab"] = {new.get(token, token): number for token, number in vocab.items()}
        else:  # Unigram: pieces with scores
            model["vocab"] = [[new.get(piece, piece), score] for piece, score in vocab]
        if model.get("unk_token") in new:
            model["unk_token"] = new[model["unk_token"]]
        if "merges" in model:
            model["merges"] = [
                pair for pair in model["merges"] if not new.keys() & {*pair, "".join(pair)}
            ]
        return tokenizers.Tokenizer.from_str(json.dumps(state))
