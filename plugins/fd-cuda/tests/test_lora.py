"""What adapters add, against fd-lora's plain tensor code: on the GPU where there is one, in
Triton's interpreter elsewhere."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from fastdeploy_testing.drivers import build_kernel_table
from fd_cuda.kernels import adapted_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = ["float32", "float16", "bfloat16"] if DEVICE == "cuda" else ["float32"]
# rows, inputs, outputs of each part, slots, rank
SHAPES = [
    (1, 48, (40,), 1, 4),
    (5, 96, (64, 16, 16), 3, 8),
    (17, 130, (72, 72), 2, 16),
    (33, 64, (200,), 4, 24),
    (300, 64, (96, 32), 9, 8),  # in two launches, more adapters than programs share a tile
    (300, 560, (96, 32), 3, 8),  # inputs in two parts, the second smaller
    *([(64, 1024, (2048, 256, 256), 8, 16), (64, 3072, (1024,), 8, 16),
       (2048, 1024, (3072, 3072), 8, 64)] if DEVICE == "cuda" else []),
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_get_what_their_adapter_adds(
    shape: tuple[int, int, tuple[int, ...], int, int], has_norm: bool, dtype: str
) -> None:
    num_rows, depth, parts, num_slots, rank = shape
    draw = torch.Generator().manual_seed(num_rows)

    def random(*size: int, spread: float = 1.0) -> torch.Tensor:
        numbers = torch.randn(*size, generator=draw) * spread
        return numbers.to(getattr(torch, dtype)).to(DEVICE)

    ends = tuple(torch.tensor(parts).cumsum(0).tolist())
    a = random(num_slots, len(parts) * rank, depth, spread=depth**-0.5)
    b = random(num_slots, ends[-1], rank)
    y, x = random(num_rows, ends[-1]), random(num_rows, depth + 8)[:, :depth]
    norm = random(depth) if has_norm else None
    slots = torch.randint(-1, num_slots, (num_rows,), generator=draw, dtype=torch.int32).to(DEVICE)
    cuda = build_kernel_table("cuda", {"tensor_library": "torch"})
    assert cuda.origins()["lora"] == "fd-cuda"
    wide = [None if t is None else t.float() for t in (y, x, norm)]
    reference = build_kernel_table("cpu")["lora"]
    wanted = reference(*wide, 1e-5, a.float(), b.float(), ends, slots)
    before = y.clone()
    found = cuda["lora"](y, x, norm, 1e-5, a, b, ends, slots)
    bound = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}[dtype]
    scale = float(wanted.abs().max())
    assert float((found.float() - wanted).abs().max()) < bound * scale
    assert torch.equal(found[slots < 0], before[slots < 0])


def test_few_rows_and_many_are_the_same_with_batch_invariance(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FD_BATCH_INVARIANT", "1")
    depth, width, rank, many = 96, 64, 8, 260
    a, b = torch.randn(2, rank, depth, device=DEVICE), torch.randn(2, width, rank, device=DEVICE)
    x, y = torch.randn(many, depth, device=DEVICE), torch.randn(many, width, device=DEVICE)
    slots = torch.arange(many, dtype=torch.int32, device=DEVICE) % 3 - 1
    kernel = build_kernel_table("cuda", {"tensor_library": "torch"})["lora"]
    together = kernel(y.clone(), x, None, 0.0, a, b, (width,), slots)
    for rows in (1, 7, 70):
        alone = kernel(y[:rows].clone(), x[:rows], None, 0.0, a, b, (width,), slots[:rows])
        assert torch.equal(alone, together[:rows]), rows


def test_a_row_does_not_depend_on_the_others() -> None:
    """One adapter among several, rows in any order, fewer rows than a tile: bit for bit, but for
    the interpreter, whose products are numpy's."""
    equal = torch.equal if DEVICE == "cuda" else partial(torch.allclose, rtol=1e-4, atol=1e-4)
    depth, width, rank = 80, 96, 8
    a, b = torch.randn(3, rank, depth, device=DEVICE), torch.randn(3, width, rank, device=DEVICE)
    x, y = torch.randn(40, depth, device=DEVICE), torch.randn(40, width, device=DEVICE)
    slots = torch.arange(40, dtype=torch.int32, device=DEVICE) % 4 - 1
    kernel = build_kernel_table("cuda", {"tensor_library": "torch"})["lora"]
    together = kernel(y.clone(), x, None, 0.0, a, b, (width,), slots)
    order = torch.randperm(40, device=DEVICE)
    shuffled = kernel(y[order].clone(), x[order], None, 0.0, a, b, (width,), slots[order])
    assert equal(shuffled, together[order])
    again = torch.where(slots == 1, slots, torch.full_like(slots, -1))
    alone = kernel(y.clone(), x, None, 0.0, a, b, (width,), again)
    assert equal(alone[slots == 1], together[slots == 1])


