"""MoE drivers that take whole blocks and shared experts: models are the same with and without."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from fastdeploy_core.contracts.moe import MoEBlockBackend
from fastdeploy_core.reference.moe import ReferenceMoE
from tests.checkpoints import build, paddle_copy, reference
from tests.paged import PagedModel, load_driver

# Shared experts that the driver takes; biases of theirs it cannot.
VARIANTS = {"ernie-moe": 0, "ernie-moe-no-bias": 2, "deepseek": 1, "qwen3-moe": 0}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("checkpoints"), list(VARIANTS))


class WholeBlocks(ReferenceMoE):
    """The reference, and what MoEBlockBackend adds."""

    blocks = 0
    shared: ClassVar[set[int]] = set()

    def __init__(self, spec: Any, device: Any, kernels: Any) -> None:
        super().__init__(spec, device, kernels)
        self._norm, self._scores = kernels["rms_norm"], kernels["linear_float32"]

    def forward_block(
        self, x: Any, norm_weight: Any, eps: float, router_weight: Any, bias: Any, weights: Any
    ) -> Any:
        WholeBlocks.blocks += 1
        y = self._norm(x, norm_weight, eps)
        return x + self.forward(y, weights, self._scores(y, router_weight), bias, None, None)

    def forward(
        self, x: Any, weights: Any, router_logits: Any, bias: Any, ids: Any, given: Any
    ) -> Any:
        experts, gate_up, down = weights
        count = self.spec.routing.num_experts
        WholeBlocks.shared.add(int(gate_up.shape[0]) - count)
        own = (experts, gate_up[:count], down[:count])
        total = super().forward(x, own, router_logits, bias, ids, given)
        for expert in range(count, int(gate_up.shape[0])):
            gate, up = (x @ gate_up[expert].transpose(0, 1)).chunk(2, -1)
            inner = gate / (1.0 + (-gate).exp()) * up
            total = total + inner @ down[expert].transpose(0, 1)
        return total


def whole_blocks(kind: str, name: str) -> Any:
    return WholeBlocks if kind == "moe" else load_driver(kind, name)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("is_paddle", [False, True])
def test_a_driver_that_takes_blocks_changes_nothing(
    checkpoints: Path, tensor_library: str, tmp_path: Path, variant: str, is_paddle: bool
) -> None:
    folder = checkpoints / variant
    prompt = reference(folder)[1]["prompt"].tolist()
    if is_paddle:
        folder = paddle_copy(folder, tmp_path / variant)
    plain = PagedModel(folder, tensor_library)
    assert not isinstance(next(iter(plain.loaded.builder.moe_drivers.values())), MoEBlockBackend)
    WholeBlocks.blocks, WholeBlocks.shared = 0, set()
    other = PagedModel(folder, tensor_library, drivers=whole_blocks)
    expected, got = (model.step([("a", prompt)])[0] for model in (plain, other))
    np.testing.assert_allclose(got, expected, rtol=2e-4, atol=2e-4)
    assert WholeBlocks.shared == {VARIANTS[variant]}
    assert (WholeBlocks.blocks > 0) == (variant != "ernie-moe")
    assert plain.loaded.weight_bytes == other.loaded.weight_bytes
