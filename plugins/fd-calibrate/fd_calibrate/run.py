"""One run of `fastdeploy quantize`: from a model folder to a quantized one."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from tqdm import tqdm

from fastdeploy_core.config import DeviceConfig, EngineConfig
from fastdeploy_core.config.model import read_model_config
from fastdeploy_core.config.quantization import parse_quantization, read_quantization
from fastdeploy_core.contracts.device import DeviceOptions
from fastdeploy_core.contracts.kv_formats import KVFormat, kv_format
from fastdeploy_core.contracts.quantizer import CalibratedQuantizer, Calibration, make_quantizer
from fastdeploy_core.errors import ConfigError
from fastdeploy_core.models.shapes import read_shapes
from fastdeploy_core.plugins.kernels import build_kernel_table
from fastdeploy_core.plugins.resolve import resolve
from fastdeploy_core.tokenizer import Tokenizer

from .cache import CacheRanges
from .observer import Observed, Observer
from .source import SourceModel
from .text import read_calibration
from .writer import CheckpointWriter

if TYPE_CHECKING:
    from fastdeploy_core.contracts.quantizer import LayerSpec
    from fastdeploy_core.tensor import Tensor

logger = logging.getLogger(__name__)

# Told to the drivers while they round for a checkpoint that will have static scales.
_CALIBRATING: Final = "is_calibrating"
_TOKENS_AT_ONCE: Final = 2048


@dataclass(frozen=True, slots=True)
class QuantizeOptions:
    """The values of the command line."""

    model: Path
    method: str  # a name, or JSON as --quantization takes it
    output: Path
    calibration: Path | None = None
    kv_cache: str = ""
    max_tokens: int = 65536
    max_length: int = 1024
    device: str = ""
    tensor_library: str = ""
    num_threads: int = 0
    show_progress: bool | None = None  # None: where there is a terminal


def quantize(options: QuantizeOptions) -> dict[str, dict[str, Any]]:
    """Write the checkpoint; returns the report: layer -> errors. ConfigError says what is wrong."""
    run = _Run(options)
    run.execute()
    return run.writer.report


class _Run:
    """The state of one run."""

    def __init__(self, options: QuantizeOptions) -> None:
        self.options = options
        if not parse_quantization(options.method, "--method"):
            raise ConfigError("--method is empty; name a number format, such as wint8 or wint4")
        asked = {"quantization": options.method}
        model = read_model_config(options.model, asked)
        if model.hf_config.get("quantization_config"):
            raise ConfigError(
                f"the model in {options.model} is quantized already; quantize its original instead"
            )
        self.kind = _cache_kind(options)
        self.settings = read_quantization(model)
        device_config = DeviceConfig(
            device=options.device,
            tensor_library=options.tensor_library,
            num_threads=options.num_threads,
        )
        self.config = EngineConfig(model=model, device=device_config)
        shapes = read_shapes(model.hf_config)
        resolved = resolve(
            self.config,
            layers=shapes.layers,
            moe=() if shapes.moe is None else (shapes.moe,),
        )
        library = resolved.tensor_library or options.tensor_library
        self.device = resolved.load("device")(
            DeviceOptions(tensor_library=library, num_threads=options.num_threads)
        )
        self.xp = self.device.xp
        kernels = build_kernel_table(self.device.name, resolved=resolved)
        settings = {**self.settings.config, _CALIBRATING: options.calibration is not None}
        quantizers = partial(resolved.load, "quantizer")
        inner = make_quantizer("", settings, self.device, kernels, quantizers)
        if not isinstance(inner, CalibratedQuantizer):
            raise ConfigError(
                f"quantizer {inner.name} reads checkpoints and writes none; possible: wint8, "
                "wint4, w8a8, w4a8, block_wise_fp8, wfp8afp8, mix_quant, and those of plugins: "
                "fastdeploy plugins list --kind quantizer"
            )
        self.inner = inner
        self.cache = CacheRanges(self.xp, self.kind)
        take = None if options.calibration else self._stream
        observer = Observer(self.inner, self.device, kernels, take)
        family = resolved.load("model")
        with self.xp.no_grad():
            self.source = SourceModel(
                self.config, self.device, kernels, family, observer, self.cache.show
            )
        self.observer = observer
        self.samples = self._read_samples()  # before the output folder belongs to this run
        self.writer = CheckpointWriter(options.output, _state(options), self.device)
        if self.writer.num_written:
            logger.info("going on with %d tensors that are there", self.writer.num_written)
        self.bar = tqdm(
            total=self._num_weights(),
            unit="w",
            unit_scale=True,
            desc="quantizing",
            disable=None if options.show_progress is None else not options.show_progress,
        )

    def _num_weights(self) -> int:
        total = 0
        experts = read_shapes(self.config.model.hf_config).moe
        for spec in self.observer.taken:
            copies = experts.routing.num_experts if experts and spec.role == "experts" else 1
            total += spec.in_features * spec.out_features * copies
        return total

    def execute(self) -> None:
        """Round, copy the rest, finish."""
        with self.xp.no_grad(), self.bar:
            if self.samples is None:
                self.source.load(lambda name: True)
            else:
                self._calibrated(self.samples)
            self.source.check_whole()
            for name, tensor in self.source.copied():
                if not self.writer.has(name):
                    self.writer.add(name, tensor.dtype, tensor.bits(), tensor.shape)
        self.writer.finish(self.options.model, self._config_json())

    # -- without calibration ----------------------------------------------------------------------

    def _stream(self, layer: LayerSpec, weight: Tensor) -> None:
        """A matrix is complete: round it, write it, drop it."""
        self._round(layer, weight, None)

    # -- with calibration -------------------------------------------------------------------------

    def _read_samples(self) -> list[list[int]] | None:
        path = self.options.calibration
        if path is None:
            return None
        tokenizer = Tokenizer.load(self.config.model.tokenizer_path)
        limit = min(self.options.max_length, self.config.model.max_model_len)
        return read_calibration(path, tokenizer, self.options.max_tokens, limit)

    def _calibrated(self, samples: list[list[int]]) -> None:
        source = self.source
        source.load(lambda name: not name.startswith("model.layers."))
        batches = source.batches(samples, _TOKENS_AT_ONCE)
        head = list(self.observer.layers)  # the lm head, if it is to be rounded
        self.observer.layers.clear()
        for number in range(source.num_blocks):
            prefix = f"model.layers.{number}."
            source.load(partial(_begins_with, prefix))
            self._block(number, batches)
            source.drop_block(number)
            self.writer.flush()
        for observed in head:
            for batch in batches:
                hidden = source.model.norm.add(batch.update, batch.residual)[0]
                observed.observe(self.xp, hidden)
            self._round_observed(observed)

    def _block(self, number: int, batches: list[Any]) -> None:
        """Observe a block, round it, and run it again with the rounded weights."""
        layers = list(self.observer.layers)
        scales = f"model.layers.{number}.self_attn.cachek_matmul.activation_scale"
        is_done = all(self._is_done(observed) for observed in layers)
        if not is_done or (self.kind is not None and not self.writer.has(scales)):
            for batch in batches:
                self.source.run_block(number, batch, keep=False)
            found = self.cache.tensors(f"model.layers.{number}.self_attn")
            for name, array in found.items():
                self.writer.add(name, "float32", array, array.shape)
        for observed in layers:
            self._round_observed(observed)
        for batch in batches:
            self.source.run_block(number, batch, keep=True)
        self.cache.tensors("")

    def _is_done(self, observed: Observed) -> bool:
        count = max(1, observed.spec.num_experts)
        return all(self._has(_own(observed.spec, expert)) for expert in range(count))

    def _round_observed(self, observed: Observed) -> None:
        """Round one layer; its weight becomes the rounded one."""
        spec = observed.spec
        if not spec.num_experts:
            observed.weight = self._round(spec, observed.weight, observed.calibration(self.xp))
            return
        for expert in range(spec.num_experts):
            calibration = observed.calibration(self.xp, expert)
            own = _own(spec, expert)
            observed.weight[expert] = self._round(own, observed.weight[expert], calibration)

    # -- one matrix -------------------------------------------------------------------------------

    def _round(self, layer: LayerSpec, weight: Tensor, calibration: Calibration | None) -> Tensor:
        """Quantize and write, or read what an earlier run wrote; returns the rounded weight."""
        if self._has(layer):
            tensors = self._read(layer)
        elif calibration is None:
            tensors = self.inner.quantize(layer, weight)
        else:
            tensors = self.inner.quantize_calibrated(layer, weight, calibration)
        rounded = self.inner.dequantize(layer, tensors)
        if not self._has(layer):
            self._report(layer, weight, rounded, calibration)
            for part, own in self._by_part(layer, tensors).items():
                for suffix, tensor in own.items():
                    self.writer.add_tensor(f"{part}.{suffix}", tensor)
        self.bar.update(layer.in_features * layer.out_features)
        return rounded.to(weight.dtype)

    def _names(self, layer: LayerSpec) -> list[str]:
        return [part.name for part in layer.parts] or [layer.name]

    def _has(self, layer: LayerSpec) -> bool:
        suffixes = self.inner.parameters(layer)
        return all(
            self.writer.has(f"{name}.{suffix}")
            for name in self._names(layer)
            for suffix, parameter in suffixes.items()
            if not parameter.optional
        )

    def _by_part(
        self, layer: LayerSpec, tensors: Mapping[str, Tensor]
    ) -> dict[str, dict[str, Tensor]]:
        """Tensors of a joined layer under the names of its parts, as other tools expect them."""
        if len(layer.parts) < 2:
            return {self._names(layer)[0]: dict(tensors)}
        found: dict[str, dict[str, Tensor]] = {}
        first: dict[str, int] = {}
        for part in layer.parts:
            own = replace(layer, name=part.name, out_features=part.out_features, parts=())
            found[part.name] = {}
            for suffix, parameter in self.inner.parameters(own).items():
                tensor, dim = tensors[suffix], parameter.shard_dim
                if dim is not None:
                    start = first.get(suffix, 0)
                    first[suffix] = start + parameter.shape[dim]
                    rows = slice(start, first[suffix])
                    tensor = tensor[rows] if dim == 0 else tensor[:, rows]
                found[part.name][suffix] = tensor
        return found

    def _read(self, layer: LayerSpec) -> dict[str, Tensor]:
        """The inverse of _by_part, from disk."""
        pieces: dict[str, list[Tensor]] = {}
        dims: dict[str, int | None] = {}
        for name in self._names(layer):
            for suffix, parameter in self.inner.parameters(layer).items():
                if self.writer.has(f"{name}.{suffix}"):
                    pieces.setdefault(suffix, []).append(self.writer.read(f"{name}.{suffix}"))
                    dims[suffix] = parameter.shard_dim
        return {
            suffix: found[0] if dims[suffix] is None else self.xp.cat(found, dims[suffix])
            for suffix, found in pieces.items()
        }

    def _report(
        self, layer: LayerSpec, weight: Tensor, rounded: Tensor, calibration: Calibration | None
    ) -> None:
        """Relative squared error of the weight, and of its outputs on calibration text."""
        w = np.array(self.xp.to_numpy(weight.float()), np.float64)
        error = w - np.array(self.xp.to_numpy(rounded), np.float64)
        power = float((w**2).sum()) or 1.0
        row: dict[str, Any] = {"weights": w.size, "weight_error": float((error**2).sum()) / power}
        if calibration is not None and calibration.hessian is not None:
            moments = calibration.hessian.astype(np.float64)
            below = float(((w @ moments) * w).sum()) or 1.0
            row["output_error"] = float(((error @ moments) * error).sum()) / below
            row["tokens"] = calibration.num_tokens
        name = layer.name
        if layer.role == "experts" and layer.parts:
            name = layer.parts[0].name.rpartition(".")[0] + "." + name.rpartition(".")[2]
        self.writer.report[name] = row

    def _config_json(self) -> dict[str, Any]:
        """The model's own config.json, plus what a loader must know."""
        quantization = dict(self.inner.checkpoint_config())
        left = sorted(set(self.source.build.unquantized))
        if left:
            quantization["modules_to_not_convert"] = left
        if self.kind is not None:
            quantization["kv_cache_quant_type"] = self.kind.name
        return {**self.config.model.hf_config, "quantization_config": quantization}


