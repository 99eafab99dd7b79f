"""Token ids to text as they arrive; the joined pieces equal the decoding of all tokens at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING

from .decoder_steps import finish, make_steps, prime, push

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

# Prompt tokens decoded before the first generated one, so that the answer continues the prompt's
# text: a leading space stays, and a character begun in the prompt is completed. A character has at
# most four bytes, so at most three tokens precede the one that completes it.
PRIMING_TOKENS = 8


class IncrementalDetokenizer:
    """The text of one answer while its tokens arrive.

    `prompt_token_ids`: the prompt whose text the answer continues, as in vLLM; without it the text
    equals `tokenizer.decode(ids)`. `visible_token_ids`: special tokens that are shown although
    special tokens are skipped, such as the markers that a parser reads.
    """

    __slots__ = ("_hidden", "_pieces", "_steps")

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        visible_token_ids: AbstractSet[int] = frozenset(),
    ) -> None:
        self._pieces = tokenizer.token_string
        self._hidden: AbstractSet[int] = frozenset()
        if skip_special_tokens:
            self._hidden = tokenizer.special_token_ids
            if visible_token_ids:
                self._hidden = self._hidden - visible_token_ids
        self._steps = make_steps(tokenizer.decoder_settings)
        if prompt_token_ids:
            prime(self._steps, self._tokens(prompt_token_ids[-PRIMING_TOKENS:]))

    def push(self, token_ids: Iterable[int]) -> str:
        """Add tokens; returns the text that is now certain."""
        return push(self._steps, self._tokens(token_ids))

    def finish(self) -> str:
        """No more tokens follow; returns the text that was held back."""
        return finish(self._steps)

    def _tokens(self, token_ids: Iterable[int]) -> list[str]:
        pieces, hidden = self._pieces, self._hidden
        return [
            token
            for token_id in token_ids
            if token_id not in hidden and (token := pieces(token_id)) is not None
        ]
