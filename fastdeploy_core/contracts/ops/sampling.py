"""Operations between logits and tokens."""

from __future__ import annotations

from typing import Annotated, Protocol

from fastdeploy_core.contracts.signature import INTEGER, Role
from fastdeploy_core.tensor import Tensor

SCRATCH = Role.SCRATCH


class SamplingOperations(Protocol):
    """B rows of logits over a vocabulary of V."""

    def apply_penalties(
        self,
        logits: Annotated[Tensor, "B V", "float32", SCRATCH],
        presence: Annotated[Tensor, "B", "float32"],
        frequency: Annotated[Tensor, "B", "float32"],
        repetition: Annotated[Tensor, "B", "float32"],
        output_counts: Annotated[Tensor, "B V", INTEGER],
        prompt_seen: Annotated[Tensor, "B V", "bool"],
        /,
    ) -> Annotated[Tensor, "B V", "float32"]:
        """Logits of tokens in the output or the prompt are divided by repetition where positive,
        else multiplied; then less frequency times the count, and less presence where the count is
        not 0."""
        ...

    def apply_bitmask(
        self,
        logits: Annotated[Tensor, "B V", "float32", SCRATCH],
        mask: Annotated[Tensor, "B V/32", "int32"],
        /,
    ) -> Annotated[Tensor, "B V", "float32"]:
        """-inf where the mask's bit is 0; bit i of word w is token 32 * w + i."""
        ...

    def filter_logits(
        self,
        logits: Annotated[Tensor, "B V", "float32", SCRATCH],
        top_k: Annotated[Tensor, "B", "int64"],
        top_p: Annotated[Tensor, "B", "float32"],
        min_p: Annotated[Tensor, "B", "float32"],
        /,
    ) -> Annotated[Tensor, "B V", "float32"]:
        """-inf outside the kept set: at least min_p times the largest probability; then the top_k
        largest (0: all); then the fewest that reach top_p of what is left. Equals of the last one
        kept are kept."""
        ...

    def sample(
        self,
        logits: Annotated[Tensor, "B V", "float32"],
        seeds: Annotated[Tensor, "B", "int64"],
        positions: Annotated[Tensor, "B", "int64"],
        /,
    ) -> Annotated[Tensor, "B", "int64"]:
        """A token of each row with the probability that softmax gives it. It depends on the row's
        seed, position and logits only."""
        ...

    def draw(
        self,
        logits: Annotated[Tensor, "B V", "float32", SCRATCH],
        is_random: Annotated[Tensor, "B", "int64"],
        top_k: Annotated[Tensor, "B", "int64"],
        seeds: Annotated[Tensor, "B", "int64"],
        temperature: Annotated[Tensor, "B", "float32"],
        top_p: Annotated[Tensor, "B", "float32"],
        min_p: Annotated[Tensor, "B", "float32"],
        positions: Annotated[Tensor, "B", "int64"],
        filters: bool,
        /,
    ) -> tuple[Annotated[Tensor, "B", "int64"], Annotated[Tensor, "B", "float32"]]:
        """(ids, each row's largest logit before anything else). Greedy where is_random is 0,
        elsewhere sample at positions + 1 of the logits divided by the temperature and, with
        filters, filtered by filter_logits."""
        ...

    def greedy(
        self, logits: Annotated[Tensor, "B V", "float32"], /
    ) -> Annotated[Tensor, "B", "int64"]:
        """The largest logit's id; the smallest id among equals; NaN counts as the largest."""
        ...

    def mark_broken(
        self,
        drawn: Annotated[Tensor, "B", "int64"],
        peaks: Annotated[Tensor, "B", "float32"],
        possible: Annotated[Tensor, "B", "float32"] | None,
        /,
    ) -> Annotated[Tensor, "B", "int64"]:
        """drawn, but -2 where peaks is not finite, else -3 where possible is not finite."""
        ...

    def log_softmax(
        self, logits: Annotated[Tensor, "B V", "float32"], /
    ) -> Annotated[Tensor, "B V", "float32"]:
        """Logarithms of probabilities."""
        ...
