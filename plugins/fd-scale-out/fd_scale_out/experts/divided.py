"""Expert parallelism: each rank holds some experts whole, instead of a share of every expert.

After attention every rank has every token. So a rank can compute what its own experts add for all
tokens, and the sum over ranks at the end of the block joins these parts: "in place". The
alternative divides the tokens among ranks: an ExpertCommunicator takes each token to its experts
and back, and every rank gets all results. Where several engines share the experts, tokens of all of
them are computed together (engines.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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

from .engines import Engines, Together, Weights
from .moving import Balance, Moving

if TYPE_CHECKING:
    from fastdeploy_core.config import EngineConfig
    from fastdeploy_core.contracts.device import Communicator, DeviceBackend
    from fastdeploy_core.layers import ModelBuilder
    from fastdeploy_core.tensor import Tensor


def expert_ranks(
    config: EngineConfig,
    device: DeviceBackend,
    rank: int,
    communicator: Communicator | None,
    make: Callable[[ExpertGroup], ExpertCommunicator] | None,
) -> ExpertRanks:
    """Entry point `experts`: the ranks that this one, `rank` of its engine, divides experts with.
    communicator: of that engine's ranks."""
    parallel = config.parallel
    most_in_place = config.batch.max_num_seqs * (config.kept_states or 1)  # a step without prompts
    engines = Engines(device, parallel, rank, communicator) if parallel.shares_experts else None
    group: Any = communicator if engines is None else engines.group
    return ExpertRanks(device, group, make, most_in_place, parallel.eplb, engines)


class ExpertRanks:
    """The ranks of one model that divide its experts. `make` builds the communicator for steps of
    more than `most_in_place` tokens; without it, all steps are computed in place."""

    def __init__(
        self,
        device: DeviceBackend,
        group: Communicator,
        make: Callable[[ExpertGroup], ExpertCommunicator] | None = None,
        most_in_place: int = 0,
        eplb: Mapping[str, Any] | None = None,
        engines: Engines | None = None,
    ) -> None:
        """eplb: see Balance; None: experts stay where they are. ConfigError for options that it
        does not have. engines: the group is of the ranks of all of them."""
        self.device, self.group, self._make = device, group, make
        self.most_in_place = most_in_place
        self._communicators: dict[int, ExpertCommunicator] = {}
        self.balance = None if eplb is None else Balance(group.world_size, eplb)
        self.engines = engines
        self._builder: ModelBuilder | None = None

    def words(self) -> str:
        """A line for the start-up report."""
        how = "results are summed over ranks"
        for one in self._communicators.values():
            how += f"; {one.name} carries tokens in steps of more than {self.most_in_place}"
        if self.balance is not None:
            how += f"; {self.balance.words()}"
        ranks = f"{self.group.world_size} ranks"
        if self.engines is not None:
            ranks += f" of {self.engines.number} engines"
        return f"experts are divided over {ranks}, {how}"

    @property
    def most_recorded(self) -> int | None:
        """Tokens of the largest step with prompts that can be captured; None: any; 0: none can."""
        if self.engines is not None:
            return 0
        if all(one.capabilities.graph_safe for one in self._communicators.values()):
            return None
        return self.most_in_place

    @property
    def is_awaited(self) -> bool:
        """Whether another engine has begun a step that this one has not, or is gone."""
        return self.engines is not None and self.engines.is_awaited

    def watch(self, wake: Callable[[], None]) -> None:
        """See Engines.watch."""
        if self.engines is not None:
            self.engines.watch(wake)

    def begin_step(self, num_tokens: int, num_rows: int = 0) -> int | None:
        """Before each step, of so many tokens on this engine, on every rank: engines agree on it,
        and experts may move. num_rows: of the captured step that would do it; 0: none would.
        Returns those of the one that all engines take; 0: none, and without tokens here experts
        have served those of other engines; None: as this one likes. WorkerError: a rank is lost."""
        captured = None if self.engines is None else self.engines.agree(num_tokens, num_rows)
        if self.balance is not None:
            self.balance.begin_step()
        if self.engines is not None and not num_tokens and not captured:
            self.engines.serve_others()
        return captured

    def close(self) -> None:
        """Leave the ranks of other engines in good order; an engine's own group is its worker's."""
        if self.engines is not None:
            self.engines.group.close()

    def share(self, num_experts: int) -> ExpertShare:
        """This rank's experts of a block with num_experts."""
        ranks = self.group.world_size
        if num_experts % ranks:
            raise ConfigError(
                f"{num_experts} experts cannot be divided over {ranks} ranks; choose a "
                "--tensor-parallel-size (times --data-parallel-size) that divides them, or leave "
                "out --enable-expert-parallel"
            )
        count, first = num_experts // ranks, self.group.rank * (num_experts // ranks)
        more: tuple[int, ...] = ()
        if self.balance is not None:
            room = count + self.balance.copies_each(num_experts)
            placed = self.balance.first_map(num_experts)
            more = tuple(placed[self.group.rank * room : (self.group.rank + 1) * room][count:])
        return ExpertShare(first, count, num_experts, more=more)

    def local(self, spec: MoESpec, intermediate: int) -> MoESpec:
        """The spec of what this rank holds of a block: some experts whole."""
        count = len(self.share(spec.routing.num_experts).held)
        routing = RoutingSpec(count, min(count, spec.routing.top_k))
        return replace(spec, routing=routing, intermediate_size=intermediate)

    def divide(
        self, build: ModelBuilder, routing: RoutingSpec, driver: MoEBackend, weights: Weights
    ) -> DividedExperts:
        """This rank's experts of a block. weights: of the block, once loaded. CapabilityError for
        those of a drafter that several engines would share: they do not draft at the same times."""
        self._builder = self._builder or build
        if self.engines is not None and build is not self._builder:
            raise CapabilityError(
                "this drafter has experts of its own, which engines cannot share "
                "(--data-parallel-size with --enable-expert-parallel); draft with ngram or suffix, "
                "or leave out one of these"
            )
        return DividedExperts(build, self, routing, driver, weights)

    def communicator(self, num_experts: int) -> ExpertCommunicator | None:
        """The communicator for blocks with so many experts, counted with their copies: what it is
        given are numbers of places."""
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
        self,
        build: ModelBuilder,
        ranks: ExpertRanks,
        routing: RoutingSpec,
        driver: MoEBackend,
        weights: Weights,
    ) -> None:
        if not isinstance(driver, DividedMoEBackend):
            raise CapabilityError(
                f"MoE driver {driver.name!r} computes all experts of a block or none; choose "
                "another with --moe-backend, or leave out --enable-expert-parallel"
            )
        self._driver, self._routing = driver, routing
        self._scores, self._route = build.kernels["linear_float32"], build.kernels["moe_routing"]
        self._share = ranks.share(routing.num_experts)
        self._most_in_place = ranks.most_in_place
        self._exchange: Exchange | None = None
        self._moving: Moving | None = None
        if ranks.balance is not None:
            number = len(ranks.balance.blocks)
            self._moving = Moving(build.xp, build.device, ranks.group, self._share, number)
            ranks.balance.blocks.append(self._moving)
        num_places = len(self._share.held) * ranks.group.world_size
        communicator = ranks.communicator(num_places)
        if communicator is not None:
            given = (driver, communicator, self._moving)
            self._exchange = Exchange(build, ranks, routing, num_places, *given)
        self._together: Together | None = None
        if ranks.engines is not None:
            how = self.add_own, self._exchange, self._most_in_place
            self._together = Together(ranks.engines, *how, weights, build.dtype)
            ranks.engines.blocks.append(self._together)

    def exchange(self, num_tokens: int) -> Exchange | Together | None:
        """What computes a step of num_tokens; None: use add_own."""
        if self._together is not None:
            return self._together
        return self._exchange if num_tokens > self._most_in_place else None

    def add_own(self, x: Tensor, weights: Any, router: Tensor, bias: Tensor | None) -> Tensor:
        """What this rank's experts add for all tokens."""
        logits = self._scores(x, router)
        if self._moving is None:
            first = self._share.first
            return self._driver.forward_share(x, weights, logits, bias, self._routing, first)
        ids, shares = self._route(logits, bias, self._routing)
        self._moving.see(weights)
        self._moving.count(ids, 1)  # every rank counts these
        return self._driver.forward_routed(x, weights, self._moving.own_places(ids), shares)


