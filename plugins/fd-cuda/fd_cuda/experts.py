"""The expert communicator over GPUs: every token is gathered on every rank, and what the ranks make
of it is added and scattered back.

Sizes do not depend on the routing, so the host waits for nothing, and steps can be captured.
Results are added in a fixed order, so they do not change from run to run. Sending tokens only where
they are needed makes the host learn the numbers of rows first, which took longer at every size that
was measured on a host's two and four GPUs.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from fastdeploy_core.contracts.moe import (
    Dispatched,
    ExpertCommunicatorCapabilities,
    ExpertGroup,
    ExpertPlan,
)
from fd_accelerator.expert_communicator import PlacedExperts

from .communicator import CudaCommunicator

if TYPE_CHECKING:
    from torch import Tensor

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
