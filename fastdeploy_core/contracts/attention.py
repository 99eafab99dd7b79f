"""Attention over a paged KV cache; and layers that keep a state in its place.

A driver claims the largest unit it implements and the core calls only that one:

    "core"         paged attention alone; the core rotates and writes the cache through kernels
    "rope_kv"      rotary embedding and cache write included
    "projections"  from the layer's normed input to its output: see BlockBackend
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from .kv_formats import kv_format
from .model import AttentionSpec as AttentionSpec
from .model import StateSpec as StateSpec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike

    from fastdeploy_core.tensor import Tensor

    from .device import DeviceBackend
    from .ops import KernelTable


def cache_dtypes(spec: AttentionSpec | StateSpec, count: int) -> tuple[str, ...]:
    """Dtypes of the `count` tensors that a driver's cache_shapes() lists."""
    if isinstance(spec, StateSpec):
        return (spec.state_dtype, spec.dtype)[2 - count :]
    kind = kv_format(spec.kv_format)
    if kind is None:
        return (spec.dtype,) * count
    if spec.kv_static:
        return (kind.dtype,) * count
    return (kind.dtype,) * (count // 2) + (kind.scale_dtype,) * (count - count // 2)


@dataclass(frozen=True, slots=True, eq=False)
class KVScales:
    """Static scales of one layer's cache, one entry for each cache tensor (k, v).

    Each is [num_kv_heads, dim] float32, dim as wide as a row; `minimum` is empty for formats
    without a zero point.
    """

    scale: tuple[Tensor, ...]
    minimum: tuple[Tensor, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class HeadNorms:
    """Root-mean-square norms of query and key heads, before they are rotated."""

    q: Tensor  # [head_dim], model dtype
    k: Tensor  # [head_dim], model dtype
    eps: float


@dataclass(frozen=True, slots=True)
class AttentionQuestion:
    """Asked of `fd_attention_backends`."""

    device: str
    tensor_library: str
    spec: AttentionSpec
    block_size: int
    kv_dtype: str  # "auto", or the cache format, as in spec.kv_format
    plain_projections: bool = False  # the matrices around attention are not quantized
    objective: str = ""  # a word of ops.OBJECTIVES, if one was asked for


@dataclass(slots=True)
class AttentionBatch:
    """One step's rows. Host arrays are numpy; `*_dev` fields are the same on the device.

    Row i feeds tokens cu_seqlens_q[i]:cu_seqlens_q[i+1]; these are the last ones of its
    seq_lens[i] tokens. Keys of this step are already counted in seq_lens. Slots that no sequence
    has written may hold anything, NaN included: a driver must not let them into a result. Nor what
    lies in front of the first token that a row still needs (AttentionSpec.retention): with a window
    or chunks, entries of block_tables in front of it name blocks of others.

    A captured step (see AttentionBackend.prepare) has `is_exact` False: the device's numbers change
    from replay to replay, and of the host's arrays only cu_seqlens_q is right. seq_lens holds what
    each row can reach at most, block_tables has the right shape and no contents. A row whose
    seq_lens_dev is 0 stands in for a sequence: its results are read by nobody but must be finite,
    its slot_mapping is -1. Tokens at the end of a row whose slot_mapping is -1 are padding, too: no
    token of the row stands after them, so none that counts sees them.

    A captured step with tokens_per_row 0 (can_capture_mixed) says on the host only how many rows
    and tokens there can be; each row feeds any number of tokens, none included, and tokens after
    the last row's are padding.

    A padded step (`is_padded`, where the device has limits.step_buckets) has padding rows and
    padding in the same way, counted in seq_lens; the host's arrays say the same as the device's.
    What a driver queues for it depends on the shapes of the batch's tensors and on nothing else.
    """

    num_seqs: int
    num_tokens: int
    cu_seqlens_q: np.ndarray  # [num_seqs + 1] int32
    seq_lens: np.ndarray  # [num_seqs] int32
    block_tables: np.ndarray  # [num_seqs, max_blocks] int32; unused entries 0
    cu_seqlens_q_dev: Tensor
    seq_lens_dev: Tensor
    block_tables_dev: Tensor
    slot_mapping: Tensor  # [num_tokens] int64: block * block_size + offset; -1: do not write
    positions: Tensor  # [num_tokens] int64
    tokens_per_row: int = 0  # above 0: every row feeds as many, and there are no tokens of no row
    is_exact: bool = True  # False: see above
    is_padded: bool = False

    @classmethod
    def upload(
        cls,
        to_device: Callable[[np.ndarray], Tensor],
        cu_seqlens_q: ArrayLike,
        seq_lens: ArrayLike,
        block_tables: ArrayLike,
        slots: ArrayLike,
        positions: ArrayLike,
        tokens_per_row: int = 0,
    ) -> AttentionBatch:
        """An exact step from the host's numbers. The device gets copies, so that either side may
        change its own."""
        import numpy as np  # here, since modules of hooks import this one at every start

        starts, lengths, tables = (
            np.array(x, np.int32) for x in (cu_seqlens_q, seq_lens, block_tables)
        )
        return cls(
            num_seqs=len(lengths),
            num_tokens=int(starts[-1]),
            cu_seqlens_q=starts,
            seq_lens=lengths,
            block_tables=tables,
            cu_seqlens_q_dev=to_device(starts.copy()),
            seq_lens_dev=to_device(lengths.copy()),
            block_tables_dev=to_device(tables.copy()),
            slot_mapping=to_device(np.array(slots, np.int64)),
            positions=to_device(np.array(positions, np.int64)),
            tokens_per_row=tokens_per_row,
        )


# What prepare() returns is the driver's own business.
AttentionMetadata = Any


@runtime_checkable
class AttentionBackend(Protocol):
    """Constructed as `Driver(spec, block_size, device, kernels)`, once per distinct spec.

    `features`, an attribute of the class: what it implements beyond plain attention, words of
    model.ATTENTION_FEATURES. A driver is neither asked about nor given a spec whose `needs` it does
    not declare, so a field added to AttentionSpec with a word of its own cannot be overlooked.

    A driver with an attribute `max_recorded_len` is not captured where sequences may be longer. One
    of unit "rope_kv" with a true attribute `norms_heads` is called as NormingBackend says. One that
    declares "sinks" is given `sinks`, [num_heads] float32, by that name exactly where spec.sinks:
    one more logit of each head in every softmax, which no value belongs to (since contract 1.2).
    One that declares "index" is given `index`, the indexer's queries [num_tokens, heads, dim], keys
    [num_tokens, 1, dim] and weights [num_tokens, heads] float32, exactly where spec.index; it
    writes both caches (since contract 1.5)."""

    name: str
    contract: tuple[int, int]
    can_capture_decode: bool
    can_capture_mixed: bool
    features: frozenset[str]

    def __init__(
        self, spec: AttentionSpec, block_size: int, device: DeviceBackend, kernels: KernelTable
    ) -> None: ...

    @property
    def unit(self) -> Literal["core", "rope_kv", "projections"]:
        """What the driver claims; an attribute of the class will do."""
        ...

    def cache_shapes(self, num_blocks: int) -> tuple[tuple[int, ...], ...]:
        """Shapes of one layer's cache tensors; dimension 0 is the block.

        gqa: (k, v); mla: (latent,). Unit "core": [num_blocks, block_size, num_kv_heads, dim] each,
        because kernel kv_write fills them. A driver that wants another layout claims "rope_kv" and
        writes its own. With spec.kv_format the tensors are those that contracts/kv_formats.py
        names, scales after numbers."""
        ...

    def prepare(self, batch: AttentionBatch) -> AttentionMetadata:
        """Build what every layer of this spec needs for this step. Must not wait for the device.

        With can_capture_decode it is also called while a step with tokens_per_row above 0 is
        captured (batch.is_exact False). What it queues then becomes part of the graph, so it copies
        nothing from the host; it and forward() read lengths and tables from the `*_dev` tensors,
        which stay where they are, and size their work by the host's upper bounds. After a row's
        last block its table holds numbers of any blocks.
        """
        ...

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: tuple[Tensor, ...],
        metadata: AttentionMetadata,
        rotary: Tensor | None = None,
        scales: KVScales | None = None,
    ) -> Tensor:
        """Attend and return [num_tokens, num_heads * v_head_dim], model dtype.

        q: [num_tokens, num_heads, head_dim]; k: [num_tokens, num_kv_heads, head_dim];
        v: [num_tokens, num_kv_heads, v_head_dim]. Unit "core": k and v are already in the cache and
        rotated. Unit "rope_kv": the driver rotates q and k with `rotary` ([max_positions,
        rotary_dim], cos then sin) and writes k and v at batch.slot_mapping. kind "mla": q is
        [num_tokens, num_heads, kv_lora_rank + qk_rope_head_dim], k the latent row, v its first
        kv_lora_rank values, and the result is [num_tokens, num_heads * kv_lora_rank]. q, k and v
        may be slices of a larger tensor (not contiguous) and must not be changed. `scales` are
        given exactly where spec.kv_static.
        """
        ...


@runtime_checkable
class NormingBackend(AttentionBackend, Protocol):
    """A driver of unit "rope_kv" that, while `norms_heads` is true, also norms heads."""

    norms_heads: bool

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: tuple[Tensor, ...],
        metadata: AttentionMetadata,
        rotary: Tensor | None = None,
        scales: KVScales | None = None,
        norms: HeadNorms | None = None,
    ) -> Tensor:
        """`norms` are given exactly where spec.head_norms: each head of q and k is normed, and
        rounded to the model's dtype, before it is rotated."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Projections:
    """The matrices around one attention layer, this rank's share, in the model's dtype."""

    qkv: Tensor  # [(num_heads + 2 * num_kv_heads) * head_dim, hidden]: queries, keys, values
    qkv_bias: Tensor | None
    output: Tensor  # [hidden, num_heads * v_head_dim]


@runtime_checkable
class BlockBackend(AttentionBackend, Protocol):
    """A driver of unit "projections"; its forward() is not called. It accepts only questions of
    kind "gqa" with plain_projections and, unless it can normalise heads, without
    spec.head_norms."""

    def prepare_projections(self, projections: Projections) -> Any:
        """Lay the matrices out once after loading; the originals are dropped. The result is handed
        to forward_block()."""
        ...

    def forward_block(
        self,
        x: Tensor,
        projections: Any,
        cache: tuple[Tensor, ...],
        metadata: AttentionMetadata,
        rotary: Tensor,
    ) -> Tensor:
        """[num_tokens, hidden]: this rank's share of the layer, without the output's bias, before
        the sum over ranks. x: [num_tokens, hidden], normed; `rotary` and the cache as in
        forward()."""
        ...


@dataclass(frozen=True, slots=True)
class StateQuestion:
    """Asked of `fd_state_backends`."""

    device: str
    tensor_library: str
    spec: StateSpec


@dataclass(slots=True, eq=False)
class StateWeights:
    """One layer's weights, this rank's share. Convolution: model dtype; the others: [num_heads]
    float32."""

    conv: Tensor  # [channels, conv_width]; the newest input's weight is last
    conv_bias: Tensor | None = None  # [channels]
    decay: Tensor | None = None  # below 0; None: "short_conv"
    dt_bias: Tensor | None = None
    skip: Tensor | None = None  # "space" alone


@runtime_checkable
class StateBackend(Protocol):
    """Constructed as `Driver(spec, block_size, device, kernels)`, once per distinct spec.
    `features` are the kinds that it serves, and "kept" (1.5): words of model.STATE_FEATURES. Added
    in contract 1.3.

    Of each head, with q, k, v out of the convolved input and a state S [key_dim, value_dim] in
    float32:
      "delta"       g = decay * softplus(dt + dt_bias), b = sigmoid(beta);
                    q, k of length 1, q / sqrt(key_dim);  S <- e^g S;
                    S <- S + k (b (v - S^T k))^T;  o = S^T q      (arXiv 2412.06464)
      "channel_delta"  the same with a g for each row of S: dt and dt_bias have key_dim numbers a
                    head instead of one (arXiv 2510.26692)
      "space"       t = softplus(dt + dt_bias), g = decay * t;  S <- e^g S + k (t v)^T;
                    o = S^T q + skip * v                          (Mamba-2, arXiv 2405.21060)
      "short_conv"  no recurrence: o is the convolved input, without the others' silu after it
    """

    name: str
    contract: tuple[int, int]
    can_capture_decode: bool
    can_capture_mixed: bool
    features: frozenset[str]

    def __init__(
        self, spec: StateSpec, block_size: int, device: DeviceBackend, kernels: KernelTable
    ) -> None: ...

    def cache_shapes(self, num_blocks: int) -> tuple[tuple[int, ...], ...]:
        """Shapes of one layer's cache tensors; dimension 0 is the block: the state in
        spec.state_dtype, unless the kind has none, then the convolution's last conv_width - 1
        inputs in spec.dtype."""
        ...

    def prepare(self, batch: AttentionBatch) -> Any:
        """What every layer of this spec needs for this step. Must not wait for the device.

        A row that feeds tokens start to end reads the state in its table's block of token start -
        1, and leaves its own in that of token end - 1, often the same; nothing else of table and
        slot_mapping is meant. A row that starts at 0 begins with zeros: what lay in a block that
        was another's must not show. With spec.kept, a block has so many states, and the next row
        may start after any token of a row of up to so many (the others were refused drafts): each
        leaves its own, padding (slot_mapping -1) none."""
        ...

    def forward(
        self,
        x: Tensor,
        dt: Tensor | None,
        beta: Tensor | None,
        weights: StateWeights,
        cache: tuple[Tensor, ...],
        metadata: Any,
    ) -> Tensor:
        """[num_tokens, num_heads * value_dim], or [num_tokens, channels] of "short_conv"; model
        dtype.

        x: [num_tokens, channels] before the convolution: q, k, v of the deltas, v, k, q of "space";
        each key head is that of as many neighbouring heads. dt, and beta of the deltas:
        [num_tokens, num_heads]."""
        ...
