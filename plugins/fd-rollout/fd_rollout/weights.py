"""New weights in the place of old ones: the checkpoint is loaded a second time, beside the model,
and each tensor of the second model is copied into that of the first.

So every number format, layout and share of a rank is what the loader makes it, captured graphs find
the new weights at the old addresses, and weights that cannot be read leave the old ones as they
are.
"""

from __future__ import annotations

import functools
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fastdeploy_core.errors import ConfigError, WeightError
from fastdeploy_core.layers import ModelBuilder
from fastdeploy_core.layers.weight_map import WeightMap
from fastdeploy_core.loading.loader import load_model
from fastdeploy_core.loading.weights import find_files

from .sources import WeightSource, open_source

if TYPE_CHECKING:
    from fastdeploy_core.config import EngineConfig
    from fastdeploy_core.contracts.device import Communicator, DeviceBackend
    from fastdeploy_core.contracts.model import StoredTensor
    from fastdeploy_core.loading.loader import LoadedModel
    from fastdeploy_core.plugins.kernels import ChosenKernels
    from fastdeploy_core.tensor import Tensor

CHECKPOINT: Final = "checkpoint"  # the source that the engine was started with
_POLL_S: Final = 0.0005
_PLAIN: Final[tuple[type, ...]] = (
    int,
    float,
    complex,
    str,
    bytes,
    bool,
    type(None),
    type,
    types.ModuleType,
)
_WITHOUT_WEIGHTS: Final = ("ngram_match", "suffix")
_MOST_UNSEEN: Final = 0.05  # of the weights' bytes: alignment, counted otherwise by formats


def check_replaceable(config: EngineConfig) -> None:
    """ConfigError for engines whose weights cannot be replaced."""
    found = ""
    if config.lora is not None:
        found = "--enable-lora: adapters belong to the weights that they were trained on"
    elif config.parallel.divides_experts:
        found = "--enable-expert-parallel"
    elif config.speculative is not None and config.speculative.method not in _WITHOUT_WEIGHTS:
        found = f"speculative method {config.speculative.method}, which has weights of its own"
    if found:
        raise ConfigError(f"weights of a running engine are not replaced with {found}")


class Replacement:
    """One rank's new weights. The arguments are those of load_model, and the model that runs."""

    def __init__(
        self,
        config: EngineConfig,
        loaded: LoadedModel,
        device: DeviceBackend,
        kernels: ChosenKernels,
        rank: int,
        world_size: int,
        communicator: Communicator | None,
        load_driver: Callable[[str, str], Any],
    ) -> None:
        self._config, self._loaded, self._device = config, loaded, device
        self._ranks = (kernels, rank, world_size, communicator)
        self._load_driver = load_driver
        self._pairs: list[tuple[Any, Any]] = []

    def read(self, source: str, options: Mapping[str, Any], version: str) -> None:
        """Load all of them. WeightError: tensors are missing, unknown or of another shape, or the
        layout has changed; nothing has been replaced then."""
        model = replace(self._config.model, weight_cache="", load_format="auto")
        driver, opened = self._load_driver, None
        if source != CHECKPOINT:
            opened = open_source(source, options, version)
            model = replace(model, checkpoint_format=source, path=opened.path)
            driver = functools.partial(self._driver, opened)
        elif not model.checkpoint_format:
            find_files(model.path)
        try:
            kernels, rank, world_size, communicator = self._ranks
            new = load_model(
                replace(self._config, model=model),
                *(self._device, kernels, rank, world_size, communicator, driver),
            )
        finally:
            if opened is not None:
                opened.close()
        found = _Walk(self._loaded, new, self._device).pairs()
        self._pairs = [(old, fresh) for _, old, fresh in found]
        num_bytes, least = self._num_bytes(), self._loaded.builder.weight_bytes
        if num_bytes < least * (1 - _MOST_UNSEEN):
            raise WeightError(
                f"{num_bytes} bytes of weights were found in the model, which has {least}: some "
                f"lie where device {self._device.name} alone knows, so that they cannot be replaced"
            )

    def copy(self) -> int:
        """Put them in place; returns their bytes."""
        with self._device.xp.no_grad():
            for old, fresh in self._pairs:
                if isinstance(old, np.ndarray):
                    old[...] = fresh
                else:
                    old.copy_(fresh)
            if self._pairs:
                done = self._device.record_event()
                while not done.query():
                    time.sleep(_POLL_S)
        return self._num_bytes()

    def _num_bytes(self) -> int:
        xp = self._device.xp
        sizes = [o.nbytes if isinstance(o, np.ndarray) else xp.nbytes(o) for o, _ in self._pairs]
        return sum(sizes)

    def _driver(self, opened: WeightSource, kind: str, name: str) -> Any:
        if kind == "checkpoint_format":
            return functools.partial(_SourceFormat, opened)
        return self._load_driver(kind, name)


