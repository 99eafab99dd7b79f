"""Steps of layers that keep a state, of models' shapes and of odd ones, for what watches kernels
instead of comparing numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from fastdeploy_core.contracts.attention import (
    AttentionBatch,
    StateSpec,
    StateWeights,
    cache_dtypes,
)

# Of Qwen3-Next, Granite 4, LFM2 and Kimi Linear, and some whose widths are no powers of 2.
SPECS = (
    StateSpec("delta", 32, 16, 128, 128, (2048, 2048, 4096), 4, "bfloat16"),
    StateSpec("space", 48, 1, 128, 64, (3072, 128, 128), 4, "bfloat16"),
    StateSpec("short_conv", 0, 0, 0, 0, (2048,), 3, "bfloat16"),
    StateSpec("delta", 4, 2, 40, 24, (80, 80, 96), 4, "float32"),
    StateSpec("channel_delta", 32, 32, 128, 128, (4096, 4096, 4096), 4, "bfloat16"),
    StateSpec("channel_delta", 4, 4, 40, 24, (160, 160, 96), 4, "float32"),
    StateSpec("space", 6, 2, 24, 80, (480, 48, 48), 4, "float16", "float16"),
)
# Tokens of each row; and a captured step with a padding row.
ROWS = ((1, 1, 1), (200, 1, 9, 5), ())


def upload(array: np.ndarray, device: str) -> torch.Tensor:
    return torch.from_numpy(array).to(device)


class Step:
    """One step of one layer. `fed`: tokens of each row, which begin at position 70; none: a
    captured step of two rows."""

    def __init__(self, spec: StateSpec, driver: Any, fed: tuple[int, ...], device: str) -> None:
        self.driver = driver(spec, 64, Host(device), None)
        dtype, channels = getattr(torch, spec.dtype), sum(spec.conv_parts)
        counts = np.array(fed or (1, 1))
        ends = counts + (70 if fed else np.array([70, -1]))
        tokens, heads = int(counts.sum()), max(1, spec.num_heads)
        tables = np.arange(1, 1 + len(counts), dtype=np.int32)[:, None].repeat(5, 1)
        self.batch = AttentionBatch.upload(
            lambda array: upload(array, device), np.cumsum([0, *counts]), ends, tables,
            np.zeros(tokens), np.zeros(tokens), 1 if counts.max() == 1 else 0,
        )  # fmt: skip
        self.batch.is_exact = bool(fed)

        def normal(*shape: int, kind: Any = dtype) -> torch.Tensor:
            return torch.randn(*shape, device=device).to(kind)

        self.x = normal(tokens, channels)
        steps = heads * spec.key_dim if spec.kind == "channel_delta" else heads
        self.dt = normal(tokens, steps) if spec.num_heads else None
        self.beta = normal(tokens, heads) if spec.kind.endswith("delta") else None
        gates = [normal(n, kind=torch.float32) for n in (heads, steps, heads)]
        self.weights = StateWeights(normal(channels, spec.conv_width), normal(channels), *gates)
        self.weights.decay = -gates[0].exp()
        shapes = self.driver.cache_shapes(1 + len(counts))
        kinds = cache_dtypes(spec, len(shapes))
        self.cache = tuple(
            normal(*shape, kind=getattr(torch, kind))
            for shape, kind in zip(shapes, kinds, strict=True)
        )

    def run(self) -> torch.Tensor:
        given = self.x, self.dt, self.beta, self.weights, self.cache
        return self.driver.forward(*given, self.driver.prepare(self.batch))


class Host:
    """What a driver asks of its device."""

    def __init__(self, device: str) -> None:
        self.device = device

    def to_device(self, array: np.ndarray) -> torch.Tensor:
        return upload(array, self.device)


def cases(device: str = "cpu") -> Iterator[Callable[[], torch.Tensor]]:
    """Every kind of step."""
    from fd_cuda.states.driver import CudaStates

    for spec in SPECS:
        for fed in ROWS:
            yield Step(spec, CudaStates, fed, device).run
