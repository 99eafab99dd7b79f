"""The decode and history operations of contracts/ops/decode.py, row by row in numpy.

Each function changes the arrays that the operation changes, and returns what it returns.
"""

from __future__ import annotations

import numpy as np

Array = np.ndarray


def prepare_decode(
    slots: Array,
    tables: Array,
    num_computed: Array,
    newest: Array,
    drafts: Array,
    num_drafts: Array,
    room: Array,
    block_size: int,
    turn: Array,
    input_ids: Array,
    positions: Array,
    slot_mapping: Array,
    seq_lens: Array,
    block_tables: Array,
) -> None:
    """Fills the last five."""
    turn += 1
    width = len(input_ids) // len(slots)
    for row, slot in enumerate(slots):
        block_tables[row] = tables[slot]
        feeds = slot < len(num_computed) - 1 and num_computed[slot] < room[slot]
        first = num_computed[slot] if feeds else 0
        seq_lens[row] = first + width if feeds else 0
        for nth in range(width):
            place = row * width + nth
            is_fed = feeds and nth <= num_drafts[slot]
            token = newest[slot] if nth == 0 else drafts[slot, nth - 1]
            where = first + nth if is_fed else first
            positions[place] = where
            input_ids[place] = token if is_fed else 0
            block = tables[slot, where // block_size]
            slot_mapping[place] = block * block_size + where % block_size if is_fed else -1


def place_tokens(
    positions: Array, room: Array, block_tables: Array, block_size: int
) -> tuple[Array, Array, Array]:
    """(positions, slot_mapping, seq_lens)."""
    rows = []
    for position, limit, table in zip(positions, room, block_tables, strict=True):
        if position < limit:
            slot = table[position // block_size] * block_size + position % block_size
            rows.append((position, slot, position + 1))
        else:
            rows.append((0, -1, 0))
    found = np.array(rows, "int64").reshape(-1, 3)
    return found[:, 0], found[:, 1], found[:, 2].astype("int32")


def keep_drafts(
    slots: Array,
    proposals: Array,
    results: Array,
    limit: Array,
    vocab_size: int,
    num_computed: Array,
    room: Array,
    drafts: Array,
    num_drafts: Array,
) -> Array:
    """Results and what was taken, [B, M+N]. Entries of `drafts` after num_drafts mean nothing."""
    told = np.full(proposals.shape, -1, "int64")
    for row, slot in enumerate(slots):
        is_padding = slot == len(num_computed) - 1
        most = 0 if is_padding else min(limit[0], room[slot] - 1 - num_computed[slot])
        count = 0
        while count < min(most, proposals.shape[1]) and 0 <= proposals[row, count] < vocab_size:
            count += 1
        if not is_padding:
            num_drafts[slot] = count
            drafts[slot, :count] = proposals[row, :count]
        told[row, :count] = proposals[row, :count]
        strange = (proposals[row] < -1) | (proposals[row] >= vocab_size)
        told[row, count:][strange[count:]] = -2
    return np.concatenate([results, told], 1)


def finish_decode(
    slots: Array,
    drawn: Array,
    marked: Array,
    peaks: Array | None,
    drafts: Array,
    num_drafts: Array,
    num_computed: Array,
    newest: Array,
    results: Array,
) -> tuple[Array, Array]:
    """(where each row's newest token stands in drawn, what is posted [B, Q+2])."""
    width = results.shape[1]
    if peaks is not None:
        marked = np.where(np.isfinite(peaks), marked, -2)
    drawn, marked = drawn.reshape(-1, width), marked.reshape(-1, width)
    last, told = [], []
    for row, slot in enumerate(slots):
        judged = min(num_drafts[slot], width - 1)
        count = 0
        while (
            count < judged
            and drawn[row, count] == drafts[slot, count]
            and marked[row, count + 1] >= 0
        ):
            count += 1
        results[row] = [*marked[row, : count + 1], *[-1] * (width - 1 - count)]
        last.append(row * width + count)
        told.append([*results[row], judged, count])
        if slot < len(num_computed) - 1:
            newest[slot] = drawn[row, count]
            num_computed[slot] += 1 + count
    return np.array(last, "int64"), np.array(told, "int64").reshape(-1, width + 2)


def append_history(slots: Array, results: Array, num_computed: Array, history: Array) -> None:
    """The padding slot's row means nothing."""
    for row, slot in enumerate(slots):
        wrong = np.flatnonzero(results[row] < 0)
        count = int(wrong[0]) if len(wrong) else results.shape[1]
        end = num_computed[slot] + 1
        if slot < len(history) - 1:
            history[slot, end - count : end] = results[row, :count]


def match_ngrams(
    history: Array, slots: Array, num_known: Array, min_size: int, max_size: int, n: int
) -> Array:
    """The longest end first, then the latest place."""
    found = np.full((len(slots), n), -1, "int64")
    for row, (slot, known) in enumerate(zip(slots, num_known, strict=True)):
        tokens = history[slot, :known].tolist()
        for size in range(max_size, min_size - 1, -1):
            end = tokens[known - size :] if size <= known else None
            begins = range(known - size - 1, -1, -1)
            place = next((b for b in begins if tokens[b : b + size] == end), None)
            if place is not None:
                after = tokens[place + size :]
                found[row] = [after[nth % len(after)] for nth in range(n)]
                break
    return found