PRODUCTS = [
    # rows, inputs, outputs of each part, slots, rank, epilogue
    (3, 128, (72, 24, 24), 2, 8, "plain"),
    (40, 192, (96, 96), 3, 16, "gated"),
    (64, 256, (136,), 2, 8, "add"),
    (300, 64, (40, 40), 3, 8, "gated"),
    *([(64, 1024, (2048, 1024, 1024), 8, 16, "plain"), (64, 1024, (3072, 3072), 8, 16, "gated"),
       (64, 3072, (1024,), 8, 16, "add"), (100, 2048, (1024,), 8, 64, "add"),
       (1, 1024, (3072, 3072), 16, 8, "gated"), (17, 512, (128, 64), 5, 24, "plain"),
       (64, 4096, (4096,), 8, 16, "add"), (33, 8192, (1024, 1024), 3, 8, "gated"),
       (200, 512, (1024, 512), 20, 8, "plain"),
       (1500, 1024, (3072, 3072), 8, 16, "gated"), (1500, 1024, (2048, 1024, 1024), 8, 16, "plain"),
       (1500, 2048, (1024, 1024), 8, 16, "gated"), (1500, 2048, (1024,), 8, 16, "add"),
       (1500, 512, (192,), 3, 8, "add"), (2000, 4096, (512,), 8, 16, "add")]
      if DEVICE == "cuda" else []),
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("shape", PRODUCTS)
def test_products_with_adapters(shape: tuple[Any, ...], has_norm: bool, dtype: str) -> None:
    """In one launch or in several: the product, what adapters add, and what follows. Again with
    other adapters in the same memory, as captured steps do."""
    num_rows, depth, parts, num_slots, rank, epilogue = shape
    if epilogue == "add" and has_norm:
        pytest.skip("no layer has it")
    draw = torch.Generator().manual_seed(depth)

    def random(*size: int, spread: float = 1.0) -> torch.Tensor:
        numbers = torch.randn(*size, generator=draw) * spread
        return numbers.to(getattr(torch, dtype)).to(DEVICE)

    width = sum(parts)
    ends = tuple(torch.tensor(parts).cumsum(0).tolist())
    a = random(num_slots, len(parts) * rank, depth, spread=depth**-0.5)
    b, weight = random(num_slots, width, rank, spread=0.5), random(width, depth, spread=depth**-0.5)
    x, norm = random(num_rows, depth), random(depth) if has_norm else None
    bias = random(width)
    cuda = build_kernel_table("cuda", {"tensor_library": "torch"})
    plain = build_kernel_table("cpu")
    slots = torch.empty(num_rows, dtype=torch.int32, device=DEVICE)
    for turn in range(3):
        chosen = torch.randint(-1, num_slots, (num_rows,), generator=draw, dtype=torch.int32)
        slots.copy_(chosen if turn < 2 else torch.full_like(chosen, -1))
        residual = random(num_rows, width) if epilogue == "add" else None
        seen = x.float() if norm is None else plain["rms_norm"](x.float(), norm.float(), 1e-5)
        wanted = seen @ weight.float().T + bias.float()
        wanted = plain["lora"](wanted, seen, None, 0.0, a.float(), b.float(), ends, slots)
        wanted = wanted if residual is None else wanted + residual.float()
        if epilogue == "gated":
            wanted = plain["silu_and_mul"](wanted)
        found = cuda["adapted_product"](
            epilogue, x, norm, 1e-5, weight, bias, residual, a, b, ends, slots
        )
        bound = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}[dtype]
        difference = float((found.float() - wanted).abs().max())
        assert difference < bound * float(wanted.abs().max())


