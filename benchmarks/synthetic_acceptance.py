"""Drafts that are accepted as often as asked for, whatever model drafts and answers: so speculation
can be timed on random weights, which never accept one. Answers mean nothing then; peers have the
same (vLLM's rejection_sample_method "synthetic", SGLang's SGLANG_SIMULATE_ACC_LEN).

Each draft is accepted with one probability, if all before it were, by a hash of the sequence's slot
and position: the same in every run, and nothing waits for the host. Only on torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fastdeploy_core.worker.slots import Slots

if TYPE_CHECKING:
    from torch import Tensor

OPTION = "--acceptance-length"
_HASHES = 1 << 24


def add_acceptance_option(parser: argparse.ArgumentParser) -> None:
    """The option that asks for it."""
    parser.add_argument(
        OPTION,
        type=float,
        help="tokens that a step gives a sequence on average, where it has drafts: from 1 to 1 "
        "+ their number",
    )


def rate_of(length: float, num_drafts: int) -> float:
    """The probability with which 1 + p + ... + p^num_drafts is `length`; ValueError if none is."""
    if not 1 <= length <= 1 + num_drafts:
        raise ValueError(
            f"{OPTION} {length:g} is not possible with {num_drafts} drafts a step: 1 to "
            f"{1 + num_drafts} are"
        )
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        if sum(middle**depth for depth in range(num_drafts + 1)) < length:
            low = middle
        else:
            high = middle
    return high


@contextmanager
def synthetic_acceptance(
    length: float | None, speculative: Mapping[str, Any] | None
) -> Iterator[None]:
    """For engines that are made and used within, with this speculative configuration; nothing
    happens without a length."""
    if length is None:
        yield
        return
    if speculative is None:
        raise ValueError(f"{OPTION} is of drafts, and no speculative method was asked for")
    rate, finish = rate_of(length, int(speculative["num_speculative_tokens"])), Slots.finish

    def accepting(
        self: Slots, rows: Tensor, drawn: Tensor, marked: Tensor, *more: Any, **options: Any
    ) -> Tensor:
        width = more[1].shape[1]
        if width > 1:
            drawn = as_drafted(self, rows, drawn, width, rate)
            marked = marked.where(marked < 0, drawn)
        return finish(self, rows, drawn, marked, *more, **options)

    Slots.finish = accepting  # type: ignore[method-assign]
    try:
        yield
    finally:
        Slots.finish = finish  # type: ignore[method-assign]


def as_drafted(slots: Slots, rows: Tensor, drawn: Tensor, width: int, rate: float) -> Tensor:
    """drawn [B * width] with the drafts that are accepted in their places, and others than the
    first one that is not."""
    import torch

    drawn = drawn.clone()  # several places may be one
    table = drawn.view(-1, width)[:, :-1]
    drafts = slots.state.drafts[rows][:, : width - 1]
    depths = torch.arange(width - 1, device=rows.device)
    number = (slots.state.num_computed[rows] + rows * 8191)[:, None] * 31 + depths
    for factor in (2654435761, 2246822519):  # Knuth's, and one of xxHash
        number = number * factor % (1 << 32)
        number = number ^ (number >> 15)
    is_accepted = (number % _HASHES < rate * _HASHES).long().cumprod(1).bool()
    other = (table == drafts).long()  # the next token, or the one before the first
    refused = torch.where(table > 0, table - other, table + other)
    table.copy_(torch.where(is_accepted, drafts, refused))
    return drawn
