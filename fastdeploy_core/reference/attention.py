"""Attention driver `reference`: paged attention in plain tensor code, kinds gqa and mla.

The whole pool is seen as a matrix with one row per (slot, head). Whatever order keys, values and
queries are needed in, they are gathered by row numbers that prepare() computes once per step, so no
layer transposes anything. Rows with few query tokens (decodes) run together over tiles of keys; a
row's own tiles are all it ever sees, so its result does not depend on who shares the batch. Longer
rows (prefill chunks) run one by one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from fastdeploy_core.contracts.base import CONTRACT

if TYPE_CHECKING:
    from fastdeploy_core.contracts.attention import AttentionBatch, AttentionSpec
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.contracts.ops import KernelTable
    from fastdeploy_core.tensor import Tensor


class ReferenceAttention:
    """One instance per distinct spec."""

    name = "reference"
    contract = CONTRACT
    unit: Literal["core", "rope_kv"] = "core"
    can_capture_decode = False
    can_capture_mixed = False

    def __init__(
        self, spec: AttentionSpec, block_size: int, device: DeviceBackend, kernels: KernelTable
    ) -> None:
        self.spec = spec
        self.block_size = block_size

    def cache_shapes(self, num_blocks: int) -> tuple[tuple[int, ...], ...]:
        """gqa: keys and values [num_blocks, block_size, num_kv_heads, dim]; mla: latent rows."""
        spec = self.spec
        shape = (num_blocks, self.block_size, spec.num_kv_heads)
        if spec.kind == "mla":
            return ((*shape, spec.head_dim),)
        return (*shape, spec.head_dim), (*shape, spec.v_head_dim)

    def prepare(self, batch: AttentionBatch) -> Any:
        """Row numbers and masks of this step, for every layer of this spec."""
        raise NotImplementedError

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: tuple[Tensor, ...],
        metadata: Any,
        rotary: Tensor | None = None,
    ) -> Tensor:
        """[num_tokens, num_heads * v_head_dim]; k and v are read from the cache."""
        raise NotImplementedError
