"""Expert communicators over GPUs: all-gather and reduce-scatter, or all-to-all of the rows needed.

`cuda_all_gather` moves every token to every rank, in sizes that do not depend on the routing. The
host waits for nothing, so decode steps that use it can be captured. `cuda_all_to_all` moves each
token only to the ranks of its experts, once to each; the host has to learn the numbers of rows,
which pays for large batches. `cuda_by_batch` chooses between the two. Results are added in a fixed
order, so they do not change from run to run.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Generic, TypeVar

import torch
from fastdeploy_core.contracts.moe import (
    Dispatched,
    ExpertCommunicatorCapabilities,
    ExpertGroup,
    ExpertPlan,
)
from fastdeploy_core.errors import CapabilityError
from fd_accelerator.expert_communicator import PlacedExperts

from .communicator import CudaCommunicator

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

# Up to this size, received rows are allocated for the worst routing. Above it the host asks for
# their number, except while a graph is captured.
_WORST_CASE_BYTES: Final = 256 << 20
_MAX_RANKS: Final = 64


def _is_recording(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


@dataclass(slots=True)
class _Local:
    """The rows for this rank's experts, of a batch of tokens on this rank."""

    plan: ExpertPlan
    places: Tensor  # [tokens, top_k]: row of y of each choice that is computed here
    is_mine: Tensor  # [tokens, top_k]
    weights: Tensor  # [tokens, top_k] float32
    num_tokens: int  # of this rank's own batch
    # How rows travelled: the tokens sent to each rank, and the numbers sent to and received from
    # each.
    routes: tuple[Tensor, list[int], list[int]] | None = None