class _SourceFormat:
    """A source in the form in which the loader takes checkpoints (contracts.small.CheckpointFormat;
    of which it uses `path` and `tensors`)."""

    def __init__(self, source: WeightSource, path: Path) -> None:
        self._source, self.path = source, path

    def tensors(
        self,
        config: Mapping[str, Any],
        device: DeviceBackend,
        dtype: str,
        is_wanted: Callable[[str], bool],
    ) -> Sequence[tuple[str, StoredTensor]]:
        """All of them; the loader says which ones are unknown."""
        return self._source.tensors(device)


def model_tensors(loaded: LoadedModel, device: DeviceBackend) -> list[Tensor]:
    """Tensors of the model that loading it fills, each once."""
    pairs = _Walk(loaded, loaded, device).pairs()
    return [old for _, old, _ in pairs if not isinstance(old, np.ndarray)]


class _Walk:
    """Finds each tensor that a model's layers hold, beside that of another model of the same
    classes. Builders, devices and drivers of layers are no part of it: they hold no weights."""

    def __init__(self, old: LoadedModel, new: LoadedModel, device: DeviceBackend) -> None:
        self._models = old.model, new.model
        self._tensor = type(device.xp.zeros((1,), dtype=device.xp.dtype("float32"), device="cpu"))
        drivers = [
            *old.builder.attention_drivers.values(),
            *old.builder.moe_drivers.values(),
            *(device, old.builder.kernels, old.builder.communicator, old.builder.quantizer),
        ]
        kinds: set[type] = {type(driver) for driver in drivers if driver is not None}
        self._left: tuple[type, ...] = (*_PLAIN, ModelBuilder, WeightMap, *kinds, type(device.xp))
        self._is_same = old is new
        self._seen: set[int] = set()
        self._kept: list[Any] = []  # what `_seen` names by id stays alive

    def pairs(self) -> list[tuple[str, Any, Any]]:
        """(where, old, new) of each. WeightError: the models differ in more than their weights."""
        return list(self._under("model", *self._models))

    def _under(self, where: str, old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
        if isinstance(old, _PLAIN):
            if type(old) is not type(new) or (old != new and not (old != old)):
                raise self._differ(where, f"{old!r:.40} and {new!r:.40}")
            return
        if isinstance(old, self._left) or id(old) in self._seen:
            return
        self._seen.add(id(old))
        self._kept.append(old)
        if type(old) is not type(new):
            raise self._differ(where, f"{type(old).__name__} and {type(new).__name__}")
        if isinstance(old, (self._tensor, np.ndarray)):
            if old is new and not self._is_same:
                return
            if tuple(old.shape) != tuple(new.shape) or old.dtype != new.dtype:
                raise self._differ(where, f"{list(old.shape)} and {list(new.shape)}")
            yield where, old, new
            return
        parts, others = _parts(old), _parts(new)
        if parts.keys() != others.keys():
            raise self._differ(where, "of other parts")
        for name, part in parts.items():
            yield from self._under(f"{where}.{name}", part, others[name])

    @staticmethod
    def _differ(where: str, how: str) -> WeightError:
        return WeightError(
            f"the new weights make another model than the one that runs: {where} is {how}; start a "
            "new engine with them"
        )


def _parts(holder: Any) -> dict[str, Any]:
    """What an object holds, by name."""
    if isinstance(holder, Mapping):
        return {str(name): value for name, value in holder.items()}
    if isinstance(holder, list | tuple):
        return {str(number): value for number, value in enumerate(holder)}
    if isinstance(holder, functools.partial):
        return {"func": holder.func, **_parts(holder.args), **_parts(holder.keywords)}
    if isinstance(holder, types.MethodType):
        return {"self": holder.__self__}
    if isinstance(holder, types.FunctionType):
        cells = holder.__closure__ or ()
        return {str(number): _content(cell) for number, cell in enumerate(cells)}
    found = dict(getattr(holder, "__dict__", {}))
    for kind in type(holder).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(holder, name) and not name.startswith("__"):
                found[name] = getattr(holder, name)
    return found


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the variable was deleted
        return None
