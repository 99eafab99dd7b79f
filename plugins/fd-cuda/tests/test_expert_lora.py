"""What adapters add to routed experts, against fd-lora's plain tensor code: on the GPU where there
is one, in Triton's interpreter elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from fastdeploy_core.contracts.moe import ExpertAdapters, MoESpec, RoutingSpec
from fastdeploy_core.tensor import Tensor
from fd_lora.experts import adapted_experts
from packed_weights import packed

from fastdeploy_testing.drivers import build_kernel_table
from fd_cuda.moe import CudaMoE

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = ["float32", "float16", "bfloat16"] if DEVICE == "cuda" else ["float32"]
BOUNDS = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}
# tokens, experts of each, experts, hidden, width, slots, rank
SHAPES = [
    (1, 2, 4, 48, 24, 1, 4),
    (9, 3, 8, 72, 40, 3, 8),
    (40, 2, 3, 64, 24, 4, 24),  # several blocks an expert
    *([(64, 8, 128, 2048, 768, 8, 16), (700, 4, 16, 1024, 512, 4, 64)]
      if DEVICE == "cuda" else []),
]  # fmt: skip


class SomeAdapters:
    """ExpertAdapters over random matrices; some rows have none."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, kernel: Callable[..., Any]):
        tokens, _, experts, hidden, width, slots, rank = shape
        random = partial(draw, dtype=dtype)
        many = slots * experts
        self.gate_up_matrices = (
            random(many, 2 * rank, hidden, spread=hidden**-0.5),
            random(many, 2 * width, rank, spread=0.3),
        )
        self.down_matrices = (
            random(many, rank, width, spread=width**-0.5),
            random(many, hidden, rank, spread=0.3),
        )
        self.ends = ((width, 2 * width), (hidden,))
        generator = torch.Generator().manual_seed(tokens)
        of_rows = torch.randint(-1, slots, (tokens,), generator=generator, dtype=torch.int32)
        self.slots, self.num_experts, self.kernel = of_rows.to(DEVICE), experts, kernel

    def as_floats(self, kernel: Callable[..., Any]) -> SomeAdapters:
        other = object.__new__(SomeAdapters)
        other.__dict__ = {**self.__dict__, "kernel": kernel}
        other.gate_up_matrices = tuple(m.float() for m in self.gate_up_matrices)
        other.down_matrices = tuple(m.float() for m in self.down_matrices)
        return other

    def gate_up(self, y: Tensor, x: Tensor, topk_ids: Tensor) -> Tensor:
        operands = (*self.gate_up_matrices, self.ends[0], self.slots, topk_ids, self.num_experts)
        return self.kernel(y, x, *operands)

    def down(self, y: Tensor, x: Tensor, topk_ids: Tensor) -> Tensor:
        operands = (*self.down_matrices, self.ends[1], self.slots, topk_ids, self.num_experts)
        return self.kernel(y, x, *operands)


def draw(*size: int, dtype: torch.dtype, spread: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(size))
    return (torch.randn(*size, generator=generator) * spread).to(dtype).to(DEVICE)


def operands(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """x, ids, shares, gate_up, down."""
    tokens, top_k, experts, hidden, width, _, _ = shape
    scores = draw(tokens, experts, dtype=torch.float32).softmax(-1)
    shares, ids = scores.topk(top_k, -1)
    return (
        draw(tokens, hidden, dtype=dtype), ids, shares / shares.sum(-1, keepdim=True),
        draw(experts, 2 * width, hidden, dtype=dtype, spread=hidden**-0.5),
        draw(experts, hidden, width, dtype=dtype, spread=width**-0.5),
    )  # fmt: skip


def forward(
    shape: tuple[int, ...], dtype: str, x: Any, gate_up: Any, down: Any, rest: Any, adapters: Any
) -> torch.Tensor:
    """What the driver computes."""
    table = build_kernel_table("cuda", {"tensor_library": "torch", "dtype": dtype})
    spec = MoESpec(RoutingSpec(shape[2], shape[1]), shape[3], shape[4], dtype)
    driver: Any = CudaMoE(spec, None, table)  # type: ignore[arg-type]
    found: torch.Tensor = driver.forward_adapted(
        x, driver.prepare_weights(gate_up, down), *rest, adapters
    )
    return found


def kernels() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """This device's, and plain tensor code."""
    cuda = build_kernel_table("cuda", {"tensor_library": "torch"})
    assert cuda.origins()["lora_experts"] == "fd-cuda"
    return cuda["lora_experts"], build_kernel_table("cpu")["lora_experts"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_pairs_get_what_their_adapter_adds(shape: tuple[int, ...], dtype: str) -> None:
    own, plain = kernels()
    adapters = SomeAdapters(shape, getattr(torch, dtype), own)
    x, ids, _, _, _ = operands(shape, getattr(torch, dtype))
    y = draw(ids.numel(), 2 * shape[4], dtype=x.dtype)
    before = y.clone()
    wanted = adapters.as_floats(plain).gate_up(y.float(), x.float(), ids)
    found = adapters.gate_up(y, x, ids)
    assert float((found.float() - wanted).abs().max()) < BOUNDS[dtype] * float(wanted.abs().max())
    alone = (adapters.slots < 0).repeat_interleave(shape[1])
    assert torch.equal(found[alone], before[alone])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_experts_with_adapters(shape: tuple[int, ...], dtype: str) -> None:
    own, plain = kernels()
    adapters: ExpertAdapters = SomeAdapters(shape, getattr(torch, dtype), own)
    x, *rest, gate_up, down = operands(shape, getattr(torch, dtype))
    floats = adapters.as_floats(plain)
    wanted = adapted_experts(x.float(), *rest, gate_up.float(), down.float(), floats)
    found = forward(shape, dtype, x, gate_up, down, rest, adapters)
    assert float((found.float() - wanted).abs().max()) < BOUNDS[dtype] * float(wanted.abs().max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["wint8", "wint4", "wfp8"])
@pytest.mark.parametrize("tokens", [3, 200])
def test_packed_experts_with_adapters(tokens: int, kind: str, dtype: str) -> None:
    """Few rows, which read packed weights where a kernel can, and many."""
    shape = (tokens if DEVICE == "cuda" else 3, 2, 8, 256, 128, 2, 8)
    own, plain = kernels()
    adapters = SomeAdapters(shape, getattr(torch, dtype), own)
    x, *rest, _, _ = operands(shape, getattr(torch, dtype))
    gate_up, down = (packed(kind, 256, depth, 0, 8, DEVICE) for depth in (256, 128))
    floats = adapters.as_floats(plain)
    wanted = adapted_experts(x.float(), *rest, gate_up, down, floats)
    found = forward(shape, dtype, x, gate_up, down, rest, adapters)
    assert float((found.float() - wanted).abs().max()) < BOUNDS[dtype] * float(wanted.abs().max())
