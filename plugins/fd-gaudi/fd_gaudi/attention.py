"""Attention driver `gaudi_block`: the vendor's fused operators, projections included.

Decodes use one operator; prompts use three, over the row's whole block table, so cached tokens are
included and every shape is one of the buckets'. Padding rows repeat the first row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fastdeploy_core.errors import CapabilityError

from .operators import OPERATORS, kv_write

if TYPE_CHECKING:
    from fastdeploy_core.contracts.attention import AttentionBatch, AttentionSpec, Projections
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.contracts.ops import KernelTable
    from fastdeploy_core.tensor import Tensor

MASKED = -1e30


@dataclass(slots=True)
class Metadata:
    """One padded step."""

    batch: AttentionBatch
    source: (
        Tensor  # [rows * tokens] the token that each place takes; padding rows take the first row's
    )
    mask: Tensor  # decodes: [blocks, block_size]; prompts: [rows, 1, tokens, keys]; 0 or MASKED
    decode: dict[str, Tensor] = field(
        default_factory=dict
    )  # index tensors, by the operator's names
    rotary: Tensor | None = None  # of this step, made by the first layer


class GaudiBlock:
    """Cache [blocks, block_size, kv_heads, head_dim]."""

    name = "gaudi_block"
    contract = (1, 0)
    unit: Literal["core", "rope_kv", "projections"] = "projections"
    can_capture_decode = False
    can_capture_mixed = False
    features = frozenset[str]()

    def __init__(
        self, spec: AttentionSpec, block_size: int, device: DeviceBackend, kernels: KernelTable
    ) -> None:
        self.spec, self._block_size, self._device, self._xp = spec, block_size, device, device.xp
        self._dtype = device.xp.dtype(spec.dtype)

    def cache_shapes(self, num_blocks: int) -> tuple[tuple[int, ...], ...]:
        """Keys and values alike."""
        shape = (num_blocks, self._block_size, self.spec.num_kv_heads, self.spec.head_dim)
        return shape, shape

    def prepare(self, batch: AttentionBatch) -> Metadata:
        """The host's index arrays in the operators' form."""
        tokens, put = batch.tokens_per_row, self._device.to_device
        somebody = np.where(batch.seq_lens > 0, np.arange(batch.num_seqs), 0)
        source = (somebody[:, None] * tokens + np.arange(tokens)).reshape(-1)
        ends = batch.seq_lens[somebody].astype(np.int64)
        tables = batch.block_tables[somebody]
        own = (ends[:, None] - tokens + np.arange(tokens)).reshape(-1)
        key = np.arange(tables.shape[1] * self._block_size)
        hidden = np.where(key <= own[:, None], 0.0, MASKED).astype(np.float32)
        metadata = Metadata(batch, put(source), self._mask(hidden, batch))
        if tokens == 1:
            rows = np.arange(batch.num_seqs)
            group = np.repeat(rows, tables.shape[1])
            mapping = (group[:, None] == rows).astype(np.float32)
            metadata.decode = {
                "block_groups": put(group.astype(np.int32)),
                "block_list": put(tables.reshape(-1).astype(np.int32)),
                "block_mapping": put(mapping).to(self._dtype),
                "block_indices": put(tables[rows, own // self._block_size].astype(np.int32)),
                "block_offsets": put((own % self._block_size).astype(np.int32)),
            }
        return metadata

    def _mask(self, hidden: np.ndarray, batch: AttentionBatch) -> Tensor:
        shape: tuple[int, ...] = (batch.num_seqs, 1, batch.tokens_per_row, hidden.shape[1])
        if batch.tokens_per_row == 1:
            shape = (hidden.size // self._block_size, self._block_size)
        return self._device.to_device(hidden.reshape(shape)).to(self._dtype)

    def forward(self, *inputs: Any) -> Tensor:
        """Not called: the unit is the whole block."""
        raise CapabilityError("driver gaudi_block runs whole attention blocks; see forward_block()")

    def prepare_projections(self, projections: Projections) -> dict[str, Tensor | None]:
        """In PaddlePaddle's layout of matrices: [inputs, outputs]."""
        return {
            "qkv": projections.qkv.transpose(0, 1).contiguous(),
            "bias": projections.qkv_bias,
            "output": projections.output.transpose(0, 1).contiguous(),
        }

    def forward_block(
        self,
        x: Tensor,
        projections: Any,
        cache: tuple[Tensor, ...],
        metadata: Metadata,
        rotary: Tensor,
    ) -> Tensor:
        """[num_tokens, hidden]."""
        spec, batch, xp = self.spec, metadata.batch, self._xp
        if metadata.rotary is None:
            metadata.rotary = self._rotary(metadata, rotary)
        x = xp.index_select(x, 0, metadata.source)
        weights = (projections["qkv"], projections["bias"])
        heads = (spec.head_dim, spec.num_heads)
        style = {"transpose": False, "use_neox_style": not spec.rotary_interleaved}
        if batch.tokens_per_row == 1:
            index = metadata.decode
            out: Tensor = OPERATORS["fused_block_attention"](
                *(x, metadata.rotary, *cache),
                *(index["block_groups"], index["block_list"], index["block_mapping"]),
                *(metadata.mask, index["block_indices"], index["block_offsets"]),
                *(*weights, projections["output"], *heads),
                scaling_factor=spec.scale,
                **style,
            )
            return out
        queries, joined = OPERATORS["fused_qkv_rope"](
            *(x, *weights, metadata.rotary, *heads, batch.num_seqs), **style
        )
        rows = joined.reshape([2, batch.num_tokens, spec.num_kv_heads, spec.head_dim])
        kv_write((rows[0], rows[1]), cache, batch.slot_mapping)
        table = batch.block_tables_dev.reshape([-1])
        shape = [1, batch.num_seqs, -1, spec.num_kv_heads, spec.head_dim]
        known = [xp.index_select(pool, 0, table).reshape(shape) for pool in cache]
        out = OPERATORS["fused_sdpa_proj_t"](
            *(queries, xp.cat(known, 0), metadata.mask, None, projections["output"]),
            scaling_factor=spec.scale,
            causal=False,  # the mask already excludes later tokens
            softmax_mode=0,
        )
        return out.reshape([batch.num_tokens, -1])

    def _rotary(self, metadata: Metadata, table: Tensor) -> Tensor:
        """[2, rows, tokens, 1, head_dim], cosines then sines, one for each dimension."""
        half = table.shape[1] // 2
        if 2 * half != self.spec.head_dim:
            raise CapabilityError(
                f"the vendor's fused projections rotate whole heads, and this model rotates "
                f"{2 * half} of {self.spec.head_dim} dimensions; run with "
                "--attention-backend reference"
            )
        xp, batch = self._xp, metadata.batch
        chosen = xp.index_select(table, 0, xp.index_select(batch.positions, 0, metadata.source))
        parts = []
        for part in (chosen[:, :half], chosen[:, half:]):
            wide = (
                xp.repeat_interleave(part, 2, 1)
                if self.spec.rotary_interleaved
                else xp.cat((part, part), 1)
            )
            parts.append(wide.reshape([1, batch.num_seqs, batch.tokens_per_row, 1, 2 * half]))
        return xp.cat(parts, 0).to(self._dtype)
