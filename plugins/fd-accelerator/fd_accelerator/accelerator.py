"""What the two bases of accelerators share, paddle_device.py and torch_device.py. A plugin uses one
of those; importing this imports no tensor library."""

from __future__ import annotations

import importlib.metadata
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastdeploy_core.contracts.base import CONTRACT
from fastdeploy_core.contracts.device import DeviceEvent, DeviceLimits, MemoryInfo
from fastdeploy_core.errors import CapabilityError, ConfigError

if TYPE_CHECKING:
    import numpy as np

    from fastdeploy_core.tensor import Tensor

GIB = 1024**3
_MOST_GIB = 1 << 20
SCORE = 100  # a chip that is here beats the reference
# The operator's word for the memory of one chip in GiB, where nobody else can say.
MEMORY_ENV = "FD_DEVICE_MEMORY_GIB"


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceleratorFacts:
    """What differs from chip to chip, whichever tensor library reaches it."""

    name: str  # of the driver and its entry points
    type_name: str  # of the library's device, as in "<type_name>:0"
    limits: DeviceLimits
    visible_env: tuple[str, ...] = ()  # variables that choose among the host's chips
    environment: tuple[tuple[str, str], ...] = ()  # set before the library is imported, unless set
    install: str = ""  # what to run, or to install, when the vendor's part is missing

    def prepare_environment(self) -> None:
        """Before the tensor library is imported."""
        for name, value in self.environment:
            os.environ.setdefault(name, value)


def installed_version(distribution: str) -> str:
    """Read without importing it; empty when it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def gib_in(variable: str, default: float = 0.0) -> int:
    """Bytes, from an environment variable in GiB; ConfigError when it holds no such number."""
    text = os.environ.get(variable, "").strip() if variable else ""
    try:
        gib = float(text or default)
        if not 0 <= gib <= _MOST_GIB:
            raise ValueError(gib)
    except ValueError:
        raise ConfigError(
            f"environment variable {variable} cannot be read: got {text!r:.40}; expected a number "
            "of GiB"
        ) from None
    return int(gib * GIB)


class Accelerator:
    """The part of a DeviceBackend that asks the tensor room's place (`_place`) and the facts."""

    name: str = ""
    contract = CONTRACT
    worker = ""
    facts: AcceleratorFacts
    limits: DeviceLimits
    _place: Any

    def _check_index(self, index: int, chips: int) -> None:
        if index < chips:
            return
        names = self.facts.visible_env
        shown = [f"{n}={os.environ[n]}" for n in names if n in os.environ]
        raise ConfigError(
            f"device {self.name!r} has no chip {index}: {chips} visible"
            f"{' (' + ', '.join(shown) + ')' if shown else ''}; lower --tensor-parallel-size or "
            "show it more"
        )

    def _check_world(self, world_size: int) -> None:
        possible = self.limits.max_tensor_parallel_size
        if world_size > possible:
            raise CapabilityError(
                f"device {self.name!r} joins at most {possible} ranks; asked for {world_size}"
            )

    def memory(self) -> MemoryInfo:
        """From the driver, the vendor's tool or the operator's setting, in that order."""
        known = self._place.driver_memory() or self._ask_tool()
        if known is None:
            total = gib_in(MEMORY_ENV)
            if not total:
                raise ConfigError(
                    f"nobody can say how much memory a {self.name} chip has: "
                    f"{self._tool_problem()}; set {MEMORY_ENV}"
                )
            known = (max(0, total - self._place.reserved_bytes()), total)
        return MemoryInfo(total_bytes=known[1], free_bytes=known[0])

    def _ask_tool(self) -> tuple[int, int] | None:
        """(free, total) bytes, of a base that knows a tool."""
        return None

    def _tool_problem(self) -> str:
        return "its driver does not tell"

    def to_device(self, array: np.ndarray) -> Tensor:
        """A tensor of the array's values."""
        x: Tensor = self._place.upload(array)
        return x

    def record_event(self) -> DeviceEvent:
        """An event after everything queued so far."""
        event: DeviceEvent = self._place.event()
        return event

    def close(self) -> None:
        """Give graphs and cached memory back; tensors still referred to stay."""
        self._place.close()
