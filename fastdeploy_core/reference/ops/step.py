"""Operations around a decode step whose state lies on the device; contracts/ops/ defines S, W, k,
q.

Everything happens in place and in fixed shapes, so that the step can be captured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from fastdeploy_core.tensor import namespace

if TYPE_CHECKING:
    from fastdeploy_core.tensor import Tensor

Post: TypeAlias = "tuple[Tensor, Tensor]"
NOT_ACCEPTED = NOTHING = -1
NOT_FINITE = -2
NOTHING_POSSIBLE = -3


def prepare_decode(
    slots: Tensor,
    tables: Tensor,
    num_computed: Tensor,
    newest: Tensor,
    drafts: Tensor,
    num_drafts: Tensor,
    room: Tensor,
    block_size: int,
    turn: Tensor,
    input_ids: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
) -> None:
    """Begin a turn: fill the last five tensors from the slots of the rows. Entries of the tables
    are block numbers or 0; entries after a row's last block are copied, too."""
    xp = namespace(slots)
    num_rows, select = slots.shape[0], xp.index_select
    turn.copy_(turn + 1)
    width = input_ids.shape[0] // max(1, num_rows)
    nth = xp.arange(width, dtype=xp.int64, device=slots.device).unsqueeze(0)
    start = select(num_computed, 0, slots).unsqueeze(1)
    is_row = (slots < num_computed.shape[0] - 1).unsqueeze(1)
    is_row = is_row & (start < select(room, 0, slots).unsqueeze(1))
    feeds = (nth <= select(num_drafts, 0, slots).unsqueeze(1)) & is_row
    fed = feeds.to(xp.int64)
    start = start * is_row.to(xp.int64)
    where = start + nth * fed
    ids = select(newest, 0, slots).unsqueeze(1)
    if width > 1:
        ids = xp.cat((ids, select(drafts, 0, slots)[:, : width - 1]), 1)
    table = select(tables, 0, slots)
    block = xp.gather(table, 1, where // block_size).to(xp.int64)
    input_ids.copy_((ids * fed).reshape([-1]))
    positions.copy_(where.reshape([-1]))
    slot_mapping.copy_(((block * block_size + where % block_size + 1) * fed - 1).reshape([-1]))
    seq_lens.copy_(((start + width) * is_row.to(xp.int64)).reshape([-1]).to(xp.int32))
    block_tables.copy_(table)


def place_tokens(
    positions: Tensor, room: Tensor, block_tables: Tensor, block_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The input of a step with one token per row: positions, cache slots, lengths."""
    xp = namespace(positions)
    fits = (positions < room).to(xp.int64)
    where = positions * fits
    block = xp.gather(block_tables, 1, (where // block_size).unsqueeze(1)).squeeze(1).to(xp.int64)
    slot_mapping = (block * block_size + where % block_size + 1) * fits - 1
    return where, slot_mapping, ((where + 1) * fits).to(xp.int32)


def finish_decode(
    slots: Tensor,
    drawn: Tensor,
    marked: Tensor,
    peaks: Tensor | None,
    drafts: Tensor,
    num_drafts: Tensor,
    num_computed: Tensor,
    newest: Tensor,
    results: Tensor,
    post: Post | None,
) -> Tensor:
    """Verify the drafts, write the sampled tokens back to the slots, and write what the host needs
    to `results`."""
    xp = namespace(slots)
    num_rows, width = results.shape
    if peaks is not None:
        marked = mark_broken(marked, peaks, None)
    marked = marked.reshape([num_rows, width])
    accepted = _count_accepted(slots, drawn.reshape([num_rows, width]), marked, drafts, num_drafts)
    is_row = (slots < num_computed.shape[0] - 1).to(xp.int64)
    start = xp.index_select(num_computed, 0, slots)
    last = xp.arange(num_rows, dtype=xp.int64, device=slots.device) * width + accepted
    token = xp.index_select(drawn, 0, last)
    # Padding rows all name the last slot; each writes the value that the slot has already.
    xp.index_copy_(newest, 0, slots, token * is_row)
    xp.index_copy_(num_computed, 0, slots, (start + 1 + accepted) * is_row)
    nth = xp.arange(width, dtype=xp.int64, device=slots.device).unsqueeze(0)
    nothing = xp.full([1, 1], NOT_ACCEPTED, dtype=xp.int64, device=slots.device)
    results.copy_(xp.where(nth <= accepted.unsqueeze(1), marked, nothing))
    judged = xp.index_select(num_drafts, 0, slots)
    judged = xp.where(judged < width, judged, xp.zeros_like(judged) + (width - 1))
    _post(xp.cat((results, judged.unsqueeze(1), accepted.unsqueeze(1)), 1), post)
    return last


def keep_results(slots: Tensor, results: Tensor, num_computed: Tensor, kept: Tensor) -> None:
    """See contracts/ops/."""
    xp, size = namespace(slots), kept.shape[1]
    nth = xp.arange(size, dtype=xp.int64, device=slots.device).unsqueeze(0)
    is_row = (slots < num_computed.shape[0] - 1).unsqueeze(1)
    column = (xp.index_select(num_computed, 0, slots) % size).unsqueeze(1)
    kept.copy_(xp.where((nth == column) & is_row, results, kept))


def _count_accepted(
    slots: Tensor, drawn: Tensor, marked: Tensor, drafts: Tensor, num_drafts: Tensor
) -> Tensor:
    """Leading drafts of each row that equal the sampled token and are followed by a valid one."""
    xp = namespace(slots)
    width = drawn.shape[1] - 1
    if not width:
        return xp.zeros([drawn.shape[0]], dtype=xp.int64, device=slots.device)
    fed = xp.index_select(drafts, 0, slots)[:, :width]
    nth = xp.arange(width, dtype=xp.int64, device=slots.device).unsqueeze(0)
    is_right = (drawn[:, :width] == fed) & (marked[:, 1:] >= 0)
    is_right = is_right & (nth < xp.index_select(num_drafts, 0, slots).unsqueeze(1))
    return (xp.cumsum(1 - is_right.to(xp.int64), 1) == 0).to(xp.int64).sum(dim=1)


def keep_drafts(
    slots: Tensor,
    proposals: Tensor,
    results: Tensor,
    limit: Tensor,
    vocab_size: int,
    num_computed: Tensor,
    room: Tensor,
    drafts: Tensor,
    num_drafts: Tensor,
    post: Post | None,
) -> Tensor:
    """Write proposals to the slots, up to the first that is no token and as far as there is room.
    Returns the results followed by what was taken."""
    xp = namespace(slots)
    num_rows, width = proposals.shape
    select = xp.index_select
    left = select(room, 0, slots) - 1 - select(num_computed, 0, slots)
    is_row = slots < num_computed.shape[0] - 1
    nth = xp.arange(width, dtype=xp.int64, device=slots.device).unsqueeze(0)
    is_token = (proposals >= 0) & (proposals < vocab_size) & (nth < limit)
    is_token = is_token & (nth < left.unsqueeze(1)) & is_row.unsqueeze(1)
    kept = (xp.cumsum(1 - is_token.to(xp.int64), 1) == 0).to(xp.int64)
    taken = proposals * kept
    missing = drafts.shape[1] - width
    if missing:
        zeros = xp.zeros([num_rows, missing], dtype=xp.int64, device=slots.device)
        taken = xp.cat((taken, zeros), 1)
    xp.index_copy_(drafts, 0, slots, taken)
    xp.index_copy_(num_drafts, 0, slots, kept.sum(dim=1))
    strange = ((proposals < NOTHING) | (proposals >= vocab_size)).to(xp.int64)
    told = (proposals + 1) * kept - 1 - strange
    _post(told, post)
    return xp.cat((results, told), 1)


def _post(values: Tensor, post: Post | None) -> None:
    """Write values [B, n] to this turn's page of a box."""
    if post is None:
        return
    box, turn = post
    xp, (rows, width) = namespace(values), values.shape
    place = turn % box.shape[0]
    page = xp.index_select(box, 0, place)
    page[0, :rows, :width] = turn * 2**32 + values % 2**32
    xp.index_copy_(box, 0, place, page)


def mark_broken(drawn: Tensor, peaks: Tensor, possible: Tensor | None) -> Tensor:
    """The sampled tokens for the host, with a code in place of those that are meaningless."""
    xp = namespace(drawn)
    for values, code in ((possible, NOTHING_POSSIBLE), (peaks, NOT_FINITE)):
        if values is not None:
            sign = xp.full([1], code, dtype=xp.int64, device=drawn.device)
            drawn = xp.where(xp.isfinite(values), drawn, sign)
    return drawn
