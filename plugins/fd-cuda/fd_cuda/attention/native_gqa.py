"""Grouped-query attention in CUDA C++, where the GPU and the shape suit it. Decodes:
kernels/native/decode_attention.cu for few rows, stream_attention.cu for batches that fill the GPU.
Prompts: prompt_attention.cu.

They need heads of 128 in 16 bits and rows aligned to 16 bytes, decodes at most 32 query rows
(tokens times heads of a group), prompts Hopper and blocks that share boxes of 128 keys; prompts may
have heads of 64, long windows, and sinks, too. Everything else takes the Triton kernels of
decode.py and prefill.py, over the same plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from fd_cuda.kernels import native
from fd_cuda.kernels.common import batch_invariant
from fd_cuda.kernels.native import tensor_map

from .plan import TILE_WORDS, DecodeShape, StreamShape

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fastdeploy_core.contracts.attention import AttentionBatch, AttentionSpec, HeadNorms
    from torch import Tensor

WIDTH: Final = 128
MAX_COLUMNS: Final = 32
_KEYS: Final = 128
_MAX_GROUP: Final = 64
_LEAST_WINDOW: Final = 1024  # of 128 the Triton kernel is quicker, whose tiles are smaller
_ALIGNMENT: Final = 1024
_ROTARY_STEP: Final = 16  # numbers: a thread rotates two pieces of eight
_HELD_BYTES: Final = 20 << 20  # of 50 MB, beside queries and results that pass through


@dataclass(frozen=True, slots=True)
class NativeShape:
    """How decode_attention.cu is specialized; the plan's numbers of splits count clusters."""

    plan: DecodeShape
    cluster: int  # blocks that share a split: 1, 2, 4, 8
    units: int  # times 16 tokens a warp reads at once
    occupancy: int  # blocks that a multiprocessor must be able to hold
    warps: int = 4  # of a block


@dataclass(frozen=True, slots=True)
class _PromptSizes:
    """How prompt_attention.cu is specialized for heads of one width."""

    row_groups: int  # of 64 rows, which are tokens times heads of a group
    stages: int  # turns of keys in shared memory

    @property
    def rows(self) -> int:
        """Of an item."""
        return 64 * self.row_groups

    @property
    def threads(self) -> int:
        """Those that have rows, and four warps of which one feeds."""
        return 128 * (self.row_groups + 1)

    def shared_bytes(self, width: int) -> int:
        """Queries, keys and values, ones, and barriers."""
        numbers = (self.rows + 2 * self.stages * _KEYS) * width + 16 * 64
        return _ALIGNMENT + 2 * numbers + 8 * (2 + 4 * self.stages)


_PROMPT_SIZES: Final = {64: _PromptSizes(3, 4), 128: _PromptSizes(2, 2)}


def norm_arguments(norms: HeadNorms | None) -> tuple[Tensor | None, Tensor | None, float]:
    """Weights and epsilon, as kernels take them."""
    return (None, None, 0.0) if norms is None else (norms.q, norms.k, norms.eps)


def _suits(spec: AttentionSpec, widths: Iterable[int], features: set[str]) -> bool:
    """Whether a model's layer is one that a kernel for these is written for."""
    is_even = spec.head_dim == spec.v_head_dim and spec.head_dim in widths
    return is_even and spec.dtype in ("bfloat16", "float16") and spec.needs <= features


def _is_aligned(*tensors: Tensor) -> bool:
    """Whether every head begins at whole 16 bytes."""
    return all(x.data_ptr() % 16 == x.stride(0) % 8 == x.stride(1) % 8 == 0 for x in tensors)


