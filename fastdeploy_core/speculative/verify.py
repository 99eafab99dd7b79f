"""The one verifier of all methods: finds the drafts that the target would have sampled itself.

At every position of a row the target has sampled a token as it would without drafts: from its own
logits, with the random numbers of that position. A draft is accepted if it equals that token, so
the output is exactly the output without speculation. Nothing here waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.tensor import Tensor


@dataclass(slots=True)
class Verdict:
    """The result for S sequences that sampled at R positions."""

    num_accepted: Tensor  # [S] int64
    next_ids: Tensor  # [S] int64: the token sampled after the last accepted draft
    kept: Tensor  # [R] bool: the sampled token is part of the output

    def mark(self, tokens: Tensor) -> Tensor:
        """[R] int64: the tokens, with -1 in place of those after a wrong draft."""
        return (tokens + 1) * self.kept.to(tokens.dtype) - 1


def count_accepted(xp: Any, sampled: Tensor, drafts: Tensor) -> Tensor:
    """[S] int64: accepted drafts of each row. sampled: [S, 1 + k] int64; drafts: [S, k] int64, -1:
    no draft."""
    wrong = (sampled[:, : drafts.shape[1]] != drafts).to(xp.int64)
    return (xp.cumsum(wrong, 1) == 0).to(xp.int64).sum(dim=1)


class DraftLayout:
    """The positions of each sequence among R rows, as numpy arrays and as the tensors that the
    device needs.

    depths: [R] number of rows of the same sequence before each row (SamplingPlan.depths).
    """

    def __init__(self, depths: np.ndarray, device: DeviceBackend) -> None:
        first = np.flatnonzero(depths == 0)
        counts = np.diff(np.append(first, depths.size))
        width = int(counts.max(initial=1))
        nth = np.minimum(np.arange(width)[None, :], counts[:, None] - 1)
        self.first, self.counts, self.width = first, counts, width
        self.row_of = np.repeat(np.arange(first.size), counts)
        self._xp = device.xp
        self._is_even = bool((counts == width).all())
        # One upload: indices of a table of equally long rows (a short row repeats its last
        # position, which has no draft), each position's sequence, each position's depth.
        table = (first[:, None] + nth).reshape(-1)
        arrays = (table, self.row_of, depths, first)
        parts = device.to_device(np.concatenate(arrays))
        ends = np.cumsum([array.size for array in arrays]).tolist()
        self._table, self._row_of = parts[: ends[0]], parts[ends[0] : ends[1]]
        self._depths, self._first = parts[ends[1] : ends[2]], parts[ends[2] :]

    def judge(self, sampled: Tensor, drafts: Tensor) -> Verdict:
        """sampled, drafts: [R] int64; a position's draft is the one that its sampled token is
        compared with, -1 at the last position of a sequence."""
        xp = self._xp
        if not self._is_even:
            sampled_table = xp.index_select(sampled, 0, self._table)
            draft_table = xp.index_select(drafts, 0, self._table)
        else:
            sampled_table, draft_table = sampled, drafts
        shape = [self.first.size, self.width]
        return self._verdict(
            sampled,
            count_accepted(
                xp, sampled_table.reshape(shape), draft_table.reshape(shape)[:, : self.width - 1]
            ),
        )

    def refuse_all(self, sampled: Tensor) -> Verdict:
        """Reject every draft, to measure what drafting costs."""
        return self._verdict(sampled, self._first * 0)

    def _verdict(self, sampled: Tensor, accepted: Tensor) -> Verdict:
        select = self._xp.index_select
        kept = self._depths <= select(accepted, 0, self._row_of)
        return Verdict(accepted, select(sampled, 0, self._first + accepted), kept)
