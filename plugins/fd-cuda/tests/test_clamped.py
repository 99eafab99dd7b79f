"""Experts of gpt-oss against the operation's definition in fd-models, plain and in MXFP4: on the
GPU, or in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fastdeploy_core.contracts.moe import RoutingSpec
from fastdeploy_core.contracts.quant_formats import PackedWeight
from fd_models.clamped import moe_experts_clamped
from fd_quant_formats.mxfp4 import FORMAT, GROUP
from test_kernels import DEVICE, HAS_GPU

from fastdeploy_testing.drivers import build_kernel_table
from fd_cuda.kernels import many_rows, quant_any
from fd_cuda.kernels.quant_mxfp4 import unpacked

ALPHA, LIMIT = 1.702, 1.5
# Experts, hidden, width: widths that fill tiles and such that do not.
SHAPES = ((4, 64, 32), (5, 96, 160))


def matrices(
    shape: tuple[int, int, int], is_packed: bool, dtype: torch.dtype
) -> list[PackedWeight | torch.Tensor]:
    """Of gate and up in turn, and down."""
    experts, hidden, width = shape
    found: list[PackedWeight | torch.Tensor] = []
    for rows, depth in ((2 * width, hidden), (hidden, width)):
        codes = torch.randint(0, 256, (experts, rows, depth // 2), dtype=torch.uint8)
        scales = torch.randint(121, 126, (experts, rows, depth // GROUP), dtype=torch.uint8)
        held = {"weight": codes.to(DEVICE), "scale": scales.to(DEVICE)}
        weight = PackedWeight(FORMAT, rows, depth, held, experts, GROUP)
        found.append(weight if is_packed else weight.dequantize().to(dtype))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_routing_widens_logits_before_it_computes(dtype: torch.dtype) -> None:
    """Weights of a softmax in 16 bits would differ in their last bits."""
    torch.manual_seed(3)
    kernels: Any = build_kernel_table("cuda", {"tensor_library": "torch"})
    logits, spec = torch.randn(9, 32).to(DEVICE, dtype), RoutingSpec(32, 4)
    given = kernels["moe_routing_widened"](logits, None, spec)
    wanted = kernels["moe_routing"](logits.float(), None, spec)
    assert all(torch.equal(*pair) for pair in zip(given, wanted, strict=True))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("is_packed", [True, False], ids=["mxfp4", "plain"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16] if HAS_GPU else [torch.float32])
def test_it_gives_what_the_definition_gives(
    shape: tuple[int, int, int], is_packed: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(sum(shape))
    has_down_bias = shape == SHAPES[0]  # one rank of several has none
    kernels: Any = build_kernel_table("cuda", {"tensor_library": "torch"})
    experts, hidden, width = shape
    weights = matrices(shape, is_packed, dtype)
    biases = [torch.randn(experts, n).to(DEVICE, dtype) for n in (2 * width, hidden)]
    prepared = [kernels.prepare("moe_experts_clamped", weight) for weight in weights]
    for tokens in (0, 1, *((37, 1100) if HAS_GPU else (9,))):  # alone, in tiles, unpacked
        x = torch.randn(tokens, hidden).to(DEVICE, dtype)
        ids = torch.stack([torch.randperm(experts)[:2] for _ in range(tokens)] or [torch.empty(2)])
        ids = ids[:tokens].long().to(DEVICE)
        shares = torch.rand(tokens, 2).to(DEVICE)

        def run(
            function: Any, x: Any, both: list[Any], own: list[Any], ids: Any = ids, s: Any = shares
        ) -> torch.Tensor:
            down_bias = own[1] if has_down_bias else None
            y: torch.Tensor = function(x, ids, s, both[0], own[0], both[1], down_bias, ALPHA, LIMIT)
            return y

        got = run(kernels["moe_experts_clamped"], x, prepared, biases)
        wide = [w if isinstance(w, PackedWeight) else w.double() for w in weights]
        wanted = run(moe_experts_clamped, x.double(), wide, [b.double() for b in biases])
        assert got.shape == x.shape and got.dtype == dtype
        error = (got.double() - wanted).norm() / wanted.norm().clamp(min=1e-30)
        assert error < (2e-6 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("has_down_bias", [True, False])
def test_prompts_unpack_the_experts_first(
    has_down_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles that reach into the next expert's outputs, blocks that are not full."""
    torch.manual_seed(3)
    seen: list[int] = []
    inner = many_rows.clamped

    def noted(*args: Any) -> torch.Tensor:
        seen.append(len(args))
        return inner(*args)

    monkeypatch.setattr(quant_any, "UNPACKED_FROM", 4)
    monkeypatch.setattr(many_rows, "clamped", noted)
    experts, hidden, width, dtype = 3, 128, 192, torch.bfloat16
    weights = matrices((experts, hidden, width), True, dtype)
    biases = [torch.randn(experts, n).to(DEVICE, dtype) for n in (2 * width, hidden)]
    x, shares = torch.randn(70, hidden).to(DEVICE, dtype), torch.rand(70, 2).to(DEVICE)
    ids = torch.rand(70, experts).topk(2, 1).indices.to(DEVICE)
    down_bias = biases[1] if has_down_bias else None
    rest = (ALPHA, LIMIT)
    got = quant_any.moe_experts_clamped(
        x, ids, shares, weights[0], biases[0], weights[1], down_bias, *rest
    )
    wide = None if down_bias is None else down_bias.double()
    wanted = moe_experts_clamped(
        x.double(), ids, shares, weights[0], biases[0].double(), weights[1], wide, *rest
    )
    assert seen and (got.double() - wanted).norm() / wanted.norm() < 1e-2


def test_every_code_and_every_scale_is_the_number_that_it_stands_for() -> None:
    """x picks one input: sums are single numbers, down to the least and up to the largest."""
    kernels: Any = build_kernel_table("cuda", {"tensor_library": "torch"})
    codes = torch.arange(16, dtype=torch.uint8)
    pairs = (codes | codes << 4).view(1, 16, 1).expand(1, 16, GROUP // 2 * 8).contiguous()
    scales = torch.tensor([0, 1, 2, 60, 127, 128, 200, 250], dtype=torch.uint8)
    scales = scales.expand(1, 16, 8).contiguous()
    held = {"weight": pairs.to(DEVICE), "scale": scales.to(DEVICE)}
    down = PackedWeight(FORMAT, 16, 8 * GROUP, held, 1, GROUP)
    gate_up = torch.zeros(1, 16 * GROUP, 16, device=DEVICE)
    for group in range(8):
        bias = torch.zeros(1, 16 * GROUP, device=DEVICE)
        bias[0, 2 * GROUP * group] = 1.0  # of one gate; its up is 0
        hidden = 1.0 / (1.0 + torch.exp(torch.tensor(-1.0)))
        ids = torch.zeros(1, 1, dtype=torch.int64, device=DEVICE)
        found = kernels["moe_experts_clamped"](
            torch.zeros(1, 16, device=DEVICE), ids, torch.ones(1, 1, device=DEVICE),
            gate_up, bias, down, None, 1.0, 7.0,
        )  # fmt: skip
        wanted = down.dequantize()[0, :, GROUP * group] * hidden.to(DEVICE)
        torch.testing.assert_close(found[0], wanted, rtol=1e-6, atol=1e-44)


def test_unpacked_numbers_are_those_that_are_stored() -> None:
    (weight, _) = matrices((3, 96, 40), True, torch.float32)
    assert isinstance(weight, PackedWeight)
    assert torch.equal(unpacked(weight, torch.float32), weight.dequantize())