def _begins_with(prefix: str, name: str) -> bool:
    return name.startswith(prefix)


def _own(spec: LayerSpec, expert: int) -> LayerSpec:
    """One expert's matrix of a layer of experts."""
    if not spec.num_experts:
        return spec
    prefix = spec.name.rpartition(".")[0]
    parts = tuple(
        replace(part, name=f"{prefix}.{expert}.{part.name.rpartition('.')[2]}")
        for part in spec.parts
    )
    return replace(spec, num_experts=0, parts=parts)


def _cache_kind(options: QuantizeOptions) -> KVFormat | None:
    kind = kv_format(options.kv_cache)
    if kind is not None and options.calibration is None:
        raise ConfigError(
            f"--kv-cache {options.kv_cache} computes static scales from text; add --calibration "
            f"FILE, or leave it out and serve with --kv-cache-dtype {kind.name}, "
            "which scales as it goes"
        )
    return kind


def _state(options: QuantizeOptions) -> dict[str, Any]:
    """The settings that must be equal for a run to continue an earlier one."""
    path = options.calibration
    text = "" if path is None else hashlib.sha256(path.read_bytes()).hexdigest()
    return {
        "model": str(options.model.resolve()),
        "method": json.dumps(parse_quantization(options.method), sort_keys=True),
        "calibration": text,
        "kv_cache": options.kv_cache,
        "max_tokens": options.max_tokens if text else 0,
        "max_length": options.max_length if text else 0,
    }


Report = Mapping[str, Mapping[str, Any]]


def summary(report: Report, worst: int = 10) -> list[tuple[str, str, str]]:
    """Rows for people, (layer, weight error, output error): the worst layers, then the mean."""
    key: Callable[[str], float] = lambda name: _error(report[name])  # noqa: E731
    rows = [
        (name, f"{report[name]['weight_error']:.6f}", _shown(report[name]))
        for name in sorted(report, key=key, reverse=True)[:worst]
    ]
    total = sum(row["weights"] for row in report.values()) or 1
    weighted = sum(row["weight_error"] * row["weights"] for row in report.values()) / total
    outputs = [row for row in report.values() if "output_error" in row]
    mean = ""
    if outputs:
        count = sum(row["weights"] for row in outputs)
        mean = f"{sum(r['output_error'] * r['weights'] for r in outputs) / count:.6f}"
    return [*rows, (f"mean of {len(report)} layers", f"{weighted:.6f}", mean)]


def _error(row: Mapping[str, Any]) -> float:
    return float(row.get("output_error", row["weight_error"]))


def _shown(row: Mapping[str, Any]) -> str:
    return f"{row['output_error']:.6f}" if "output_error" in row else ""
