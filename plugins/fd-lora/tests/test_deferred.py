"""What adapters add to a product onto the residual, added by the norm that reads the sum: answers
stay PEFT's. The device's operations for it are plain tensor code here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engines import GREEDY, RAW, ask, check_logits, engine, lora, tokens_of
from fd_lora.layers import AdaptedLinear, AdapterLayers, Deferred
from fd_lora.targets import Slots
from peft_adapters import ADAPTERS

from fastdeploy_core.tensor import Tensor
from fastdeploy_testing.drivers import build_kernel_table

torch = pytest.importorskip("torch")
Inputs = tuple[Tensor, Tensor, Tensor]


class DeferringKernels:
    """A device's kernel table with operations that defer."""

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels
        self.counts = {"deferring_add": 0, "deferred_product": 0, "deferred_norm": 0}

    def __contains__(self, operation: object) -> bool:
        return operation in self.counts or operation in self._kernels

    def __getitem__(self, operation: str) -> Callable[..., Any]:
        return getattr(self, operation) if operation in self.counts else self._kernels[operation]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def deferring_add(
        self, x: Tensor, weight: Any, bias: Tensor | None, residual: Tensor, a: Tensor, b: Tensor
    ) -> Tensor | None:
        """Not for one row."""
        if x.shape[0] == 1:
            return None
        self.counts["deferring_add"] += 1
        return self._kernels["linear_add"](x, weight, bias, residual)

    def deferred_norm(
        self, x: Tensor, deferred: Inputs, norm: Tensor, eps: float, slots: Tensor
    ) -> tuple[Tensor, Tensor]:
        self.counts["deferred_norm"] += 1
        return self._normed(x, deferred, norm, eps, slots)

    def deferred_product(
        self, epilogue: str, x: Tensor, deferred: Inputs, norm: Tensor, eps: float, weight: Any,
        bias: Tensor | None, a: Tensor, b: Tensor, ends: Sequence[int], slots: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        self.counts["deferred_product"] += 1
        normed, total = self._normed(x, deferred, norm, eps, slots)
        y = self._kernels["linear"](normed, weight, bias)
        y = self._kernels["lora"](y, normed, None, 0.0, a, b, ends, slots)
        return self._kernels["silu_and_mul"](y) if epilogue == "gated" else y, total

    def _normed(
        self, x: Tensor, deferred: Inputs, norm: Tensor, eps: float, slots: Tensor
    ) -> tuple[Tensor, Tensor]:
        inputs, a, b = deferred
        total = self._kernels["lora"](x, inputs, None, 0.0, a, b, (x.shape[1],), slots)
        return self._kernels["rms_norm"](total, norm, eps), total


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> list[DeferringKernels]:
    found: list[DeferringKernels] = []
    make, watch = AdapterLayers.__init__, AdapterLayers.watch

    def deferring(
        self: AdapterLayers, config: Any, device: Any, kernels: Any, family: type[Any]
    ) -> None:
        found.append(DeferringKernels(kernels))
        make(self, config, device, found[-1], family)

    monkeypatch.setattr(AdapterLayers, "__init__", deferring)
    monkeypatch.setattr(AdapterLayers, "watch", lambda self, kernels: watch(self, found[-1]))
    return found


# One whose norms read all sums; others whose experts, mixers or selected rows come in between.
@pytest.mark.parametrize(
    "base",
    ["llama", *(pytest.param(b, marks=pytest.mark.slow) for b in ("ernie-moe", "nemotron-h"))],
)
def test_answers_are_pefts(
    made: Callable[[str], Path], tables: list[DeferringKernels], base: str
) -> None:
    """With a request in the batch that has no adapter."""
    folder, names = made(base), list(ADAPTERS[base])
    has_experts = any("target_parameters" in a for a in ADAPTERS[base].values())
    with engine(folder / base, "torch", max_loras=4, lora_experts=has_experts, **RAW) as llm:
        for name in names:
            prompts, greedy = check_logits(llm, folder, name)
            adapters = [lora(folder, name)] * len(prompts)
            found = tokens_of(ask(llm, [*prompts, prompts[0]], [*adapters, None], GREEDY))
            assert found[:-1] == greedy
    if base == "llama":
        assert all(tables[0].counts.values())


def test_sum_that_no_norm_reads() -> None:
    """As where a drafter reads what a block returns: the addends stay as they were."""
    x, total = torch.randn(3, 8), torch.randn(3, 4)
    a, b = torch.randn(2, 4, 8), torch.randn(2, 4, 4)
    rows: Any = SimpleNamespace(slots=torch.tensor([1, -1, 0], dtype=torch.int32), is_idle=False)
    kernels = build_kernel_table("cpu", {"tensor_library": "torch"})
    layer = AdaptedLinear(rows, kernels, Slots(a, b), (4,))
    wanted, before = total.clone(), total.clone()
    for row, slot in ((0, 1), (2, 0)):
        wanted[row] += b[slot] @ (a[slot] @ x[row])
    assert torch.allclose(total + Deferred(x, layer), wanted, atol=1e-5)
    assert torch.equal(total, before)