class NativeDecode:
    """Those of decodes for one spec and block size."""

    def __init__(self, spec: AttentionSpec, block_size: int) -> None:
        self._spec, self._block_size = spec, block_size
        self._group = spec.num_heads // spec.num_kv_heads
        self._serves = _suits(spec, (WIDTH,), {"offsets"}) and native.available()

    def columns(self, max_tokens: int) -> int:
        """Query rows of a program, padded; 0 where the kernel does not serve so many."""
        used = self._group * max_tokens
        if not self._serves or used > MAX_COLUMNS:
            return 0
        return max(8, 1 << (used - 1).bit_length())

    def can_run(
        self, q: Tensor, k: Tensor, v: Tensor, rotary: Tensor | None, norms: HeadNorms | None
    ) -> bool:
        """Whether these arguments are laid out as the kernel reads them."""
        if rotary is not None and rotary.shape[1] != WIDTH:
            return False
        weights = () if norms is None else (norms.q, norms.k)
        if any(x.data_ptr() % 16 or x.dtype != q.dtype for x in weights):
            return False
        return _is_aligned(q, k, v)

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        cache: tuple[Tensor, ...],
        batch: AttentionBatch,
        shape: NativeShape | StreamShape,
        items: Tensor,
        parts: tuple[Tensor, ...],
        columns: int,
        rotary: Tensor | None,
        norms: HeadNorms | None,
        scale: float,
        *,
        writes: bool,
    ) -> None:
        """Queue it; see decode_attention of decode.py."""
        spec = self._spec
        defines = {
            "HALF": int(spec.dtype == "float16"),
            "GROUP": self._group,
            "BLOCK_SIZE": self._block_size,
            "ROTARY": int(rotary is not None),
            "INTERLEAVED": int(spec.rotary_interleaved),
            "NORMS": int(norms is not None),
        }
        streams = isinstance(shape, StreamShape)  # where a token stands follows from its row there
        arguments = [
            *(q, k, v, out, *cache, items, batch.block_tables_dev, batch.slot_mapping),
            *(() if streams else (batch.positions,)),
            *(rotary, *parts, scale),
            *(q.stride(0), k.stride(0), v.stride(0), q.stride(1), k.stride(1), v.stride(1)),
            batch.block_tables_dev.stride(0),
            *norm_arguments(norms),
            spec.num_kv_heads,
        ]
        if not isinstance(shape, StreamShape):
            arguments.append(int(writes))
            launch_splits("decode_attention", shape, columns, defines, items, spec, arguments)
            return
        defines |= {**_sizes(shape, columns), "TILE": shape.tile, "STAGES": shape.stages}
        ring = shape.warps * shape.stages * shape.units * 16 * 2 * 2 * WIDTH
        arguments += [shape.num_blocks, int(writes)]
        native.launch(
            native.function("stream_attention", defines), (shape.num_blocks, 1, 1),
            32 * shape.warps, arguments, shared=512 * columns + ring,
        )  # fmt: skip


def _sizes(shape: NativeShape | StreamShape, columns: int) -> dict[str, int]:
    """What kernels of decodes are specialized by."""
    return {
        "NT": columns // 8,
        "WARPS": shape.warps,
        "UNITS": shape.units,
        "OCCUPANCY": shape.occupancy,
    }


def launch_splits(
    name: str,
    shape: NativeShape,
    columns: int,
    defines: dict[str, int],
    items: Tensor,
    spec: AttentionSpec,
    arguments: list[Any],
) -> None:
    """Queue a kernel that serves items of a plan by clusters: decode_attention.cu or
    quant_attention.cu."""
    sizes = {**_sizes(shape, columns), "TILE": shape.plan.tile, "CLUSTER": shape.cluster}
    native.launch(
        native.function(name, {**defines, **sizes}),
        (items.shape[0], spec.num_kv_heads, shape.cluster),
        32 * shape.warps,
        arguments,
        shared=columns // 8 * 4 * (512 + 1024 * (shape.warps + 1)),
        cluster=shape.cluster,
    )


