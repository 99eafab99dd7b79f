"""Expert parallelism: each rank holds some experts whole, instead of a share of every expert.

After attention every rank has every token. So a rank can compute what its own experts add for all
tokens, and the sum over ranks at the end of the block joins these parts: "in place". The
alternative divides the tokens among ranks: an ExpertCommunicator takes each token to its experts
and back, and every rank gets all results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fastdeploy_core.contracts.moe import (
    DividedMoEBackend,
    ExpertCommunicator,
    ExpertGroup,
    ExpertPlan,
    MoEBackend,
    MoESpec,
    RoutingSpec,
)
from fastdeploy_core.errors import CapabilityError, ConfigError
from fastdeploy_core.layers import ExpertShare

if TYPE_CHECKING:
    from fastdeploy_core.contracts.device import Communicator, DeviceBackend
    from fastdeploy_core.layers import ModelBuilder
    from fastdeploy_core.tensor import Tensor


class ExpertRanks:
    """Entry point `experts`: the ranks of one model that divide its experts. `make` builds the
    communicator for steps of more than `most_in_place` tokens; without it, all steps are computed
    in place."""

    def __init__(
        self,
        device: DeviceBackend,
        group: Communicator,
        make: Callable[[ExpertGroup], ExpertCommunicator] | None = None,
        most_in_place: int = 0,
    ) -> None:
        self.device, self.group, self._make = device, group, make
        self.most_in_place = most_in_place
        self._communicators: dict[int, ExpertCommunicator] = {}

    def words(self) -> str:
        """A line for the start-up report."""
        how = "results are summed over ranks"
        for one in self._communicators.values():
            how += f"; {one.name} carries tokens in steps of more than {self.most_in_place}"
        return f"experts are divided over {self.group.world_size} ranks, {how}"

    @property
    def most_recorded(self) -> int | None:
        """Tokens of the largest step that can be captured; None: any."""
        if all(one.capabilities.graph_safe for one in self._communicators.values()):
            return None
        return self.most_in_place

    def share(self, num_experts: int) -> ExpertShare:
        """This rank's experts of a block with num_experts."""
        ranks = self.group.world_size
        if num_experts % ranks:
            raise ConfigError(
                f"{num_experts} experts cannot be divided over {ranks} ranks; choose a "
                "--tensor-parallel-size that divides them, or leave out --enable-expert-parallel"
            )
        count = num_experts // ranks
        return ExpertShare(self.group.rank * count, count, num_experts)

    def local(self, spec: MoESpec, intermediate: int) -> MoESpec:
        """The spec of what this rank holds of a block: some experts whole."""
        count = self.share(spec.routing.num_experts).count
        routing = RoutingSpec(count, min(count, spec.routing.top_k))
        return replace(spec, routing=routing, intermediate_size=intermediate)

    def divide(
        self, build: ModelBuilder, routing: RoutingSpec, driver: MoEBackend
    ) -> DividedExperts:
        """This rank's experts of a block."""
        return DividedExperts(build, self, routing, driver)

    def communicator(self, num_experts: int) -> ExpertCommunicator | None:
        """The communicator for blocks with num_experts."""
        if self._make is None:
            return None
        if num_experts not in self._communicators:
            about = ExpertGroup(self.device, self.group, tuple(range(num_experts)))
            self._communicators[num_experts] = self._make(about)
        return self._communicators[num_experts]


class DividedExperts:
    """The experts of one block that this rank holds. `exchange` serves large steps, if a
    communicator was asked for."""

    def __init__(
        self, build: ModelBuilder, ranks: ExpertRanks, routing: RoutingSpec, driver: MoEBackend
    ) -> None:
        if not isinstance(driver, DividedMoEBackend):
            raise CapabilityError(
                f"MoE driver {driver.name!r} computes all experts of a block or none; choose "
                "another with --moe-backend, or leave out --enable-expert-parallel"
            )
        self._driver, self._routing = driver, routing
        self._scores = build.kernels["linear_float32"]
        self._share = ranks.share(routing.num_experts)
        self._most_in_place = ranks.most_in_place
        self._exchange: Exchange | None = None
        communicator = ranks.communicator(routing.num_experts)
        if communicator is not None:
            self._exchange = Exchange(build, ranks.group, routing, driver, communicator)

    def exchange(self, num_tokens: int) -> Exchange | None:
        """The Exchange for a step of num_tokens; None: use add_own."""
        return self._exchange if num_tokens > self._most_in_place else None

    def add_own(self, x: Tensor, weights: Any, router: Tensor, bias: Tensor | None) -> Tensor:
        """What this rank's experts add for all tokens."""
        logits = self._scores(x, router)
        first = self._share.first
        return self._driver.forward_share(x, weights, logits, bias, self._routing, first)


class Exchange:
    """A block whose tokens travel: each rank routes a part of them."""

    def __init__(
        self,
        build: ModelBuilder,
        group: Communicator,
        routing: RoutingSpec,
        driver: DividedMoEBackend,
        communicator: ExpertCommunicator,
    ) -> None:
        self._xp, self._dtype, self._group = build.xp, build.dtype, group
        self._routing, self._driver, self._communicator = routing, driver, communicator
        self._route, self._scores = build.kernels["moe_routing"], build.kernels["linear_float32"]
        self._held = routing.num_experts // group.world_size
        self._plans: dict[int, Any] = {}

    def __call__(self, x: Tensor, weights: Any, router: Tensor, bias: Tensor | None) -> Tensor:
        """The whole result for all tokens, on every rank."""
        xp, group, num_tokens = self._xp, self._group, int(x.shape[0])
        each = -(-num_tokens // group.world_size)
        first = min(num_tokens, group.rank * each)
        own = x[first : min(num_tokens, first + each)]
        ids, shares = self._route(self._scores(own, router), bias, self._routing)
        sent = self._communicator.dispatch(own, ids, shares, self._plan(each, int(x.shape[1])))
        y = self._computed(sent.x, sent.offsets, weights)
        done = self._communicator.combine(y, sent.handle)
        missing = each - int(done.shape[0])
        if missing:
            nothing = xp.zeros([missing, x.shape[1]], dtype=done.dtype, device=x.device)
            done = xp.cat([done, nothing], 0)
        gathered: Tensor = group.all_gather(done, 0)
        return gathered[:num_tokens]

    def _plan(self, max_tokens: int, hidden: int) -> Any:
        if max_tokens not in self._plans:
            routing = self._routing
            plan = ExpertPlan(
                max_tokens, hidden, routing.top_k, routing.num_experts, "contiguous", self._dtype
            )
            self._plans[max_tokens] = self._communicator.plan(plan)
        return self._plans[max_tokens]

    def _computed(self, x: Tensor, offsets: Tensor, weights: Any) -> Tensor:
        """The experts' results for rows sorted by expert; rows after the last offset are unused."""
        xp, num_rows = self._xp, int(x.shape[0])
        if not num_rows:
            return x
        row = xp.arange(num_rows, device=x.device).unsqueeze(1)
        ids = (row >= offsets[1:].unsqueeze(0)).sum(1).unsqueeze(1)
        unused = xp.full([num_rows, 1], -1, dtype=ids.dtype, device=x.device)
        ones = xp.ones([num_rows, 1], dtype=xp.float32, device=x.device)
        ids = xp.where(ids < self._held, ids, unused)
        return self._driver.forward_routed(x, weights, ids, ones)
