"""quant_attention.cu against attention in float64 over what the cache's numbers mean: emulated, or on the GPU."""

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
from fastdeploy_core.plugins.drivers import lookup
from quant_emulation import use_kernels

from fd_cuda.attention.native_decode import NativeShape
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


def quantize(
    x: torch.Tensor, name: str, scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows [slots, heads, dim] as numbers, scales of rows, and what they mean."""
    bound = 127.0 if name == "int8" else 448.0
    own = (x.float().abs().amax(-1, keepdim=True) / bound).half() if scale is None else scale
    numbers = x.float() / own.float()
    numbers = numbers.clamp(-bound, bound)
    numbers = numbers.round() if name == "int8" else numbers
    numbers = torch.nan_to_num(numbers).to(getattr(torch, name))
    return numbers, own, numbers.double() * own.double()


def check(
    name: str, spec: Any, rows: list[tuple[int, int]], shape: NativeShape, is_static: bool
) -> None:
    device = lookup("device", DEVICE)(DeviceOptions(tensor_library="torch", num_threads=1))
    spec = replace(spec, kv_format=name, kv_static=is_static)
    step = Step(device, spec, rows, block_size=16)
    driver, sizes = QuantizedAttention(spec, 16, device, None), Given(Gpu(4, True))
    sizes.shape = shape
    driver.use(sizes)
    # The step's own rows are in the cache.
    mapping = torch.from_numpy(step.slot_mapping())
    kept, news = mapping >= 0, (step.k, step.v)
    numbers, scales, means = [], [], []
    for old, new in zip((step.old_k, step.old_v), news, strict=True):
        old[mapping[kept]] = new[kept]
        given = torch.rand(spec.num_kv_heads, 128) * 0.02 + 0.02 if is_static else None
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
        static = KVScales(tuple(s.to(DEVICE) for s in scales))
    else:
        held += [s.reshape(blocks, 16, spec.num_kv_heads, 1).to(DEVICE) for s in scales]
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
@pytest.mark.parametrize("name", ["int8", "float8_e4m3fn"])
def test_splits_and_clusters(name: str, is_static: bool) -> None:
    shape = sizes(2, 1, 4, 2) if is_static else sizes(4, 2, 1)
    check(name, gqa("bfloat16", 8, 1, 128), ROWS, shape, is_static)


@pytest.mark.parametrize("case", [(2, (5, 1), "float16"), (3, (8, 1), "bfloat16")], ids=str)
@pytest.mark.parametrize("name", ["int8", "float8_e4m3fn"])
def test_tokens_see_those_before_them(name: str, case: tuple[int, Any, str]) -> None:
    tokens, heads, dtype = case
    rows = [(tokens, 100), (tokens, tokens), (tokens, 0)]
    check(name, gqa(dtype, *heads, 128), rows, sizes(1, 1, 4), is_static=False)
