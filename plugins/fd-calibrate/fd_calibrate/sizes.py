"""Bytes that a model's weights take in a format, from config.json alone: nothing is allocated."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from fastdeploy_core.config import ModelConfig
from fastdeploy_core.config.quantization import read_quantization
from fastdeploy_core.contracts.quantizer import QuantizationQuestion, make_quantizer
from fastdeploy_core.errors import UnsupportedModel
from fastdeploy_core.layers import DriverFactories, ModelBuilder, ModelRanks, WeightFormats
from fastdeploy_core.models.shapes import model_class
from fastdeploy_core.plugins import lookup
from fastdeploy_core.plugins.manager import hook_manager
from fastdeploy_core.tensor import DTYPE_BYTES

_FEW_POSITIONS = 16  # the rotary table does not count as a weight


class _ShapeLibrary:
    """Tensors that have a shape and no memory."""

    name = "shapes"
    float32 = np.dtype(np.float32)

    def __getattr__(self, name: str) -> Any:
        if name not in DTYPE_BYTES:
            raise AttributeError(name)
        return name

    def dtype(self, name: str) -> str:
        return name

    def zeros(self, shape: tuple[int, ...], *, dtype: Any = None, device: Any = None) -> np.ndarray:
        return np.broadcast_to(np.float32(0), shape)

    empty = zeros

    def nbytes(self, x: Any) -> int:
        return 0


class _NoKernels(dict[str, Any]):
    """A kernel table that has every kernel; none is ever called."""

    device = "shapes"

    def __missing__(self, operation: str) -> Any:
        return None

    def __contains__(self, operation: object) -> bool:
        return True


def weight_bytes(
    hf_config: Mapping[str, Any], method: str = "", dtype: str = "bfloat16", tp_size: int = 1
) -> dict[str, int]:
    """Bytes of one rank by part: experts, linear (other layers), other (embedding, head, norms).

    `method`: a value of --quantization, or the name in config.json's own quantization_config; empty
    is full precision.
    """
    model = ModelConfig(Path(), Path(), dtype=dtype, quantization=method, hf_config=hf_config)
    settings = read_quantization(model)
    device: Any = SimpleNamespace(
        name="shapes", device="shapes", xp=_ShapeLibrary(), to_device=lambda array: array
    )
    kernels: Any = _NoKernels()
    quantizer = None
    if settings.method:
        name = _driver_name(settings.method, settings.config)
        quantizers = partial(lookup, "quantizer")
        quantizer = make_quantizer(name, settings.config, device, kernels, quantizers)
    build = ModelBuilder(
        device,
        kernels,
        dtype,
        max_positions=_FEW_POSITIONS,
        drivers=DriverFactories(
            lambda spec: SimpleNamespace(unit="core"),
            lambda spec: SimpleNamespace(unit="routing_experts"),
        ),
        ranks=ModelRanks(size=tp_size),
        formats=WeightFormats(quantizer=quantizer, is_dummy=True),
    )
    model_class(hf_config)(hf_config, build)
    found = {"experts": 0, "linear": 0, "other": 0}
    for name, placement in build.weights.placements.items():
        count = math.prod(
            _length(s, size) for s, size in zip(placement.region, placement.shape, strict=True)
        )
        found[_part(name)] += count * DTYPE_BYTES[placement.dtype or dtype]
    return found


def _length(part: slice, size: int) -> int:
    start, stop, _ = part.indices(size)
    return stop - start


def _part(name: str) -> str:
    if ".experts." in name:
        return "experts"
    return "linear" if "_proj." in name or ".gate." in name else "other"


def _driver_name(method: str, config: Mapping[str, Any]) -> str:
    question = QuantizationQuestion(method, config, "shapes", "shapes")
    answer = hook_manager().first("fd_quantizer_for", question=question)
    if answer is None:
        raise UnsupportedModel(
            f"no installed quantizer serves {method!r}; see: "
            "fastdeploy plugins list --kind quantizer"
        )
    name: str = answer.value.name
    return name
