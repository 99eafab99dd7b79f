"""Experts that move between ranks while a model serves (`--enable-eplb`).

Each block counts on the device how many tokens chose each expert. Every `step_interval` steps one
block after the other, one a step, looks for a better map (placement.py), rank 0's for all. Weights
of experts that move are broadcast by a rank that has them, and written to their new places, then
the tables that say where experts are: in place, so that captured steps see them. All ranks do it
before the same step, because all get the same steps in the same order.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fastdeploy_core.errors import CapabilityError, ConfigError, WorkerError

from .placement import balanced_map, first_map, imbalance

if TYPE_CHECKING:
    from fastdeploy_core.contracts.device import Communicator, DeviceBackend
    from fastdeploy_core.layers import ExpertShare
    from fastdeploy_core.tensor import Tensor, TensorLibrary

logger = logging.getLogger(__name__)

OPTIONS: Final = {"num_redundant_experts": None, "step_interval": 3000}
MIN_GAIN: Final = 0.02  # of max/mean; less is not worth moving weights
FADE: Final = 0.5  # what earlier counts are worth at the next look


class Balance:
    """The blocks of one rank's model whose experts move."""

    def __init__(self, num_ranks: int, options: Mapping[str, Any]) -> None:
        """options: OPTIONS; `num_redundant_experts` counts copies on all ranks together, without it
        each rank has one. ConfigError for others."""
        values = OPTIONS | dict(options)
        if values["num_redundant_experts"] is None:
            values["num_redundant_experts"] = num_ranks
        if unknown := sorted(values.keys() - OPTIONS.keys()):
            raise ConfigError(
                f"--eplb-config has {', '.join(unknown)}; possible are {', '.join(OPTIONS)}"
            )
        for name, value in values.items():
            if type(value) is not int or value < 1:
                raise ConfigError(f"--eplb-config {name} must be a number above 0, got {value!r}")
        self._num_copies: int = values["num_redundant_experts"]
        self._interval: int = values["step_interval"]
        self._num_ranks, self._num_steps = num_ranks, 0
        self.blocks: list[Moving] = []
        if self._num_copies % num_ranks:
            raise ConfigError(
                f"--eplb-config num_redundant_experts {self._num_copies} cannot be divided over "
                f"{num_ranks} ranks; choose a multiple of {num_ranks}"
            )

    def words(self) -> str:
        """For the start-up report."""
        return (
            f"{self._num_copies} copies of experts, and every {self._interval} steps experts move "
            "to where load is least"
        )

    def copies_each(self, num_experts: int) -> int:
        """Places on each rank that are for copies; ConfigError for more than there are experts
        elsewhere."""
        each = self._num_copies // self._num_ranks
        most = num_experts - num_experts // self._num_ranks
        if each > most:
            raise ConfigError(
                f"--eplb-config num_redundant_experts {self._num_copies}: a rank has {each} copies "
                f"of the {most} experts that others have; at most {most * self._num_ranks} do"
            )
        return each

    def first_map(self, num_experts: int) -> list[int]:
        """Where experts are at first."""
        return first_map(num_experts, self._num_copies, self._num_ranks)

    def begin_step(self) -> None:
        """Before each step, on every rank: at most one block's experts move."""
        self._num_steps += 1
        number = self._num_steps % max(self._interval, len(self.blocks))
        if self._num_steps >= self._interval and number < len(self.blocks):
            self.blocks[number].rebalance()


