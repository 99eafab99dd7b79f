"""Weights of all experts of a block: collected expert by expert, passed to the MoE driver when
complete; and which experts are this rank's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from fastdeploy_core.contracts.moe import MoEBackend, MoESpec, RoutingSpec
from fastdeploy_core.contracts.quantizer import LayerPart, LayerSpec, Quantizer

from .linear import joined_names
from .stored import WHOLE, Piece, StoredLayer, StoredPart
from .weight_map import FusedPart, Placement

if TYPE_CHECKING:
    from fastdeploy_core.tensor import Tensor

    from .builder import ModelBuilder

# (expert, counted from this rank's first; first row, None for down; tensor)
Accept = Callable[[int, int | None, "Tensor"], None]


def expert_specs(
    prefix: str, spec: MoESpec, expert: int = 0, shards: int = 1
) -> tuple[LayerSpec, LayerSpec]:
    """The layer specs of one expert's two matrices, for a quantizer; `prefix` ends in .experts."""
    hidden, width, name = spec.hidden_size, spec.intermediate_size, f"{prefix}.{expert}"
    parts = (LayerPart(f"{name}.gate_proj", width), LayerPart(f"{name}.up_proj", width))
    gate_up = LayerSpec(
        f"{prefix}.gate_up_proj",
        "experts",
        hidden,
        2 * width,
        dtype=spec.dtype,
        parallel="column",
        parts=parts,
        shards=shards,
    )
    down = replace(
        gate_up,
        name=f"{prefix}.down_proj",
        in_features=width,
        out_features=hidden,
        parallel="row",
        parts=(LayerPart(f"{name}.down_proj", hidden),),
    )
    return gate_up, down


@dataclass(frozen=True, slots=True)
class ExpertShare:
    """A rank's part of a block's experts: `count` of `total` from `first` on, then copies of `more`
    that other ranks have, too; and of each expert a piece."""

    first: int
    count: int
    total: int
    piece: Piece = WHOLE
    more: tuple[int, ...] = ()

    @property
    def held(self) -> tuple[int, ...]:
        """The numbers of this rank's experts, in the order in which weights have them."""
        return (*range(self.first, self.first + self.count), *self.more)

    @property
    def others(self) -> tuple[int, ...]:
        """The numbers of experts on other ranks."""
        return tuple(sorted(set(range(self.total)) - set(self.held)))


Weights = Callable[[], "tuple[Any, Tensor, Tensor | None]"]  # experts', router's, correction bias


class DividedExperts(Protocol):
    """The experts of one block that this rank holds whole. What is called gets x [num_tokens,
    hidden], their prepared weights, the router's matrix and the correction bias."""

    def exchange(self, num_tokens: int) -> Callable[..., Tensor] | None:
        """Computes the whole result, on every rank, of steps in which tokens travel; None: add_own
        serves this one."""

    def add_own(self, x: Tensor, weights: Any, router: Tensor, bias: Tensor | None) -> Tensor:
        """What this rank's experts add for all tokens."""


class ExpertRanks(Protocol):
    """Ranks that hold whole experts, each some of them: `experts` of kind part."""

    @property
    def most_recorded(self) -> int | None:
        """Tokens of the largest step with prompts that can be captured; None: any; 0: none can."""

    def words(self) -> str:
        """A line for the start-up report."""

    @property
    def is_awaited(self) -> bool:
        """Whether another engine that shares the experts has begun a step that this one has not."""

    def watch(self, wake: Callable[[], None]) -> None:
        """Have `wake` called, in a thread, when is_awaited changes while no step is begun here."""

    def begin_step(self, num_tokens: int, num_rows: int = 0) -> int | None:
        """Before each step, of so many tokens on this engine, on every rank: experts may move.
        num_rows: of the captured step that would do it; 0: none would. Returns those of the one
        that all engines take; 0: none, and without tokens here this rank's experts have served the
        others'; None: as this one likes. WorkerError: a rank is lost."""

    def close(self) -> None:
        """Leave the ranks of other engines in good order."""

    def share(self, num_experts: int) -> ExpertShare:
        """This rank's experts of a block with so many."""

    def local(self, spec: MoESpec, intermediate: int) -> MoESpec:
        """The spec of what this rank holds of a block whose experts are so wide."""

    def divide(
        self, build: ModelBuilder, routing: RoutingSpec, driver: MoEBackend, weights: Weights
    ) -> DividedExperts:
        """This rank's experts of a block. weights: what follows x in calls, once loaded."""


