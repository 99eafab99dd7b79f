"""Adapters of routed experts: a MoE driver around the one of the device.

Steps without adapters run the device's driver as it is. In others it lets adapters add to both
products of its experts (contracts/moe.py: AdaptedMoEBackend), or the products are computed here in
plain tensor code, from the weights as the driver was given them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fastdeploy_core.contracts.moe import AdaptedMoEBackend
from fastdeploy_core.contracts.quant_formats import FORMATS, PackedWeight
from fastdeploy_core.errors import ConfigError, WorkerError
from fastdeploy_core.tensor import namespace

if TYPE_CHECKING:
    from fastdeploy_core.contracts.moe import ExpertAdapters, MoEBackend, MoESpec
    from fastdeploy_core.contracts.ops import KernelTable
    from fastdeploy_core.tensor import Tensor

    from .layers import StepRows
    from .targets import Slots


class AdaptedExperts:
    """contracts.moe.ExpertAdapters: the slots of one block's experts."""

    def __init__(
        self, rows: StepRows, kernels: KernelTable, spec: MoESpec, gate_up: Slots, down: Slots
    ) -> None:
        self._rows, self._kernel = rows, kernels["lora_experts"]
        self._gate_up, self._down = gate_up, down
        self._num_experts = spec.routing.num_experts
        width = spec.intermediate_size
        self._ends = ((width, 2 * width), (spec.hidden_size,))

    @property
    def is_idle(self) -> bool:
        """Whether no row of this step has an adapter."""
        return self._rows.is_idle

    def gate_up(self, y: Tensor, x: Tensor, topk_ids: Tensor) -> Tensor:
        """See ExpertAdapters."""
        return self._add(y, x, self._gate_up, self._ends[0], topk_ids)

    def down(self, y: Tensor, x: Tensor, topk_ids: Tensor) -> Tensor:
        """See ExpertAdapters."""
        return self._add(y, x, self._down, self._ends[1], topk_ids)

    def _add(
        self, y: Tensor, x: Tensor, slots: Slots, ends: tuple[int, ...], topk_ids: Tensor
    ) -> Tensor:
        of_rows = self._rows.slots
        if of_rows.shape[0] != topk_ids.shape[0]:
            raise WorkerError(
                f"experts with adapters were given {topk_ids.shape[0]} rows in a step of "
                f"{of_rows.shape[0]}; start without --lora-experts"
            )
        added: Tensor = self._kernel(
            y, x, slots.a, slots.b, ends, of_rows, topk_ids, self._num_experts
        )
        return added


class AdaptedMoE:
    """A MoEBackend: `driver`, and what adapters add to the experts of one block."""

    contract = (1, 7)

    def __init__(self, driver: MoEBackend, adapters: AdaptedExperts, build: Any, spec: Any) -> None:
        self.name, self.spec = driver.name, spec
        self._driver, self._adapters, self._build = driver, adapters, build
        self._route = build.kernels["moe_routing"]

    @property
    def unit(self) -> Literal["experts", "routing_experts", "gate"]:
        """The driver's own."""
        return self._driver.unit

    def prepare_weights(self, gate_up: Tensor | PackedWeight, down: Tensor | PackedWeight) -> Any:
        """What the driver makes of them. Beside it, for a driver that lets nothing be added, the
        weights themselves: the reference keeps no others. ConfigError for formats of others."""
        for weight in (gate_up, down):
            if isinstance(weight, PackedWeight) and weight.format.name not in FORMATS:
                raise ConfigError(
                    f"adapters cannot change experts in the format {weight.format.name}; possible: "
                    f"experts that are not quantized, or in {', '.join(FORMATS)}; else leave out "
                    "--lora-experts and adapters that change experts"
                )
        prepared = self._driver.prepare_weights(gate_up, down)
        if isinstance(self._driver, AdaptedMoEBackend):
            return prepared
        if self._driver.name != "reference":
            for weight in (gate_up, down):
                is_packed = isinstance(weight, PackedWeight)
                self._build.hold(weight.tensors if is_packed else {"": weight})
        return prepared, gate_up, down

    def forward(
        self,
        x: Tensor,
        weights: Any,
        router_logits: Tensor,
        correction_bias: Tensor | None,
        topk_ids: Tensor | None,
        topk_weights: Tensor | None,
    ) -> Tensor:
        """See MoEBackend."""
        driver, adapters = self._driver, self._adapters
        is_native = isinstance(driver, AdaptedMoEBackend)
        if adapters.is_idle:
            own = weights if is_native else weights[0]
            return driver.forward(x, own, router_logits, correction_bias, topk_ids, topk_weights)
        if topk_ids is None or topk_weights is None:
            topk_ids, topk_weights = self._route(router_logits, correction_bias, self.spec.routing)
        if isinstance(driver, AdaptedMoEBackend):
            return driver.forward_adapted(x, weights, topk_ids, topk_weights, adapters)
        _, gate_up, down = weights
        return adapted_experts(x, topk_ids, topk_weights, gate_up, down, adapters)


def adapted_experts(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    gate_up: Tensor | PackedWeight,
    down: Tensor | PackedWeight,
    adapters: ExpertAdapters,
) -> Tensor:
    """Operation moe_experts with what adapters add: x [T, H], topk_ids and topk_weights [T, k]."""
    xp, (tokens, top_k) = namespace(x), topk_ids.shape
    if not tokens:
        return xp.zeros_like(x)
    y = adapters.gate_up(_products(x, topk_ids, gate_up), x, topk_ids)
    hidden = xp.silu_and_mul(y)
    y = adapters.down(_products(hidden, topk_ids, down), hidden, topk_ids)
    y = y.float().reshape([tokens, top_k, y.shape[-1]])
    return xp.matmul(topk_weights.unsqueeze(1), y).reshape(list(x.shape)).to(x.dtype)


def _products(x: Tensor, topk_ids: Tensor, weight: Tensor | PackedWeight) -> Tensor:
    """[T * k, N]: x [T, K], or of each choice [T * k, K], times the chosen expert's matrix."""
    xp, ids = namespace(x), topk_ids.reshape([-1])
    pairs = int(ids.shape[0])
    if x.shape[0] != pairs:
        x = xp.repeat_interleave(x, topk_ids.shape[1], 0)
    count = weight.num_experts if isinstance(weight, PackedWeight) else weight.shape[0]
    if str(x.device) != "cpu":  # every expert over all rows: nothing may wait for the device
        y = _product(xp, x, weight, 0)
        for expert in range(1, count):
            y = xp.where((ids == expert).unsqueeze(1), _product(xp, x, weight, expert), y)
        return y
    chosen = xp.to_numpy(ids)
    order = np.argsort(chosen, kind="stable")
    rows = xp.index_select(x, 0, xp.from_numpy(order))
    results, start = [], 0
    for expert, size in enumerate(np.bincount(chosen, minlength=count).tolist()):
        if size:
            results.append(_product(xp, rows[start : start + size], weight, expert))
            start += size
    return xp.index_select(xp.cat(results, 0), 0, xp.from_numpy(np.argsort(order)))


def _product(xp: Any, x: Tensor, weight: Tensor | PackedWeight, expert: int) -> Tensor:
    if not isinstance(weight, PackedWeight):
        y: Tensor = xp.linear(x, weight[expert])
        return y
    own = weight.expert(expert)
    y = xp.linear(own.activate(x).float(), own.dequantize(), None)
    return y.to(x.dtype)