class AllGatherExperts(PlacedExperts):
    """See ExpertCommunicator. Every rank sees all tokens and adds its experts' share."""

    name = "cuda_all_gather"
    contract = (1, 0)
    capabilities = ExpertCommunicatorCapabilities(
        graph_safe=True, deterministic=True, max_ranks=_MAX_RANKS
    )

    def __init__(self, group: ExpertGroup) -> None:
        super().__init__(group)
        self._backend = group.device

    def dispatch(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, plan: ExpertPlan
    ) -> Dispatched:
        """Rows of all ranks' tokens, grouped by this rank's experts."""
        self._check(x, plan)
        num_tokens = int(x.shape[0])
        physical, weights = self._physical(topk_ids), topk_weights.float()
        if self._communicator is not None and self.world_size > 1:
            missing = plan.max_tokens - num_tokens
            if missing:
                x = torch.nn.functional.pad(x, (0, 0, 0, missing))
                physical = torch.nn.functional.pad(physical, (0, 0, 0, missing), value=-1)
                weights = torch.nn.functional.pad(weights, (0, 0, 0, missing))
            gather = self._communicator.all_gather
            x, physical, weights = gather(x, 0), gather(physical, 0), gather(weights, 0)
        return self._group(x, physical, weights, plan, num_tokens)

    def combine(self, y: Tensor, handle: _Local) -> Tensor:
        """Weighted sums for this rank's tokens, in their order."""
        total = self._add(y, handle)
        first = 0
        if self._communicator is not None and self.world_size > 1:
            if isinstance(self._communicator, CudaCommunicator):
                total = self._communicator.reduce_scatter(total)
            else:
                total = self._communicator.all_reduce(total)
                first = self.rank * handle.plan.max_tokens
        return total[first : first + handle.num_tokens]

    def cost_s(self, tokens_per_rank: int) -> float:
        """Measure one dispatch and combine, in seconds; every rank has to call."""
        plan = ExpertPlan(
            max(1, tokens_per_rank), 1024, 1, self._num_physical, "contiguous", "bfloat16"
        )
        device = self._device
        x = torch.zeros((tokens_per_rank, 1024), dtype=torch.bfloat16, device=device)
        ids = torch.arange(tokens_per_rank, device=device).unsqueeze(1) % self._table.shape[0]
        weights = torch.ones((tokens_per_rank, 1), device=device)
        times = []
        for _ in range(3):
            began = time.perf_counter()
            sent = self.dispatch(x, ids, weights, plan)
            self._backend.to_host(self.combine(sent.x, sent.handle)[:1])
            times.append(time.perf_counter() - began)
        return min(times)

    def _group(
        self, x: Tensor, physical: Tensor, weights: Tensor, plan: ExpertPlan, num_tokens: int
    ) -> Dispatched:
        """Sort the choices of all tokens by local expert; those of other ranks go after."""
        local = physical - self.rank * self._num_local
        is_mine = (physical >= 0) & (local >= 0) & (local < self._num_local)
        keys = torch.where(is_mine, local, self._num_local).view(-1)
        ordered, order = torch.sort(keys, stable=True)
        experts = torch.arange(self._num_local + 1, device=keys.device)
        offsets = torch.searchsorted(ordered, experts)
        number = torch.arange(keys.shape[0], device=keys.device)
        places = torch.empty_like(order)
        if plan.layout == "masked":
            width = plan.max_tokens * self.world_size
            row = ordered * width + number - offsets[ordered]
            places[order] = row
            # One additional row, to which choices of other ranks are written.
            spare = self._num_local * width
            rows = x.new_zeros((spare + 1, plan.hidden_size))
            rows[row.clamp(max=spare)] = x[order // plan.top_k]
            received = rows[:spare].view(self._num_local, width, plan.hidden_size)
            offsets = offsets.diff()
        else:
            places[order] = number
            num_bytes = keys.shape[0] * plan.hidden_size * x.element_size()
            if num_bytes > _WORST_CASE_BYTES and not _is_recording(x):
                order = order[: int(offsets[-1])]
            received = x[order // plan.top_k]
        handle = _Local(plan, places.view_as(physical), is_mine, weights, num_tokens)
        return Dispatched(received, offsets, handle)

    def _add(self, y: Tensor, handle: _Local) -> Tensor:
        """[tokens, hidden] in y's dtype: each token's weighted rows, first choice first."""
        flat = y.reshape(-1, handle.plan.hidden_size)
        shape = (handle.places.shape[0], handle.plan.hidden_size)
        total = torch.zeros(shape, dtype=torch.float32, device=y.device)
        if flat.shape[0]:
            for choice in range(handle.plan.top_k):
                mine = handle.is_mine[:, choice]
                # Rows of other ranks' choices may hold any values.
                row = flat[torch.where(mine, handle.places[:, choice], 0)].float()
                share = row * handle.weights[:, choice, None]
                total += torch.where(mine[:, None], share, 0.0)
        return total.to(y.dtype)


class AllToAllExperts(AllGatherExperts):
    """See ExpertCommunicator. Each token travels once to each rank that has one of its experts."""

    name = "cuda_all_to_all"
    capabilities = ExpertCommunicatorCapabilities(
        deterministic=True, dedup=True, max_ranks=_MAX_RANKS
    )

    def __init__(self, group: ExpertGroup) -> None:
        super().__init__(group)
        self._peers: CudaCommunicator | None = None
        if self.world_size > 1:
            if not isinstance(group.communicator, CudaCommunicator):
                raise CapabilityError(
                    f"expert communicator {self.name!r} needs the collectives of device 'cuda'; "
                    "choose another with fastdeploy plugins list --kind expert_communicator"
                )
            self._peers = group.communicator

    def dispatch(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, plan: ExpertPlan
    ) -> Dispatched:
        """Rows of the tokens that chose this rank's experts, grouped by expert."""
        self._check(x, plan)
        num_tokens = int(x.shape[0])
        physical, weights = self._physical(topk_ids), topk_weights.float()
        if self._peers is None:
            return self._group(x, physical, weights, plan, num_tokens)
        ranks = torch.arange(self.world_size, device=x.device)
        rank_of = torch.where(physical >= 0, physical // self._num_local, -1)
        wanted = (rank_of.unsqueeze(-1) == ranks).any(1)  # [tokens, ranks]
        counts = self._peers.all_gather(wanted.sum(0).unsqueeze(0), 0)
        table = self._backend.to_host(counts).tolist()
        send, receive = table[self.rank], [row[self.rank] for row in table]
        # By rank, then by token.
        tokens = torch.nonzero(wanted.t())[:, 1]
        exchange = self._peers.all_to_all
        got = [exchange(part[tokens], send, receive) for part in (x, physical, weights)]
        sent = self._group(got[0], got[1], got[2], plan, num_tokens)
        sent.handle.routes = (tokens, send, receive)
        return sent

    def combine(self, y: Tensor, handle: _Local) -> Tensor:
        """Weighted sums, of this rank's tokens in their order."""
        total = self._add(y, handle)
        if handle.routes is None or self._peers is None:
            return total[: handle.num_tokens]
        tokens, send, receive = handle.routes
        back = self._peers.all_to_all(total, receive, send)
        shape = (handle.num_tokens, handle.plan.hidden_size)
        result = torch.zeros(shape, dtype=torch.float32, device=y.device)
        # Rank by rank. A token is in each part at most once, so the order of addition is fixed.
        for part, rows in zip(back.split(send), tokens.split(send), strict=True):
            result[rows] += part.float()
        return result.to(y.dtype)


_Inner = TypeVar("_Inner", ExpertPlan, _Local)


@dataclass(slots=True)
class _Chosen(Generic[_Inner]):
    """A plan with the communicator that serves it, or a handle of that communicator's."""

    communicator: AllGatherExperts
    inner: _Inner


class ByBatchExperts:
    """See ExpertCommunicator. Uses the faster of both for each plan's number of tokens, measured
    when the plan is made; all ranks choose alike."""

    name = "cuda_by_batch"
    contract = (1, 0)
    capabilities = ExpertCommunicatorCapabilities(deterministic=True, max_ranks=_MAX_RANKS)

    def __init__(self, group: ExpertGroup) -> None:
        self._group = group
        self._all = (AllGatherExperts(group), AllToAllExperts(group))
        self._costs: dict[int, list[float]] = {}

    def plan(self, plan: ExpertPlan) -> _Chosen[ExpertPlan]:
        """Measure and choose; every rank has to make the same plans in the same order."""
        if self._all[0].world_size == 1:
            return _Chosen(self._all[0], self._all[0].plan(plan))
        costs = self._cost(1 << (plan.max_tokens - 1).bit_length())
        best = self._all[costs.index(min(costs))]
        logger.info(
            "expert parallel steps of up to %d tokens a rank: %s (%s us)", plan.max_tokens,
            best.name, ", ".join(f"{c.name} {1e6 * s:.0f}" for c, s in zip(self._all, costs,
                strict=True)),
        )  # fmt: skip
        return _Chosen(best, best.plan(plan))

    def dispatch(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, plan: _Chosen[ExpertPlan]
    ) -> Dispatched:
        """Use the communicator chosen for the plan."""
        sent = plan.communicator.dispatch(x, topk_ids, topk_weights, plan.inner)
        sent.handle = _Chosen(plan.communicator, sent.handle)
        return sent

    def combine(self, y: Tensor, handle: _Chosen[_Local]) -> Tensor:
        """Use the communicator that dispatched."""
        return handle.communicator.combine(y, handle.inner)

    def cost_s(self, tokens_per_rank: int) -> float:
        """The smaller cost; every rank has to call."""
        return min(self._cost(tokens_per_rank))

    def set_expert_map(self, version: int, physical_to_logical: list[int]) -> None:
        """For both."""
        for one in self._all:
            one.set_expert_map(version, physical_to_logical)

    def set_active_ranks(self, active: list[bool]) -> None:
        """Refused unless all are active."""
        self._all[0].set_active_ranks(active)

    def close(self) -> None:
        """Nothing to free."""

    def _cost(self, tokens: int) -> list[float]:
        """The slowest rank's cost of each."""
        group, device = self._group.communicator, self._group.device
        if tokens not in self._costs:
            costs = [one.cost_s(tokens) for one in self._all]
            if group is not None:
                own = torch.tensor([costs], dtype=torch.float64, device=device.device)
                costs = device.to_host(group.all_gather(own, 0)).max(0).tolist()
            self._costs[tokens] = costs
        return self._costs[tokens]
