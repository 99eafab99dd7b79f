"""The kit tells a leak from what other processes take of a device meanwhile."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from fastdeploy_testing.conformance.base import MEBIBYTE, assert_memory_returns


@dataclass
class _Memory:
    total_bytes: int
    free_bytes: int


class _Device:
    """Only what the kit reads of one: where it is, and its driver's figures."""

    device = "gpu"

    def __init__(self) -> None:
        self.taken = 0

    def memory(self) -> _Memory:
        return _Memory(1 << 40, (1 << 40) - self.taken)


def test_a_leak_is_found() -> None:
    device = _Device()

    def cycle() -> None:
        device.taken += MEBIBYTE // 2

    with pytest.raises(AssertionError, match=r"50\.0 MiB more after 100 cycles"):
        assert_memory_returns(device, cycle)


def test_another_process_that_takes_memory_is_no_leak() -> None:
    device, count = _Device(), 0

    def cycle() -> None:
        nonlocal count
        count += 1
        device.taken += 200 * MEBIBYTE * (count == 70)

    assert_memory_returns(device, cycle)
    assert count == 220, "looked at again, and no more often than needed"
