"""What a model family states before any weight is read: its sizes, and its layers.

A model states one spec for each layer that keeps something of a sequence (ModelShapes.layers).
Drivers read the whole spec; block pools, prefix cache and scheduler read `retention` alone. What a
spec asks beyond plain attention is its `needs`: a driver that does not declare them in `features`
is declined before it is asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, runtime_checkable

from fastdeploy_core.errors import ConfigError

from .moe import MoESpec

if TYPE_CHECKING:
    import numpy as np

    from fastdeploy_core.tensor import Tensor
    from fastdeploy_core.types import SequenceExtras

    from .attention import AttentionBatch

# What an attention layer may need beyond plain attention over all earlier tokens, and the kinds of
# layers that keep a state. Drivers declare those they implement in `features`.
ATTENTION_FEATURES: Final = frozenset({"window", "chunk", "sinks", "softcap", "index", "offsets"})
STATE_FEATURES: Final = frozenset({"delta", "channel_delta", "space", "short_conv", "kept"})
LAYER_FEATURES: Final = ATTENTION_FEATURES | STATE_FEATURES
# What sequences may ask of a family (types.SequenceExtras), which declares it in `features`:
#   adapter     rows of a step may have different LoRA adapters, or none
#   embeddings  vectors stand in the place of some tokens' embeddings
#   positions   forward() also takes positions of three axes, [3, num_tokens], and positions that
#               are not the tokens' indices
#   pooling     hidden states are pooled to vectors, and rows get no token (small.PoolingLM)
MODEL_FEATURES: Final = frozenset({"adapter", "embeddings", "positions", "pooling"})


@dataclass(frozen=True, slots=True)
class Retention:
    """Which tokens' cache entries a sequence still needs.

    "all": every one; "window": the last `tokens`, the next token's own included; "chunk": those of
    the next token's chunk of `tokens`; "state": the newest, which stands for all before it.
    """

    kind: Literal["all", "window", "chunk", "state"]
    tokens: int = 0

    def first_needed(self, num_tokens: int) -> int:
        """The first token whose entry the tokens after the first `num_tokens` still read."""
        if self.kind == "window":
            return max(0, num_tokens - self.tokens + 1)
        if self.kind == "chunk":
            return num_tokens // self.tokens * self.tokens
        if self.kind == "state":
            return max(0, num_tokens - 1)
        return 0


@dataclass(frozen=True, slots=True)
class IndexSpec:
    """An indexer that chooses the keys a query attends to (DeepSeek V3.2, arXiv 2512.02556)."""

    num_heads: int
    dim: int
    top_k: int  # keys, or blocks of keys, that a query attends to
    block: int = 1  # neighbouring keys, counted from position 0, that are chosen together
    format: str = ""  # of index keys in the cache; empty: the model's dtype


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One attention layer's shape; layers with equal specs share metadata and a driver instance.

    For "mla" (DeepSeek V2/V3, arXiv 2412.19437) the cache holds one latent row of
    kv_lora_rank + qk_rope_head_dim per token, num_kv_heads is 1 and head_dim is that row's width.
    """

    kind: Literal["gqa", "mla"]
    num_heads: int  # of this rank
    num_kv_heads: int  # of this rank
    head_dim: int
    v_head_dim: int
    scale: float
    dtype: str
    kv_lora_rank: int = 0
    qk_rope_head_dim: int = 0
    rotary_interleaved: bool = False
    kv_format: str = ""  # a name of contracts/kv_formats.py; empty: the cache holds `dtype`
    kv_static: bool = False  # scales come with the layer instead of lying in the cache
    head_norms: bool = False  # queries and keys are normalised before they are rotated
    window: int = 0  # keys that a query sees, its own included; 0: all
    chunk: int = 0  # a query sees the keys of its chunk of so many tokens alone; 0: all
    sinks: bool = False  # one more logit per head, without a value, in each softmax
    softcap: float = 0.0  # c: logits become c * tanh(logit / c) before the mask; 0: as they are
    index: IndexSpec | None = None
    offsets: bool = False  # AttentionBatch.positions are not always the tokens' indices

    def __post_init__(self) -> None:
        if self.window < 0 or self.chunk < 0 or self.softcap < 0 or (self.window and self.chunk):
            raise ConfigError(
                f"an attention layer has window {self.window}, chunk {self.chunk} and softcap "
                f"{self.softcap}; possible: 0 or more each, and not both a window and a chunk"
            )

    @property
    def needs(self) -> frozenset[str]:
        """Of ATTENTION_FEATURES, those that a driver of this layer must declare."""
        asked = {
            "window": self.window,
            "chunk": self.chunk,
            "sinks": self.sinks,
            "softcap": self.softcap,
            "index": self.index is not None,
            "offsets": self.offsets,
        }
        return frozenset(name for name, is_needed in asked.items() if is_needed)

    @property
    def retention(self) -> Retention:
        """Which entries of its cache a sequence still needs."""
        if self.window:
            return Retention("window", self.window)
        return Retention("chunk", self.chunk) if self.chunk else Retention("all")