class Moving:
    """The experts of one block, all of which can be on any rank."""

    def __init__(
        self,
        xp: TensorLibrary,
        device: DeviceBackend,
        group: Communicator,
        share: ExpertShare,
        number: int,
    ) -> None:
        """share: what this rank has at first. number: of the block, for the log."""
        self.version = 0  # how often the map has changed
        self._xp, self._device, self._group, self._number = xp, device, group, number
        self._room = len(share.held)
        self._first = group.rank * self._room
        self.places = first_map(share.total, len(share.more) * group.world_size, group.world_size)
        self._counts = xp.zeros([share.total], dtype=xp.float32, device=device.device)
        self._tables = [device.to_device(table) for table in self._as_tables()]
        self._weights: Any = None
        self._slots: list[Tensor] = []

    def see(self, weights: Any) -> None:
        """What the block's driver has prepared; each step has it. CapabilityError where experts
        cannot be told apart in it."""
        if weights is not self._weights:
            self._slots = [_bits(self._xp, slot) for slot in _slots(weights, self._room)]
            self._weights = weights

    def count(self, ids: Tensor, weight: int) -> None:
        """Tokens that chose experts. ids: [num_tokens, top_k]. weight: 1 where every rank counts
        them, the number of ranks where this one alone does."""
        xp, flat = self._xp, ids.reshape([-1])
        ones = xp.full([int(flat.shape[0])], float(weight), dtype=xp.float32, device=flat.device)
        self._counts = xp.index_add_(self._counts, 0, flat, ones)

    def places_of(self, ids: Tensor) -> Tensor:
        """The place of each choice, as wide as ids [num_tokens, top_k], among those of all ranks:
        copies take turns, token by token."""
        xp, (first, copies, order) = self._xp, self._tables
        flat = ids.reshape([-1])
        token = xp.arange(int(flat.shape[0]), device=flat.device) // int(ids.shape[1])
        turn = token % xp.index_select(copies, 0, flat)
        places = xp.index_select(order, 0, xp.index_select(first, 0, flat) + turn)
        return places.reshape(list(ids.shape))

    def own_places(self, ids: Tensor) -> Tensor:
        """The same among those of this rank; -1: of another one."""
        xp = self._xp
        places = self.places_of(ids) - self._first
        is_own = (places >= 0) & (places < self._room)
        nowhere = xp.full(list(ids.shape), -1, dtype=places.dtype, device=places.device)
        return xp.where(is_own, places, nowhere)

    def rebalance(self) -> None:
        """Move experts, if that makes the most loaded rank noticeably lighter. Every rank calls."""
        if self._weights is not None:
            with self._xp.no_grad():
                self._rebalance()

    def _rebalance(self) -> None:
        group, num_ranks = self._group, self._group.world_size
        counts = self._read(group.all_reduce(self._counts + 0.0))
        self._counts *= FADE
        before = imbalance(counts, self.places, num_ranks)
        wanted = balanced_map(counts, self.places, num_ranks)
        if before - imbalance(counts, wanted, num_ranks) < MIN_GAIN:
            wanted = self.places
        told = self._device.to_device(np.array([self.version, *wanted], np.int64))
        version, *wanted = map(int, self._read(group.broadcast(told, 0)))
        if version != self.version:
            raise WorkerError(
                f"ranks disagree on where experts are: rank {group.rank} has version "
                f"{self.version} of block {self._number}, rank 0 {version}"
            )
        if wanted != self.places:
            num_moved = sum(a != b for a, b in zip(wanted, self.places, strict=True))
            self._move(wanted)
            if not group.rank:
                after = imbalance(counts, wanted, num_ranks)
                logger.info(
                    "experts of block %d: %d of %d places change, the most loaded rank has %.2f "
                    "instead of %.2f times the mean", self._number, num_moved, len(wanted), after,
                    before,
                )  # fmt: skip

    def _move(self, wanted: list[int]) -> None:
        """Bring experts to their places of a new map, and the tables up to date."""
        changed = [n for n, expert in enumerate(wanted) if expert != self.places[n]]
        # What comes is put aside first: its place may hold what another rank still waits for.
        coming: dict[int, list[Tensor]] = {}
        for expert in sorted({wanted[n] for n in changed}):
            rank, at = divmod(self.places.index(expert), self._room)
            at = at if rank == self._group.rank else 0  # elsewhere for its shape alone
            rows = [self._group.broadcast(slot[at : at + 1].clone(), rank) for slot in self._slots]
            for n in changed:
                if wanted[n] == expert and n // self._room == self._group.rank:
                    coming[n - self._first] = rows
        for place, rows in coming.items():
            for slot, row in zip(self._slots, rows, strict=True):
                slot[place : place + 1] = row
        self.places, self.version = wanted, self.version + 1
        for table, new in zip(self._tables, self._as_tables(), strict=True):
            table[:] = self._device.to_device(new)

    def _read(self, x: Tensor) -> np.ndarray:
        return np.asarray(self._device.to_host(x))

    def _as_tables(self) -> list[np.ndarray]:
        """(of each expert where its places begin in the third, how many it has; places sorted by
        expert), int64."""
        at = np.asarray(self.places)
        copies = np.bincount(at)
        tables = np.cumsum(copies) - copies, copies, np.argsort(at, kind="stable")
        return [table.astype(np.int64) for table in tables]


def _slots(weights: Any, room: int) -> Iterator[Tensor]:
    """The tensors of prepared weights, whose rows are `room` experts. CapabilityError where a
    driver keeps them otherwise."""
    if hasattr(weights, "shape") and hasattr(weights, "dtype"):
        if not len(weights.shape) or int(weights.shape[0]) != room:
            raise _cannot(f"a tensor of {list(weights.shape)} for {room} experts")
        yield weights
    elif isinstance(weights, Mapping):
        yield from _slots(list(weights.values()), room)
    elif dataclasses.is_dataclass(weights) and not isinstance(weights, type):
        fields = [getattr(weights, field.name) for field in dataclasses.fields(weights)]
        yield from _slots(fields, room)
    elif isinstance(weights, list | tuple):
        for one in weights:
            yield from _slots(one, room)
    elif not (weights is None or callable(weights) or isinstance(weights, int | float | str)):
        raise _cannot(f"a {type(weights).__name__}")


def _cannot(what: str) -> CapabilityError:
    return CapabilityError(
        f"--enable-eplb cannot move experts that a MoE driver keeps in {what}; choose another with "
        "--moe-backend, or leave out --enable-eplb"
    )


def _bits(xp: TensorLibrary, x: Tensor) -> Tensor:
    """As numbers that every library can assign and send; the same memory."""
    return x.view(xp.uint8) if x.dtype == xp.float8_e4m3fn else x
