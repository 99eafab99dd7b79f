"""The common base of devices that run on PaddlePaddle: a plugin states facts, this does the rest.

    FACTS = PaddleFacts(name="mychip", type_name="mychip", limits=DeviceLimits(...), ...)

    class MyChipDevice(PaddleDevice):
        name, facts = FACTS.name, FACTS

and its hook module answers `fd_device_probe` with `probe(FACTS, question)`. Works for custom
devices (a runtime library behind PaddlePaddle's C interface) and for places built into a vendor's
PaddlePaddle. Importing this imports no tensor library.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import site
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from fastdeploy_core.contracts.base import Accept, Candidate, Decline
from fastdeploy_core.contracts.device import (
    CapturedGraph,
    Communicator,
    DeviceOptions,
    DeviceQuestion,
)
from fastdeploy_core.errors import CapabilityError, ConfigError, PluginLoadError

from .accelerator import SCORE, Accelerator, AcceleratorFacts, gib_in, installed_version

if TYPE_CHECKING:
    import numpy as np

    from fastdeploy_core.tensor import Tensor, TensorLibrary

    from .torch_device import TorchFacts

# What PaddlePaddle's exceptions say; they are plain OSErrors, of which the code tells the kind.
_CODE = "customdevice error, the error code is : "
_OOM_TEXTS = (f"{_CODE}2", "resourceexhausted", "out of memory")
_LOST_TEXTS = (f"{_CODE}4",)
_TOOL_LIMIT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddleFacts(AcceleratorFacts):
    """Strings name PaddlePaddle's and the vendor's things; type_name is of a custom device. Of
    visible_env the first variable that is set wins."""

    # A place built into the vendor's PaddlePaddle: paddle's function that says so, its type name,
    # and its module of paddle.device.
    builtin_check: str = ""
    builtin_type: str = ""
    builtin_module: str = ""
    packages: tuple[str, ...] = ()  # distributions that bring the runtime
    # (paddlepaddle, first of `packages`): pairs of versions known to belong together.
    tested_versions: tuple[tuple[str, str], ...] = ()
    groups: tuple[tuple[int, tuple[tuple[int, ...], ...]], ...] = ()  # (ranks, chips that may join)
    collective_environment: tuple[tuple[str, str], ...] = ()
    # A command whose output parse_memory() understands; {index} is the chip's number on the host.
    memory_command: str = ""
    # The operator's variable for the size of the KV pool in GiB, where free memory cannot be known.
    kv_memory_env: str = ""
    kv_memory_gib: float = 0.0  # without that variable
    exercised_on: str = (
        "stand-in"  # real chip | simulated device | stand-in; for the support matrix
    )


def probe(
    facts: PaddleFacts, question: DeviceQuestion, on_torch: TorchFacts | None = None
) -> Candidate:
    """The answer to fd_device_probe. Where the vendor's torch is another door, PaddlePaddle is
    tried first unless torch is asked for."""
    if on_torch is None or question.tensor_library == "paddle":
        return _probe(facts, question)
    from . import torch_device

    if question.tensor_library == "torch":
        return torch_device.probe(on_torch, question)
    first = _probe(facts, question)
    if isinstance(first.verdict, Accept):
        return first
    second = torch_device.probe(on_torch, question)
    if isinstance(second.verdict, Accept):
        return second
    reasons = f"{first.verdict.reason}; and on torch: {second.verdict.reason}"
    return Candidate(facts.name, Decline(reasons))


def _probe(facts: PaddleFacts, question: DeviceQuestion) -> Candidate:
    """Cheap checks first, PaddlePaddle's own word last."""
    reason = _why_not(facts, question)
    if reason:
        return Candidate(facts.name, Decline(reason))
    from . import paddle_place

    facts.prepare_environment()
    type_name, module = _door(facts)
    if not type_name:
        return Candidate(facts.name, Decline(_unregistered(facts)))
    chips = paddle_place.count(type_name, module)
    if not chips:
        return Candidate(facts.name, Decline("its runtime is installed but finds no chip"))
    details = {"tensor_library": "paddle", "chips": str(chips), "versions": versions(facts)}
    return Candidate(facts.name, Accept(SCORE, f"{chips} chip(s) as {type_name}"), details)


