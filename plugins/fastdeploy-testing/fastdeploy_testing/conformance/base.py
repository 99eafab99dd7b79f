"""What all suites share: the driver under test, tolerances, memory measurements."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest

from fastdeploy_core.contracts.device import DeviceOptions
from fastdeploy_testing.conformance.declared import DeclaredKernels

if TYPE_CHECKING:
    from fastdeploy_core.plugins.discovery import PluginEntry

# (relative, absolute) distance from a float64 oracle, by the dtype of inputs and outputs.
TOLERANCE = {
    "float64": (1e-9, 1e-9),
    "float32": (1e-4, 1e-5),
    "float16": (1e-2, 2e-3),
    "bfloat16": (4e-2, 2e-2),
}


def values(seed: int, *shape: int) -> np.ndarray:
    """Normal float32 numbers."""
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


def option_value(text: str) -> Any:
    """The value of a key of --fd-option: parsed as JSON if possible, else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


class Conformance:
    """Base of every suite. Subclass one, set `driver_name`, override fixtures where needed."""

    kind: ClassVar[str] = ""
    driver_name: ClassVar[str] = ""

    @pytest.fixture(scope="class")
    @classmethod
    def driver(cls, fd_entry: PluginEntry) -> Any:
        """The driver's class, loaded as the engine would."""
        from fastdeploy_core.plugins.drivers import load

        return load(fd_entry)

    def tolerance(self, dtype: str) -> tuple[float, float]:
        """(relative, absolute) for results of that dtype; override to be stricter."""
        return TOLERANCE[dtype]


class OnDevice(Conformance):
    """Base of suites that compute: they have a device, its kernels, and the tensor library."""

    # Name of the device to run on, for suites of other kinds than a device's own.
    runs_on: ClassVar[str] = ""

    @pytest.fixture(scope="class")
    @classmethod
    def device(cls, request: pytest.FixtureRequest, fd_tensor: str) -> Iterator[Any]:
        """The device under test, or the one that the driver under test runs on."""
        from fastdeploy_core.plugins.drivers import lookup

        option = request.config.getoption
        own = cls.driver_name if cls.kind in ("device", "kernels") else ""
        asked = option("--fd-driver") if option("--fd-kind") in ("device", "kernels") else ""
        name = own or cls.runs_on or asked or option("--fd-device") or "cpu"
        device = lookup("device", name)(
            DeviceOptions(tensor_library=fd_tensor, num_threads=1, seed=0)
        )
        with device.xp.no_grad():
            yield device
        device.close()

    @pytest.fixture(scope="class")
    @classmethod
    def kernels(cls, device: Any) -> Any:
        """The device's kernel table; the reference fills its gaps. Suites of kernels call them
        through a table that holds calls to the contract's declarations."""
        from fastdeploy_core.plugins.kernels import build_kernel_table

        table = build_kernel_table(device.name)
        return DeclaredKernels(table) if cls.kind == "kernels" else table

    @pytest.fixture(params=["float32", "float16", "bfloat16"])
    def dtype(self, request: pytest.FixtureRequest, device: Any) -> str:
        """Every dtype that the device declares."""
        if request.param not in device.limits.dtypes:
            pytest.skip(f"{request.param} is not among limits.dtypes {device.limits.dtypes}")
        return str(request.param)

    def to_device(self, device: Any, array: np.ndarray, dtype: str = "") -> Any:
        """A device tensor of the array's values in `dtype`; shares no memory with the array, which
        expected values are computed from."""
        x = device.to_device(np.array(array, order="C"))
        return x.to(device.xp.dtype(dtype)) if dtype else x

    def rounded(self, device: Any, array: np.ndarray, dtype: str) -> np.ndarray:
        """The array's values after a round trip through `dtype`, as float64: the values that a
        kernel got."""
        x = self.to_device(device, np.asarray(array, "float32"), dtype)
        return np.array(device.to_host(x.float()), "float64")

    def to_host(self, device: Any, x: Any) -> np.ndarray:
        """Values of a device tensor as float64 or as integers."""
        if device.xp.dtype_name(x.dtype) in ("float16", "bfloat16", "float32"):
            return np.array(device.to_host(x.float()), "float64")
        return np.array(device.to_host(x))

    @contextmanager
    def unchanged(self, device: Any, **tensors: Any) -> Iterator[None]:
        """Check that none of these tensors is another one afterwards; None may be among them."""
        given = {name: x for name, x in tensors.items() if x is not None}
        before = {name: self.to_host(device, x) for name, x in given.items()}
        yield
        for name, x in given.items():
            same = np.array_equal(self.to_host(device, x), before[name], equal_nan=True)
            assert same, f"{name} is not as it was given"

    def assert_dtype(self, device: Any, result: Any, dtype: str) -> None:
        """The result is of that dtype, as the contract says."""
        got = device.xp.dtype_name(result.dtype)
        assert got == dtype, f"the result is {got}, expected {dtype}"

    def assert_close(
        self, device: Any, result: Any, expected: np.ndarray, dtype: str, scale: float = 0.0
    ) -> None:
        """Within the dtype's tolerance of the oracle; `scale`: the size of intermediate values."""
        got = self.to_host(device, result)
        assert got.shape == expected.shape, f"shape {got.shape}, expected {expected.shape}"
        if not got.size:
            return
        relative, absolute = self.tolerance(dtype)
        limit = absolute + relative * max(scale, float(np.max(np.abs(expected))))
        assert np.all(np.isfinite(got)), "the result has NaN or infinite values"
        worst = float(np.max(np.abs(got - expected)))
        assert worst <= limit, f"off by {worst:.3g}, at most {limit:.3g} is allowed for {dtype}"


def resident_bytes() -> int:
    """Bytes of this process that lie in RAM."""
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def used_bytes(device: Any) -> int:
    """Bytes that this process uses of the device: its RAM if the device is the host, else the bytes
    that the device's driver reports as taken."""
    gc.collect()
    if device.device == "cpu":
        return resident_bytes()
    info = device.memory()
    return int(info.total_bytes - info.free_bytes)


def assert_memory_returns(device: Any, cycle: Callable[[], object]) -> None:
    """100 cycles leave no memory behind, in one of three attempts: a leak shows in every attempt,
    memory that other processes take meanwhile does not."""
    for _ in range(20):
        cycle()
    for _ in range(3):
        before = used_bytes(device)
        for _ in range(100):
            cycle()
        grown = used_bytes(device) - before
        if grown <= 24 * MEBIBYTE:
            return
    raise AssertionError(f"{grown / MEBIBYTE:.1f} MiB more after 100 cycles")


def wait_until(condition: Any, limit_s: float = 20.0) -> bool:
    """Poll until the condition holds; generous, because test machines are slow."""
    import time

    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


MEBIBYTE = 1024 * 1024
