"""Packed weights for the tests of quantized kernels, one matrix or one for each expert."""

from __future__ import annotations

from typing import Any

import torch
from fastdeploy_core.contracts.quant_formats import FORMATS, PackedWeight, QuantFormat
from fastdeploy_core.tensor import namespace

from fastdeploy_testing.conformance.test_quantized_ops import make_packed


def elsewhere(weight: PackedWeight) -> Any:
    """fd-quant-wint2 defines these formats; tests here decode for themselves."""
    raise AssertionError(f"{weight.format.name} is defined in fd-quant-wint2")


CCQ = QuantFormat("ccq2", "", {}, elsewhere)
TRELLIS = QuantFormat("tet2", "as fd-quant-wint2 defines it", {}, elsewhere)


def packed(name: str, rows: int, count: int, group: int, num_experts: int, device: str) -> Any:
    """Of a format of the core, by its own rounding; ccq2 and tet2 at random."""
    lead = (num_experts,) if num_experts else ()
    if name == "tet2":
        shape = (*lead, rows // 64, count // 8, 32)
        held = {
            "weight": torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).to(torch.int32),
            "scale": torch.rand(*lead, rows).half(),
            "signs": torch.ones((*lead, count), dtype=torch.int8),
            "block": torch.full((*lead, 1), count & -count, dtype=torch.int32),
        }
        on_device = {key: tensor.to(device) for key, tensor in held.items()}
        return PackedWeight(TRELLIS, rows, count, on_device, num_experts)
    if name == "ccq2":
        held = {
            "weight": torch.randint(0, 256, (*lead, count // 4, rows), dtype=torch.uint8),
            "scale": torch.randint(1, 256, (*lead, count // 128, rows), dtype=torch.uint8),
            "super_scale": torch.rand(*lead, rows) * 1e-2,
            "code_scale": torch.rand(*lead, rows) * 4 + 118,
            "code_zero": torch.rand(*lead, rows) * 540 - 60,
        }
        on_device = {key: tensor.to(device) for key, tensor in held.items()}
        return PackedWeight(CCQ, rows, count, on_device, num_experts)
    each = []
    for _ in range(max(1, num_experts)):
        weight = torch.randn(rows, count, device=device)
        each.append(make_packed(namespace(weight), name, weight, group).tensors)
    tensors = each[0]
    if num_experts:
        tensors = {key: torch.stack([own[key] for own in each]) for key in tensors}
    return PackedWeight(FORMATS[name], rows, count, tensors, num_experts, group)
