"""What a model is built with: device, kernels, ranks, drivers, and functions that make each layer.

There is one builder per model and rank. It collects the destination of each checkpoint tensor
(`weights`), the attention layers in cache order (`kv_layers`) and lines for the start-up report.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

from fastdeploy_core.contracts.attention import AttentionSpec
from fastdeploy_core.contracts.model import StateSpec, StepPart, spec_within
from fastdeploy_core.contracts.moe import MoEBackend, MoEBlockBackend, MoESpec
from fastdeploy_core.contracts.quantizer import (
    HEAD_QUANTIZER,
    FindQuantizer,
    LayerSpec,
    Quantizer,
    make_quantizer,
)
from fastdeploy_core.errors import PluginNotFound

from .attention import Attention, HeadShape
from .embedding import Embedding, LMHead
from .experts import ExpertRanks, ExpertShare
from .linear import Linear, LinearPart, LinearShape
from .mlp import GatedMLP
from .moe import MoEBlock, SharedExperts
from .norm import LayerNorm, RMSNorm
from .rotary import RotarySpec, cos_sin_table
from .stored import WHOLE, Piece
from .weight_map import WeightMap

if TYPE_CHECKING:
    from fastdeploy_core.contracts.attention import AttentionBatch
    from fastdeploy_core.contracts.device import Communicator, DeviceBackend
    from fastdeploy_core.contracts.ops import KernelTable
    from fastdeploy_core.tensor import Tensor


class KeptWeights(Protocol):
    """Laid-out weights that are kept between starts, by name; get: None for one that is not."""

    def get(self, name: str) -> Any: ...
    def put(self, name: str, prepared: Any) -> None: ...


class Adapters(StepPart, Protocol):
    """LoRA adapters of one rank: target `lora` of fd-lora, which says more of each method."""

    # The kernels that layers are given; and what adds to a layer's product, None: nothing may.
    def watch(self, kernels: KernelTable) -> KernelTable: ...
    def layer(
        self, build: ModelBuilder, spec: LayerSpec, pieces: Sequence[Piece], in_piece: Piece
    ) -> Any: ...
    def experts(
        self, build: ModelBuilder, prefix: str, spec: MoESpec, driver: MoEBackend
    ) -> MoEBackend: ...

    # The slots of a captured step's rows; and a forward pass.
    def attach(self, rows: Tensor) -> None: ...
    def begin(self, batch: AttentionBatch) -> None: ...


@dataclass(frozen=True, slots=True)
class DriverFactories:
    """Make the drivers of a model's layers, one for each distinct spec."""

    attention: Callable[[Any], Any]  # an AttentionBackend or StateBackend for its spec
    moe: Callable[[MoESpec], MoEBackend]


@dataclass(frozen=True, slots=True)
class ModelRanks:
    """The ranks that a model is divided among, and this rank's place among them."""

    rank: int = 0
    size: int = 1
    communicator: Communicator | None = None  # None: a single rank
    experts: ExpertRanks | None = None  # hold whole experts; None: a share of every expert


@dataclass(frozen=True, slots=True)
class WeightFormats:
    """Number formats of weights and cache, and laid-out weights of earlier starts."""

    quantizer: Quantizer | None = None  # None: full precision
    quantizers: FindQuantizer | None = None  # finds others that a layer may need
    is_dummy: bool = False  # weights are random
    kv_format: str = ""  # empty: the cache holds the model's dtype
    kv_static: bool = False  # the checkpoint has the cache's scales
    kept: KeptWeights | None = None


_ONE_RANK = ModelRanks()
_FULL_PRECISION = WeightFormats()


