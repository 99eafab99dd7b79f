"""quant_attention.cu against attention in float64 over what the cache's numbers mean: emulated, or
on the GPU."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from attention_steps import TOLERANCE, Step, gqa
from fastdeploy_core.contracts.attention import KVScales
from fastdeploy_core.contracts.device import DeviceOptions
from fastdeploy_core.contracts.kv_formats import KV_FORMATS
from quant_emulation import use_kernels

from fastdeploy_testing.drivers import lookup
from fd_cuda.attention.native_gqa import NativeShape
from fd_cuda.attention.plan import DecodeShape
from fd_cuda.attention.quantized import QuantizedAttention
from fd_cuda.attention.tuning import Gpu, Sizes
from fd_cuda.kernels import native

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
pytestmark = pytest.mark.skipif(not HAS_GPU and shutil.which("g++") is None, reason="needs g++")
ROWS = [(1, 130), (1, 1), (1, 300), (1, 0), (1, 64)]


class Given(Sizes):
    """One shape for all."""

    shape: NativeShape

    def quantized(self, *args: Any) -> NativeShape:
        return self.shape


@pytest.fixture(autouse=True)
def kernels(tmp_path_factory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    use_kernels(tmp_path_factory.getbasetemp(), monkeypatch)
    if not HAS_GPU:
        monkeypatch.setattr(native, "available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))


Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def quantize(x: torch.Tensor, name: str, given: tuple[torch.Tensor, torch.Tensor] | None) -> Parts:
    """Rows [slots, heads, dim] as numbers, scales of rows (and what they are shifted by), and what
    they mean."""
    x, kind = x.float(), KV_FORMATS[name]
    if given is not None:
        scale, low = given
    elif kind.has_minimum:
        low = x.amin(-1, keepdim=True).half()
        scale = ((x.amax(-1, keepdim=True) - low.float()) / kind.bound).half()
    else:
        scale, low = (x.abs().amax(-1, keepdim=True) / kind.bound).half(), torch.zeros(1).half()
    shift = low.float() if kind.has_minimum else 0.0
    numbers = ((x - shift) / scale.float()).clamp(
        0 if kind.has_minimum else -kind.bound, kind.bound
    )
    numbers = torch.nan_to_num(numbers if name == "float8_e4m3fn" else numbers.round())
    stored = numbers.to(getattr(torch, kind.dtype))
    means = stored.double() * scale.double() + (low.double() if kind.has_minimum else 0)
    if kind.per_byte == 2:
        stored = stored[..., ::2] | stored[..., 1::2] << 4
    return stored, torch.cat((scale, low), -1) if kind.has_minimum else scale, means


def check(
    name: str, spec: Any, rows: list[tuple[int, int]], shape: NativeShape, is_static: bool
) -> None:
    device = lookup("device", DEVICE)(DeviceOptions(tensor_library="torch", num_threads=1))
    spec = replace(spec, kv_format=name, kv_static=is_static)
    step = Step(device, spec, rows, block_size=16)
    driver, sizes = QuantizedAttention(spec, 16, device, None), Given(Gpu(4, True))
    sizes.shape = shape
    driver.use(sizes)
    heads = spec.num_kv_heads
    # The step's own rows are in the cache.
    mapping = torch.from_numpy(step.slot_mapping())
    kept, news = mapping >= 0, (step.k, step.v)
    numbers, scales, means = [], [], []
    for old, new in zip((step.old_k, step.old_v), news, strict=True):
        old[mapping[kept]] = new[kept]
        given = None
        if is_static:
            low = torch.rand(heads, 128) - (2.5 if name == "int4_zp" else 0)
            given = torch.rand(heads, 128) * 0.02 + (0.3 if name == "int4_zp" else 0.02), low
        parts = quantize(old, name, given)
        for into, part in zip((numbers, scales, means), parts, strict=True):
            into.append(part)
    step.old_k, step.old_v = means
    step.k, step.v = (torch.zeros(x.shape, dtype=torch.float64) for x in news)
    step.k[kept], step.v[kept] = means[0][mapping[kept]], means[1][mapping[kept]]
    blocks = len(step.old_k) // 16
    held = [
        n.reshape(s).to(DEVICE) for n, s in zip(numbers, driver.cache_shapes(blocks), strict=False)
    ]
    static = None
    if is_static:
        # int4: scales, then what channels are shifted by.
        tables = [s.to(DEVICE).split(128, -1) for s in scales]
        static = KVScales(
            *(tuple(t.contiguous() for t in own) for own in zip(*tables, strict=True))
        )
    else:
        held += [s.reshape(blocks, 16, heads, -1).to(DEVICE) for s in scales]
    metadata = driver.prepare(step.batch(tokens_per_row=rows[0][0]))
    assert metadata.launches[0].shape is shape, "another kernel ran"
    q = step.q.to(DEVICE)
    out = driver.forward(q, q, q, tuple(held), metadata, None, static)
    again = driver.forward(q, q, q, tuple(held), metadata, None, static)
    assert torch.equal(out, again) and torch.isfinite(out).all()
    got = out.float().cpu().numpy()
    for row, expected in enumerate(step.expected()):
        if rows[row][1]:
            own = got[step.starts[row] : step.starts[row + 1]]
            limit = TOLERANCE[spec.dtype] * max(1.0, np.abs(expected).max())
            assert np.abs(own - expected).max() <= limit


def sizes(cluster: int, units: int, target: int, warps: int = 4) -> NativeShape:
    return NativeShape(DecodeShape(64, 1, 8, target, 4, 1), cluster, units, 1, warps)


@pytest.mark.parametrize("is_static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("name", KV_FORMATS)
def test_splits_and_clusters(name: str, is_static: bool) -> None:
    shape = sizes(2, 1, 4, 2) if is_static else sizes(4, 2, 1)
    check(name, gqa("bfloat16", 8, 1, 128), ROWS, shape, is_static)


@pytest.mark.parametrize("case", [(2, (5, 1), "float16"), (3, (8, 1), "bfloat16")], ids=str)
@pytest.mark.parametrize("name", KV_FORMATS)
def test_tokens_see_those_before_them(name: str, case: tuple[int, Any, str]) -> None:
    tokens, heads, dtype = case
    rows = [(tokens, 100), (tokens, tokens), (tokens, 0)]
    check(name, gqa(dtype, *heads, 128), rows, sizes(1, 1, 4), is_static=False)
