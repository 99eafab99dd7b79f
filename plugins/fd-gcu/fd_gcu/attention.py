"""Attention driver `gcu_flash`: rotation, cache write and attention by the vendor's operators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from .operators import OPERATORS

if TYPE_CHECKING:
    from fastdeploy_core.contracts.attention import AttentionBatch, AttentionSpec, KVScales
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.contracts.ops import KernelTable
    from fastdeploy_core.tensor import Tensor


@dataclass(slots=True)
class Metadata:
    """One step in the operators' form: everything int32."""

    batch: AttentionBatch
    positions: Tensor
    slot_mapping: Tensor
    longest_query: int
    longest: int


class GcuAttention:
    """Cache [blocks, block_size, kv_heads, head_dim]; block tables are the scheduler's."""

    name = "gcu_flash"
    contract = (1, 0)
    unit: Literal["core", "rope_kv"] = "rope_kv"
    can_capture_decode = False
    can_capture_mixed = False
    features = frozenset[str]()

    def __init__(
        self, spec: AttentionSpec, block_size: int, device: DeviceBackend, kernels: KernelTable
    ) -> None:
        self.spec, self._block_size, self._xp = spec, block_size, device.xp
        self._rotate = kernels["rotary_embedding"]
        self._tables: dict[int, tuple[Tensor, Tensor]] = {}  # rotary tables in the model's dtype

    def cache_shapes(self, num_blocks: int) -> tuple[tuple[int, ...], ...]:
        """Keys and values alike."""
        shape = (num_blocks, self._block_size, self.spec.num_kv_heads, self.spec.head_dim)
        return shape, shape

    def prepare(self, batch: AttentionBatch) -> Metadata:
        """Narrow the integers once for all layers."""
        int32 = self._xp.int32
        lengths = batch.cu_seqlens_q[1:] - batch.cu_seqlens_q[:-1]
        return Metadata(
            batch=batch,
            positions=batch.positions.to(int32),
            slot_mapping=batch.slot_mapping.to(int32),
            longest_query=int(lengths.max(initial=0)),
            longest=int(batch.seq_lens.max(initial=0)),
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
        """[num_tokens, num_heads * head_dim]. Caches with scales are declined, so no scales are
        given."""
        spec, batch, xp = self.spec, metadata.batch, self._xp
        tokens, width = q.shape[0], spec.num_heads * spec.head_dim
        if tokens == 0:
            return xp.zeros([0, width], dtype=q.dtype, device=q.device)
        # only a part of each head is rotated
        if rotary is not None and rotary.shape[1] != spec.head_dim:
            q, k = self._rotate(q, k, batch.positions, rotary, spec.rotary_interleaved)
            rotary = None
        flat_q, flat_k, flat_v = (x.reshape([tokens, -1]).contiguous() for x in (q, k, v))
        if rotary is not None:
            flat_q, flat_k = OPERATORS["fused_rotary_embedding"](
                *(flat_q, flat_k, self._table(rotary, q), metadata.positions),
                *(not spec.rotary_interleaved, spec.head_dim),
            )
        OPERATORS["reshape_and_cache_flash"](*cache, flat_k, flat_v, metadata.slot_mapping)
        out = OPERATORS["flash_attn_var_len"](
            query=flat_q.reshape([tokens, spec.num_heads, spec.head_dim]),
            key=cache[0],
            value=cache[1],
            cu_seqlens_q=batch.cu_seqlens_q_dev,
            cu_seqlens_k=None,
            seqused_k=batch.seq_lens_dev,
            leftpad_k=None,
            block_table=batch.block_tables_dev,
            alibi_slopes=None,
            max_seqlen_q=metadata.longest_query,
            max_seqlen_k=metadata.longest,
            p_dropout=0.0,
            softmax_scale=spec.scale,
            zero_tensors=False,
            is_causal=True,
            window_size_left=-1,
            window_size_right=-1,
            softcap=0.0,
            return_softmax=False,
        )
        return out.reshape([tokens, width])

    def _table(self, rotary: Tensor, like: Tensor) -> Tensor:
        """The rotary table in the model's dtype. The original is kept alive, so that no other
        tensor gets its id."""
        if id(rotary) not in self._tables:
            self._tables[id(rotary)] = (rotary, rotary.to(like.dtype))
        return self._tables[id(rotary)][1]
