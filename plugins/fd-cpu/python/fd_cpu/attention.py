"""Paged attention over this device's own cache layout; rotation and cache write included."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from .team import BFLOAT16, FLOAT32, address, rows_of, team

if TYPE_CHECKING:
    from fastdeploy_core.contracts.attention import AttentionBatch, AttentionSpec, KVScales
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.contracts.ops import KernelTable
    from fastdeploy_core.tensor import Tensor


class X86Attention:
    """Keys [block, kv head, head_dim, block_size]: sixteen tokens per register; values [block, kv
    head, block_size, head_dim]: sixteen dimensions of one token. Latent attention keeps rows of
    tokens. In int8 keys and values have the same layout, with scales [block, kv head, block_size]
    after them unless the scales are static."""

    name = "x86_paged"
    contract = (1, 2)
    unit: Literal["core", "rope_kv"] = "rope_kv"
    can_capture_decode = True
    can_capture_mixed = True
    # Of "offsets": positions are what is rotated by, and nothing else.
    features = frozenset({"window", "chunk", "sinks", "softcap", "offsets"})

    def __init__(
        self, spec: AttentionSpec, block_size: int, device: DeviceBackend, kernels: KernelTable
    ) -> None:
        from . import _native

        self._spec, self._block_size = spec, block_size
        self._is_latent = spec.kind == "mla"
        self._value_dim = spec.kv_lora_rank if self._is_latent else spec.v_head_dim
        code = FLOAT32 if spec.dtype == "float32" else BFLOAT16
        self._shape = _native.AttentionShape(
            [
                *(spec.num_heads, spec.num_kv_heads, spec.head_dim, self._value_dim, block_size),
                *(spec.rotary_interleaved, code, bool(spec.kv_format), spec.window, spec.chunk),
            ],
            spec.scale,
            spec.softcap,
        )

    def cache_shapes(self, num_blocks: int) -> tuple[tuple[int, ...], ...]:
        """(keys, values), with scales after them, or (latent rows,)."""
        spec, size = self._spec, self._block_size
        if self._is_latent:
            return ((num_blocks, size, 1, spec.head_dim),)
        lead = (num_blocks, spec.num_kv_heads)
        numbers = ((*lead, spec.head_dim, size), (*lead, size, spec.v_head_dim))
        has_scales = spec.kv_format and not spec.kv_static
        return (*numbers, (*lead, size), (*lead, size)) if has_scales else numbers

    def prepare(self, batch: AttentionBatch) -> AttentionBatch:
        """Kernels read the batch's own tensors; a captured step of prompts begins here."""
        t = team()
        if t.capture is not None and not batch.is_exact and not batch.tokens_per_row:
            starts = batch.cu_seqlens_q_dev
            t.begin_prompts(
                starts,
                *(batch.positions, batch.slot_mapping, batch.seq_lens_dev, batch.block_tables_dev),
            )
            t.native.count_tokens(address(starts), batch.num_seqs)
        return batch

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: tuple[Tensor, ...],
        metadata: AttentionBatch,
        rotary: Tensor | None = None,
        scales: KVScales | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Rotate, write, attend."""
        t, spec, batch = team(), self._spec, metadata
        q, k, v = rows_of(q), rows_of(k), rows_of(v)
        num_tokens = int(q.shape[0])
        y = t.new((num_tokens, spec.num_heads * self._value_dim), q.dtype)
        if num_tokens == 0:
            return y
        t.reads(q, k, v, batch.slot_mapping, batch.seq_lens_dev, batch.block_tables_dev)
        keys, values = cache[0], None if self._is_latent else cache[1]
        width = 0 if rotary is None else int(rotary.shape[1])
        of_tokens = cache[2:] or (None, None)
        of_channels = (None, None) if scales is None else scales.scale
        tensors = (
            *(q, k, v, rotary, batch.positions, batch.slot_mapping, batch.cu_seqlens_q_dev),
            *(
                batch.seq_lens_dev,
                batch.block_tables_dev,
                keys,
                values,
                y,
                *of_tokens,
                *of_channels,
                sinks,
            ),
        )
        t.keep(*tensors)
        sizes = (
            *(int(q.stride()[0]), int(k.stride()[0]), int(v.stride()[0])),
            *(num_tokens, batch.num_seqs, int(batch.block_tables_dev.shape[1])),
            *(width, spec.head_dim - width if self._is_latent else 0),
        )
        t.native.attention(self._shape, [address(x) for x in tensors], sizes)
        return y