@pytest.mark.parametrize("rank", [8, 16, 64])
@pytest.mark.parametrize("epilogue", ["plain", "gated", "add"])
def test_tiles_of_prompts_add_what_each_row_has(epilogue: str, rank: int) -> None:
    """Tiles with eight adapters, as decoded tokens in front of prompts have, with two, with one,
    with none, and beyond the last row."""
    draw = torch.Generator().manual_seed(7)

    def random(*size: int, spread: float = 1.0) -> torch.Tensor:
        return (torch.randn(*size, generator=draw) * spread).bfloat16().to(DEVICE)

    is_gated = epilogue == "gated"
    ends = (128, 256) if is_gated else (128, 160, 192)
    x, weight = random(660, 128), random(ends[-1], 128, spread=128**-0.5)
    a = random(8, len(ends) * rank, 128, spread=128**-0.5)
    b = random(8, ends[-1], rank)
    slots = torch.full((660,), -1, dtype=torch.int32, device=DEVICE)
    slots[:48] = torch.arange(48, dtype=torch.int32, device=DEVICE) % 9 - 1
    slots[48:200], slots[200:384], slots[400:430:3], slots[650:] = 2, 6, 3, 1
    residual = random(660, ends[-1]) if epilogue == "add" else None
    plain = build_kernel_table("cpu")
    wanted = x.float() @ weight.float().T + (0 if residual is None else residual.float())
    wanted = plain["lora"](wanted, x.float(), None, 0.0, a.float(), b.float(), ends, slots)
    sums = adapted_rows.sums_of(x, a, b, ends, slots)
    sums.inner[:, slots < 0] = float("nan")  # nobody has written them
    found = adapted_rows.product(x, weight, residual, sums, is_gated=is_gated)
    if is_gated:
        wanted = plain["silu_and_mul"](wanted)
    assert float((found.float() - wanted).abs().max()) < 2e-2 * float(wanted.abs().max())


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("num_rows", "hidden", "depth", "parts", "rank"),
    [
        (64, 1024, 3072, (2048, 256, 256), 16),
        (64, 1024, 2048, (3072, 3072), 16),
        (3, 512, 1024, (72, 24, 24), 8),  # outputs that no tile divides: in several operations
        (40, 1536, 8192, (512,), 32),
        (17, 256, 128, (128, 128), 64),
    ],
)
def test_norm_adds_what_adapters_add_to_the_product_before(
    num_rows: int, hidden: int, depth: int, parts: tuple[int, ...], rank: int, dtype: str
) -> None:
    """A product onto a residual, the norm, and the product after it, captured; again with other
    inputs and adapters in the same memory."""
    draw = torch.Generator().manual_seed(depth)

    def random(*size: int, spread: float = 1.0) -> torch.Tensor:
        numbers = torch.randn(*size, generator=draw) * spread
        return numbers.to(getattr(torch, dtype)).to(DEVICE)

    width = sum(parts)
    ends = tuple(torch.tensor(parts).cumsum(0).tolist())
    weight, bias = random(hidden, depth, spread=depth**-0.5), random(hidden)
    a, b = random(8, rank, depth, spread=depth**-0.5), random(8, hidden, rank, spread=0.3)
    norm, next_weight = random(hidden), random(width, hidden, spread=hidden**-0.5)
    next_a = random(8, len(parts) * rank, hidden, spread=hidden**-0.5)
    next_b = random(8, width, rank, spread=0.3)
    source, start = random(num_rows, depth), random(num_rows, hidden)
    slots = torch.zeros(num_rows, dtype=torch.int32, device=DEVICE)
    cuda, plain = build_kernel_table("cuda", {"tensor_library": "torch"}), build_kernel_table("cpu")

    def run() -> tuple[torch.Tensor, ...]:
        x = cuda["silu_and_mul"](torch.cat((source, source), 1))
        y = cuda["deferring_add"](x, weight, bias, start.clone(), a, b)
        assert y is not None
        more = (next_weight, None, next_a, next_b, ends, slots)
        out, total = cuda["deferred_product"]("plain", y, (x, a, b), norm, 1e-5, *more)
        y = cuda["deferring_add"](x, weight, bias, start.clone(), a, b)
        normed, same = cuda["deferred_norm"](y, (x, a, b), norm, 1e-5, slots)
        return x, out, total, normed, same

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x, out, total, normed, same = run()
    for turn in range(4):
        chosen = torch.randint(-1, 8, (num_rows,), generator=draw, dtype=torch.int32)
        slots.copy_(chosen if turn < 3 else torch.full_like(chosen, -1))
        source.copy_(random(num_rows, depth))
        start.copy_(random(num_rows, hidden))
        graph.replay()
        wide = x.float()
        wanted = start.float() + wide @ weight.float().T + bias.float()
        wanted = plain["lora"](wanted, wide, None, 0.0, a.float(), b.float(), (hidden,), slots)
        bound = {"float16": 4e-3, "bfloat16": 3e-2}[dtype]
        for found in (total, same):  # whose inputs as many blocks divide as the next product needs
            assert float((found.float() - wanted).abs().max()) < bound * float(wanted.abs().max())
        seen = plain["rms_norm"](same.float(), norm.float(), 1e-5)
        assert float((normed.float() - seen).abs().max()) < bound * float(seen.abs().max())
        seen = plain["rms_norm"](total.float(), norm.float(), 1e-5)
        wanted = plain["lora"](
            seen @ next_weight.float().T, seen, None, 0.0,
            next_a.float(), next_b.float(), ends, slots,
        )  # fmt: skip
        assert float((out.float() - wanted).abs().max()) < bound * float(wanted.abs().max())
