"""Mixture of experts: the layer driver, and the communicator between ranks that hold experts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from fastdeploy_core.errors import ConfigError

if TYPE_CHECKING:
    from fastdeploy_core.tensor import Tensor

    from .device import Communicator, DeviceBackend, DeviceEvent
    from .ops import KernelTable
    from .quant_formats import PackedWeight


@dataclass(frozen=True, slots=True)
class RoutingSpec:
    """How router logits become expert weights.

    softmax routing is Qwen3-MoE's and ERNIE 4.5's; sigmoid with groups is DeepSeek V3's
    (arXiv 2412.19437, section 2.1.2). The correction bias only changes which experts are chosen.
    """

    num_experts: int
    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = True
    scaling_factor: float = 1.0
    num_groups: int = 1
    top_k_groups: int = 1
    has_correction_bias: bool = False


@dataclass(frozen=True, slots=True)
class MoESpec:
    """One MoE layer as one rank holds it. Shared experts are ordinary linear layers beside it,
    unless the driver is a MoEBlockBackend."""

    routing: RoutingSpec
    hidden_size: int
    intermediate_size: int  # of this rank
    dtype: str
    activation: Literal["silu"] = "silu"
    # After the routed experts, as wide as they are: every token visits them, with weight 1. Only a
    # MoEBlockBackend is asked for them.
    num_shared_experts: int = 0


@dataclass(frozen=True, slots=True)
class MoEQuestion:
    """Asked of `fd_moe_backends`."""

    device: str
    tensor_library: str
    spec: MoESpec
    quantization: str = ""  # internal format of the experts (quant_formats.py); several: "a,b"
    objective: str = ""  # a word of ops.OBJECTIVES, if one was asked for


@runtime_checkable
class MoEBackend(Protocol):
    """Constructed as `Driver(spec, device, kernels)`, once per distinct spec."""

    name: str
    contract: tuple[int, int]

    def __init__(self, spec: MoESpec, device: DeviceBackend, kernels: KernelTable) -> None: ...

    @property
    def unit(self) -> Literal["experts", "routing_experts", "gate"]:
        """What the driver claims; an attribute of the class will do. "gate": see
        GatedMoEBackend."""
        ...

    def prepare_weights(self, gate_up: Tensor | PackedWeight, down: Tensor | PackedWeight) -> Any:
        """Lay the weights out once after loading.

        gate_up: [num_experts, 2 * intermediate, hidden], gate rows first; down:
        [num_experts, hidden, intermediate]. Either both are tensors or both are PackedWeights of
        one internal format, one of those that the driver accepted in MoEQuestion.quantization;
        layers of one model may differ. The result is passed to forward().
        """
        ...

    def forward(
        self,
        x: Tensor,
        weights: Any,
        router_logits: Tensor,
        correction_bias: Tensor | None,
        topk_ids: Tensor | None,
        topk_weights: Tensor | None,
    ) -> Tensor:
        """Return sum over the chosen experts, [num_tokens, hidden].

        x: [num_tokens, hidden]; router_logits: [num_tokens, num_experts] float32. Unit "experts":
        topk_ids [num_tokens, top_k] int64 and topk_weights (float32) are given. Unit
        "routing_experts": they are None and the driver routes by spec.routing.
        """
        ...


@runtime_checkable
class MoEBlockBackend(MoEBackend, Protocol):
    """A driver that also computes a block from its norm to its sum, and takes shared experts.

    With spec.num_shared_experts = S, gate_up and down have S experts more, after the routed ones;
    forward() adds what they make of x, too. Ids that forward() is given are those of routed experts
    alone."""

    def forward_block(
        self,
        x: Tensor,
        norm_weight: Tensor,
        eps: float,
        router_weight: Tensor,
        correction_bias: Tensor | None,
        weights: Any,
    ) -> Tensor:
        """Return x + forward(y) with y = rms_norm(x), scored by y router_weight^T in float32.

        x: [num_tokens, hidden], may be overwritten; router_weight: [num_experts, hidden] float32.
        """
        ...


@runtime_checkable
class DividedMoEBackend(MoEBackend, Protocol):
    """A driver that can compute some experts of a block, while other ranks compute the others:
    expert parallelism asks for it. Its spec and its weights are of this rank's experts alone.

    Added in contract 1.0.
    """

    def forward_share(
        self,
        x: Tensor,
        weights: Any,
        router_logits: Tensor,
        correction_bias: Tensor | None,
        routing: RoutingSpec,
        first: int,
    ) -> Tensor:
        """What experts `first` and following, as many as `weights` has, add to the sum that
        forward() returns for all: [num_tokens, hidden]. `routing`, logits and bias are of all
        experts."""
        ...

    def forward_routed(
        self, x: Tensor, weights: Any, topk_ids: Tensor, topk_weights: Tensor
    ) -> Tensor:
        """The sum over choices made elsewhere. topk_ids: [num_tokens, k] int64 places in `weights`;
        -1: a choice that adds nothing. topk_weights: [num_tokens, k] float32."""
        ...


@runtime_checkable
class GatedMoEBackend(MoEBackend, Protocol):
    """A driver of unit "gate": it computes router logits, too. Its forward() is not called."""

    def forward_gate(
        self, x: Tensor, weights: Any, router: Tensor, correction_bias: Tensor | None
    ) -> Tensor:
        """As MoEBackend.forward; router: [num_experts, hidden] float32."""
        ...


class ExpertAdapters(Protocol):
    """What LoRA adapters add to the products of a block's experts. Row token * top_k + nth of y is
    of the token's nth expert; y may be overwritten.

    Added in contract 1.7.
    """

    def gate_up(self, y: Tensor, x: Tensor, topk_ids: Tensor) -> Tensor:
        """Before the activation. y: [num_tokens * top_k, 2 * intermediate], x: [num_tokens,
        hidden]."""
        ...

    def down(self, y: Tensor, x: Tensor, topk_ids: Tensor) -> Tensor:
        """y: [num_tokens * top_k, hidden], x: [num_tokens * top_k, intermediate]."""
        ...


@runtime_checkable
class AdaptedMoEBackend(MoEBackend, Protocol):
    """A driver that lets adapters add to its products. For others fd-lora multiplies.

    Added in contract 1.7.
    """

    def forward_adapted(
        self,
        x: Tensor,
        weights: Any,
        topk_ids: Tensor,
        topk_weights: Tensor,
        adapters: ExpertAdapters,
    ) -> Tensor:
        """forward() of these choices, with what adapters add."""
        ...


@dataclass(frozen=True, slots=True)
class ExpertQuestion:
    """Asked of `fd_expert_communicators`."""

    device: str
    tensor_library: str
    num_ranks: int


@dataclass(frozen=True, slots=True)
class ExpertPlan:
    """Buffers for one token count, allocated once: nothing is allocated in dispatch or combine."""

    max_tokens: int
    hidden_size: int
    top_k: int
    num_physical_experts: int
    layout: Literal["contiguous", "masked"]
    dtype: str


@dataclass(slots=True)
class Dispatched:
    """What this rank's experts have to compute.

    contiguous layout: x [num_received, hidden] grouped by local expert, offsets [num_local + 1];
    masked layout: x [num_local, max_tokens, hidden], counts in offsets [num_local].
    """

    x: Tensor
    offsets: Tensor
    handle: Any
    event: DeviceEvent | None = None


@dataclass(frozen=True, slots=True)
class ExpertCommunicatorCapabilities:
    """What the communicator guarantees."""

    graph_safe: bool = False
    deterministic: bool = True
    dedup: bool = False
    asynchronous: bool = False
    elastic: bool = False
    max_ranks: int = 1


@dataclass(frozen=True, slots=True)
class ExpertGroup:
    """What a communicator is built from. `communicator` is None for a group of one rank.

    Rank r of w holds physical experts [r * p / w, (r + 1) * p / w) of p = len(physical_to_logical).
    """

    device: DeviceBackend
    communicator: Communicator | None
    physical_to_logical: tuple[int, ...]

    @property
    def rank(self) -> int:
        """This rank."""
        return 0 if self.communicator is None else self.communicator.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return 1 if self.communicator is None else self.communicator.world_size

    @property
    def num_local(self) -> int:
        """Physical experts of a rank; ConfigError if they cannot be split evenly."""
        num_physical = len(self.physical_to_logical)
        if num_physical % self.world_size:
            raise ConfigError(
                f"{num_physical} experts cannot be split over {self.world_size} ranks evenly"
            )
        return num_physical // self.world_size


@runtime_checkable
class ExpertCommunicator(Protocol):
    """All-to-all between expert-parallel ranks, split from expert compute and from quantization.

    Constructed as `Driver(ExpertGroup)`. Token ids of experts are logical; every rank calls
    dispatch and combine the same number of times, with possibly different numbers of tokens.
    """

    name: str
    contract: tuple[int, int]
    capabilities: ExpertCommunicatorCapabilities

    def plan(self, plan: ExpertPlan) -> Any:
        """Allocate for a plan; the result is passed to dispatch."""
        ...

    def dispatch(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, plan: Any) -> Dispatched:
        """Send each token to the ranks of its experts. topk_ids of -1 go nowhere; more tokens than
        the plan's max_tokens raise CapabilityError."""
        ...

    def combine(self, y: Tensor, handle: Any) -> Tensor:
        """Bring expert results home, weighted and summed: [num_tokens, hidden], in token order."""
        ...

    def cost_s(self, tokens_per_rank: int) -> float:
        """Measured seconds of one dispatch and combine, for choosing between communicators."""
        ...

    def set_expert_map(self, version: int, physical_to_logical: list[int]) -> None:
        """New expert placement, called between steps; handles given out before keep the old one.
        Versions only grow: an older one is ignored."""
        ...

    def set_active_ranks(self, active: list[bool]) -> None:
        """Leave dead ranks out; only when capabilities.elastic."""
        ...

    def close(self) -> None:
        """Free buffers and leave the group."""
        ...


def expert_places(physical_to_logical: Sequence[int], num_physical: int) -> list[list[int]]:
    """For each logical expert where its copies are, repeated to the number of the most copied one:
    what set_expert_map() needs. ConfigError says what is wrong with the map."""
    if (found := len(physical_to_logical)) != num_physical:
        raise ConfigError(f"expert map of {found} entries, the group has {num_physical} experts")
    places: dict[int, list[int]] = defaultdict(list)
    for physical, logical in enumerate(physical_to_logical):
        places[logical].append(physical)
    missing = sorted(set(range(max(places) + 1)) - set(places))
    if missing:
        raise ConfigError(f"expert map leaves out logical experts {missing[:8]}")
    most = max(map(len, places.values()))
    return [[places[e][i % len(places[e])] for i in range(most)] for e in sorted(places)]
