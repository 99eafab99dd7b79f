"""A mixture-of-experts block: router, experts through the chosen driver, optional shared experts.

Tensor parallel: every rank holds all experts with its share of their intermediate width; routed and
shared parts are added before the one sum over ranks.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from fastdeploy_core.contracts.moe import MoESpec

from .linear import Linear, LinearPart
from .mlp import GatedMLP
from .weight_map import FusedPart, Placement

if TYPE_CHECKING:
    from fastdeploy_core.tensor import Tensor

    from .builder import ModelBuilder
    from .norm import RMSNorm


class MoEBlock:
    """x: [num_tokens, hidden] to the same.

    `intermediate` is one expert's width in the whole model; `bias_name` is the checkpoint name of
    the correction bias, its shape there may be [experts] or [1, experts].
    """

    def __init__(
        self,
        build: ModelBuilder,
        prefix: str,
        spec: MoESpec,
        intermediate: int,
        *,
        shared: GatedMLP | None = None,
        bias_name: str = "",
        bias_shape: tuple[int, ...] = (),
    ) -> None:
        routing = spec.routing
        self._spec, self._shared = spec, shared
        # Routing decides which experts run: it is computed in float32 whatever the model's dtype.
        self._router = Linear(
            build,
            f"{prefix}.gate",
            [LinearPart(f"{prefix}.gate", routing.num_experts)],
            spec.hidden_size,
            dtype="float32",
            quantize=False,
        )
        self._scores = build.kernels["linear_float32"]
        self._bias: Tensor | None = None
        if bias_name:
            self._place_bias(build, bias_name, bias_shape or (routing.num_experts,))
        self._driver = build.moe(spec)
        build.leave_unquantized(f"{prefix}.experts")
        self._experts = _Experts(build, f"{prefix}.experts", spec, intermediate, self._driver)
        self._route = None
        if self._driver.unit == "experts":
            self._route = build.kernels["moe_routing"]
        self._reduce = build.all_reduce if build.tp_size > 1 else None

    def _place_bias(self, build: ModelBuilder, name: str, shape: tuple[int, ...]) -> None:
        bias = build.zeros((self._spec.routing.num_experts,), build.xp.float32)

        def accept(tensor: Tensor) -> None:
            bias[:] = tensor.reshape(-1).float()

        self._bias = bias
        region = tuple(slice(0, size) for size in shape)
        build.weights.add(Placement(name, shape, region, accept, fill="zeros"))

    def __call__(self, x: Tensor) -> Tensor:
        """x: [num_tokens, hidden], model dtype."""
        logits = self._scores(x, self._router.weight)
        ids = weights = None
        if self._route is not None:
            ids, weights = self._route(logits, self._bias, self._spec.routing)
        y = self._driver.forward(x, self._experts.prepared, logits, self._bias, ids, weights)
        if self._shared is not None:
            y, more = self._shared.add_to(y, x)
            y = y if more is None else y + more
        return y if self._reduce is None else self._reduce(y)

    def after(self, norm: RMSNorm, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Two addends of the sum t = x + residual and of the block's result for norm(t)."""
        normed, total = norm.add(x, residual)
        return self(normed), total


class _Experts:
    """Weights of all experts: gate_up [E, 2I, H] and down [E, H, I], handed to the driver when whole."""

    def __init__(
        self, build: ModelBuilder, prefix: str, spec: MoESpec, intermediate: int, driver: Any
    ) -> None:
        self._build, self._driver, self._spec = build, driver, spec
        self._gate_up: Tensor | None = None
        self._down: Tensor | None = None
        self.prepared: Any = None
        count, hidden, width = spec.routing.num_experts, spec.hidden_size, spec.intermediate_size
        self._shapes = ((count, 2 * width, hidden), (count, hidden, width))
        self._outstanding = 3 * count
        mine, whole = build.piece.of(intermediate), slice(0, hidden)
        for expert in range(count):
            name = f"{prefix}.{expert}"
            wide, tall = (intermediate, hidden), (hidden, intermediate)
            self._place(f"{name}.gate_proj.weight", wide, (mine, whole), expert, 0)
            self._place(f"{name}.up_proj.weight", wide, (mine, whole), expert, width)
            self._place(f"{name}.down_proj.weight", tall, (whole, mine), expert, None)
            parts = [
                FusedPart(f"{name}.gate_proj.weight", 0),
                FusedPart(f"{name}.up_proj.weight", intermediate),
            ]
            for fused in ("gate_up_proj", "up_gate_proj"):
                fused_shape = (2 * intermediate, hidden)
                build.weights.add_fused(f"{name}.{fused}.weight", fused_shape, parts)
        self._offer_stacked(prefix, intermediate)

    def _place(
        self,
        name: str,
        shape: tuple[int, int],
        region: tuple[slice, slice],
        expert: int,
        start: int | None,
    ) -> None:
        self._build.weights.add(
            Placement(
                name=name,
                shape=shape,
                region=region,
                accept=partial(self._accept, expert, start),
                is_linear=True,
            )
        )

    def _offer_stacked(self, prefix: str, intermediate: int) -> None:
        """All experts in one tensor, as some tools save them."""
        count, _, hidden = self._shapes[0]
        gate_up = [
            FusedPart(f"{prefix}.{e}.{half}_proj.weight", offset, e)
            for e in range(count)
            for half, offset in (("gate", 0), ("up", intermediate))
        ]
        down = [FusedPart(f"{prefix}.{e}.down_proj.weight", 0, e) for e in range(count)]
        weights = self._build.weights
        weights.add_fused(f"{prefix}.gate_up_proj", (count, 2 * intermediate, hidden), gate_up)
        weights.add_fused(f"{prefix}.down_proj", (count, hidden, intermediate), down)

    def _accept(self, expert: int, start: int | None, tensor: Tensor) -> None:
        dtype = self._build.xp.dtype(self._spec.dtype)
        if self._gate_up is None or self._down is None:
            self._gate_up = self._build.empty(self._shapes[0], dtype)
            self._down = self._build.empty(self._shapes[1], dtype)
        if start is None:
            self._down[expert] = tensor.to(dtype)
        else:
            self._gate_up[expert, start : start + tensor.shape[0]] = tensor.to(dtype)
        self._outstanding -= 1
        if self._outstanding == 0:
            self.prepared = self._driver.prepare_weights(self._gate_up, self._down)
            self._gate_up = self._down = None
