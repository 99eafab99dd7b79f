"""Runs whole sequences through a model at once, without an engine: batches and temporary caches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fastdeploy_core.contracts.attention import AttentionBatch, cache_dtypes
from fastdeploy_core.layers import ForwardContext

if TYPE_CHECKING:
    from fastdeploy_core.contracts.attention import AttentionSpec, StateSpec
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.tensor import Tensor

BLOCK_SIZE = 64


def grouped(samples: Sequence[list[int]], max_tokens: int) -> Iterator[list[list[int]]]:
    """Samples in their order, in groups of at most max_tokens; a longer sample is a group of its
    own."""
    group: list[list[int]] = []
    for sample in samples:
        if group and sum(map(len, group)) + len(sample) > max_tokens:
            yield group
            group = []
        group.append(sample)
    if group:
        yield group


def prefill(
    device: DeviceBackend,
    drivers: dict[Any, Any],
    kv_layers: Sequence[AttentionSpec | StateSpec],
    samples: Sequence[list[int]],
    *,
    shares_cache: bool = False,
) -> tuple[Tensor, Tensor, ForwardContext]:
    """(input_ids [T], positions [T], context) of sequences that begin at their first token.

    With `shares_cache` all layers of one shape write to one cache: enough if one layer runs at a
    time.
    """
    to_device, xp = device.to_device, device.xp
    lengths = np.array([len(sample) for sample in samples], np.int32)
    blocks = -(-lengths // BLOCK_SIZE)
    first = np.concatenate(([0], np.cumsum(blocks)[:-1]))
    tables = np.zeros((len(samples), int(blocks.max())), np.int32)
    slots, positions = [], []
    for row, length in enumerate(lengths):
        tables[row, : blocks[row]] = np.arange(first[row], first[row] + blocks[row])
        slots.append(first[row] * BLOCK_SIZE + np.arange(length))
        positions.append(np.arange(length))
    cu_seqlens = np.concatenate(([0], np.cumsum(lengths)))
    batch = AttentionBatch.upload(
        *(to_device, cu_seqlens, lengths, tables),
        *(np.concatenate(slots), np.concatenate(positions)),
    )

    def cache(spec: AttentionSpec | StateSpec) -> tuple[Any, ...]:
        shapes = drivers[spec].cache_shapes(int(blocks.sum()))
        dtypes = cache_dtypes(spec, len(shapes))
        return tuple(
            xp.zeros(shape, dtype=xp.dtype(dtype), device=device.device)
            for shape, dtype in zip(shapes, dtypes, strict=True)
        )

    shared = {spec: cache(spec) for spec in drivers} if shares_cache else {}
    caches = [shared[spec] if shares_cache else cache(spec) for spec in kv_layers]
    metadata = {spec: driver.prepare(batch) for spec, driver in drivers.items()}
    ids = np.concatenate([np.array(sample, np.int64) for sample in samples])
    return to_device(ids), batch.positions, ForwardContext(batch, metadata, caches)
