"""Copies of KV blocks that a step asks for: within the device, and to and from host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fastdeploy_core.errors import WorkerError
from fastdeploy_core.types import BlockCopies

if TYPE_CHECKING:
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.contracts.ops import KernelTable
    from fastdeploy_core.tensor import Tensor

Pairs = list[tuple[int, int]]


class BlockMover:
    """Carries out a step's BlockCopies over a group of layers of this rank."""

    def __init__(
        self,
        device: DeviceBackend,
        kernels: KernelTable,
        caches: list[tuple[Tensor, ...]],
        num_host_blocks: int,
        host_file: str = "",
    ) -> None:
        self._device, self._xp, self._caches = device, device.xp, caches
        self._copy, self._read = kernels["kv_copy_blocks"], kernels["kv_read_blocks"]
        self._write = kernels["kv_write_blocks"]
        self.num_host_blocks = num_host_blocks
        # numpy has no bfloat16: such blocks are kept as their bits.
        self._host: list[tuple[np.ndarray, ...]] = []
        if num_host_blocks and caches:
            like = [tuple(device.to_host(pool[:1]) for pool in cache) for cache in caches]
            self._host = _host_arrays(like, num_host_blocks, host_file)

    def apply(self, copies: BlockCopies) -> None:
        """Device to host, host to device, then within the device."""
        if not self._caches:
            return  # blocks of no layer are numbers alone
        if copies.device_to_host:
            self._to_host(copies.device_to_host)
        if copies.host_to_device:
            self._to_device(copies.host_to_device)
        if copies.device_to_device:
            source, target = self._indices(copies.device_to_device)
            source_dev, target_dev = map(self._device.to_device, (source, target))
            for cache in self._caches:
                self._copy(cache, source_dev, target_dev)

    def _to_host(self, pairs: Pairs) -> None:
        source, target = self._indices(pairs, host=1)
        blocks = self._device.to_device(source)
        for cache, host in zip(self._caches, self._host, strict=True):
            for part, store in zip(self._read(cache, blocks), host, strict=True):
                store[target] = self._device.to_host(part)

    def _to_device(self, pairs: Pairs) -> None:
        source, target = self._indices(pairs, host=0)
        blocks, xp, device = self._device.to_device(target), self._xp, self._device.device
        for cache, host in zip(self._caches, self._host, strict=True):
            data = tuple(
                xp.to_device(xp.from_numpy(store[source], pool.dtype), device)
                for store, pool in zip(host, cache, strict=True)
            )
            self._write(cache, blocks, data)

    def _indices(self, pairs: Pairs, host: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """(sources, targets); `host` says which of the two are host blocks."""
        table = np.asarray(pairs, dtype=np.int64).reshape(-1, 2)
        num_device = self._caches[0][0].shape[0]
        limits = [num_device, num_device]
        if host is not None:
            limits[host] = self.num_host_blocks
        if bool((table < 0).any()) or bool((table >= np.asarray(limits)).any()):
            raise WorkerError(
                f"a step copies blocks that do not exist: {pairs[:8]}; there are {num_device} on "
                f"the device and {self.num_host_blocks} on the host"
            )
        return np.ascontiguousarray(table[:, 0]), np.ascontiguousarray(table[:, 1])


def _host_arrays(
    like: list[tuple[np.ndarray, ...]], num_blocks: int, path: str
) -> list[tuple[np.ndarray, ...]]:
    """[num_blocks, ...] of each array, which is that of one block, in the file at `path` or in
    memory of ours. All of a block lies together."""
    parts = [(f"{n} {m}", a) for n, layer in enumerate(like) for m, a in enumerate(layer)]
    block = np.dtype([(name, a.dtype, a.shape[1:]) for name, a in parts], align=True)
    blocks = np.memmap(path, block, "w+", shape=num_blocks) if path else np.zeros(num_blocks, block)
    return [tuple(blocks[f"{n} {m}"] for m in range(len(layer))) for n, layer in enumerate(like)]
