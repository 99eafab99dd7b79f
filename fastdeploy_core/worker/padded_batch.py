"""A step laid out as its StepShape: whatever is queued for it has the same shapes for all such steps."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from fastdeploy_core.contracts.attention import AttentionBatch

if TYPE_CHECKING:
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.tensor import Tensor

    from .input_batch import InputBatch
    from .step_rows import StepRows
    from .step_shapes import StepShape


def attention_batch(
    device: DeviceBackend,
    batch: InputBatch,
    rows: StepRows,
    shape: StepShape,
    token_slots: np.ndarray,
    positions: np.ndarray,
) -> AttentionBatch:
    """What attention drivers see; token_slots and positions are of the tokens that count."""
    block, offset = np.divmod(positions, batch.block_size)
    slot_mapping = batch.block_tables[token_slots, block].astype(np.int64) * batch.block_size
    tables = np.zeros((shape.rows, shape.blocks), dtype=np.int32)
    width = min(shape.blocks, batch.block_tables.shape[1])
    tables[: rows.slots.size, :width] = batch.block_tables[rows.slots, :width]
    seq_lens = shape.pad((rows.starts + shape.tokens).astype(np.int32))
    offsets = np.arange(shape.rows + 1, dtype=np.int32) * np.int32(shape.tokens)
    where = np.repeat(shape.pad(rows.starts), shape.tokens)  # padding: where its row begins
    real = shape.spread(rows, np.ones(positions.size, dtype=bool))
    where[real] = positions
    slot_mapping = shape.spread(rows, slot_mapping + offset, -1)
    made = AttentionBatch.upload(
        device.to_device, offsets, seq_lens, tables, slot_mapping, where, shape.tokens
    )
    return replace(made, is_padded=True)


def input_ids(
    device: DeviceBackend,
    batch: InputBatch,
    rows: StepRows,
    shape: StepShape,
    known: np.ndarray,
    unknown_slots: np.ndarray,
) -> Tensor:
    """[rows * tokens] int64. `known`: [T] ids, unknown_slots: [T] slot whose newest token on the device
    is meant, -1 where the host knows it."""
    xp, put = device.xp, device.to_device
    on_host = put(shape.spread(rows, known))
    slots = shape.spread(rows, unknown_slots, -1)
    newest = xp.index_select(batch.newest_dev, 0, put(np.maximum(slots, 0)))
    return xp.where(put(slots >= 0), newest, on_host)
