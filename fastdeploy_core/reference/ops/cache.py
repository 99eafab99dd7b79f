"""Operations on the paged cache. Dimension 0 of every cache tensor is the block."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastdeploy_core.tensor import namespace

if TYPE_CHECKING:
    from fastdeploy_core.tensor import Tensor


def kv_write(rows: tuple[Tensor, ...], cache: tuple[Tensor, ...], slot_mapping: Tensor) -> None:
    """Store each token's rows in its slot, in place.

    rows: one [T, heads, dim] for each cache tensor [blocks, block_size, heads, dim]; slot_mapping
    [T] int64: block * block_size + offset, -1 for a token that is not stored.
    """
    if slot_mapping.shape[0] == 0:
        return
    xp = namespace(slot_mapping)
    if str(slot_mapping.device) != "cpu":
        _write_without_waiting(xp, rows, cache, slot_mapping)
        return
    padded = int(slot_mapping.min()) < 0
    if padded:
        kept = xp.nonzero(slot_mapping >= 0).flatten()
        slot_mapping = xp.index_select(slot_mapping, 0, kept)
    for row, pool in zip(rows, cache, strict=True):
        data = xp.index_select(row, 0, kept) if padded else row
        slots = pool.view([pool.shape[0] * pool.shape[1], *pool.shape[2:]])
        xp.index_copy_(slots, 0, slot_mapping, data)


def _write_without_waiting(
    xp: Any, rows: tuple[Tensor, ...], cache: tuple[Tensor, ...], slot_mapping: Tensor
) -> None:
    """kv_write for accelerators, where asking whether there is padding would wait for the device.
    Padding stores the first real token once more; without a real token it stores the content of
    slot 0."""
    is_real = slot_mapping >= 0
    places = xp.arange(slot_mapping.shape[0], device=slot_mapping.device)
    source = xp.where(is_real, places, xp.argmax(is_real.to(xp.int32), 0))
    slots = xp.clamp(xp.index_select(slot_mapping, 0, source), 0)
    has_real = is_real.any().reshape([1, 1, 1])
    for row, pool in zip(rows, cache, strict=True):
        flat = pool.view([pool.shape[0] * pool.shape[1], *pool.shape[2:]])
        stored = xp.index_select(flat, 0, slots)
        xp.index_copy_(flat, 0, slots, xp.where(has_real, xp.index_select(row, 0, source), stored))


def kv_copy_blocks(cache: tuple[Tensor, ...], source: Tensor, target: Tensor) -> None:
    """Copy block source[i] to target[i], [n] int64; all are read before any is written."""
    xp = namespace(source)
    for pool in cache:
        xp.index_copy_(pool, 0, target, xp.index_select(pool, 0, source))


def kv_read_blocks(cache: tuple[Tensor, ...], blocks: Tensor) -> tuple[Tensor, ...]:
    """Copies of the blocks, [n, ...] for each cache tensor; blocks [n] int64."""
    xp = namespace(blocks)
    return tuple(xp.index_select(pool, 0, blocks) for pool in cache)


def kv_write_blocks(cache: tuple[Tensor, ...], blocks: Tensor, data: tuple[Tensor, ...]) -> None:
    """Overwrite blocks with data, [n, ...] for each cache tensor; blocks [n] int64, distinct."""
    xp = namespace(blocks)
    for pool, part in zip(cache, data, strict=True):
        xp.index_copy_(pool, 0, blocks, part)