def spec_within(spec: AttentionSpec, max_model_len: int) -> AttentionSpec:
    """The spec that computes the same for sequences of up to so many tokens: a window or chunk that
    holds them all is none. Added in contract 1.2."""
    is_idle = max(spec.window, spec.chunk) >= max_model_len
    return replace(spec, window=0, chunk=0) if is_idle else spec


@dataclass(frozen=True, slots=True)
class StateSpec:
    """One layer that keeps a state of fixed size per sequence instead of an entry per token.

    The state is [num_heads, key_dim, value_dim]; beside it lie the last conv_width - 1 inputs of a
    causal convolution over sum(conv_parts) channels. contracts/attention.py has the formulae. All
    numbers are of this rank.
    """

    kind: Literal["delta", "channel_delta", "space", "short_conv"]
    num_heads: int
    num_key_heads: int
    key_dim: int
    value_dim: int
    conv_parts: tuple[int, ...]  # channels of each part that ranks divide, such as (q, k, v)
    conv_width: int
    dtype: str
    state_dtype: str = "float32"
    kept: int = 0  # tokens of a step with drafts, each of whose states stays; 0: no drafts

    @property
    def needs(self) -> frozenset[str]:
        """Its kind, and "kept": what a driver must declare among its features."""
        return frozenset({self.kind, "kept"} if self.kept else {self.kind})

    @property
    def retention(self) -> Retention:
        """One live entry."""
        return Retention("state")


@dataclass(frozen=True, slots=True)
class ModelShapes:
    """Everything about a model's shape that planning needs; built from config.json alone.

    `layers` are those that keep something of a sequence, in the order in which the family builds
    them; layers that keep nothing are left out. They and `moe` are as one rank of the
    tensor-parallel group holds them.
    """

    architecture: str
    num_layers: int
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    layers: tuple[AttentionSpec | StateSpec, ...]
    moe: MoESpec | None = None


@runtime_checkable
class StoredTensor(Protocol):
    """A checkpoint tensor that has not been read yet; reading a part reads only that part."""

    shape: tuple[int, ...]
    dtype: str

    def read(self, *region: slice | int) -> Tensor:
        """The region (all of it without arguments), on the device, in the stored dtype."""
        ...


class StepPart(Protocol):
    """A part of a model on one rank that sees which sequences a step has; a family or one of its
    layers appends it to layers.ModelBuilder.parts. Added in contract 1.6."""

    features: frozenset[str]  # of SequenceExtras.needs: what sequences may bring because of it

    def add(self, slot: int, extras: SequenceExtras) -> None:
        """A sequence that brings these has got the slot. InvalidRequest ends it alone."""

    def reset(self, slot: int) -> None:
        """The slot is free."""

    def lay_out(self, rows: np.ndarray, batch: AttentionBatch, read: np.ndarray | None) -> None:
        """This batch's forward pass is next; captured decode steps have none. rows [B] int64: slots
        of its first B rows, others are padding. read: as ForwardContext.rows, [n] on the host."""


@dataclass(frozen=True, slots=True)
class MediaRules:
    """What an operator, or the program with an LLM, lets requests bring. Added in contract 1.1."""

    limits: Mapping[str, int] = field(default_factory=dict)  # items of a prompt by kind
    allowed_domains: tuple[str, ...] = ()  # hosts that http(s) URLs may name; empty: none
    allowed_local_path: Path | None = None  # below it file: URLs may be read; None: nowhere
    is_trusted: bool = False  # parts come from this program: it may read any file


@dataclass(frozen=True, slots=True)
class MediaPart:
    """A part of a message or entry of multi_modal_data that is no text. Added in contract 1.1."""

    kind: str  # "image", "video"
    value: Any  # a URL; of a trusted program also bytes, a path, or an object of a library
    where: str  # its place in the request, for errors: "messages[0].content[1]"
    # How the request wants it prepared (mm_processor_kwargs): {"max_pixels": 50176}. Added in 1.2.
    options: Mapping[str, Any] = field(default_factory=dict)


@runtime_checkable
class MediaProcessor(Protocol):
    """What a front end asks of a multimodal family; made by small.MultimodalLM.media, one per front
    end. Thread safe; it needs no tensor library. A method `largest(num_vectors, most)` makes up
    items of the largest size, with at most so many vectors in all, or one item, and `most` in each,
    for the first steps of a worker (contract 1.6). Added in contract 1.1."""

    kinds: Sequence[str]  # of parts that it takes: "image", "video"

    def prepare(
        self, token_ids: Sequence[int], parts: Sequence[MediaPart], salt: str
    ) -> tuple[list[int], SequenceExtras | None]:
        """The prompt with as many placeholder tokens as each part has vectors, and what the engine
        needs beside it: spans, items and positions. `token_ids` has one placeholder for each part,
        where its template or its writer put it; other numbers are InvalidRequest, and so is a part
        that is malformed, too large or not allowed, or whose options are unknown or beyond the
        server's limits.

        A digest covers the source, the settings that its patches depend on, and `salt`. It may take
        seconds, and is called in a thread of its own. Called without parts, too: then the prompt
        may hold no placeholder, and the second result is None."""
        ...

    def close(self) -> None:
        """End the processes that it has started."""
        ...
