"""Blocks beside the KV pool, in GPU memory that other processes read and fill (`cuda_ipc`).

Takes the place of the host tier: steps copy blocks there and back within the GPU, and no block
passes through host memory on its way to another instance.
"""

from __future__ import annotations

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from fastdeploy_core.errors import ResourceError, WorkerError

from fd_cuda.device import wait

from .driver import Driver, name_of

if TYPE_CHECKING:
    from fastdeploy_core.contracts.ops import KernelTable
    from fastdeploy_core.tensor import Tensor
    from fastdeploy_core.types import BlockCopies

    from fd_cuda.torch_device import TorchCudaDevice

_ALIGNMENT: Final = 16
Pairs = list[tuple[int, int]]


class DeviceTier:
    """Carries out a step's BlockCopies, the blocks of "the host" being those of this memory."""

    def __init__(
        self,
        device: TorchCudaDevice,
        kernels: KernelTable,
        caches: list[tuple[Tensor, ...]],
        num_blocks: int,
        path: str,
    ) -> None:
        """path: a file, to write down where the memory is. ResourceError where there is no room."""
        self._device, self._caches, self.num_host_blocks = device, caches, num_blocks
        self._copy, self._read = kernels["kv_copy_blocks"], kernels["kv_read_blocks"]
        self._write = kernels["kv_write_blocks"]
        self._places: list[list[tuple[int, int]]] = []  # of each tensor: offset in a block, bytes
        size = 0
        for cache in caches:
            self._places.append([])
            for pool in cache:
                num_bytes = math.prod(pool.shape[1:]) * pool.element_size()
                self._places[-1].append((size, num_bytes))
                size += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        self._driver = Driver()
        self._address = 0
        self._driver.bind(device.index)
        try:
            self._address = self._driver.allocate(num_blocks * size)
        except ResourceError as error:
            raise ResourceError(
                f"{num_blocks * size / 2**30:.1f} GiB of GPU memory for blocks that other "
                f"instances fetch: {error}; lower --swap-space or --gpu-memory-utilization"
            ) from error
        self._blocks = tensor_at(self._address, num_blocks * size, device.index).view(-1, size)
        where = {
            "device": device.device,
            "address": self._address,
            "nbytes": num_blocks * size,
            "handle": name_of(self._driver, self._address).hex(),
        }
        Path(path).write_text(json.dumps(where))

    def __del__(self) -> None:
        """Other processes that have mapped the memory must be told before; they are fenced then."""
        if getattr(self, "_address", 0):
            with suppress(ResourceError):
                self._driver.free(self._address)

    def apply(self, copies: BlockCopies) -> None:
        """Pool to tier, tier to pool, then within the pool. What has passed between both is there
        when this returns: others may read and overwrite blocks of the tier from then on."""
        for pairs, is_out in ((copies.device_to_host, True), (copies.host_to_device, False)):
            if pairs:
                blocks, places = self._indices(pairs, [is_out, not is_out])[:: 1 if is_out else -1]
                for cache, spans in zip(self._caches, self._places, strict=True):
                    self._move(cache, spans, blocks, places, is_out=is_out)
        if copies.device_to_device:
            source, target = self._indices(copies.device_to_device, [True, True])
            for cache in self._caches:
                self._copy(cache, source, target)
        if copies.device_to_host or copies.host_to_device:
            wait(self._device.record_event())

    def _move(
        self,
        cache: tuple[Tensor, ...],
        spans: list[tuple[int, int]],
        blocks: Tensor,
        places: Tensor,
        *,
        is_out: bool,
    ) -> None:
        """One layer's part of blocks of the pool, to or from blocks of the tier."""
        if is_out:
            for part, (at, size) in zip(self._read(cache, blocks), spans, strict=True):
                rows = part.contiguous().view(len(blocks), -1).view(torch.uint8)
                _words(self._blocks, at, size)[places] = _words(rows, 0, size)
        else:
            data: list[Any] = []
            for pool, (at, size) in zip(cache, spans, strict=True):
                rows = _words(self._blocks, at, size)[places].view(pool.dtype)
                data.append(rows.view(len(blocks), *pool.shape[1:]))
            self._write(cache, blocks, tuple(data))

    def _indices(self, pairs: Pairs, is_pool: list[bool]) -> tuple[Tensor, Tensor]:
        table = np.asarray(pairs, dtype=np.int64).reshape(-1, 2)
        num_blocks = self._caches[0][0].shape[0] if self._caches else 0
        limits = [num_blocks if one else self.num_host_blocks for one in is_pool]
        if bool((table < 0).any()) or bool((table >= np.asarray(limits)).any()):
            raise WorkerError(
                f"a step copies blocks that do not exist: {pairs[:8]}; there are {num_blocks} in "
                f"the pool and {self.num_host_blocks} beside it"
            )
        first, second = (self._device.to_device(np.ascontiguousarray(x)) for x in table.T)
        return first, second


def _words(rows: Tensor, at: int, size: int) -> Tensor:
    """Columns of bytes, as the widest numbers that divide them."""
    part = rows[:, at : at + size]
    return part if size % 8 else part.view(torch.int64)


class _Memory:
    """In the form in which torch takes memory of a GPU."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def tensor_at(address: int, num_bytes: int, index: int) -> Tensor:
    """Bytes of GPU `index`."""
    return torch.as_tensor(_Memory(address, num_bytes), device=torch.device("cuda", index))