class ModelBuilder:
    """Passed to the constructor of every model family; the methods at the end make layers."""

    def __init__(
        self,
        device: DeviceBackend,
        kernels: KernelTable,
        dtype: str,
        *,
        max_positions: int,
        drivers: DriverFactories,
        ranks: ModelRanks = _ONE_RANK,
        formats: WeightFormats = _FULL_PRECISION,
        adapters: Adapters | None = None,
    ) -> None:
        self.device, self.xp, self.adapters = device, device.xp, adapters
        self.kernels = kernels if adapters is None else adapters.watch(kernels)
        self.dtype, self.max_positions = dtype, max_positions
        self.tp_rank, self.tp_size = ranks.rank, ranks.size
        self.communicator, self.expert_ranks = ranks.communicator, ranks.experts
        self.piece = Piece(ranks.rank, ranks.size)
        self.quantizer, self._quantizers = formats.quantizer, formats.quantizers
        self._is_dummy, self._kept_weights = formats.is_dummy, formats.kept
        self.kv_format, self.kv_static = formats.kv_format, formats.kv_static
        self.weights = WeightMap()
        self.parts: list[StepPart] = [] if adapters is None else [adapters]
        self.kv_layers: list[AttentionSpec | StateSpec] = []
        self.attention_drivers: dict[AttentionSpec | StateSpec, Any] = {}
        self.moe_drivers: dict[MoESpec, MoEBackend] = {}
        self.unquantized: list[str] = []
        self.weight_bytes = 0  # held by layers; quantized layers count in the checkpoint's layout
        self._drivers = drivers
        self._tables: dict[tuple[int, float, str, int], list[tuple[RotarySpec, Tensor]]] = {}

    def extension(self, quantizer: Quantizer | None) -> ModelBuilder:
        """A builder of additional layers for this model, such as a drafter's. It shares ranks,
        kernels, drivers, cache order and checkpoint dialect; weights and number format are its
        own."""
        other = copy.copy(self)
        other.weights = self.weights.same_dialect()
        other.quantizer, other._kept_weights, other.adapters = quantizer, None, None
        other.unquantized, other.weight_bytes = [], 0
        return other

    # -- for layers -------------------------------------------------------------------------------

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Tensor:
        """Uninitialised memory on the device, for a weight."""
        return self._count(self.xp.empty(shape, dtype=dtype, device=self.device.device))

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Tensor:
        """Zeros on the device, for a weight."""
        return self._count(self.xp.zeros(shape, dtype=dtype, device=self.device.device))

    def release(self, weight: Tensor) -> None:
        """A weight's memory is free again: a quantizer has taken the weight over."""
        self.weight_bytes -= self.xp.nbytes(weight)

    def hold(self, tensors: Mapping[str, Tensor]) -> None:
        """Count quantized tensors that a layer keeps."""
        self.weight_bytes += sum(self.xp.nbytes(tensor) for tensor in tensors.values())

    def place(self, name: str, announce: Callable[[], None]) -> Any:
        """Announce the tensors of a weight. If an earlier start kept the laid-out weight, it is
        returned and none of its tensors is read; else None."""
        mark = self.weights.mark()
        announce()
        kept = None if self._kept_weights is None else self._kept_weights.get(name)
        if kept is not None:
            self.weights.hold(mark)
        return kept

    def keep(self, name: str, prepared: Any) -> Any:
        """Keep a weight after it was laid out, so that the next start finds it; returns it."""
        if self._kept_weights is not None:
            self._kept_weights.put(name, prepared)
        return prepared

    def _count(self, weight: Tensor) -> Tensor:
        self.weight_bytes += self.xp.nbytes(weight)
        return weight

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over ranks; with one rank, x itself."""
        return x if self.communicator is None else self.communicator.all_reduce(x)

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's x along the last dimension, in rank order."""
        return x if self.communicator is None else self.communicator.all_gather(x, -1)

    def cache_spec(self, spec: AttentionSpec) -> AttentionSpec:
        """The attention shape with this model's cache format. A window or chunk that no sequence
        exceeds is none."""
        spec = spec_within(spec, self.max_positions)
        return replace(spec, kv_format=self.kv_format, kv_static=self.kv_static)

    def add_kv_layer(self, spec: AttentionSpec | StateSpec) -> int:
        """Add a layer that keeps something; returns its index in ForwardContext.caches."""
        self.kv_layers.append(spec)
        return len(self.kv_layers) - 1

    def attention(self, spec: AttentionSpec | StateSpec) -> Any:
        """The AttentionBackend or StateBackend for layers of this spec; equal specs share one."""
        if spec not in self.attention_drivers:
            self.attention_drivers[spec] = self._drivers.attention(spec)
        return self.attention_drivers[spec]

    def moe(self, spec: MoESpec) -> MoEBackend:
        """The driver for mixture-of-experts layers of this spec."""
        if spec not in self.moe_drivers:
            self.moe_drivers[spec] = self._drivers.moe(spec)
        return self.moe_drivers[spec]

    def expert_share(self, num_experts: int) -> ExpertShare:
        """The part of a block's experts that this rank holds."""
        if self.expert_ranks is not None:
            return self.expert_ranks.share(num_experts)
        return ExpertShare(0, num_experts, num_experts, self.piece)

    def cos_sin(self, rotary: RotarySpec) -> Tensor:
        """The rotary table on the device, [max_positions, dim] float32; layers share it."""
        key = (rotary.dim, rotary.theta, rotary.kind, rotary.max_position_embeddings)
        for spec, table in self._tables.setdefault(key, []):
            if spec == rotary:
                return table
        table = self.device.to_device(cos_sin_table(rotary, self.max_positions))
        self._tables[key].append((rotary, table))
        return table

    def quantizer_for(self, layer: LayerSpec) -> Quantizer | None:
        """The quantizer if it takes this layer. Layers that it leaves alone are listed in
        `unquantized`."""
        if self.quantizer is None:
            return None
        if self.quantizer.supports(layer):
            return self.quantizer
        self.unquantized.append(layer.name)
        return None

    def head_quantizer(self) -> Quantizer | None:
        """The one that rounds an embedding shared with the head; None where none was resolved."""
        if self._quantizers is None:
            return None
        try:
            return make_quantizer(HEAD_QUANTIZER, {}, self.device, self.kernels, self._quantizers)
        except PluginNotFound:  # its distribution is not installed: the head stays as it is
            return None

    def is_stored(self, layer: LayerSpec) -> bool:
        """Whether the layer's quantized tensors are read, instead of made from a full-precision
        weight.

        Dummy weights are made in quantized form: rounding noise is pointless, and a model that only
        fits in few bits could not be loaded otherwise.
        """
        return self._is_dummy or (self.quantizer is not None and self.quantizer.is_stored(layer))

    def leave_unquantized(self, name: str) -> None:
        """Record a layer that is never quantized; beside a quantizer, the report names it."""
        if self.quantizer is not None:
            self.unquantized.append(name)

    # -- for model families -----------------------------------------------------------------------

    def embedding(
        self, name: str, vocab_size: int, hidden: int, *, like: Embedding | None = None
    ) -> Embedding:
        """The token embedding; `like`: share that one's weight, unless the checkpoint's differs."""
        return Embedding(self, name, vocab_size, hidden, like=like)

    def lm_head(
        self,
        name: str,
        vocab_size: int,
        hidden: int,
        *,
        tied: Embedding | None = None,
        bias: bool = False,
        like: LMHead | None = None,
    ) -> LMHead:
        """The output projection; `tied`: share the embedding's weight and ignore the head's own;
        `like`: share another head's weight, unless the checkpoint's differs."""
        return LMHead(self, name, vocab_size, hidden, tied=tied, bias=bias, like=like)

    def norm(self, name: str, size: int, eps: float) -> RMSNorm:
        """Root-mean-square normalisation."""
        return RMSNorm(self, name, size, eps)

    def layer_norm(self, name: str, size: int, eps: float, *, bias: bool = True) -> LayerNorm:
        """Normalisation by mean and variance."""
        return LayerNorm(self, name, size, eps, bias=bias)

    def linear(
        self,
        name: str,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        parallel: Literal["none", "column", "row"] = "none",
        quantize: bool = True,
    ) -> Linear:
        """One product, sizes of the whole model. "none": every rank computes it whole; "column":
        each rank has a share of the outputs; "row": each rank has a share of the inputs, and the
        results are summed over ranks."""
        piece = self.piece if parallel == "column" else WHOLE
        part = LinearPart(name, out_features, piece)
        return Linear(
            self,
            LinearShape(name, [part], in_features, parallel, bias, quantize=quantize),
        )

    def mlp(
        self,
        prefix: str,
        hidden: int,
        intermediate: int,
        *,
        bias: bool = False,
        reduce: bool = True,
    ) -> GatedMLP:
        """The gated feed-forward block."""
        return GatedMLP(self, prefix, hidden, intermediate, bias=bias, reduce=reduce)

    def gqa(
        self,
        prefix: str,
        shape: HeadShape,
        spec: AttentionSpec,
        rotary: RotarySpec,
        *,
        qkv_bias: bool = False,
        output_bias: bool = False,
        norm_eps: float | None = None,
    ) -> Attention:
        """Grouped-query attention with its projections. `norm_eps`: queries and keys are
        normalised, each head or, with shape.norm_whole, all heads of a token at once."""
        return Attention(
            self,
            prefix,
            shape,
            spec,
            rotary,
            qkv_bias=qkv_bias,
            output_bias=output_bias,
            norm_eps=norm_eps,
        )

    def moe_block(
        self,
        prefix: str,
        spec: MoESpec,
        intermediate: int,
        *,
        shared_intermediate: int = 0,
        shared_bias: bool = False,
        shared: SharedExperts | None = None,
        bias_name: str = "",
        bias_shape: tuple[int, ...] = (),
    ) -> MoEBlock:
        """Routed experts, and shared ones if they have a width. The MoE driver computes the shared
        ones if it takes them. `shared`: the family's own in their place."""
        count = shared_intermediate // intermediate
        can_join = self.quantizer is None and not shared_bias and self.expert_ranks is None
        can_join &= self.adapters is None  # which change shared experts as linear layers
        if count and can_join and shared_intermediate == count * intermediate:
            joined = replace(spec, num_shared_experts=count)
            spec = joined if isinstance(self.moe(spec), MoEBlockBackend) else spec
        if shared_intermediate and not spec.num_shared_experts:
            shared = self.mlp(
                f"{prefix}.shared_experts",
                spec.hidden_size,
                shared_intermediate,
                bias=shared_bias,
                reduce=False,
            )
        return MoEBlock(
            self,
            prefix,
            spec,
            intermediate,
            shared=shared,
            bias_name=bias_name,
            bias_shape=bias_shape,
        )
