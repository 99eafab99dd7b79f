"""The common base of devices that a vendor's torch reaches: a plugin states facts, this does the
rest.

    TORCH = TorchFacts(name="mychip", type_name="mychip", module="torch_mychip", limits=..., ...)

    class MyTorchDevice(TorchAcceleratorDevice):
        name, facts = TORCH.name, TORCH

and its hook module answers `fd_device_probe` with `probe(TORCH, question)`. A plugin that runs on
PaddlePaddle, too, writes no class: TORCH is its PaddleDevice's `on_torch`, and that of
paddle_device.probe.
Importing this imports no tensor library.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fastdeploy_core.contracts.base import Accept, Candidate, Decline
from fastdeploy_core.contracts.device import (
    CapturedGraph,
    Communicator,
    DeviceOptions,
    DeviceQuestion,
)
from fastdeploy_core.errors import CapabilityError, PluginLoadError

from .accelerator import SCORE, Accelerator, AcceleratorFacts, installed_version

if TYPE_CHECKING:
    import numpy as np

    from fastdeploy_core.tensor import Tensor, TensorLibrary


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFacts(AcceleratorFacts):
    """Strings name torch's and the vendor's things. limits.graph_capture is not used: no graphs
    through torch."""

    collectives: str  # backend of torch.distributed
    # How the vendor's torch is told from any other: a module that has to be imported for the device
    # type, part of the version that the distribution `torch` has, or both.
    module: str = ""
    version_mark: str = ""
    pinned_memory: bool = False  # torch.zeros(..., pin_memory=True) gives page-locked memory for it


def probe(facts: TorchFacts, question: DeviceQuestion) -> Candidate:
    """The answer to fd_device_probe: cheap checks first, torch's own word last."""
    reason = _why_not(facts, question.tensor_library)
    if reason:
        return Candidate(facts.name, Decline(reason))
    facts.prepare_environment()
    from . import torch_place

    chips = torch_place.count(facts.type_name, facts.module)
    if not chips:
        return Candidate(facts.name, Decline("the vendor's torch is installed but finds no chip"))
    details = {"tensor_library": "torch", "chips": str(chips), "versions": versions(facts)}
    return Candidate(
        facts.name, Accept(SCORE, f"{chips} chip(s) as {facts.type_name} on torch"), details
    )


def _why_not(facts: TorchFacts, tensor_library: str) -> str:
    if tensor_library not in ("", "torch"):
        return f"it runs on torch, asked for {tensor_library!r}"
    version = installed_version("torch")
    if not version:
        return f"torch is not installed; install {facts.install}"
    if facts.version_mark not in version:
        return (
            f"torch {version} is not the vendor's (its version would have {facts.version_mark!r}); "
            f"install {facts.install}"
        )
    if facts.module and importlib.util.find_spec(facts.module.partition(".")[0]) is None:
        return f"the vendor's module {facts.module} is not installed; install {facts.install}"
    return ""


def versions(facts: TorchFacts) -> str:
    """For the start-up table."""
    module = f" with {facts.module}" if facts.module else ""
    return f"torch {installed_version('torch')}{module}, collectives {facts.collectives}"


class TorchAcceleratorDevice(Accelerator):
    """One chip as one process sees it. Subclasses set `name` and `facts`, and override what
    differs."""

    facts: TorchFacts

    def __init__(self, options: DeviceOptions, facts: TorchFacts | None = None) -> None:
        if facts is not None:
            self.name, self.facts = facts.name, facts
        if reason := _why_not(self.facts, options.tensor_library):
            raise PluginLoadError(f"device {self.name!r} cannot be opened on torch: {reason}")
        self.facts.prepare_environment()
        from . import torch_place

        self.xp: TensorLibrary = torch_place.TORCH
        self._torch = torch_place
        self._check_index(options.index, torch_place.count(self.facts.type_name, self.facts.module))
        self._place = torch_place.Place(
            self.facts.type_name, options.index, self.facts.pinned_memory
        )
        self.device = self._place.device
        self.limits = replace(self.facts.limits, graph_capture=False, graph_collectives=False)
        if options.num_threads:
            self.xp.set_num_threads(options.num_threads)

    def to_host(self, x: Tensor) -> np.ndarray:
        """The values; other threads run while this one waits."""
        self._place.bind()
        return self.xp.to_numpy(x)

    def host_buffer(self, num_bytes: int) -> np.ndarray:
        """Page-locked, where the facts say that there is such memory."""
        buffer: np.ndarray = self._place.host_buffer(num_bytes)
        return buffer

    def upload(self, source: np.ndarray, target: Tensor) -> None:
        """Queued on the current stream."""
        self._place.copy_in(source, target)

    def download(self, source: Tensor, target: np.ndarray) -> None:
        """Queued on the current stream."""
        self._place.copy_out(source, target)

    def capture(
        self, run: Callable[[], None], beside: CapturedGraph | None = None
    ) -> CapturedGraph:
        """Refused."""
        raise CapabilityError(
            f"device {self.name!r} captures no graphs on torch (limits.graph_capture is False); "
            "run steps directly"
        )

    def communicator(self, rank: int, world_size: int, address: str) -> Communicator:
        """Join the group of this host's ranks through the vendor's backend of torch.distributed."""
        self._check_world(world_size)
        group: Communicator = self._torch.Collectives(
            self._place, self.facts.collectives, rank, world_size, address
        )
        return group

    def is_oom(self, error: BaseException) -> bool:
        """torch's own class of errors, or a runtime's words."""
        return self._torch.is_oom(error)

    def is_lost(self, error: BaseException) -> bool:
        """Whether torch failed and the chip answers no more."""
        return (
            isinstance(error, RuntimeError) and not self.is_oom(error) and not self._place.works()
        )

    def report(self) -> list[str]:
        """For the start-up table."""
        return [versions(self.facts)]