def make_experts(
    build: ModelBuilder,
    prefix: str,
    spec: MoESpec,
    intermediate: int,
    driver: Any,
    share: ExpertShare,
    shared_prefix: str = "",
) -> DenseExperts | PackedExperts:
    """Make the experts: in the model's dtype, or quantized if the quantizer takes both matrices.
    `spec` is this rank's. `shared_prefix`: where the checkpoint holds the spec's shared experts, as
    one block as wide as all of them."""
    for expert in share.others:
        build.weights.leave_to_others(f"{prefix}.{expert}")
    quantizer, shards = build.quantizer, share.piece.count
    if quantizer is not None:
        taken = [quantizer.supports(own) for own in expert_specs(prefix, spec, 0, shards)]
        if all(taken):
            return PackedExperts(build, prefix, spec, intermediate, driver, share, quantizer)
        build.leave_unquantized(prefix)
    return DenseExperts(build, prefix, spec, intermediate, driver, share, shared_prefix)


class DenseExperts:
    """gate_up [E, 2I, H] and down [E, H, I] in the model's dtype, shared experts last."""

    def __init__(
        self,
        build: ModelBuilder,
        prefix: str,
        spec: MoESpec,
        intermediate: int,
        driver: Any,
        share: ExpertShare,
        shared_prefix: str = "",
    ) -> None:
        self._build, self._driver, self._spec = build, driver, spec
        self._gate_up: Tensor | None = None
        self._down: Tensor | None = None
        self._count = spec.routing.num_experts + spec.num_shared_experts
        self._outstanding, self._prefix = 3 * self._count, prefix

        def announce() -> None:
            _place(build, prefix, spec, intermediate, share, self._accept)
            if spec.num_shared_experts:
                _place_shared(build, shared_prefix, spec, intermediate, self._accept)

        self.prepared = build.place(prefix, announce)

    def _accept(self, expert: int, start: int | None, tensor: Tensor) -> None:
        spec, dtype = self._spec, self._build.xp.dtype(self._spec.dtype)
        if self._gate_up is None or self._down is None:
            count, hidden, width = self._count, spec.hidden_size, spec.intermediate_size
            self._gate_up = self._build.empty((count, 2 * width, hidden), dtype)
            self._down = self._build.empty((count, hidden, width), dtype)
        if start is None:
            self._down[expert] = tensor.to(dtype)
        else:
            self._gate_up[expert, start : start + tensor.shape[0]] = tensor.to(dtype)
        self._outstanding -= 1
        if self._outstanding == 0:
            prepared = self._driver.prepare_weights(self._gate_up, self._down)
            self.prepared = self._build.keep(self._prefix, prepared)
            self._gate_up = self._down = None


class PackedExperts:
    """Quantized experts, one at a time: at most one expert's full-precision matrices are held."""

    def __init__(
        self,
        build: ModelBuilder,
        prefix: str,
        spec: MoESpec,
        intermediate: int,
        driver: Any,
        share: ExpertShare,
        quantizer: Quantizer,
    ) -> None:
        self._build, self._driver, self._quantizer = build, driver, quantizer
        self._prefix, self._spec, self._share = prefix, spec, share
        self._count = spec.routing.num_experts
        self._outstanding = 2 * self._count  # quantized matrices that are still missing
        self._buffers: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
        self._dtypes: dict[str, Any] = {}
        # Full-precision matrices being collected: (expert, which matrix) -> (tensor, parts still
        # missing)
        self._staged: dict[tuple[int, int], tuple[Tensor, int]] = {}
        self.prepared = build.place(prefix, partial(self._announce, intermediate))

    def _announce(self, intermediate: int) -> None:
        build, prefix, spec, share = self._build, self._prefix, self._spec, self._share
        if not build.is_stored(self._specs(0)[0]):
            _place(build, prefix, spec, intermediate, share, self._accept)
            return
        for expert in range(self._count):
            for which, own in enumerate(self._specs(expert)):
                parts = [StoredPart(p.name, p.out_features, share.piece) for p in own.parts]
                done = partial(self._store, expert, which)
                names = joined_names(f"{prefix}.{share.held[expert]}.gate_up_proj")
                StoredLayer(build, self._quantizer, own, parts, done, names)

    def _specs(self, expert: int) -> tuple[LayerSpec, LayerSpec]:
        """The layer specs of one of this rank's experts."""
        share = self._share
        return expert_specs(self._prefix, self._spec, share.held[expert], share.piece.count)

    def _accept(self, expert: int, start: int | None, tensor: Tensor) -> None:
        which = 1 if start is None else 0
        own = self._specs(expert)[which]
        dtype = self._build.xp.dtype(self._spec.dtype)
        staged = self._staged.pop((expert, which), None)
        if staged is None:
            shape = (own.out_features, own.in_features)
            staged = (self._build.xp.empty(shape, dtype=dtype, device=tensor.device), 2 - which)
        matrix, left = staged
        first = start or 0
        matrix[first : first + tensor.shape[0]] = tensor.to(dtype)
        if left > 1:
            self._staged[expert, which] = (matrix, left - 1)
            return
        self._store(expert, which, self._quantizer.quantize(own, matrix))

    def _store(self, expert: int, which: int, tensors: dict[str, Tensor]) -> None:
        xp, buffers = self._build.xp, self._buffers[which]
        for suffix, tensor in tensors.items():
            # Not every library can assign to slices of float8; their bits can always be assigned.
            bits = tensor.view(xp.uint8) if tensor.dtype == xp.float8_e4m3fn else tensor
            if suffix not in buffers:
                self._dtypes[suffix] = tensor.dtype
                buffers[suffix] = self._build.empty((self._count, *bits.shape), bits.dtype)
            buffers[suffix][expert] = bits
        self._outstanding -= 1
        if self._outstanding == 0:
            self._prepare()

    def _prepare(self) -> None:
        xp, packed = self._build.xp, []
        specs = self._specs(0)
        for own, buffers in zip(specs, self._buffers, strict=True):
            tensors = {
                suffix: tensor.view(self._dtypes[suffix])
                if self._dtypes[suffix] == xp.float8_e4m3fn
                else tensor
                for suffix, tensor in buffers.items()
            }
            buffers.clear()
            whole = replace(own, num_experts=self._count)
            packed.append(self._quantizer.prepare(whole, tensors))
        self.prepared = self._build.keep(self._prefix, self._driver.prepare_weights(*packed))


