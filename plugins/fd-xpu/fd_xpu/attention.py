"""Attention driver `xpu_block`: one fused operator for rotation, cache write, prefill and decode.

The operator wants prompts before decodes and some twenty index arrays, which the vendor's
get_infer_param computes from lengths.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from fd_accelerator.vendor_operators import WholeHeads

from .operators import OPERATORS

if TYPE_CHECKING:
    from fastdeploy_core.contracts.attention import AttentionBatch, AttentionSpec, KVScales
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.contracts.ops import KernelTable
    from fastdeploy_core.tensor import Tensor

# What get_infer_param returns, in order.
PARAMETERS = (
    *("encoder_batch_map", "decoder_batch_map", "encoder_batch_idx", "decoder_batch_idx"),
    *("encoder_seq_lod", "decoder_seq_lod", "encoder_kv_lod", "prefix_len", "decoder_context_len"),
    *("decoder_context_len_cache", "prefix_block_tables", "encoder_batch_map_cpu"),
    *("decoder_batch_map_cpu", "encoder_batch_idx_cpu", "decoder_batch_idx_cpu"),
    *("encoder_seq_lod_cpu", "decoder_seq_lod_cpu", "encoder_kv_lod_cpu", "prefix_len_cpu"),
    *("decoder_context_len_cpu", "decoder_context_len_cache_cpu", "len_info_cpu"),
)
# Which of them block_attn takes between the block tables and the optional arguments, in order.
PASSED = (
    *("prefix_block_tables", "len_info_cpu", "encoder_seq_lod_cpu", "decoder_seq_lod_cpu"),
    *("encoder_kv_lod_cpu", "encoder_batch_map_cpu", "decoder_context_len_cpu"),
    *("decoder_context_len_cache_cpu", "decoder_batch_map_cpu", "prefix_len_cpu"),
    *("encoder_seq_lod", "decoder_seq_lod", "encoder_kv_lod", "encoder_batch_map"),
    *("decoder_context_len", "decoder_context_len_cache", "decoder_batch_map", "prefix_len"),
)
# Scales and zero points of an int8 cache, shift, smooth, weights of q and k norms, KV signals.
NUM_UNUSED = 12


@dataclass(slots=True)
class Metadata:
    """One step: the order in which the operator sees tokens, and its index arrays."""

    num_tokens: int
    positions: Tensor
    order: Tensor | None  # None: as they are
    back: Tensor | None
    block_tables: Tensor
    cum_offsets: Tensor
    parameters: dict[str, Tensor]


class XpuAttention:
    """Cache [blocks, kv_heads, block_size, head_dim]."""

    name = "xpu_block"
    contract = (1, 0)
    unit: Literal["core", "rope_kv"] = "rope_kv"
    can_capture_decode = False
    can_capture_mixed = False
    features = frozenset[str]()

    def __init__(
        self, spec: AttentionSpec, block_size: int, device: DeviceBackend, kernels: KernelTable
    ) -> None:
        self.spec, self._block_size, self._device, self._xp = spec, block_size, device, device.xp
        self._rotary: tuple[Tensor, Tensor] | None = None
        self._whole_heads = WholeHeads(spec, kernels)
        # The operator always multiplies scores by head_dim ** -0.5.
        self._scale = spec.scale * spec.head_dim**0.5

    def cache_shapes(self, num_blocks: int) -> tuple[tuple[int, ...], ...]:
        """Keys and values alike."""
        shape = (num_blocks, self.spec.num_kv_heads, self._block_size, self.spec.head_dim)
        return shape, shape

    def prepare(self, batch: AttentionBatch) -> Metadata:
        """Lengths as the vendor counts them: a prompt's chunk is "encoder", what precedes it and
        every decode is "decoder"."""
        put = self._device.to_device
        counts = np.diff(batch.cu_seqlens_q).astype(np.int32)
        before = (batch.seq_lens - counts).astype(np.int32)
        is_prompt = (counts > 1) | (before == 0)
        encoder, decoder = np.where(is_prompt, counts, 0), before
        values = OPERATORS["get_infer_param"](
            *(put(encoder.astype(np.int32)), put(decoder), put(counts), batch.block_tables_dev),
            self._block_size,
        )
        rows = np.repeat(np.arange(len(counts)), counts)
        order = np.argsort(~is_prompt[rows], kind="stable")
        in_order = bool((order == np.arange(len(order))).all())
        return Metadata(
            num_tokens=batch.num_tokens,
            positions=batch.positions,
            order=None if in_order else put(order),
            back=None if in_order else put(np.argsort(order)),
            block_tables=batch.block_tables_dev,
            cum_offsets=put(np.zeros(len(counts), dtype=np.int32)),
            parameters=dict(zip(PARAMETERS, values, strict=True)),
        )

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
        """[num_tokens, num_heads * head_dim]. No cache with scales is accepted, so none are
        given."""
        spec, xp = self.spec, self._xp
        width = spec.num_heads * spec.head_dim
        if metadata.num_tokens == 0:
            return xp.zeros([0, width], dtype=q.dtype, device=q.device)
        q, k, rotary = self._whole_heads(q, k, metadata.positions, rotary)
        if abs(self._scale - 1) > 1e-6:
            q = q * self._scale
        qkv = xp.cat((q, k, v), 1).reshape([q.shape[0], -1])
        if metadata.order is not None:
            qkv = xp.index_select(qkv, 0, metadata.order)
        passed = [metadata.parameters[name] for name in PASSED]
        out = OPERATORS["block_attn"](
            *(qkv, *cache, metadata.cum_offsets, self._table(rotary), metadata.block_tables),
            *(*passed, *[None] * NUM_UNUSED),
            *(not spec.rotary_interleaved, False),
        )
        out = out[0] if isinstance(out, list | tuple) else out
        if metadata.back is not None:
            out = xp.index_select(out, 0, metadata.back)
        return out.reshape([q.shape[0], width])

    def _table(self, rotary: Tensor | None) -> Tensor | None:
        """[2, 1, positions, 1, head_dim / 2] float32: cosines, then sines."""
        if rotary is None:
            return None
        if self._rotary is None or self._rotary[0] is not rotary:
            halves = rotary.reshape([rotary.shape[0], 2, rotary.shape[1] // 2]).transpose(0, 1)
            table = halves.contiguous().reshape([2, 1, rotary.shape[0], 1, rotary.shape[1] // 2])
            self._rotary = (rotary, table)
        return self._rotary[1]
