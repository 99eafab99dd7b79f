"""Fixtures: the kit's, and models on the reference device without an engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fd_calibrate.prefill import BLOCK_SIZE, prefill

from fastdeploy_core import tensor
from fastdeploy_core.config import CacheConfig, DeviceConfig, EngineConfig
from fastdeploy_core.config.model import read_model_config
from fastdeploy_core.contracts.device import DeviceBackend, DeviceOptions
from fastdeploy_core.engine.selection import resolve_plugins
from fastdeploy_core.loading.loader import LoadedModel, load_model
from fastdeploy_core.plugins.kernels import build_kernel_table

pytest_plugins = ["fastdeploy_testing.pytest_plugin"]
Load = Callable[..., tuple[LoadedModel, DeviceBackend]]


@pytest.fixture(scope="session")
def library(fd_tensor: str) -> str:
    """The tensor library of this run."""
    return fd_tensor or tensor.available()[0]


@pytest.fixture(scope="session")
def load(library: str) -> Load:
    """load(folder, kv_dtype="auto", **model settings): a model, and the reference device."""

    def load(
        folder: Path, kv_dtype: str = "auto", **settings: Any
    ) -> tuple[LoadedModel, DeviceBackend]:
        config = EngineConfig(
            model=read_model_config(folder, settings),
            cache=CacheConfig(block_size=BLOCK_SIZE, kv_dtype=kv_dtype),
            device=DeviceConfig(device="cpu", tensor_library=library, num_threads=1),
        )
        resolved = resolve_plugins(config)
        options = DeviceOptions(tensor_library=library, num_threads=1)
        device = resolved.load("device")(options)
        kernels = build_kernel_table("cpu", resolved=resolved)
        return load_model(config, device, kernels, 0, 1, None, resolved.load), device

    return load


@pytest.fixture(scope="session")
def logits_of(load: Load) -> Callable[..., np.ndarray]:
    """logits_of(folder, token_ids, kv_dtype="auto"): of every token, [tokens, vocabulary]."""

    def logits_of(folder: Path, token_ids: list[int], kv_dtype: str = "auto") -> np.ndarray:
        model, device = load(folder, kv_dtype)
        with device.xp.no_grad():
            layers = model.builder.kv_layers
            ids, positions, context = prefill(device, model.attention, layers, [token_ids])
            hidden = model.model.forward(ids, positions, context)
            return np.array(device.to_host(model.model.compute_logits(hidden).float()))

    return logits_of