def _why_not(facts: PaddleFacts, question: DeviceQuestion) -> str:
    if question.tensor_library not in ("", "paddle"):
        return f"it runs on paddle, asked for {question.tensor_library!r}"
    if importlib.util.find_spec("paddle") is None:
        return f"PaddlePaddle is not installed; run: {facts.install or 'pip install paddlepaddle'}"
    packaged = any(installed_version(name) for name in facts.packages)
    if not packaged and not _runtime_libraries():
        return f"no runtime of it is installed; run: {facts.install}"
    return ""


def _runtime_libraries() -> list[Path]:
    """Libraries that PaddlePaddle will load as custom devices."""
    root = os.environ.get("CUSTOM_DEVICE_ROOT")
    folders = [Path(root)] if root else [Path(p) / "paddle_custom_device" for p in _site_folders()]
    return [p for folder in folders if folder.is_dir() for p in sorted(folder.glob("*.so"))]


def _site_folders() -> list[str]:
    return [*site.getsitepackages(), site.getusersitepackages()]


def _door(facts: PaddleFacts) -> tuple[str, str]:
    """(type name, module of a built-in place); no type name when PaddlePaddle does not know the
    chip."""
    from . import paddle_place

    if facts.builtin_check and paddle_place.is_builtin(facts.builtin_check):
        return facts.builtin_type or facts.type_name, facts.builtin_module
    return (facts.type_name if facts.type_name in paddle_place.custom_types() else ""), ""


def _unregistered(facts: PaddleFacts) -> str:
    """PaddlePaddle leaves a runtime out silently; say what that can mean."""
    from . import paddle_place

    known = ", ".join(paddle_place.custom_types()) or "none"
    return (
        f"PaddlePaddle {paddle_place.PADDLE.version} did not register device type "
        f"{facts.type_name!r} (registered: {known}): its runtime does not match this PaddlePaddle, "
        f"or misses a library of the vendor's, or was not found; {versions(facts)}; run: "
        f"{facts.install}"
    )


def versions(facts: PaddleFacts) -> str:
    """The installed pair, compared with the tested ones."""
    library = next(
        (v for n in ("paddlepaddle", *facts.packages) if (v := installed_version(n))), "none"
    )
    runtime = installed_version(facts.packages[0]) if facts.packages else ""
    pair = f"PaddlePaddle {library} with {facts.packages[0] if runtime else 'runtime'} {runtime}"
    if (library, runtime) in facts.tested_versions:
        return f"{pair.strip()}: a known pair"
    known = "; ".join(f"{a} with {b}" for a, b in facts.tested_versions) or "none"
    return f"{pair.strip()}: not a known pair (known: {known})"


