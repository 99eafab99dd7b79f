"""Speculative methods propose; the core verifies. Several proposals per sequence and step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from fastdeploy_core.tensor import Tensor


@dataclass(frozen=True, slots=True)
class SpeculativeQuestion:
    """Asked of `fd_speculative_requirements`: what does this method need of this configuration?"""

    method: str
    num_speculative_tokens: int
    architecture: str
    hf_config: Mapping[str, Any]
    options: Mapping[str, Any]


@dataclass(slots=True)
class DraftInput:
    """The state after a step, rows in batch order."""

    seq_ids: Sequence[int]
    token_ids: Sequence[Sequence[int]]  # all known tokens of each sequence, the newest last
    max_drafts: Sequence[int]  # how many drafts each row may get, 0 to num_speculative_tokens
    hidden_states: Tensor | None = None  # [num_rows, hidden] at each row's last verified token


@runtime_checkable
class Drafter(Protocol):
    """Constructed by the model runner of every rank as `Driver(context)`; see DrafterContext."""

    name: str
    contract: tuple[int, int]

    def propose(self, batch: DraftInput) -> list[list[int]]:
        """Up to max_drafts[i] draft tokens for each row, possibly none."""
        ...

    def observe(self, seq_id: int, drafted: Sequence[int], accepted: int) -> None:
        """How the last proposal of a sequence fared."""
        ...

    def forget(self, seq_id: int) -> None:
        """The sequence ended or was preempted."""
        ...


@dataclass(slots=True)
class DrafterContext:
    """What a drafter is built from. `model` and `device` are the target's."""

    num_speculative_tokens: int
    options: Mapping[str, Any]
    model: Any
    device: Any
    max_num_seqs: int
    vocab_size: int
