"""Builds and loads the model of one rank: the only place where files, layers and drivers meet."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from tqdm import tqdm

from fastdeploy_core import envs
from fastdeploy_core.config import EngineConfig, ModelConfig
from fastdeploy_core.config.model import checkpoint_layout, fit_dtype
from fastdeploy_core.config.quantization import QuantizationSettings, quantization_of
from fastdeploy_core.contracts.attention import AttentionSpec
from fastdeploy_core.contracts.device import PackingDevice
from fastdeploy_core.contracts.kv_formats import kv_format
from fastdeploy_core.contracts.model import ModelShapes, StateSpec, StoredTensor
from fastdeploy_core.contracts.quantizer import make_quantizer
from fastdeploy_core.contracts.small import CausalLM, CheckpointFormat
from fastdeploy_core.errors import UnsupportedModel, WeightError, WorkerError
from fastdeploy_core.layers import DriverFactories, ModelBuilder, ModelRanks, WeightFormats
from fastdeploy_core.layers.cache_scales import CACHE_SCALE_NAMES
from fastdeploy_core.layers.context import ForwardContext
from fastdeploy_core.layers.experts import ExpertRanks
from fastdeploy_core.tensor import DTYPE_BYTES

from .read_ahead import ReadAhead
from .revision import fingerprint
from .weights import SafetensorsFile, dummy_tensors, find_files

if TYPE_CHECKING:
    from fastdeploy_core.contracts.attention import AttentionBatch
    from fastdeploy_core.contracts.device import Communicator, DeviceBackend
    from fastdeploy_core.contracts.model import Retention
    from fastdeploy_core.contracts.ops import KernelTable
    from fastdeploy_core.tensor import Tensor

logger = logging.getLogger(__name__)

LoadDriver = Callable[[str, str], Any]
Named = tuple[str, Any]  # a checkpoint name and its contracts.model.StoredTensor


@dataclass(slots=True)
class LoadedModel:
    """A model that is ready to run on this rank."""

    model: CausalLM
    shapes: ModelShapes
    dtype: str  # the dtype the model computes in, adjusted to the device
    attention: dict[AttentionSpec | StateSpec, Any]  # an AttentionBackend or StateBackend
    builder: ModelBuilder  # the model's builder; drafters add layers with it
    load_driver: LoadDriver  # what was resolved at start-up, for drivers that requests need
    weight_bytes: int = 0
    report: list[str] = field(default_factory=list)  # lines for the start-up report

    def context(
        self,
        caches: list[tuple[Tensor, ...]],
        batch: AttentionBatch,
        more: Mapping[Retention, AttentionBatch],
    ) -> ForwardContext:
        """What layers need of a step. more: the batch of each bounded group of them."""
        metadata = {
            spec: driver.prepare(more.get(spec.retention, batch))
            for spec, driver in self.attention.items()
        }
        return ForwardContext(batch, metadata, caches, more=more)

    def run(self, input_ids: Tensor, context: ForwardContext, axes: Tensor | None = None) -> Tensor:
        """Hidden states of context.rows, or of all tokens. axes: [3, T] int64, positions where they
        differ between the axes. WorkerError: the model returns others than it should."""
        if self.builder.adapters is not None:
            self.builder.adapters.begin(context.batch)
        positions = context.batch.positions if axes is None else axes
        hidden, rows = self.model.forward(input_ids, positions, context), context.rows
        if rows is not None and hidden.shape[0] != rows.shape[0]:
            raise WorkerError(
                f"{type(self.model).__name__}.forward returned {int(hidden.shape[0])} hidden "
                f"states where context.rows names {int(rows.shape[0])} of "
                f"{context.batch.num_tokens} tokens; it has to return those alone (contract 1.0)"
            )
        return hidden


def load_model(
    config: EngineConfig,
    device: DeviceBackend,
    kernels: KernelTable,
    tp_rank: int,
    tp_size: int,
    communicator: Communicator | None,
    load_driver: LoadDriver,
) -> LoadedModel:
    """Build and load the model. `load_driver(kind, name)` returns a driver class; an empty name is
    the chosen one. ConfigError, UnsupportedModel or WeightError say what is wrong."""
    limits = device.limits
    model_config, report = fit_dtype(config.model, limits.dtypes, limits.preferred_dtype)
    checkpoint = _checkpoint(model_config, load_driver)
    hf_config = _tied_or_not(model_config, checkpoint, device, report)
    family = load_driver("model", model_config.architecture)
    shapes = family.shapes(hf_config, tp_size, model_config.dtype)
    settings = quantization_of(config)
    report += settings.notes
    fitted = replace(config, model=model_config)
    keeping = _weight_cache(fitted, settings, device, tp_rank, checkpoint, load_driver)
    experts = _expert_ranks(config, shapes, device, tp_rank, communicator, load_driver)
    adapters = None if config.lora is None else load_driver("part", "lora")
    formats = _weight_formats(model_config, settings, device, kernels, load_driver)
    with device.xp.no_grad(), keeping as cache:
        build = ModelBuilder(
            device,
            kernels,
            model_config.dtype,
            max_positions=model_config.max_model_len,
            drivers=DriverFactories(
                lambda spec: load_driver(
                    "state" if isinstance(spec, StateSpec) else "attention", ""
                )(_with_kept(spec, config), config.cache.block_size, device, kernels),
                lambda spec: load_driver("moe", "")(spec, device, kernels),
            ),
            ranks=ModelRanks(tp_rank, tp_size, communicator, experts),
            formats=replace(formats, kept=cache),
            adapters=adapters and adapters(fitted, device, kernels, family),
        )
        for text in CACHE_SCALE_NAMES if settings.kv_unused else ():
            build.weights.ignore(text)
        model = family(hf_config, build)
        _check_layers(shapes, build)
        fill_model(model, build, model_config.path, hf_config, model_config, checkpoint)
    if config.model.weight_cache:
        refused = [f"turned off: the weight cache; device {device.name} keeps no weights"]
        report += refused if cache is None else cache.report
    report += [*_unquantized_lines(build), *_expert_lines(config, build)]
    return LoadedModel(
        model=model,
        shapes=shapes,
        dtype=model_config.dtype,
        attention=build.attention_drivers,
        builder=build,
        load_driver=load_driver,
        weight_bytes=build.weight_bytes + (0 if cache is None else cache.num_bytes),
        report=report,
    )


def _tied_or_not(
    model: ModelConfig, checkpoint: Any, device: DeviceBackend, report: list[str]
) -> Mapping[str, Any]:
    """config.json, which ties no stored head that differs from the embedding: as transformers."""
    config, is_dummy = model.hf_config, model.load_format == "dummy"
    if checkpoint is not None or is_dummy or config.get("tie_word_embeddings") is False:
        return config
    stored = dict(pair for file in open_files(model.path, device) for pair in file.tensors())
    head, table = stored.get("lm_head.weight"), stored.get("model.embed_tokens.weight")
    if head is None or table is None or (head.shape, head.dtype) != (table.shape, table.dtype):
        return config
    parts = (slice(n, n + 4096) for n in range(0, head.shape[0], 4096))
    if all(np.array_equal(head.bits()[part], table.bits()[part]) for part in parts):
        return config
    report.append("lm_head.weight differs from the embedding, so they are not tied")
    return {**config, "tie_word_embeddings": False}


def _with_kept(spec: Any, config: EngineConfig) -> Any:
    return replace(spec, kept=config.kept_states) if isinstance(spec, StateSpec) else spec


def _check_layers(shapes: ModelShapes, build: ModelBuilder) -> None:
    """Drivers and memory were chosen for the layers that the family stated."""
    stated = [
        build.cache_spec(layer) if isinstance(layer, AttentionSpec) else layer
        for layer in shapes.layers
    ]
    for number, (said, made) in enumerate(zip_longest(stated, build.kv_layers)):
        if said != made:
            raise UnsupportedModel(
                f"{shapes.architecture} states {said} as layer {number} of those with a cache, and "
                f"builds {made}; shapes() must state what the constructor builds"
            )


def _checkpoint(model: ModelConfig, load_driver: LoadDriver) -> CheckpointFormat | None:
    """What reads a checkpoint that is no folder of safetensors."""
    if not model.checkpoint_format or model.load_format == "dummy":
        return None
    driver = load_driver("checkpoint_format", model.checkpoint_format)
    opened: CheckpointFormat = driver(model.path)
    return opened


def _weight_cache(
    config: EngineConfig,
    settings: QuantizationSettings,
    device: DeviceBackend,
    rank: int,
    checkpoint: CheckpointFormat | None,
    load_driver: LoadDriver,
) -> AbstractContextManager[Any]:
    """`--weight-cache`: what keeps this rank's weights between starts, as a context around loading;
    of nothing where that is not asked for or the device cannot."""
    model = config.model
    if not model.weight_cache or not isinstance(device, PackingDevice):
        return nullcontext()
    depends_on = {
        "config": model.hf_config,
        "dtype": model.dtype,
        "quantization": [settings.method, settings.config],
        "ranks": [rank, config.parallel.tensor_parallel_size, config.parallel.divides_experts],
        "engine": config.parallel.shares_experts and config.parallel.data_parallel_rank,
        "layout": envs.FD_FOR_TORCH_MODEL_FORMAT,
    }
    own = hashlib.sha256(json.dumps(depends_on, sort_keys=True, default=str).encode())
    files = find_files(model.path) if checkpoint is None else checkpoint.files
    own.update(fingerprint(files, with_times=True))
    name = f"{model.path.name}-{own.hexdigest()[:16]}-{device.name}-{rank}.packed"
    cache: AbstractContextManager[Any] = load_driver("part", "weight-cache")(
        device, Path(model.weight_cache) / name
    )
    return cache


def _weight_formats(
    model: ModelConfig,
    settings: QuantizationSettings,
    device: DeviceBackend,
    kernels: KernelTable,
    load_driver: LoadDriver,
) -> WeightFormats:
    """The formats that the configuration asks for."""
    quantizer, quantizers = None, partial(load_driver, "quantizer")
    if settings.method:
        quantizer = make_quantizer("", settings.config, device, kernels, quantizers)
    kind = kv_format(settings.kv_format)
    return WeightFormats(
        quantizer=quantizer,
        quantizers=quantizers,
        is_dummy=model.load_format == "dummy",
        kv_format="" if kind is None else kind.name,
        kv_static=settings.kv_static,
    )


def _expert_ranks(
    config: EngineConfig,
    shapes: ModelShapes,
    device: DeviceBackend,
    rank: int,
    communicator: Communicator | None,
    load_driver: LoadDriver,
) -> ExpertRanks | None:
    """The ranks that divide experts among them; None: each has a share of every expert."""
    if shapes.moe is None or not config.parallel.divides_experts:
        return None
    make = None
    if config.parallel.expert_communicator:
        make = load_driver("expert_communicator", "")
    divided: Callable[..., ExpertRanks] = load_driver("part", "experts")
    return divided(config, device, rank, communicator, make)


def _expert_lines(config: EngineConfig, build: ModelBuilder) -> list[str]:
    """Start-up report: where experts are, if ranks divide them."""
    if not config.parallel.divides_experts:
        return []
    if build.expert_ranks is None:
        return ["turned off: expert parallelism; this model has no experts"]
    return [build.expert_ranks.words()]


def _unquantized_lines(build: ModelBuilder) -> list[str]:
    """Start-up report: layers that the quantizer left alone."""
    if not build.unquantized:
        return []
    kinds = dict.fromkeys(name.rpartition(".")[2] for name in build.unquantized)
    return [
        f"{len(build.unquantized)} layers stay in {build.dtype}, the quantizer leaves them alone: "
        f"{', '.join(kinds)}"
    ]


def fill_model(
    model: CausalLM,
    build: ModelBuilder,
    path: Path,
    hf_config: Mapping[str, Any],
    config: ModelConfig,
    checkpoint: CheckpointFormat | None = None,
) -> None:
    """Load every tensor of the checkpoint into the model; WeightError unless all required tensors
    were found. `hf_config`: the config.json of the model at `path`. Without `checkpoint` that is a
    folder of safetensors."""
    architecture = str((hf_config.get("architectures") or [config.architecture])[0])
    with ExitStack() as stack:
        if config.load_format == "dummy":
            tensors: Iterable[Named] = dummy_tensors(
                build.weights.placements, config.seed, build.device
            )
            source = "random weights"
        else:
            layout = checkpoint_layout(hf_config, force_torch=envs.FD_FOR_TORCH_MODEL_FORMAT)
            build.weights.swap_linear = layout == "paddle"
            files: Sequence[WeightFile] = (
                open_files(path, build.device)
                if checkpoint is None
                else [DriverTensors(checkpoint, build, hf_config)]
            )
            tensors = stack.enter_context(Checkpoint(files, build.tp_rank))
            if build.device.limits.asynchronous and checkpoint is None:
                # A driver's tensors may be decoded on the host, so they have no read-ahead.
                tensors = stack.enter_context(ReadAhead(build.device, build.weights)).over(tensors)
            source = f"the checkpoint in {path}"
        unknown = model.load_weights(tensors)
    if unknown:
        raise WeightError(
            f"{source} has {len(unknown)} weights that {architecture} does not know: "
            f"{some_names(unknown)}; they do not belong to its config.json"
        )
    missing = build.weights.missing()
    if missing:
        raise WeightError(
            f"{source} lacks {len(missing)} weights that {architecture} needs: "
            f"{some_names(missing)}; finish the download or correct config.json"
        )
    build.weights.finish()


def some_names(names: list[str]) -> str:
    """The first few names, for a message."""
    rest = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(sorted(names)[:5]) + rest


class WeightFile(Protocol):
    """One open checkpoint file, or one model in another container."""

    path: Path

    @property
    def nbytes(self) -> int:
        """Total bytes of the tensors that tensors() returns."""

    def names(self) -> Iterable[str]:
        """Checkpoint names of the tensors that tensors() returns."""

    def tensors(self) -> Iterator[Named]:
        """Every tensor, in the order that is cheapest to read."""


def open_files(folder: Path, device: DeviceBackend) -> list[SafetensorsFile]:
    """The safetensors files of a folder."""
    try:
        return [SafetensorsFile(file, device) for file in find_files(folder)]
    except OSError as error:  # of another user, or a link to what is gone
        raise WeightError(f"the weights in {folder} cannot be read: {error}") from None


class DriverTensors:
    """WeightFile: what the driver of a checkpoint format reads."""

    def __init__(
        self, checkpoint: CheckpointFormat, build: ModelBuilder, hf_config: Mapping[str, Any]
    ) -> None:
        self.path = checkpoint.path
        is_wanted = build.weights.placements.__contains__
        self._tensors = checkpoint.tensors(hf_config, build.device, build.dtype, is_wanted)

    @property
    def nbytes(self) -> int:
        """Bytes of everything tensors() gives."""
        return sum(stored_bytes(tensor) for _, tensor in self._tensors)

    def names(self) -> list[str]:
        """Checkpoint names of what tensors() gives."""
        return [name for name, _ in self._tensors]

    def tensors(self) -> Iterator[Named]:
        """Every tensor, in the driver's order."""
        return iter(self._tensors)


def stored_bytes(tensor: StoredTensor) -> int:
    """Bytes of the tensor as it is read."""
    return DTYPE_BYTES[tensor.dtype] * math.prod(tensor.shape)


class Checkpoint:
    """Iterates over all tensors of all files, with a progress bar on rank 0 of a terminal."""

    def __init__(self, files: Sequence[WeightFile], tp_rank: int) -> None:
        self._files = files
        owner: dict[str, Path] = {}
        for file in self._files:
            for name in file.names():
                if name in owner:
                    raise WeightError(f"weight {name} is both in {owner[name]} and in {file.path}")
                owner[name] = file.path
        self._bar = tqdm(
            total=sum(file.nbytes for file in files),
            unit="B",
            unit_scale=True,
            desc="loading weights",
            leave=False,
            disable=True if tp_rank else None,  # None: only on a terminal
        )

    def __enter__(self) -> Iterator[Named]:
        return self._tensors()

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def _tensors(self) -> Iterator[Named]:
        for file in self._files:
            for name, tensor in file.tensors():
                yield name, tensor
                self._bar.update(stored_bytes(tensor))