class PaddleDevice(Accelerator):
    """One chip as one process sees it. Subclasses set `name` and `facts`, and override what
    differs."""

    facts: PaddleFacts
    on_torch: ClassVar[TorchFacts | None] = None  # the vendor's torch as another door

    def __new__(cls, options: DeviceOptions) -> Any:
        """An instance of the class for the tensor library."""
        if options.tensor_library == "torch" and cls.on_torch is not None:
            from .torch_device import TorchAcceleratorDevice

            return TorchAcceleratorDevice(options, cls.on_torch)
        return object.__new__(cls)

    def __init__(self, options: DeviceOptions) -> None:
        if options.tensor_library not in ("", "paddle"):
            raise ConfigError(
                f"device {self.name!r} runs on paddle; asked for {options.tensor_library!r}; "
                "drop --tensor-library"
            )
        self.facts.prepare_environment()
        from . import paddle_place

        self.xp: TensorLibrary = paddle_place.PADDLE
        self._index, self._paddle = options.index, paddle_place
        type_name, self._module = _door(self.facts)
        if not type_name:
            raise PluginLoadError(
                f"device {self.name!r} cannot be opened: {_unregistered(self.facts)}"
            )
        self._check_index(options.index, paddle_place.count(type_name, self._module))
        self._place = paddle_place.Place(type_name, options.index, self._module)
        self.device = self._place.device
        self.limits = self.facts.limits
        if by_hand := self._kv_memory_bytes():
            self.limits = replace(self.limits, kv_memory_bytes=by_hand)
        if options.num_threads:
            self.xp.set_num_threads(options.num_threads)

    # -- memory -----------------------------------------------------------------------------------

    def _kv_memory_bytes(self) -> int:
        """What the operator, or the plugin, sets aside for the KV pool by hand; 0: measured."""
        return gib_in(self.facts.kv_memory_env, self.facts.kv_memory_gib)

    @staticmethod
    def parse_memory(output: str) -> tuple[int, int]:
        """(free, total) bytes in what `facts.memory_command` printed; ValueError if it has
        neither."""
        raise ValueError(f"cannot read {output!r:.80}")

    def _ask_tool(self) -> tuple[int, int] | None:
        command = shlex.split(self.facts.memory_command.format(index=self.chips()[self._index]))
        if not command or shutil.which(command[0]) is None:
            return None
        try:
            result = subprocess.run(  # noqa: S603 - the vendor's own tool
                command, capture_output=True, text=True, timeout=_TOOL_LIMIT_S, check=True
            )
            return self.parse_memory(result.stdout)
        except (OSError, subprocess.SubprocessError, ValueError, LookupError):
            return None

    def _tool_problem(self) -> str:
        tool = self.facts.memory_command.partition(" ")[0]
        return f"{tool} is missing or says nothing" if tool else "PaddlePaddle does not tell"

    def to_host(self, x: Tensor) -> np.ndarray:
        """The values; other threads run while this one waits."""
        return self.xp.to_numpy(x)

    def host_buffer(self, num_bytes: int) -> np.ndarray:
        """Ordinary memory: PaddlePaddle has no page-locked memory for custom devices."""
        import numpy as np

        return np.zeros(num_bytes, dtype=np.uint8)

    def upload(self, source: np.ndarray, target: Tensor) -> None:
        """Copied now."""
        target.copy_(self.to_device(source))

    def download(self, source: Tensor, target: np.ndarray) -> None:
        """Copied now."""
        import numpy as np

        target[:] = np.ascontiguousarray(self.to_host(source)).reshape(-1).view(np.uint8)

    # -- order ------------------------------------------------------------------------------------

    def capture(
        self, run: Callable[[], None], beside: CapturedGraph | None = None
    ) -> CapturedGraph:
        """Record `run`, where limits.graph_capture."""
        if not self.limits.graph_capture:
            raise CapabilityError(
                f"device {self.name!r} captures no graphs (limits.graph_capture is False); "
                "run steps directly"
            )
        shared: Any = beside
        graph: CapturedGraph = self._place.capture(run, shared)
        return graph

    # -- several chips ----------------------------------------------------------------------------

    def chips(self) -> list[int]:
        """Numbers on the host of the chips this process sees, in PaddlePaddle's order."""
        for name in self.facts.visible_env:
            text = os.environ.get(name, "")
            numbers = [part.strip() for part in text.split(",") if part.strip()]
            if numbers and all(n.isdecimal() for n in numbers):
                return [int(n) for n in numbers]
        return list(range(self._paddle.count(self._place.type_name, self._module)))

    def communicator(self, rank: int, world_size: int, address: str) -> Communicator:
        """Join the group of this host's ranks, on chips that are wired together."""
        self._check_world(world_size)
        possible = dict(self.facts.groups).get(world_size)
        used = tuple(self.chips()[:world_size])
        if possible and tuple(sorted(used)) not in possible:
            names = " or ".join(",".join(map(str, group)) for group in possible)
            raise CapabilityError(
                f"{world_size} {self.name} chips work together only as {names}; visible are "
                f"{','.join(map(str, used))}; set {self.facts.visible_env[0]}"
            )
        environment = dict(self.facts.collective_environment)
        if not self._module:
            environment |= {
                "PADDLE_DISTRI_BACKEND": "xccl",
                "PADDLE_XCCL_BACKEND": self._place.type_name,
            }
        group: Communicator = self._paddle.Collectives(
            self._place, rank, world_size, address, environment
        )
        return group

    # -- trouble ----------------------------------------------------------------------------------

    def is_oom(self, error: BaseException) -> bool:
        """PaddlePaddle raises plain OSErrors and RuntimeErrors; their text tells."""
        text = str(error).lower()
        return isinstance(error, MemoryError) or any(known in text for known in _OOM_TEXTS)

    def is_lost(self, error: BaseException) -> bool:
        """Whether the runtime failed in its own affairs and the chip answers no more."""
        text = str(error).lower()
        return any(known in text for known in _LOST_TEXTS) and not self._place.works()

    def report(self) -> list[str]:
        """For the start-up table."""
        return [versions(self.facts)]

    def without_fallback(self) -> AbstractContextManager[None]:
        """Inside, an operation without a kernel on the chip is an error."""
        return self._paddle.without_fallback()

    def missing_kernel(self, error: BaseException) -> str:
        """Which kernel was missing; empty for any other error."""
        return self._paddle.missing_kernel(error)
