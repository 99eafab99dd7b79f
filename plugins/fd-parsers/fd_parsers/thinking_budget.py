"""The thinking budget: when it is spent, the end of thinking is forced into the text.

Thinking is open after `<think>`, in the prompt or generated, until `</think>`. The budget counts
generated tokens in between. It is set by `thinking_token_budget` (vLLM) or by
logits_processors_args={"thinking_budget": n, "think_stop_sentence": text} (FastDeploy).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fastdeploy_core.contracts.small import ProcessorContext
from fastdeploy_core.errors import InvalidRequest
from fastdeploy_core.types import SamplingParams

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from fastdeploy_core.tensor import Tensor

START, END = "<think>", "</think>"
MAX_SENTENCE_CHARS = 256


@dataclass(slots=True)
class _State:
    budget: int
    forced: list[int]  # the tokens to write when the budget is spent
    thinking: bool = False
    done: bool = False
    num_thought: int = 0
    num_forced: int = 0
    num_seen: int = 0  # generated tokens looked at so far


class ThinkingBudgetLogitsProcessor:
    """Applies budgets; reads the tokenizer when the first sequence with a budget arrives."""

    arguments = frozenset({"thinking_budget", "think_stop_sentence"})

    def __init__(self, context: ProcessorContext) -> None:
        self._context = context
        self._states: dict[int, _State] = {}
        self._tokenizer: Tokenizer | None = None
        self._start: list[int] = []
        self._end: list[int] = []

    def validate(self, params: SamplingParams) -> None:
        """A whole number of tokens, and a short sentence."""
        args = params.logits_processors_args or {}
        budget = args.get("thinking_budget", 0)
        sentence = args.get("think_stop_sentence", "")
        if isinstance(budget, bool) or not isinstance(budget, int) or budget < 0:
            raise InvalidRequest(
                f"logits_processors_args.thinking_budget must be 0 or more, got {budget!r:.40}",
                param="logits_processors_args",
            )
        if not isinstance(sentence, str) or len(sentence) > MAX_SENTENCE_CHARS:
            raise InvalidRequest(
                "logits_processors_args.think_stop_sentence must be text of at most "
                f"{MAX_SENTENCE_CHARS} characters",
                param="logits_processors_args",
            )

    def add(self, seq_id: int, params: SamplingParams, prompt_token_ids: np.ndarray) -> bool:
        """Takes only sequences with a budget."""
        args = params.logits_processors_args or {}
        budget = params.thinking_token_budget
        if budget is None:
            budget = args.get("thinking_budget")
        if budget is None:
            return False
        tokenizer = self._read_tokenizer()
        sentence = args.get("think_stop_sentence", "")
        text = sentence if END in sentence else sentence + END
        state = _State(budget, tokenizer.encode(text, add_special_tokens=False).ids)
        prompt = list(prompt_token_ids)
        opened, closed = _rfind(prompt, self._start), _rfind(prompt, self._end)
        state.thinking = opened >= 0 and opened > closed
        self._states[seq_id] = state
        return True

    def remove(self, seq_id: int) -> None:
        """Forget the sequence's state."""
        self._states.pop(seq_id, None)

    def apply(
        self, logits: Tensor, seq_ids: Sequence[int], output_token_ids: Sequence[np.ndarray]
    ) -> Tensor:
        """Leave one token possible where the budget is spent."""
        last = None
        state = _State(0, [])
        for row, (seq_id, output) in enumerate(zip(seq_ids, output_token_ids, strict=True)):
            # A sequence's later rows come after drafts; the effect of drafts is not remembered.
            state = copy.copy(state) if seq_id == last else self._states[seq_id]
            last = seq_id
            token = self._next_forced(state, output)
            if token is not None:
                logits[row : row + 1] = float("-inf")
                logits[row : row + 1, token : token + 1] = 0.0
        return logits

    def _next_forced(self, state: _State, output: np.ndarray) -> int | None:
        for end in range(state.num_seen + 1, len(output) + 1):
            self._observe(state, output, end)
        state.num_seen = len(output)
        if state.done or not state.thinking or state.num_thought < state.budget:
            return None
        return state.forced[state.num_forced]

    def _observe(self, state: _State, output: np.ndarray, end: int) -> None:
        """Update the state with token end - 1."""
        if state.done:
            return
        if not state.thinking:
            state.thinking = _ends_with(output, end, self._start)
        elif state.num_thought >= state.budget:
            state.num_forced += 1
            state.done = state.num_forced == len(state.forced)
        else:
            state.num_thought += 1
            state.done = _ends_with(output, end, self._end)

    def _read_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            from tokenizers import Tokenizer

            if not self._context.tokenizer_json:
                raise InvalidRequest(
                    "thinking_token_budget needs the model's tokenizer.json",
                    param="thinking_token_budget",
                )
            tokenizer = Tokenizer.from_file(self._context.tokenizer_json)
            self._start = tokenizer.encode(START, add_special_tokens=False).ids
            self._end = tokenizer.encode(END, add_special_tokens=False).ids
            self._tokenizer = tokenizer
        return self._tokenizer


def _ends_with(tokens: np.ndarray, end: int, part: list[int]) -> bool:
    """Whether tokens[:end] ends with part."""
    start = end - len(part)
    return start >= 0 and all(tokens[start + i] == token for i, token in enumerate(part))


def _rfind(tokens: list[int], part: list[int]) -> int:
    """The last place where `part` begins; -1 if nowhere."""
    for start in range(len(tokens) - len(part), -1, -1):
        if tokens[start] == part[0] and tokens[start : start + len(part)] == part:
            return start
    return -1
