"""Log-probabilities of sampled tokens and their alternatives: gathered on the device, read
later."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fastdeploy_core.types import TokenLogprobs

if TYPE_CHECKING:
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.tensor import Tensor

# Replaces -inf, because JSON has no infinity.
LOWEST = np.float32(-9999.0)


@dataclass(slots=True)
class LogprobTensors:
    """Log-probabilities of some rows. `widths`: alternatives that each row asked for."""

    rows: np.ndarray  # row numbers within the batch
    widths: np.ndarray
    token_ids: Tensor  # [n, 1] the sampled tokens
    chosen: Tensor  # [n, 1] float32
    ranks: Tensor  # [n] int64, 1 = most likely
    top_values: Tensor | None  # [n, k]
    top_ids: Tensor | None

    def tensors(self) -> list[Tensor]:
        """The tensors to copy to the host before `read`."""
        found = [self.token_ids, self.chosen, self.ranks]
        if self.top_values is not None and self.top_ids is not None:
            found += [self.top_values, self.top_ids]
        return found


def gather(
    device: DeviceBackend,
    values: Tensor,
    token_ids: Tensor,
    rows: np.ndarray,
    widths: np.ndarray,
    named: Sequence[Sequence[int]] = (),
) -> LogprobTensors:
    """values: [n, vocabulary] log-probabilities (or logits); token_ids: [n] int64, the sampled
    tokens; widths: alternatives per row, -1 for the whole vocabulary; named: the alternatives that
    a row names itself, in place of its likeliest ones."""
    xp = device.xp
    vocab_size = int(values.shape[-1])
    widths = np.where(widths < 0, vocab_size, np.minimum(widths, vocab_size))
    column = token_ids.unsqueeze(1)
    chosen = xp.gather(values, 1, column)
    ranks = (values > chosen).long().sum(dim=-1) + 1
    width = int(widths.max(initial=0))
    top_values = top_ids = None
    if width:
        top_values, top_ids = xp.topk(values, width, -1)
    if any(named):
        asked = np.array([[*ids, *[-1] * (width - len(ids))] for ids in named])
        asked_dev = device.to_device(asked)
        top_ids = xp.where(asked_dev < 0, top_ids, asked_dev)
        top_values = xp.gather(values, 1, top_ids)
    return LogprobTensors(rows, widths, column, chosen, ranks, top_values, top_ids)


def read(tensors: LogprobTensors, arrays: Iterator[np.ndarray]) -> list[TokenLogprobs]:
    """One record per row, in order. `arrays`: the tensors of `tensors()`, on the host."""
    chosen_ids = next(arrays)[:, 0].tolist()
    chosen = np.maximum(next(arrays)[:, 0], LOWEST).tolist()
    ranks = next(arrays).tolist()
    top_values: list[list[float]] = [[]] * len(ranks)
    top_ids: list[list[int]] = [[]] * len(ranks)
    if tensors.top_values is not None:
        top_values = np.maximum(next(arrays), LOWEST).tolist()
        top_ids = next(arrays).tolist()
    widths = tensors.widths.tolist()
    return [
        TokenLogprobs([token, *ids[:width]], [value, *values[:width]], rank)
        for token, value, rank, ids, values, width in zip(
            chosen_ids, chosen, ranks, top_ids, top_values, widths, strict=True
        )
    ]
