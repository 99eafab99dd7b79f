"""Attention over a quantized cache, for every format and kind of scale that the driver accepts.

The oracle rounds keys and values in numpy as contracts/kv_formats.py says, and attends in float64.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fastdeploy_core.contracts.attention import (
    AttentionQuestion,
    AttentionSpec,
    KVScales,
    cache_dtypes,
)
from fastdeploy_core.contracts.base import Accept
from fastdeploy_core.contracts.kv_formats import KV_FORMATS, KVFormat
from fastdeploy_testing import oracle

from .attention_world import Row, World
from .base import OnDevice
from .test_attention import BATCHES, gqa_spec, mla_spec

# A number between two levels may be rounded either way: one level of one channel.
TOLERANCE = {"int8": 4e-3, "float8_e4m3fn": 2e-2, "int4_zp": 6e-2}


def round_e4m3(x: np.ndarray) -> np.ndarray:
    """Nearest float8_e4m3fn, ties to even, cut at 448."""
    magnitude = np.maximum(np.abs(x), 2.0**-20)
    step = 2.0 ** (np.maximum(np.floor(np.log2(magnitude)), -6) - 3)
    return np.sign(x) * np.minimum(np.round(np.abs(x) / step) * step, 448.0)


def rounded_rows(
    x: np.ndarray, kind: KVFormat, static: tuple[np.ndarray, np.ndarray | None] | None
) -> np.ndarray:
    """The cache's content for rows [T, heads, dim]; static: (scale, minimum), each [heads, dim]."""
    low: Any = 0.0
    if static is not None:
        scale = static[0]
        low = 0.0 if static[1] is None else static[1]
    elif kind.has_minimum:
        low = x.min(axis=-1, keepdims=True).astype(np.float16).astype(np.float64)
        raw = (x.max(axis=-1, keepdims=True) - x.min(axis=-1, keepdims=True)) / kind.bound
        scale = np.maximum(raw, 1e-7).astype(np.float16).astype(np.float64)
    else:
        raw = np.abs(x).max(axis=-1, keepdims=True) / kind.bound
        scale = np.maximum(raw, 1e-7).astype(np.float16).astype(np.float64)
    numbers = (x - low) / scale
    if kind.name == "float8_e4m3fn":
        numbers = round_e4m3(numbers)
    else:
        numbers = np.clip(np.round(numbers), 0 if kind.has_minimum else -kind.bound, kind.bound)
    return numbers * scale + low


class KVFormatConformance(OnDevice):
    """Override nothing but `driver_name`, or run it through `fastdeploy plugins check`."""

    kind = "attention"

    @pytest.mark.parametrize("batch", BATCHES)
    @pytest.mark.parametrize("name", KV_FORMATS)
    def test_dynamic_scales(
        self, request: pytest.FixtureRequest, device: Any, kernels: Any, name: str, batch: str
    ) -> None:
        spec = gqa_spec("gqa 4:2", device.limits.dtypes[0])
        self._check(request, device, kernels, replace(spec, kv_format=name), BATCHES[batch])

    @pytest.mark.parametrize("shape", ["mha", "gqa 6:2, narrow values", "head 64"])
    @pytest.mark.parametrize("name", KV_FORMATS)
    def test_static_scales(
        self, request: pytest.FixtureRequest, device: Any, kernels: Any, name: str, shape: str
    ) -> None:
        spec = gqa_spec(shape, device.limits.dtypes[0])
        spec = replace(spec, kv_format=name, kv_static=True)
        self._check(request, device, kernels, spec, BATCHES["mixed"])

    @pytest.mark.parametrize("name", KV_FORMATS)
    def test_latent_rows(
        self, request: pytest.FixtureRequest, device: Any, kernels: Any, name: str
    ) -> None:
        spec = mla_spec(device.limits.dtypes[0])
        self._check(request, device, kernels, replace(spec, kv_format=name), BATCHES["mixed"])

    def _check(
        self,
        request: pytest.FixtureRequest,
        device: Any,
        kernels: Any,
        spec: AttentionSpec,
        rows: list[tuple[int, int]],
    ) -> None:
        kind, size = KV_FORMATS[spec.kv_format], int(device.limits.default_block_size)
        backend = self._driver(request, device, kernels, spec, size)
        world = QuantizedWorld(self, device, kernels, spec, size, rows)
        inputs = world.write(backend)
        metadata = backend.prepare(world.batch())
        got = backend.forward(*inputs, world.cache, metadata, None, world.scales)
        world.check_canaries()
        result = self.to_host(device, got)
        assert np.all(np.isfinite(result)), "a block outside the sequence's table was read"
        parts = np.split(result, np.cumsum([n for n, _ in rows])[:-1])
        dtype = device.limits.dtypes[0]
        for part, row in zip(parts, world.rows, strict=True):
            expected = world.expected(kind, row, lambda a: self.rounded(device, a, dtype))
            worst = float(np.max(np.abs(part - expected)))
            limit = TOLERANCE[kind.name] * float(np.max(np.abs(expected)))
            assert worst <= limit, f"off by {worst:.3g}, at most {limit:.3g} is allowed"

    def _driver(
        self, request: pytest.FixtureRequest, device: Any, kernels: Any, spec: Any, size: int
    ) -> Any:
        """The driver under test, or the engine's choice; skips if no driver takes the format."""
        from fastdeploy_core.plugins.discovery import discover
        from fastdeploy_core.plugins.drivers import lookup
        from fastdeploy_core.plugins.manager import hook_manager
        from fastdeploy_core.plugins.negotiate import ask_candidates

        option = request.config.getoption
        asked = self.driver_name or (
            option("--fd-driver") if option("--fd-kind") == "attention" else ""
        )
        question = AttentionQuestion(device.name, device.xp.name, spec, size, spec.kv_format)
        decision, found = ask_candidates(
            hook_manager(), discover(), "attention", "fd_attention_backends", question, asked
        )
        takes = [c for c in found if c.name == decision.winner and isinstance(c.verdict, Accept)]
        if not takes:
            pytest.skip(f"cache format {spec.kv_format}: {decision.why}")
        driver = lookup("attention", decision.winner)(spec, size, device, kernels)
        if driver.unit != "core":
            pytest.skip("unit rope_kv writes the cache itself; it is tested end to end")
        return driver


