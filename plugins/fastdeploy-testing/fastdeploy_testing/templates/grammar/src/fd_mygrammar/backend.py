"""Makes answers one of several given texts. Other kinds of constraints are refused."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from fastdeploy_core.errors import InvalidRequest
from fastdeploy_core.types import StructuredOutputsParams

END = "\0"  # stands for the end of the text, which no choice has


class MyGrammarMatcher:
    """The tokens of one sequence so far."""

    def __init__(self, choices: Sequence[str], spelled: Sequence[str]) -> None:
        self._choices, self._spelled = choices, spelled
        self.tokens: list[int] = []

    def fits(self, tokens: Sequence[int]) -> bool:
        """Whether an answer may begin with these tokens. The end may be repeated."""
        text = "".join(self._spelled[token] for token in tokens)
        whole = text.rstrip(END)
        if whole != text:
            return whole in self._choices
        return any(choice.startswith(text) for choice in self._choices)

    def accept(self, token_ids: Sequence[int]) -> int:
        """How many fit; with speculation, a draft may be wrong."""
        for number, token in enumerate(token_ids):
            if not self._spelled[token] or not self.fits([*self.tokens, token]):
                return number
            self.tokens.append(token)
        return len(token_ids)

    def rollback(self, num_tokens: int) -> None:
        """Undo the last accepted tokens."""
        del self.tokens[len(self.tokens) - num_tokens :]

    def fill_mask(self, mask: np.ndarray) -> None:
        """A bit for each token that may follow."""
        fit = [bool(s) and self.fits([*self.tokens, t]) for t, s in enumerate(self._spelled)]
        bits = np.zeros(mask.size * 32, dtype=np.uint8)
        bits[: len(fit)] = fit
        mask[:] = np.packbits(bits, bitorder="little").view(np.int32)

    def is_finished(self) -> bool:
        """Whether only the end can follow."""
        return bool(self.tokens) and self._spelled[self.tokens[-1]] == END


class MyGrammarBackend:
    """Built in the compiling process of a front end, and in the worker."""

    name = "mygrammar"
    contract = (1, 0)
    matcher_class: type[MyGrammarMatcher] = MyGrammarMatcher

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = Tokenizer.from_file(tokenizer_json)
        words = [self._tokenizer.id_to_token(token) or "" for token in range(vocab_size)]
        # Special tokens have no text of their own, so they never fit.
        self._spelled = ["" if w.startswith("<") and len(w) > 2 else w for w in words]
        for token in eos_token_ids:
            self._spelled[token] = END

    def compile(self, params: StructuredOutputsParams, options: Mapping[str, Any]) -> bytes:
        """The choices, spelled as the tokenizer's tokens are."""
        if not params.choice:
            raise InvalidRequest(f"mygrammar takes choices alone, not {params.kind}")
        split = self._tokenizer.pre_tokenizer.pre_tokenize_str
        spelled = ["".join(piece for piece, _ in split(word)) for word in params.choice]
        return json.dumps(spelled).encode()

    def matcher(self, compiled: bytes) -> MyGrammarMatcher:
        """A fresh state."""
        return self.matcher_class(json.loads(compiled), self._spelled)
