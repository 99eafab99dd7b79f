"""Attention driver `cuda_paged`: grouped-query attention with norms of heads, rotation and cache
write."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

from triton.tools.tensor_descriptor import TensorDescriptor

from fd_cuda.kernels.common import cdiv, pad2
from fd_cuda.kernels.common import options as launch_options

from .cached import LOG2E, AttentionDriver, Metadata
from .decode import decode_attention
from .native_gqa import NativeDecode, NativePrompts, NativeShape, norm_arguments
from .plan import (
    ITEM,
    TILE_WORDS,
    DecodeShape,
    StreamShape,
    decode_items,
    prompt_tiles,
    split_parts,
    stream_items,
)
from .prefill import prefill_attention
from .question import MAX_ROWS
from .rope import rotate_and_write
from .tuning import PrefillShape, Sizes

if TYPE_CHECKING:
    from fastdeploy_core.contracts.attention import (
        AttentionBatch,
        AttentionSpec,
        HeadNorms,
        KVScales,
    )
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.contracts.ops import KernelTable
    from torch import Tensor

_ROPE_ROWS = 16


@dataclass(slots=True)
class _Decodes:
    """Rows that are split by keys."""

    shape: DecodeShape | NativeShape | StreamShape  # of the Triton kernel, and of those in CUDA C++
    max_tokens: int
    rows: int  # of the matrix: tokens times heads of a group
    items: Tensor
    counters: Tensor
    parts: tuple[Tensor, Tensor, Tensor]


@dataclass(slots=True)
class _Tiles:
    """Rows that are tiled by tokens."""

    shape: PrefillShape
    tokens: int  # per tile
    tiles: Tensor


@dataclass(slots=True)
class _Given:
    """Arguments of forward()."""

    q: Tensor
    k: Tensor
    v: Tensor
    cache: tuple[Tensor, ...]
    batch: AttentionBatch
    rotary: Tensor | None
    norms: HeadNorms | None
    sinks: Tensor | None


class PagedAttention(AttentionDriver):
    """One instance per distinct spec; see AttentionBackend."""

    name = "cuda_paged"
    unit: Literal["core", "rope_kv"] = "rope_kv"
    can_capture_mixed = True
    features = frozenset({"window", "chunk", "sinks", "softcap", "offsets"})
    norms_heads = True

    def __init__(
        self, spec: AttentionSpec, block_size: int, device: DeviceBackend, kernels: KernelTable
    ) -> None:
        self._group = spec.num_heads // spec.num_kv_heads
        self._v_pad = max(16, pad2(spec.v_head_dim))
        self._pad = max(16, pad2(spec.head_dim))
        self._native = NativeDecode(spec, block_size)
        self._native_prompts = NativePrompts(spec, block_size)
        super().__init__(spec, block_size, device, MAX_ROWS // self._group)

    def use(self, sizes: Sizes) -> None:
        """Cut work for another GPU than the device's own."""
        super().use(sizes)
        powers_of_2 = (self._pad, self._v_pad) == (self.spec.head_dim, self.spec.v_head_dim)
        self._has_engine = sizes.gpu.from_hopper_on and not self._exact and powers_of_2

    def cache_shapes(self, num_blocks: int) -> tuple[tuple[int, ...], ...]:
        """Keys and values, [num_blocks, block_size, num_kv_heads, dim] each."""
        spec = self.spec
        shape = (num_blocks, self.block_size, spec.num_kv_heads)
        return (*shape, spec.head_dim), (*shape, spec.v_head_dim)

    # -- once a step ------------------------------------------------------------------------------

    def _decodes(
        self,
        batch: AttentionBatch,
        max_tokens: int,
        *,
        is_alone: bool = True,
        may_be_native: bool = True,
    ) -> _Decodes:
        spec, num_seqs = self.spec, batch.num_seqs
        heads = spec.num_kv_heads
        rows = pad2(max_tokens * self._group)
        native, columns = None, self._native.columns(max_tokens)
        if columns and may_be_native:
            # The streaming kernel takes a token's position from its index.
            may_stream = is_alone and not spec.offsets
            native = self.sizes.native(num_seqs, heads, columns, may_stream)
        lengths = (batch.seq_lens_dev, batch.cu_seqlens_q_dev, num_seqs)
        if isinstance(native, StreamShape):
            items, counters = stream_items(*lengths, heads, max_tokens, native)
            parts = split_parts(items, 2 * columns, self._v_pad)
            return _Decodes(native, max_tokens, columns, items, counters, parts)
        if native is not None:
            rows, shape, clusters = columns, native.plan, native.cluster
        else:
            shape = self.sizes.decode(num_seqs, heads, rows, self._pad, self._itemsize)
            clusters = 1
        items, counters = decode_items(
            *lengths,
            num_seqs * heads * clusters,
            max_tokens,
            shape,
            new_in_cache=False,
            window=spec.window,
            chunk=spec.chunk,
        )
        parts = split_parts(items, heads * rows, self._v_pad)
        return _Decodes(native or shape, max_tokens, rows, items, counters, parts)

    def _tiles(self, batch: AttentionBatch, shortest: int) -> _Tiles:
        rows = self._native_prompts.rows
        if rows:
            chosen = self.sizes.native_prefill(rows)
        else:
            chosen = self.sizes.prefill(self._group, self._pad, self._itemsize)
        tokens = (rows or chosen.rows) // self._group
        return _Tiles(chosen, tokens, prompt_tiles(batch, shortest, tokens))

    # -- once a layer -----------------------------------------------------------------------------

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: tuple[Tensor, ...],
        metadata: Metadata,
        rotary: Tensor | None = None,
        scales: KVScales | None = None,
        norms: HeadNorms | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """[num_tokens, num_heads * v_head_dim]; k is rotated, k and v are written here."""
        batch, spec, launches = metadata.batch, self.spec, metadata.launches
        width = spec.num_heads * spec.v_head_dim
        # Of steps that only the device knows, what writes prompts' keys clears padding, too.
        clears = len(launches) > 1 and not batch.is_exact
        out = q.new_empty((q.shape[0], width)) if clears else self._out(q, batch, width)
        given = _Given(q, k, v, cache, batch, rotary, norms, sinks)
        for launch in launches:
            if isinstance(launch, _Decodes):
                self._decode(given, launch, out, writes=len(launches) == 1)
                continue
            native = self._native_prompts
            rotates = native.can_rotate(q, batch, rotary, norms)
            turns = rotary is not None or norms is not None
            turned = q.new_empty(q.shape) if turns and not rotates else q
            self._rotate_and_write(given, turned, out, clears=clears)
            if native.can_run(turned, batch):
                left = (rotary, norms) if rotates else (None, None)
                own = (turned, out, cache, batch, launch.tiles, *left, sinks, self._scale)
                native.run(*own, self.sizes.gpu.num_multiprocessors)
            else:
                self._prefill(turned, given, launch, out)
        return out

    def _strides(self, given: _Given) -> dict[str, int]:
        q, k, v = given.q, given.k, given.v
        return {
            "stride_q": q.stride(0),
            "stride_k": k.stride(0),
            "stride_v": v.stride(0),
            "stride_q_head": q.stride(1),
            "stride_k_head": k.stride(1),
            "stride_v_head": v.stride(1),
        }

    def _widths(self, given: _Given) -> dict[str, int | bool]:
        spec, rotary = self.spec, given.rotary
        return {
            "WIDTH": spec.head_dim,
            "V_WIDTH": spec.v_head_dim,
            "WIDTH_PAD": self._pad,
            "V_WIDTH_PAD": self._v_pad,
            "ROTARY": 0 if rotary is None else rotary.shape[1],
            "INTERLEAVED": spec.rotary_interleaved,
            "NORMS": given.norms is not None,
        }

    def _scores(self) -> dict[str, int | bool | float]:
        """What becomes of logits, and which of them there are."""
        spec = self.spec
        return {
            "cap": (spec.softcap or 1.0) * LOG2E,
            "WINDOW": spec.window,
            "CHUNK": spec.chunk,
            "SOFTCAP": spec.softcap > 0,
            "SINKS": spec.sinks,
        }

    def _decode(self, given: _Given, decodes: _Decodes, out: Tensor, *, writes: bool) -> None:
        q, k, v, batch = given.q, given.k, given.v, given.batch
        if not isinstance(decodes.shape, DecodeShape):
            if self._native.can_run(q, k, v, given.rotary, given.norms):
                parts = (*decodes.parts, decodes.counters)
                self._native.run(
                    *(q, k, v, out, given.cache, batch, decodes.shape, decodes.items, parts),
                    *(decodes.rows, given.rotary, given.norms, self._scale),
                    writes=writes,
                )
                return
            decodes = self._decodes(batch, decodes.max_tokens, may_be_native=False)
        shape = cast("DecodeShape", decodes.shape)
        decode_attention[(decodes.items.shape[0], self.spec.num_kv_heads)](
            *(q, k, v, out, *given.cache),
            decodes.items,
            batch.block_tables_dev,
            batch.slot_mapping,
            batch.positions,
            given.rotary,
            *norm_arguments(given.norms),
            given.sinks,
            *decodes.parts,
            decodes.counters,
            self._scale,
            **self._scores(),
            **self._strides(given),
            stride_table=batch.block_tables_dev.stride(0),
            num_kv_heads=self.spec.num_kv_heads,
            GROUP=self._group,
            **self._widths(given),
            BLOCK_SIZE=self.block_size,
            TOKENS=max(16, pad2(decodes.max_tokens)),
            M=max(16, decodes.rows),
            ROWS=decodes.rows,
            TILE=shape.tile,
            STAGES=shape.num_stages,
            WRITES=writes,
            EXACT=self._exact,
            ITEM=ITEM,
            num_warps=shape.num_warps,
            **launch_options(),
        )

    def _rotate_and_write(
        self, given: _Given, turned: Tensor, out: Tensor, *, clears: bool
    ) -> None:
        """Queries as they are attended to to `turned`, where that is not what was given; keys and
        values to the cache. clears: what `out` holds of padding becomes zeros."""
        spec, q, tokens = self.spec, given.q, given.k.shape[0]
        heads, num_queries = spec.num_kv_heads, 0 if turned is q else tokens * spec.num_heads
        rotate_and_write[(cdiv(tokens * heads, _ROPE_ROWS) + cdiv(num_queries, _ROPE_ROWS),)](
            *(q, given.k, given.v, turned, *given.cache, out),
            given.batch.slot_mapping,
            given.batch.positions,
            given.rotary,
            *norm_arguments(given.norms),
            tokens * heads,
            num_queries,
            **self._strides(given),
            NUM_HEADS=spec.num_heads,
            NUM_KV_HEADS=heads,
            **self._widths(given),
            ROWS=_ROPE_ROWS,
            CLEARS=clears,
            **launch_options(),
        )

    def _prefill(self, q: Tensor, given: _Given, tiles: _Tiles, out: Tensor) -> None:
        """Of queries as _rotate_and_write leaves them."""
        spec, shape, batch, keys = self.spec, tiles.shape, given.batch, tiles.shape.keys
        heads, cache = spec.num_kv_heads, given.cache
        is_padded = self._invariant or batch.tokens_per_row > 0
        engine = self._has_engine and self.block_size % keys == 0 and not (is_padded or spec.window)
        descriptors: list[Tensor | TensorDescriptor] = [*cache]
        if engine:
            rows = [x.view(x.shape[0] * self.block_size, -1) for x in cache]
            descriptors = [
                TensorDescriptor.from_tensor(x, [keys, x.shape[1] // heads]) for x in rows
            ]
        prefill_attention[(heads, tiles.tiles.shape[0])](
            q, out, *cache, *descriptors, tiles.tiles, batch.block_tables_dev, batch.slot_mapping,
            given.sinks, self._scale, **self._scores(),
            stride_q=q.stride(0), stride_q_head=q.stride(1),
            stride_table=batch.block_tables_dev.stride(0),
            NUM_KV_HEADS=heads, GROUP=self._group,
            WIDTH=spec.head_dim, V_WIDTH=spec.v_head_dim,
            WIDTH_PAD=self._pad, V_WIDTH_PAD=self._v_pad, BLOCK_SIZE=self.block_size,
            TOKENS=tiles.tokens, M=shape.rows, N=keys, STAGES=shape.num_stages,
            PADDED=is_padded, ENGINE=engine, EXACT=self._exact,
            TILE_WORDS=TILE_WORDS, num_warps=shape.num_warps,
        )  # fmt: skip
