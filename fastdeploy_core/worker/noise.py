"""Made-up numbers for large dummy weights: one block of noise, repeated, so that no host has to draw
billions of them. Each tensor begins elsewhere in the block."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.tensor import Tensor

LARGE: Final = 1 << 20  # numbers of a tensor from which it repeats the block
SPREAD: Final = np.float32(0.02)
# Primes, so that rows and matrices of the usual sizes do not begin at the same place.
_NUMBERS: Final = 4_194_301
_BYTES: Final = 16_777_213


class Noise:
    """One model's; the block is made when it is first needed and lives as long as this does."""

    def __init__(self, seed: int, device: DeviceBackend) -> None:
        self._seed, self._device = seed, device

    def normal(self, name: str, shape: tuple[int, ...], count: int) -> Tensor:
        """N(0, 0.02) on the device, float32."""
        xp, block = self._device.xp, self._numbers
        values = xp.empty((count,), dtype=xp.float32, device=self._device.device)
        for to, place, part in _pieces(name, count, _NUMBERS):
            values[to : to + part] = block[place : place + part]
        return values.reshape(list(shape))

    def bits(self, name: str, count: int) -> np.ndarray:
        """So many bytes on the host."""
        values = np.empty(count, np.uint8)
        for to, place, part in _pieces(name, count, _BYTES):
            values[to : to + part] = self._bytes[place : place + part]
        return values

    @functools.cached_property
    def _numbers(self) -> Tensor:
        block = np.random.default_rng(self._seed).standard_normal(_NUMBERS, dtype=np.float32)
        return self._device.to_device(block * SPREAD)

    @functools.cached_property
    def _bytes(self) -> np.ndarray:
        return np.frombuffer(np.random.default_rng(self._seed).bytes(_BYTES), np.uint8)


def _pieces(name: str, count: int, period: int) -> Iterator[tuple[int, int, int]]:
    """How `count` numbers are copied from a block of `period`: (to, from, how many)."""
    done, place = 0, zlib.crc32(name.encode()) % period
    while done < count:
        part = min(count - done, period - place)
        yield done, place, part
        done, place = done + part, 0
