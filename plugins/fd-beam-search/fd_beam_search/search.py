"""The search itself, which knows neither engine nor text: from log-probabilities to the sequences
that are continued next, and to the best ones at the end.

Step for step what transformers' generate(num_beams=...) does (Wu et al. 2016 for the scores):

* A step looks at every continuation of every running beam. The `width` best that do not end run
  on; of the `width` best, those that end are finished.
* A score is the sum of log-probabilities divided by the number of tokens, the ending one included,
  to the power of length_penalty. The `width` best finished ones are kept.
* The search is over at max_tokens, or once `width` have finished and no running one can be better:
  judged at the length so far, or with early_stopping="never" at the longest possible one; with
  early_stopping=True as soon as `width` have finished.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from .params import EarlyStopping

Said = TypeVar("Said")  # what the caller keeps of a token


@dataclass(frozen=True, slots=True)
class Beam(Generic[Said]):
    """A continuation of the prompt."""

    token_ids: tuple[int, ...] = ()
    logprob: float = 0.0  # the sum
    said: tuple[Said, ...] = ()  # one for each token


@dataclass(frozen=True, slots=True)
class Finished(Generic[Said]):
    """A continuation that has ended."""

    beam: Beam[Said]
    score: float
    stop_id: int | None  # the token that ended it; None: it has max_tokens


class BeamSearch(Generic[Said]):
    """One prompt's. Until `is_done`: ask the model for the `num_asked` likeliest tokens after each
    of `running`, and `take` them. Then `finished` has the `width` best, best first."""

    def __init__(
        self,
        width: int,
        max_tokens: int,
        stop_ids: frozenset[int],
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
    ) -> None:
        self._width = width
        self._max_tokens = max_tokens
        self._stop_ids = stop_ids
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping
        self._length = 0
        self.running: list[Beam[Said]] = [Beam()]
        self.finished: list[Finished[Said]] = []
        self.is_done = False

    @property
    def num_asked(self) -> int:
        """Among this many of a beam's tokens are all that can matter: `width` that do not end."""
        return self._width + len(self._stop_ids)

    def take(self, likeliest: Sequence[Sequence[tuple[int, float, Said]]]) -> None:
        """For each running beam its likeliest tokens: id, log-probability, and what is kept."""
        self._length += 1
        found = [
            (beam, token, logprob, said)
            for beam, tokens in zip(self.running, likeliest, strict=True)
            for token, logprob, said in tokens
        ]
        found.sort(key=lambda one: one[0].logprob + one[2], reverse=True)
        self.running = []
        for place, (beam, token, logprob, said) in enumerate(found):
            stop_id = token if token in self._stop_ids else None
            ends = stop_id is not None or self._length == self._max_tokens
            if place >= self._width and (ends or len(self.running) == self._width):
                continue
            longer = Beam((*beam.token_ids, token), beam.logprob + logprob, (*beam.said, said))
            if ends:
                self.finished.append(Finished(longer, self._score(longer), stop_id))
            else:
                self.running.append(longer)
        self.finished.sort(key=lambda one: one.score, reverse=True)
        del self.finished[self._width :]
        self.is_done = not self.running or (
            len(self.finished) == self._width and not self._can_improve()
        )

    def _score(self, beam: Beam[Said], length: int = 0) -> float:
        score: float = beam.logprob / (length or len(beam.token_ids)) ** self._length_penalty
        return score

    def _can_improve(self) -> bool:
        if self._early_stopping is True:
            return False
        length = self._length
        if self._early_stopping == "never" and self._length_penalty > 0:
            length = self._max_tokens
        return self._score(self.running[0], length) > self.finished[-1].score
