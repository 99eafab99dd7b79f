"""The one verifier of all methods: which drafts the target would have drawn itself.

At every position of a row the target has drawn a token as it would without drafts: from its own
logits, with the random numbers of that position. A draft is right while it is that token, so what
comes out are the very tokens that would come out without speculation. Nothing here waits for the
device.
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
    """Of S sequences that drew at R positions."""

    num_accepted: Tensor  # [S] int64
    next_ids: Tensor  # [S] int64: the token drawn behind the last accepted draft
    kept: Tensor  # [R] bool: the drawn token is part of the output

    def mark(self, tokens: Tensor) -> Tensor:
        """[R] int64 with -1 in place of tokens behind a wrong draft."""
        return (tokens + 1) * self.kept.to(tokens.dtype) - 1


def count_accepted(xp: Any, drawn: Tensor, drafts: Tensor) -> Tensor:
    """[S] int64: how many drafts of each row are right. drawn: [S, 1 + k] int64; drafts: [S, k]
    int64, -1 where there is none."""
    wrong = (drawn[:, : drafts.shape[1]] != drafts).to(xp.int64)
    return (xp.cumsum(wrong, 1) == 0).to(xp.int64).sum(dim=1)


class DraftLayout:
    """Where the positions of each sequence stand among R rows, as numpy tells and the device needs
    it.

    depths: [R] how many rows of the same sequence stand before each (SamplingPlan.depths).
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
        # One upload: indices of a table of equal rows (a short row repeats its last position, which
        # has no draft), each position's sequence, each position's depth.
        table = (first[:, None] + nth).reshape(-1)
        arrays = (table, self.row_of, depths, first)
        parts = device.to_device(np.concatenate(arrays))
        ends = np.cumsum([array.size for array in arrays]).tolist()
        self._table, self._row_of = parts[: ends[0]], parts[ends[0] : ends[1]]
        self._depths, self._first = parts[ends[1] : ends[2]], parts[ends[2] :]

    def judge(self, drawn: Tensor, drafts: Tensor) -> Verdict:
        """drawn, drafts: [R] int64; a position's draft is the one that its draw decides about, -1
        at the last position of a sequence."""
        xp = self._xp
        if not self._is_even:
            drawn_table = xp.index_select(drawn, 0, self._table)
            draft_table = xp.index_select(drafts, 0, self._table)
        else:
            drawn_table, draft_table = drawn, drafts
        shape = [self.first.size, self.width]
        return self._verdict(
            drawn,
            count_accepted(
                xp, drawn_table.reshape(shape), draft_table.reshape(shape)[:, : self.width - 1]
            ),
        )

    def refuse_all(self, drawn: Tensor) -> Verdict:
        """As if every draft were wrong: for measuring what drafting costs."""
        return self._verdict(drawn, self._first * 0)

    def _verdict(self, drawn: Tensor, accepted: Tensor) -> Verdict:
        select = self._xp.index_select
        kept = self._depths <= select(accepted, 0, self._row_of)
        return Verdict(accepted, select(drawn, 0, self._first + accepted), kept)
