"""A mixture-of-experts block: router, experts through the chosen driver, optional shared experts.

Tensor parallel: every rank holds all experts with its share of their intermediate width, or
(ExpertRanks) its share of the experts. Routed and shared parts are added before the one sum
over ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from fastdeploy_core.contracts.moe import MoEBlockBackend, MoESpec

from .experts import DenseExperts, DividedExperts, make_experts
from .linear import Linear, LinearPart, LinearShape
from .weight_map import Placement

if TYPE_CHECKING:
    from fastdeploy_core.tensor import Tensor

    from .builder import ModelBuilder
    from .norm import RMSNorm


class SharedExperts(Protocol):
    """What every token visits beside its routed experts, such as a GatedMLP without `reduce`."""

    def __call__(self, x: Tensor) -> Tensor:
        """x: [num_tokens, hidden] to this rank's part of the sum over ranks, as wide."""

    def add_to(self, total: Tensor, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Two addends of total + self(x); the second is None if they were added already."""


class MoEBlock:
    """x: [num_tokens, hidden]; so is the result.

    `intermediate` is one expert's width in the whole model. `shared` computes the shared experts
    that the driver does not compute itself (spec.num_shared_experts). `bias_name` is the checkpoint
    name of the correction bias, whose shape there may be [experts] or [1, experts].
    """

    def __init__(
        self,
        build: ModelBuilder,
        prefix: str,
        spec: MoESpec,
        intermediate: int,
        *,
        shared: SharedExperts | None = None,
        bias_name: str = "",
        bias_shape: tuple[int, ...] = (),
    ) -> None:
        routing = spec.routing
        self._routing, self._shared = routing, shared
        # Routing decides which experts run, so it is computed in float32 for every model dtype.
        self._router = Linear(
            build,
            LinearShape(
                f"{prefix}.gate",
                [LinearPart(f"{prefix}.gate", routing.num_experts)],
                spec.hidden_size,
                quantize=False,
                is_float32=True,
            ),
        )
        self._scores = build.kernels["linear_float32"]
        self._bias: Tensor | None = None
        if bias_name:
            self._place_bias(build, bias_name, bias_shape or (routing.num_experts,))
        ranks, share = build.expert_ranks, build.expert_share(routing.num_experts)
        self._divided: DividedExperts | None = None
        if ranks is not None:
            spec = ranks.local(spec, intermediate)
            self._divided = ranks.divide(build, routing, build.moe(spec), self._weights)
        self._driver, experts = build.moe(spec), f"{prefix}.experts"
        if build.adapters is not None:
            self._driver = build.adapters.experts(build, experts, spec, self._driver)
        self._experts = make_experts(
            build, experts, spec, intermediate, self._driver, share, f"{prefix}.shared_experts"
        )
        self._route = build.kernels["moe_routing"] if self._driver.unit == "experts" else None
        if hasattr(build.kernels, "watched_routing"):  # by fd-rollout
            self._route = build.kernels.watched_routing(routing)
        # A driver that multiplies with the router's matrix itself.
        self._gated: Any = self._driver if self._driver.unit == "gate" else None
        self._reduce = build.all_reduce if build.tp_size > 1 else None
        self._whole = None
        if (
            isinstance(self._driver, MoEBlockBackend)
            and isinstance(self._experts, DenseExperts)
            and shared is None
            and self._reduce is None
            and ranks is None
            and self._route is None
        ):
            self._whole = self._driver.forward_block

    def _place_bias(self, build: ModelBuilder, name: str, shape: tuple[int, ...]) -> None:
        bias = build.zeros((self._routing.num_experts,), build.xp.float32)

        def accept(tensor: Tensor) -> None:
            bias[:] = tensor.reshape(-1).float()

        self._bias = bias
        region = tuple(slice(0, size) for size in shape)
        build.weights.add(Placement(name, shape, region, accept, fill=0.0))

    def _weights(self) -> tuple[Any, Tensor, Tensor | None]:
        return self._experts.prepared, self._router.weight, self._bias

    def __call__(self, x: Tensor) -> Tensor:
        """x: [num_tokens, hidden], model dtype."""
        given = (x, *self._weights())
        if self._divided is not None:
            exchange = self._divided.exchange(int(x.shape[0]))
            if exchange is not None:
                return self._beside_shared(exchange(*given), x)
            y = self._divided.add_own(*given)
        elif self._gated is not None:
            y = self._gated.forward_gate(*given)
        else:
            y = self._routed(x)
        if self._shared is not None:
            y, more = self._shared.add_to(y, x)
            y = y if more is None else y + more
        return y if self._reduce is None else self._reduce(y)

    def _beside_shared(self, routed: Tensor, x: Tensor) -> Tensor:
        """Add a result that is complete already and the shared experts' shares, which are summed
        over ranks first."""
        if self._shared is None:
            return routed
        more = self._shared(x)
        return routed + (more if self._reduce is None else self._reduce(more))

    def _routed(self, x: Tensor) -> Tensor:
        logits = self._scores(x, self._router.weight)
        ids = weights = None
        if self._route is not None:
            ids, weights = self._route(logits, self._bias, self._routing)
        return self._driver.forward(x, self._experts.prepared, logits, self._bias, ids, weights)

    def after(
        self, norm: RMSNorm, x: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Two addends of t + block(norm(t)) with t = x + residual; the second is None if they were
        added already. x may be overwritten."""
        if self._whole is not None and residual is None:
            router, weights = self._router.weight, self._experts.prepared
            return self._whole(x, norm.weight, norm.eps, router, self._bias, weights), None
        normed, total = norm.add(x, residual)
        return self(normed), total