def _place(
    build: ModelBuilder,
    prefix: str,
    spec: MoESpec,
    intermediate: int,
    share: ExpertShare,
    accept: Accept,
) -> None:
    """Announce full-precision experts in each form: one by one, gate and up joined, all in one."""
    hidden, width = spec.hidden_size, spec.intermediate_size
    held = share.held
    mine, whole = share.piece.of(intermediate), slice(0, hidden)
    weights = build.weights

    def add(
        name: str, shape: tuple[int, int], region: tuple[slice, slice], e: int, start: int | None
    ) -> None:
        take = partial(accept, held.index(e), start)
        weights.add(Placement(name, shape, region, take, is_linear=True))

    for expert in held:
        name = f"{prefix}.{expert}"
        wide, tall = (intermediate, hidden), (hidden, intermediate)
        add(f"{name}.gate_proj.weight", wide, (mine, whole), expert, 0)
        add(f"{name}.up_proj.weight", wide, (mine, whole), expert, width)
        add(f"{name}.down_proj.weight", tall, (whole, mine), expert, None)
        parts = [
            FusedPart(f"{name}.gate_proj.weight", 0),
            FusedPart(f"{name}.up_proj.weight", intermediate),
        ]
        for fused in joined_names(f"{name}.gate_up_proj"):
            weights.add_fused(f"{fused}.weight", (2 * intermediate, hidden), parts)
    # All experts in one tensor, as some tools save them.
    gate_up = [
        FusedPart(f"{prefix}.{e}.{half}_proj.weight", offset, e)
        for e in held
        for half, offset in (("gate", 0), ("up", intermediate))
    ]
    down = [FusedPart(f"{prefix}.{e}.down_proj.weight", 0, e) for e in held]
    weights.add_fused(f"{prefix}.gate_up_proj", (share.total, 2 * intermediate, hidden), gate_up)
    weights.add_fused(f"{prefix}.down_proj", (share.total, hidden, intermediate), down)


def _place_shared(
    build: ModelBuilder, prefix: str, spec: MoESpec, intermediate: int, accept: Accept
) -> None:
    """Announce shared experts, one wide block in checkpoints: cut to the width of the others."""
    first, count = spec.routing.num_experts, spec.num_shared_experts
    hidden, width, full = spec.hidden_size, spec.intermediate_size, count * intermediate
    mine, whole, weights = build.piece.of(full), slice(0, hidden), build.weights

    def rows(start: int, tensor: Tensor) -> None:
        for nth in range(count):
            accept(first + nth, start, tensor[nth * width : (nth + 1) * width])

    def columns(tensor: Tensor) -> None:
        for nth in range(count):
            accept(first + nth, None, tensor[:, nth * width : (nth + 1) * width])

    gate, up, down = (f"{prefix}.{part}_proj.weight" for part in ("gate", "up", "down"))
    for name, start in ((gate, 0), (up, width)):
        take = partial(rows, start)
        weights.add(Placement(name, (full, hidden), (mine, whole), take, is_linear=True))
    weights.add(Placement(down, (hidden, full), (whole, mine), columns, is_linear=True))
    for name in joined_names(f"{prefix}.gate_up_proj"):
        parts = [FusedPart(gate, 0), FusedPart(up, full)]
        weights.add_fused(f"{name}.weight", (2 * full, hidden), parts)
