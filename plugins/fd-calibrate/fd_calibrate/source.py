"""The model to be quantized: built on the reference drivers, loaded part by part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastdeploy_core import envs
from fastdeploy_core.config.model import checkpoint_layout, fit_dtype
from fastdeploy_core.errors import ConfigError, WeightError
from fastdeploy_core.layers import DriverFactories, ModelBuilder, WeightFormats
from fastdeploy_core.loading.weights import SafetensorsFile, SafetensorsTensor, find_files
from fastdeploy_core.reference.attention import ReferenceAttention

from .observer import ObservingKernels, ObservingMoE
from .prefill import BLOCK_SIZE, grouped, prefill

if TYPE_CHECKING:
    from fastdeploy_core.config import EngineConfig
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.contracts.ops import KernelTable
    from fastdeploy_core.layers.context import ForwardContext
    from fastdeploy_core.tensor import Tensor

    from .observer import Observer


@dataclass(slots=True)
class Batch:
    """Sequences that run together, and their state between two blocks."""

    context: ForwardContext
    positions: Tensor
    residual: Tensor
    update: Tensor | None = None


class SourceModel:
    """Skeleton of the model, checkpoint tensors by name, and its blocks one by one."""

    def __init__(
        self,
        config: EngineConfig,
        device: DeviceBackend,
        kernels: KernelTable,
        family: Any,
        observer: Observer,
        show_cache: Callable[[tuple[Tensor, ...]], None],
    ) -> None:
        model_config, self.report = fit_dtype(
            config.model, device.limits.dtypes, device.limits.preferred_dtype
        )
        self.path, self.dtype = model_config.path, model_config.dtype
        self._device, self.observer = device, observer
        self.build = ModelBuilder(
            device,
            ObservingKernels(kernels, show_cache),
            model_config.dtype,
            max_positions=model_config.max_model_len,
            drivers=DriverFactories(
                lambda s: ReferenceAttention(s, BLOCK_SIZE, device, kernels),
                lambda s: ObservingMoE(s, device, kernels),
            ),
            formats=WeightFormats(quantizer=observer),
        )
        self.model = family(model_config.hf_config, self.build)
        layout = checkpoint_layout(
            model_config.hf_config, force_torch=envs.FD_FOR_TORCH_MODEL_FORMAT
        )
        self.build.weights.swap_linear = layout == "paddle"
        self.tensors = _open(self.path, device)

    # -- weights ----------------------------------------------------------------------------------

    def load(self, wanted: Callable[[str], bool]) -> None:
        """Read every tensor whose canonical name is wanted."""
        weights = self.build.weights
        chosen = (
            (name, tensor)
            for name, tensor in self.tensors.items()
            if wanted(weights.canonical(name))
        )
        self.model.load_weights(chosen)

    def check_whole(self) -> None:
        """WeightError unless every weight was loaded."""
        missing = self.build.weights.missing()
        if missing:
            raise WeightError(
                f"the checkpoint in {self.path} lacks {len(missing)} weights: "
                f"{', '.join(sorted(missing)[:5])}; finish the download"
            )

    def copied(self) -> Iterator[tuple[str, SafetensorsTensor]]:
        """Tensors that are copied unchanged, by their checkpoint name."""
        rounded = self._rounded()
        weights = self.build.weights
        for name, tensor in self.tensors.items():
            parts = weights.parts_of(weights.canonical(name))
            if not any(part in rounded for part in parts):
                yield name, tensor

    def _rounded(self) -> set[str]:
        """Placements of every layer that the quantizer takes."""
        found: set[str] = set()
        for spec in self.observer.taken:
            if spec.role == "experts":
                experts = spec.name.rpartition(".")[0]
                ends = tuple(f".{part.name.rpartition('.')[2]}.weight" for part in spec.parts)
                found.update(
                    name
                    for name in self.build.weights.placements
                    if name.startswith(f"{experts}.") and name.endswith(ends)
                )
            else:
                found.update(f"{part.name}.weight" for part in spec.parts)
        return found

    # -- running ----------------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        """The number of decoder blocks; ConfigError for a model whose blocks cannot be run one by
        one."""
        if not hasattr(self.model, "layers") or not hasattr(self.model, "embedding"):
            raise ConfigError(
                f"{type(self.model).__name__} cannot be calibrated: it is not made of blocks after "
                "an embedding; quantize it without --calibration"
            )
        return len(self.model.layers)

    def batches(self, samples: list[list[int]], max_tokens: int) -> list[Batch]:
        """Group samples and look their tokens up."""
        found = []
        for group in grouped(samples, max_tokens):
            ids, positions, context = prefill(
                self._device,
                self.build.attention_drivers,
                self.build.kv_layers,
                group,
                shares_cache=True,
            )
            found.append(Batch(context, positions, self.model.embedding(ids)))
        return found

    def run_block(self, number: int, batch: Batch, *, keep: bool) -> None:
        """Run one block over one batch; `keep`: the batch takes the outputs, else the run is only
        observed."""
        layer = self.model.layers[number]
        residual, update = layer(batch.residual, batch.update, batch.positions, batch.context)
        if keep:
            batch.residual, batch.update = residual, update

    def drop_block(self, number: int) -> None:
        """Free a block's memory: it was rounded and has run."""
        prefix = f"model.layers.{number}."
        placements = self.build.weights.placements
        for name in [name for name in placements if name.startswith(prefix)]:
            placements[name].accept = _refuse
        self.model.layers[number] = None
        self.observer.layers.clear()


def _refuse(tensor: Tensor) -> None:
    raise WeightError("a block that has been quantized is read again")


def _open(path: Path, device: DeviceBackend) -> dict[str, SafetensorsTensor]:
    found: dict[str, SafetensorsTensor] = {}
    for file in find_files(path):
        found.update(SafetensorsFile(file, device).tensors())
    return found
