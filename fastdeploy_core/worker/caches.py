"""The KV caches of one rank: pools of blocks of all attention layers, and moves between blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from fastdeploy_core.contracts.attention import cache_dtypes
from fastdeploy_core.contracts.device import TierDevice
from fastdeploy_core.errors import ConfigError, WorkerError
from fastdeploy_core.kvcache import bounded_rules
from fastdeploy_core.memory.block_mover import BlockMover
from fastdeploy_core.memory.host_pages import untouched
from fastdeploy_core.tensor import DTYPE_BYTES
from fastdeploy_core.types import NO_COPIES, BlockCopies

if TYPE_CHECKING:
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.contracts.ops import KernelTable
    from fastdeploy_core.loading.loader import LoadedModel
    from fastdeploy_core.tensor import Tensor


class Caches:
    """None until `allocate`."""

    def __init__(self, device: DeviceBackend, kernels: KernelTable, loaded: LoadedModel) -> None:
        self._device, self._kernels, self._loaded = device, kernels, loaded
        self.tensors: list[tuple[Tensor, ...]] = []  # of each layer
        self.rules = bounded_rules(loaded.builder.kv_layers)  # of groups of layers after the first
        self._is_state = [rule.kind == "state" for rule in self.rules]
        if self.rules and device.limits.step_buckets is not None:
            rule = self.rules[0]
            raise ConfigError(
                f"layers with a {rule.kind} have block tables of their own, and steps of "
                f"fixed shapes, which device {device.name} needs, have one for all; possible: "
                + (f"--max-model-len {rule.tokens}" if rule.tokens else "another device")
            )
        groups = {rule: number for number, rule in enumerate(self.rules, 1)}
        self._groups = [groups.get(spec.retention, 0) for spec in loaded.builder.kv_layers]
        self._movers: list[BlockMover] = []  # of each group

    def block_bytes(self) -> list[int]:
        """Of each group, one block in all of its layers."""
        found = [0] * (1 + len(self.rules))
        for group, layer in zip(self._groups, self.shapes(*found), strict=True):
            found[group] += sum(math.prod(shape[1:]) * DTYPE_BYTES[dtype] for shape, dtype in layer)
        return found

    def most_bytes(self, num_seqs: int, num_blocks: int) -> int:
        """What so many sequences of so many blocks could ever hold; of states a few each."""
        counts = [num_blocks, *(min(num_blocks, 8) if s else num_blocks for s in self._is_state)]
        return num_seqs * sum(n * size for n, size in zip(counts, self.block_bytes(), strict=True))

    def spread(self, blocks: list[int]) -> list[int]:
        """These blocks in every group, as messages have them, but all states in the first one."""
        return [n for block in blocks for n in (block, *(block * (not s) for s in self._is_state))]

    def shapes(self, *num_blocks: int) -> list[list[tuple[tuple[int, ...], str]]]:
        """(shape, dtype) of each tensor of each layer's cache. num_blocks: of each group."""
        layers = []
        for spec, group in zip(self._loaded.builder.kv_layers, self._groups, strict=True):
            shapes = self._loaded.attention[spec].cache_shapes(num_blocks[group])
            layers.append(list(zip(shapes, cache_dtypes(spec, len(shapes)), strict=True)))
        return layers

    def allocate(
        self,
        num_blocks: int,
        num_host_blocks: int,
        *more_blocks: int,
        host_files: Sequence[str] = (),
        is_touched: bool,
    ) -> None:
        """Zeroed caches of every layer; those there were have been dropped. more_blocks: of each
        group after the first, then their host blocks; none: as many as that has, of states one, and
        no host blocks. Without `is_touched` the host's memory comes page by page when it is used:
        clearing gigabytes takes seconds. host_files: where each group's host blocks lie, for others
        to use; device:FILE: see TierDevice."""
        device, xp = self._device, self._device.xp
        is_late = device.limits.shares_host_memory and num_blocks and not is_touched

        def make(shape: tuple[int, ...], dtype: str) -> Tensor:
            if is_late:
                return untouched(xp, shape, dtype)
            return xp.zeros(shape, dtype=xp.dtype(dtype), device=device.device)

        more, hosts = more_blocks[: len(self.rules)], more_blocks[len(self.rules) :]
        sizes = (num_blocks, *(more or [1 if s else num_blocks for s in self._is_state]))
        self.tensors = [
            tuple(make(shape, dtype) for shape, dtype in layer) for layer in self.shapes(*sizes)
        ]
        layers: list[list[tuple[Tensor, ...]]] = [[] for _ in sizes]
        for layer, group in zip(self.tensors, self._groups, strict=True):
            layers[group].append(layer)
        files = host_files or [""] * len(sizes)
        of = (self._kernels, layers[0], num_host_blocks, files[0].removeprefix("device:"))
        keeps = files[0].startswith("device:") and isinstance(device, TierDevice) and device
        self._movers = [keeps.block_tier(*of) if keeps else BlockMover(device, *of)]
        self._movers += map(partial(BlockMover, device, of[0]), layers[1:], hosts, files[1:])

    def drop(self) -> None:
        """Give the memory back, as far as nobody else holds the tensors."""
        self._movers, self.tensors = [], []

    def move(self, copies: BlockCopies) -> None:
        """Copy blocks as a step says."""
        if copies == NO_COPIES:
            return
        if len(copies.more) >= len(self._movers):
            raise WorkerError("a step copies blocks that were not allocated")
        for mover, own in zip(self._movers, (copies, *copies.more), strict=False):
            mover.apply(own)