class NativePrompts:
    """prompt_attention.cu for one spec and block size."""

    def __init__(self, spec: AttentionSpec, block_size: int) -> None:
        self._spec, self._block_size = spec, block_size
        self._group = spec.num_heads // spec.num_kv_heads
        self._box = min(block_size, _KEYS)  # of the cache, keys that lie together
        serves = (
            _suits(spec, _PROMPT_SIZES, {"offsets", "sinks", "window"})
            and self._group <= _MAX_GROUP
            and (not spec.window or spec.window >= _LEAST_WINDOW)
            and self._box >= 8
            and _KEYS % self._box == block_size % self._box == 0
            and not batch_invariant()
            and native.has_wgmma()
        )
        self.rows = _PROMPT_SIZES[spec.head_dim].rows if serves else 0

    def can_run(self, q: Tensor, batch: AttentionBatch) -> bool:
        """Whether the copy engine can fetch these, and finds all of the step's keys in the cache:
        rows of as many tokens each may have some that are not written."""
        return bool(self.rows) and not batch.tokens_per_row and _is_aligned(q)

    def can_rotate(
        self, q: Tensor, batch: AttentionBatch, rotary: Tensor | None, norms: HeadNorms | None
    ) -> bool:
        """Whether it runs with queries that are neither normed nor rotated, where that is quicker
        than a kernel before it."""
        if rotary is not None and rotary.shape[1] % _ROTARY_STEP:
            return False
        if norms is not None and (norms.q.data_ptr() % 16 or norms.q.dtype != q.dtype):
            return False
        return self._group > 1 and q.shape[2] == WIDTH and self.can_run(q, batch)

    def _heads_together(self, num_tokens: int) -> int:
        """Key-value heads whose keys and values of a step the second-level cache holds."""
        heads = self._spec.num_kv_heads
        while heads % 2 == 0 and heads * num_tokens * self._spec.head_dim * 4 > _HELD_BYTES:
            heads //= 2
        return heads

    def run(
        self,
        q: Tensor,
        out: Tensor,
        cache: tuple[Tensor, ...],
        batch: AttentionBatch,
        tiles: Tensor,
        rotary: Tensor | None,
        norms: HeadNorms | None,
        sinks: Tensor | None,
        scale: float,
        num_processors: int,
    ) -> None:
        """Queue it; the step's keys and values are in the cache. Queries are still to be rotated
        and normed with `rotary` and `norms`. `tiles`: prompt_tiles of `rows` // group tokens."""
        spec, tokens, heads = self._spec, self.rows // self._group, self._spec.num_kv_heads
        width, sizes = spec.head_dim, _PROMPT_SIZES[spec.head_dim]
        defines = {
            "HALF": int(spec.dtype == "float16"),
            "WIDTH": width,
            "GROUP": self._group,
            "TOKENS": tokens,
            "WINDOW": spec.window,
            "SINKS": int(spec.sinks),
            "ROTARY": 0 if rotary is None else rotary.shape[1],
            "INTERLEAVED": int(spec.rotary_interleaved),
            "NORMS": int(norms is not None),
            "BLOCK_SIZE": self._block_size,
            "BOX": self._box,
            "THREADS": sizes.threads,
            "STAGES": sizes.stages,
            "TILE_WORDS": TILE_WORDS,
        }
        slots = cache[0].shape[0] * self._block_size
        norm, _, eps = norm_arguments(norms)
        arguments = [
            tensor_map.head_boxes(q, self._group, tokens),
            *(tensor_map.boxes(x.view(slots, -1), self._box) for x in cache),
            *(batch.positions, rotary, norm, eps),
            *(tiles, batch.block_tables_dev, sinks, out, scale),
            *(batch.block_tables_dev.stride(0), heads, self._heads_together(q.shape[0])),
        ]
        kernel = native.function("prompt_attention", defines)
        blocks, shared = min(num_processors, tiles.shape[0] * heads), sizes.shared_bytes(width)
        native.launch(kernel, (blocks, 1, 1), sizes.threads, arguments, shared=shared)
