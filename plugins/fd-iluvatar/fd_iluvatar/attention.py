"""Attention driver `iluvatar_paged`: one operator for whole prompts, one for decodes.

Both rotate, write the cache and attend; keys, values and queries come joined.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from fd_accelerator.vendor_operators import WholeHeads

from fastdeploy_core.errors import CapabilityError

from .operators import OPERATORS

if TYPE_CHECKING:
    from fastdeploy_core.contracts.attention import AttentionBatch, AttentionSpec, KVScales
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.contracts.ops import KernelTable
    from fastdeploy_core.tensor import Tensor

BLOCK_SIZE = 16


@dataclass(slots=True)
class Part:
    """The step's prompts, or its decodes."""

    tokens: Tensor | None  # which of the step's tokens; None: all of them
    block_tables: Tensor
    lengths: Tensor  # prompts: offsets of their tokens; decodes: tokens in the cache


@dataclass(slots=True)
class Metadata:
    """One step in two parts."""

    positions: Tensor
    prompts: Part | None
    decodes: Part | None


class IluvatarAttention:
    """Cache [blocks, kv_heads, 16, head_dim]."""

    name = "iluvatar_paged"
    contract = (1, 0)
    unit: Literal["core", "rope_kv"] = "rope_kv"
    can_capture_decode = False
    can_capture_mixed = False
    features = frozenset[str]()

    def __init__(
        self, spec: AttentionSpec, block_size: int, device: DeviceBackend, kernels: KernelTable
    ) -> None:
        if block_size != BLOCK_SIZE:
            raise CapabilityError(
                f"the vendor's paged attention has blocks of {BLOCK_SIZE} tokens, asked for "
                f"{block_size}; run with --block-size {BLOCK_SIZE}"
            )
        self.spec, self._device, self._xp = spec, device, device.xp
        self._rotary: tuple[Tensor, Tensor, Tensor] | None = None
        self._whole_heads = WholeHeads(spec, kernels)

    def cache_shapes(self, num_blocks: int) -> tuple[tuple[int, ...], ...]:
        """Keys and values alike."""
        shape = (num_blocks, self.spec.num_kv_heads, BLOCK_SIZE, self.spec.head_dim)
        return shape, shape

    def prepare(self, batch: AttentionBatch) -> Metadata:
        """Sort rows into prompts and decodes."""
        counts = np.diff(batch.cu_seqlens_q)
        before = batch.seq_lens - counts
        is_decode = (counts == 1) & (before > 0)
        if bool(((before > 0) & ~is_decode).any()):
            raise CapabilityError(
                "a step continues a prompt, which the vendor's operator cannot "
                "(limits.chunked_prefill is False)"
            )
        prompts, decodes = np.flatnonzero(~is_decode & (counts > 0)), np.flatnonzero(is_decode)
        offsets = np.concatenate(([0], np.cumsum(counts[prompts]))).astype(np.int32)
        return Metadata(
            batch.positions,
            self._part(batch, prompts, offsets) if len(prompts) else None,
            self._part(batch, decodes, batch.seq_lens[decodes]) if len(decodes) else None,
        )

    def _part(self, batch: AttentionBatch, rows: np.ndarray, lengths: np.ndarray) -> Part:
        put = self._device.to_device
        starts, ends = batch.cu_seqlens_q[rows], batch.cu_seqlens_q[rows + 1]
        tokens = np.concatenate([np.arange(a, b) for a, b in zip(starts, ends, strict=True)])
        is_all = len(tokens) == batch.num_tokens
        tables = np.ascontiguousarray(batch.block_tables[rows])
        return Part(None if is_all else put(tokens), put(tables), put(lengths.copy()))

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
        q, k, rotary = self._whole_heads(q, k, metadata.positions, rotary)
        qkv = xp.cat((q, k, v), 1).reshape(
            [q.shape[0], width + 2 * spec.num_kv_heads * spec.head_dim]
        )
        out = xp.zeros([q.shape[0], width], dtype=q.dtype, device=q.device)
        for part, attend in ((metadata.prompts, self._prompts), (metadata.decodes, self._decodes)):
            if part is None:
                continue
            if part.tokens is None:
                return attend(qkv, cache, part, rotary).reshape([q.shape[0], width])
            own = xp.index_select(qkv, 0, part.tokens)
            result = attend(own, cache, part, rotary).reshape([own.shape[0], width])
            xp.index_copy_(out, 0, part.tokens, result)
        return out

    def _prompts(
        self, qkv: Tensor, cache: tuple[Tensor, ...], part: Part, rotary: Tensor | None
    ) -> Tensor:
        cos, sin = self._table(rotary)
        return OPERATORS["prefill_fused_paged_attention"](
            qkv,
            *cache,
            block_tables=part.block_tables,
            cu_seqlens_qkv=part.lengths,
            rope_sin=sin,
            rope_cos=cos,
            max_seq_len=0 if rotary is None else rotary.shape[0],
            q_rope=rotary is not None,
            k_rope=rotary is not None,
            v_rope=False,
            **self._shape(),
        )

    def _decodes(
        self, qkv: Tensor, cache: tuple[Tensor, ...], part: Part, rotary: Tensor | None
    ) -> Tensor:
        cos, sin = self._table(rotary)
        return OPERATORS["paged_attention"](
            qkv,
            *cache,
            block_tables=part.block_tables,
            seq_lens=part.lengths,
            max_context_len=0 if rotary is None else rotary.shape[0],
            alibi_slopes=None,
            window_left=-1,
            window_right=-1,
            softcap=0.0,
            use_cuda_graph=False,
            use_sqrt_alibi=False,
            merged_qkv=True,
            k=qkv,
            v=qkv,
            rope_sin=sin,
            rope_cos=cos,
            rope_batch_stride=0,
            **self._shape(),
        )

    def _shape(self) -> dict[str, object]:
        spec = self.spec
        return {
            "num_heads": spec.num_heads,
            "head_dim": spec.head_dim,
            "num_kv_heads": spec.num_kv_heads,
            "block_size": BLOCK_SIZE,
            "scale": spec.scale,
            "causal": True,
            "is_interleaved_rope_mode": spec.rotary_interleaved,
        }

    def _table(self, rotary: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Cosines and sines [positions, 1, head_dim] float32, one for each dimension."""
        if rotary is None:
            return None, None
        if self._rotary is None or self._rotary[0] is not rotary:
            half = rotary.shape[1] // 2
            wide = []
            for part in (rotary[:, :half], rotary[:, half:]):
                spread = self._xp.repeat_interleave(part, 2,
                    1) if self.spec.rotary_interleaved else (
                    self._xp.cat((part, part), 1)
                )  # fmt: skip
                wide.append(spread.contiguous().unsqueeze(1))
            self._rotary = (rotary, *wide)
        return self._rotary[1], self._rotary[2]
