"""Attention driver `cuda_quantized`: grouped-query attention over an int8, fp8 or int4 cache.

The core rotates and writes the cache (kernels/quant_cache.py); numbers stay packed until a tile of
them is in the multiprocessor. Rows that feed few tokens are quantized_native.py's where it can.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastdeploy_core.contracts.kv_formats import KV_FORMATS

from fd_cuda.kernels.common import options as launch_options
from fd_cuda.kernels.common import pad2

from .cached import CachedAttention, Launch, Metadata
from .plan import ITEM, DecodeShape
from .quantized_kernel import quantized_attention
from .quantized_native import QuantizedDecode, Splits
from .question import MAX_ROWS

if TYPE_CHECKING:
    from fastdeploy_core.contracts.attention import AttentionBatch, AttentionSpec, KVScales
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.contracts.ops import KernelTable
    from torch import Tensor

_PROMPT_KEYS = 64  # keys per tile of prompts
_PROMPT_ROWS = 64  # tokens times heads of a group


class QuantizedAttention(CachedAttention):
    """One instance per distinct spec; see AttentionBackend."""

    name = "cuda_quantized"
    can_capture_mixed = True

    def __init__(
        self, spec: AttentionSpec, block_size: int, device: DeviceBackend, kernels: KernelTable
    ) -> None:
        self._group = spec.num_heads // spec.num_kv_heads
        super().__init__(spec, block_size, device, MAX_ROWS // self._group)
        self._kind = KV_FORMATS[spec.kv_format]
        self._native = QuantizedDecode(spec, block_size)
        self._pad, self._v_pad = max(16, pad2(spec.head_dim)), max(16, pad2(spec.v_head_dim))

    def cache_shapes(self, num_blocks: int) -> tuple[tuple[int, ...], ...]:
        """Numbers of keys and values, and dynamic scales of both after them."""
        spec, kind = self.spec, self._kind
        lead = (num_blocks, self.block_size, spec.num_kv_heads)
        numbers = tuple((*lead, kind.width(dim)) for dim in (spec.head_dim, spec.v_head_dim))
        return numbers if spec.kv_static else (*numbers, *[(*lead, kind.scale_width)] * 2)

    def _decodes(
        self, batch: AttentionBatch, max_tokens: int, *, is_alone: bool = True
    ) -> Launch | Splits:
        cut = self._native.cut(batch, max_tokens, self.sizes)
        return cut or super()._decodes(batch, max_tokens)

    def _short_rows(self, num_seqs: int, max_tokens: int) -> tuple[DecodeShape, int, int, int, int]:
        heads, rows = self.spec.num_kv_heads, pad2(max_tokens * self._group)
        shape = self.sizes.decode(num_seqs, heads, rows, self._pad, self._itemsize)
        return shape, rows, self._group, heads, self._v_pad

    def _long_rows(self) -> tuple[DecodeShape, int, int, int, int]:
        tokens = max(1, _PROMPT_ROWS // self._group)
        keys, stages = (32, 1) if self._exact else (_PROMPT_KEYS, 2)
        shape = DecodeShape(keys, 1, 1, 1, 4, stages)
        return shape, pad2(tokens * self._group), self._group, self.spec.num_kv_heads, tokens

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: tuple[Tensor, ...],
        metadata: Metadata,
        rotary: Tensor | None = None,
        scales: KVScales | None = None,
    ) -> Tensor:
        """[num_tokens, num_heads * v_head_dim]; k and v are read from the cache."""
        batch, spec = metadata.batch, self.spec
        out = self._out(q, batch, spec.num_heads * spec.v_head_dim)
        if scales is None:
            tables = (cache[2], cache[3], cache[3])
        else:
            lows = scales.minimum or scales.scale
            tables = (scales.scale[0], scales.scale[1], lows[1])
        for launch in metadata.launches:
            if isinstance(launch, Splits):
                self._native.run(
                    q, out, cache[:2], tables, batch, launch, self._scale,
                    is_static=scales is not None,
                )  # fmt: skip
                continue
            quantized_attention[(launch.items.shape[0], launch.columns)](
                q,
                out,
                cache[0],
                cache[1],
                *tables,
                launch.items,
                batch.block_tables_dev,
                *launch.parts,
                self._scale,
                stride_q=q.stride(0),
                stride_q_head=q.stride(1),
                stride_table=batch.block_tables_dev.stride(0),
                num_kv_heads=spec.num_kv_heads,
                GROUP=launch.heads,
                WIDTH=spec.head_dim,
                V_WIDTH=spec.v_head_dim,
                WIDTH_PAD=self._pad,
                V_WIDTH_PAD=self._v_pad,
                PER_BYTE=self._kind.per_byte,
                IS_STATIC=scales is not None,
                HAS_LOW=self._kind.has_minimum,
                BLOCK_SIZE=self.block_size,
                M=max(16, launch.rows),
                ROWS=launch.rows,
                TILE=launch.shape.tile,
                STAGES=launch.shape.num_stages,
                EXACT=self._exact,
                ITEM=ITEM,
                num_warps=launch.shape.num_warps,
                **launch_options(),
            )
        return out