class QuantizedWorld(World):
    """A cache in which only the rows' own blocks hold numbers; scales elsewhere are NaN."""

    scales: KVScales | None = None

    def write(self, backend: Any) -> tuple[Any, Any, Any]:
        """Fill the cache through the format's own operation; returns (q, k, v) of the step."""
        device, spec, xp = self.device, self.spec, self.device.xp
        shapes = backend.cache_shapes(self.num_blocks)
        dtypes = cache_dtypes(spec, len(shapes))
        owned = sorted({0, *(b for row in self.rows for b in row.blocks)})
        pools = []
        for shape, dtype in zip(shapes, dtypes, strict=True):
            if dtype == "float16":
                array = np.full(shape, np.nan, np.float32)
                array[owned] = 0.5
                pools.append(device.to_device(array).to(xp.float16))
            else:
                bits = np.full(shape, 0x55, np.uint8)
                pools.append(device.to_device(bits).view(xp.dtype(dtype)))
        self.cache = tuple(pools)
        self._static()
        slots = [
            row.blocks[t // self.block_size] * self.block_size + t % self.block_size
            for row in self.rows
            for t in range(len(row.k))
        ]
        stacked = [np.concatenate([r.k for r in self.rows])]
        if spec.kind == "gqa":
            stacked.append(np.concatenate([r.v for r in self.rows]))
        self.kernels[KV_FORMATS[spec.kv_format].write](
            tuple(self.put(a) for a in stacked),
            self.cache,
            device.to_device(np.array(slots, "int64")),
            self.scales,
        )
        self.before = [np.array(device.to_host(c.float())) for c in self.cache]
        return self.step_inputs()

    def _static(self) -> None:
        spec, kind = self.spec, KV_FORMATS[self.spec.kv_format]
        if not spec.kv_static:
            return
        rng, dims = np.random.default_rng(17), (spec.head_dim, spec.v_head_dim)
        shape = spec.num_kv_heads
        spread = [rng.uniform(0.8, 1.2, (shape, d)).astype(np.float32) for d in dims]
        if kind.has_minimum:
            scale = [s * np.float32(7 / kind.bound) for s in spread]
            minimum = [s * np.float32(-3.5) for s in spread]
        else:
            scale, minimum = [s * np.float32(3.5 / kind.bound) for s in spread], []
        self.tables = [
            (s.astype(np.float64), minimum[i].astype(np.float64) if minimum else None)
            for i, s in enumerate(scale)
        ]
        to_device = self.device.to_device
        self.scales = KVScales(tuple(map(to_device, scale)), tuple(map(to_device, minimum)))

    def expected(self, kind: KVFormat, row: Row, seen: Any) -> np.ndarray:
        """Attention over the values that the cache can hold of this row."""
        tables = self.tables if self.spec.kv_static else [None, None]
        keys = rounded_rows(seen(row.k), kind, tables[0])
        if self.spec.kind == "mla":
            values = keys[..., : self.spec.kv_lora_rank]
        else:
            values = rounded_rows(seen(row.v), kind, tables[1])
        return oracle.attention(seen(row.q), keys, values, self.spec.scale)


class TestKVFormats(KVFormatConformance):
    """Run by `fastdeploy plugins check`."""
