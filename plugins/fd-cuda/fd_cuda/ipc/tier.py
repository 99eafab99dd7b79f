"""Blocks beside the KV pool, in GPU memory that other processes read and fill (`cuda_ipc`).

Takes the place of the host tier: steps copy blocks there and back within the GPU, and no block
passes through host memory on its way to another instance.
"""

from __future__ import annotations

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from fastdeploy_core.errors import ResourceError, WorkerError

from fd_cuda.device import wait
from fd_cuda.kernels.cache import move_blocks, sum_blocks
from fd_cuda.torch_device import tensor_at

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
        self._copy = kernels["kv_copy_blocks"]
        parts, size = [], 0
        for pool in (pool for cache in caches for pool in cache):
            num_bytes = math.prod(pool.shape[1:]) * pool.element_size()
            parts.append((pool.data_ptr(), size, num_bytes))
            size += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        self._size, self._most = size, max((row[2] for row in parts), default=0)
        self._word = 1 if any(row[2] % 8 for row in parts) else 8
        self._parts = device.to_device(np.array(parts, dtype=np.int64).reshape(-1, 3))
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
        if num_blocks and parts:  # compiled now, not when a request waits
            for is_out in (True, False):
                self._move([(0, 0)], is_out=is_out)
            first = tensor_at(self._address, size, device.index).view(torch.int32)
            with torch.cuda.device(device.index):
                sum_blocks(first[None], torch.zeros(1, dtype=torch.int64, device=first.device))
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
        if copies.device_to_host:
            self._move(copies.device_to_host, is_out=True)
        if copies.host_to_device:
            self._move(copies.host_to_device, is_out=False)
        if copies.device_to_device:
            source, target = self._indices(copies.device_to_device, [True, True])
            for cache in self._caches:
                self._copy(cache, source, target)
        if copies.device_to_host or copies.host_to_device:
            wait(self._device.record_event())

    def _move(self, pairs: Pairs, *, is_out: bool) -> None:
        """All layers' parts of blocks of the pool, to or from blocks of the tier, in one launch."""
        found = self._indices(pairs, [is_out, not is_out])
        blocks, places = found if is_out else found[::-1]
        where = self._parts, self._most, self._address, self._size, blocks, places
        with torch.cuda.device(self._device.index):
            move_blocks(*where, word=self._word, is_out=is_out)

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
