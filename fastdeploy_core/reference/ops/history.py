"""Token histories on the device: appending to them, and finding what followed an earlier occurrence
of their ends.

Shapes are fixed and the host is not involved, so both can be captured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastdeploy_core.tensor import namespace

if TYPE_CHECKING:
    from fastdeploy_core.tensor import Tensor


def append_history(slots: Tensor, results: Tensor, num_computed: Tensor, history: Tensor) -> None:
    """See contracts/ops/. Tokens that are not kept go to the padding row."""
    xp = namespace(slots)
    length, padding = history.shape[1], history.shape[0] - 1
    kept = (xp.cumsum((results < 0).to(xp.int64), 1) == 0).to(xp.int64)
    nth = xp.arange(results.shape[1], dtype=xp.int64, device=slots.device)
    last = xp.index_select(num_computed, 0, slots).unsqueeze(1)
    where = (last + 1 - kept.sum(dim=1).unsqueeze(1) + nth) * kept
    rows = slots.unsqueeze(1) * kept + padding * (1 - kept)
    where = (rows * length + where % length).reshape([-1])
    xp.index_copy_(history.view([-1]), 0, where, results.reshape([-1]).to(xp.int32))


def match_ngrams(
    history: Tensor, slots: Tensor, num_known: Tensor, min_size: int, max_size: int, n: int
) -> Tensor:
    """See contracts/ops/. Compares the end of each history with every place at once."""
    xp = namespace(slots)
    if not n:
        return xp.zeros([slots.shape[0], 0], dtype=xp.int64, device=slots.device)
    rows = xp.index_select(history, 0, slots).to(xp.int64)
    num_rows, length = rows.shape
    last = (num_known - 1).unsqueeze(1)
    place = xp.arange(length, dtype=xp.int64, device=slots.device).unsqueeze(0)
    alive = place < last
    size = xp.zeros([num_rows, length], dtype=xp.int64, device=slots.device)
    for back in range(min(max_size, length)):
        # Places before the beginning never match, since the end would have to begin before it, too.
        end = xp.gather(rows, 1, (last - back) * (last >= back).to(xp.int64))
        there = rows
        if back:
            nothing = xp.full([num_rows, back], -1, dtype=xp.int64, device=slots.device)
            there = xp.cat((nothing, rows[:, : length - back]), 1)
        alive = alive & (there == end)
        size = size + alive.to(xp.int64)
    score = (size * (length + 1) + place + 1) * (size >= min_size).to(xp.int64)
    best = xp.amax(score, 1).unsqueeze(1)
    found = best > 0
    begin = best % (length + 1)
    period = xp.where(found, num_known.unsqueeze(1) - begin, begin * 0 + 1)
    nth = xp.arange(n, dtype=xp.int64, device=slots.device).unsqueeze(0)
    tokens = xp.gather(rows, 1, begin + nth % period)
    return xp.where(found, tokens, xp.full([1, 1], -1, dtype=xp.int64, device=slots.device))