class Exchange:
    """A block whose tokens travel: each rank routes a part of them."""

    def __init__(
        self,
        build: ModelBuilder,
        ranks: ExpertRanks,
        routing: RoutingSpec,
        num_places: int,
        driver: DividedMoEBackend,
        communicator: ExpertCommunicator,
        moving: Moving | None,
    ) -> None:
        """num_places: of all ranks, for experts and copies of them."""
        self._xp, self._dtype, self._engines = build.xp, build.dtype, ranks.engines
        self._group = group = ranks.group
        self._routing, self._driver, self._communicator = routing, driver, communicator
        self._route, self._scores = build.kernels["moe_routing"], build.kernels["linear_float32"]
        self._num_places, self._held = num_places, num_places // group.world_size
        self._moving = moving
        self._plans: dict[int, Any] = {}

    def __call__(self, x: Tensor, weights: Any, router: Tensor, bias: Tensor | None) -> Tensor:
        """The whole result for all tokens, on every rank."""
        xp, engines, num_tokens = self._xp, self._engines, int(x.shape[0])
        # Ranks that have the same tokens divide them: the engine's own.
        group = self._group if engines is None else engines.own_ranks
        most = num_tokens if engines is None else max(engines.sizes(num_tokens))
        each = -(-most // group.world_size)
        first = min(num_tokens, group.rank * each)
        own = x[first : min(num_tokens, first + each)]
        ids, shares = self._route(self._scores(own, router), bias, self._routing)
        if self._moving is not None:
            self._moving.see(weights)
            self._moving.count(ids, self._group.world_size)  # no other rank counts these
            ids = self._moving.places_of(ids)
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
                max_tokens, hidden, routing.top_k, self._num_places, "contiguous", self._dtype
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
