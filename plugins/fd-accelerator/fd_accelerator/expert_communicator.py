"""Expert communicators in plain tensor code: a single rank, and ranks joined by all-gather.

`loopback` serves a group of one rank. `all_gather` gives every token to every rank and adds up the
results of their experts, over any device Communicator: exact and simple, not fast.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastdeploy_core.contracts.base import CONTRACT
from fastdeploy_core.contracts.moe import (
    Dispatched,
    ExpertCommunicatorCapabilities,
    ExpertGroup,
    ExpertPlan,
    expert_places,
)
from fastdeploy_core.errors import CapabilityError, ConfigError

if TYPE_CHECKING:
    from fastdeploy_core.tensor import Tensor


@dataclass(slots=True)
class _Handle:
    """What combine() needs from its dispatch."""

    plan: ExpertPlan
    num_tokens: int
    all_tokens: int  # rows of the gathered batch
    pairs: Tensor  # [num_received] flat (token, choice) index of each received row
    experts: Tensor  # [num_received] local expert of each received row
    rows: Tensor  # [num_received] row of each within its expert, for the masked layout
    weights: Tensor  # [all_tokens, top_k] float32


class PlacedExperts:
    """Base of expert communicators: where experts are, and what is refused. A driver adds dispatch,
    combine and cost_s."""

    name: str
    capabilities: ExpertCommunicatorCapabilities

    def __init__(self, group: ExpertGroup) -> None:
        self._xp = group.device.xp
        self._device = group.device.device
        self._communicator = group.communicator
        self.rank, self.world_size = group.rank, group.world_size
        if self.world_size > self.capabilities.max_ranks:
            raise CapabilityError(
                f"expert communicator {self.name!r} serves {self.capabilities.max_ranks} rank(s), "
                f"the group has {self.world_size}: choose another with "
                "fastdeploy plugins list --kind expert_communicator"
            )
        self._version = -1
        self._num_physical = len(group.physical_to_logical)
        self._num_local = group.num_local
        self.set_expert_map(0, list(group.physical_to_logical))

    def plan(self, plan: ExpertPlan) -> ExpertPlan:
        """Nothing to allocate: plain tensor code makes new tensors."""
        if plan.num_physical_experts != self._num_physical:
            raise ConfigError(
                f"plan for {plan.num_physical_experts} experts, the group has {self._num_physical}"
            )
        return plan

    def set_expert_map(self, version: int, physical_to_logical: list[int]) -> None:
        """Map logical ids to physical ones; copies of one expert divide its tokens by token
        index."""
        if version <= self._version:
            return
        table = expert_places(physical_to_logical, self._num_physical)
        self._version = version
        xp = self._xp
        self._table = xp.tensor(table, dtype=xp.int64, device=self._device)

    def set_active_ranks(self, active: list[bool]) -> None:
        """Refused unless all ranks are active: this communicator is not elastic."""
        if not all(active):
            raise CapabilityError(
                f"expert communicator {self.name!r} is not elastic (capabilities.elastic is False)"
            )

    def close(self) -> None:
        """Nothing to free; the group belongs to the caller."""

    @staticmethod
    def _check(x: Tensor, plan: ExpertPlan) -> None:
        if x.shape[0] > plan.max_tokens:
            raise CapabilityError(
                f"{x.shape[0]} tokens in one dispatch, the plan was made for {plan.max_tokens}"
            )

    def _physical(self, topk_ids: Tensor) -> Tensor:
        """The physical expert of every choice; -1 stays -1."""
        xp = self._xp
        copies = int(self._table.shape[1])
        token = xp.arange(int(topk_ids.shape[0]), device=self._device).unsqueeze(-1)
        index = xp.clamp(topk_ids, 0) * copies + token % copies
        chosen = xp.index_select(self._table.reshape([-1]), 0, index.reshape([-1]))
        chosen = chosen.reshape(list(topk_ids.shape))
        return xp.where(topk_ids >= 0, chosen, topk_ids)


class LoopbackExperts(PlacedExperts):
    """All experts are on this rank: dispatch sorts, combine restores the order. See
    ExpertCommunicator."""

    name = "loopback"
    contract = CONTRACT
    capabilities = ExpertCommunicatorCapabilities(deterministic=True, max_ranks=1)

    def dispatch(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, plan: ExpertPlan
    ) -> Dispatched:
        """Group the rows for this rank's experts."""
        self._check(x, plan)
        xp = self._xp
        num_tokens = int(x.shape[0])
        x, topk_ids, topk_weights = self._gather(x, topk_ids, topk_weights, plan)
        physical = self._physical(topk_ids).reshape([-1])
        first = self.rank * self._num_local
        local = physical - first
        mine = (physical >= 0) & (local >= 0) & (local < self._num_local)
        pairs = xp.nonzero(mine).reshape([-1])
        experts = xp.index_select(local, 0, pairs)
        # Unique keys make the order the same on every library: by expert, then by token.
        order = xp.argsort(experts * int(physical.shape[0]) + pairs)
        pairs, experts = xp.index_select(pairs, 0, order), xp.index_select(experts, 0, order)
        received = xp.index_select(x, 0, pairs // plan.top_k)
        counts = xp.bincount(experts, minlength=self._num_local)[: self._num_local]
        starts = xp.cumsum(counts, 0) - counts
        positions = xp.arange(int(pairs.shape[0]), device=self._device)
        rows = positions - xp.index_select(starts, 0, experts)
        handle = _Handle(
            plan=plan,
            num_tokens=num_tokens,
            all_tokens=int(x.shape[0]),
            pairs=pairs,
            experts=experts,
            rows=rows,
            weights=topk_weights.float(),
        )
        if plan.layout == "contiguous":
            zero = xp.zeros([1], dtype=xp.int64, device=self._device)
            return Dispatched(received, xp.cat([zero, xp.cumsum(counts, 0)], 0), handle)
        width = plan.max_tokens * self.world_size
        masked = xp.zeros(
            [self._num_local * width, plan.hidden_size], dtype=x.dtype, device=self._device
        )
        xp.index_copy_(masked, 0, experts * width + rows, received)
        return Dispatched(masked.reshape([self._num_local, width, -1]), counts, handle)

    def combine(self, y: Tensor, handle: _Handle) -> Tensor:
        """Weighted sum of the experts' rows, in the order of the tokens."""
        xp, plan = self._xp, handle.plan
        if plan.layout == "masked":
            width = int(y.shape[1])
            flat = y.reshape([-1, plan.hidden_size])
            y = xp.index_select(flat, 0, handle.experts * width + handle.rows)
        pairs = xp.zeros(
            [handle.all_tokens * plan.top_k, plan.hidden_size],
            dtype=xp.float32,
            device=self._device,
        )
        xp.index_copy_(pairs, 0, handle.pairs, y.float())
        pairs = pairs.reshape([handle.all_tokens, plan.top_k, plan.hidden_size])
        summed = (pairs * handle.weights.unsqueeze(-1)).sum(dim=1)
        return self._reduce(summed, handle).to(y.dtype)

    def cost_s(self, tokens_per_rank: int) -> float:
        """Measure one dispatch and combine of that many small tokens."""
        xp = self._xp
        plan = ExpertPlan(
            max(1, tokens_per_rank), 64, 1, self._num_physical, "contiguous", "float32"
        )
        x = xp.zeros([tokens_per_rank, 64], dtype=xp.float32, device=self._device)
        ids = xp.zeros([tokens_per_rank, 1], dtype=xp.int64, device=self._device)
        weights = xp.ones([tokens_per_rank, 1], dtype=xp.float32, device=self._device)
        started = time.perf_counter()
        dispatched = self.dispatch(x, ids, weights, plan)
        self.combine(dispatched.x, dispatched.handle)
        return time.perf_counter() - started

    def _gather(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, plan: ExpertPlan
    ) -> tuple[Tensor, Tensor, Tensor]:
        del plan
        return x, topk_ids, topk_weights

    def _reduce(self, summed: Tensor, handle: _Handle) -> Tensor:
        del handle
        return summed


class AllGatherExperts(LoopbackExperts):
    """Every rank sees all tokens and adds its experts' share; results are summed over ranks."""

    name = "all_gather"
    capabilities = ExpertCommunicatorCapabilities(deterministic=True, max_ranks=64)

    def _gather(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, plan: ExpertPlan
    ) -> tuple[Tensor, Tensor, Tensor]:
        """All ranks' tokens, each padded to max_tokens with choices of -1."""
        if self._communicator is None:
            return x, topk_ids, topk_weights
        group, xp = self._communicator, self._xp
        padding = plan.max_tokens - int(x.shape[0])

        def padded(rows: Tensor, value: Any) -> Tensor:
            shape = [padding, *rows.shape[1:]]
            return xp.cat([rows, xp.full(shape, value, dtype=rows.dtype, device=self._device)], 0)

        if padding:
            x, topk_ids = padded(x, 0), padded(topk_ids, -1)
            topk_weights = padded(topk_weights, 0)
        return (
            group.all_gather(x, dim=0),
            group.all_gather(topk_ids, dim=0),
            group.all_gather(topk_weights, dim=0),
        )

    def _reduce(self, summed: Tensor, handle: _Handle) -> Tensor:
        if self._communicator is None:
            return summed
        total = self._communicator.all_reduce(summed)
        first = self.rank * handle.plan.max_tokens
        return total[first : first + handle.num_tokens]
