"""Short convolutions, row by row in plain tensor code. Right, and slow."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from fastdeploy_core.errors import CapabilityError

if TYPE_CHECKING:
    from fastdeploy_core.contracts.attention import AttentionBatch, StateSpec, StateWeights
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.contracts.ops import KernelTable
    from fastdeploy_core.tensor import Tensor


class Row(NamedTuple):
    """One sequence of a step."""

    tokens: slice
    source: int  # block of what it fed before; -1: it begins
    target: int  # block in which it leaves the newest


class MyStatesStates:
    """What a sequence keeps are the last inputs of the convolution."""

    name = "mystates"
    contract = (1, 3)
    can_capture_decode = False
    can_capture_mixed = False
    features = frozenset({"short_conv"})

    def __init__(
        self, spec: StateSpec, block_size: int, device: DeviceBackend, kernels: KernelTable
    ) -> None:
        if spec.kind != "short_conv":
            raise CapabilityError(f"state driver 'mystates' has no {spec.kind!r}, only short_conv")
        self.spec, self._block_size, self._xp = spec, block_size, device.xp

    def cache_shapes(self, num_blocks: int) -> tuple[tuple[int, ...], ...]:
        """The last inputs; kinds with a recurrence have the state before them."""
        return ((num_blocks, self.spec.conv_width - 1, sum(self.spec.conv_parts)),)

    def prepare(self, batch: AttentionBatch) -> list[Row]:
        """Once a step, for all layers of this spec."""
        rows: list[Row] = []
        for number, end in enumerate(batch.seq_lens.tolist()):
            first, last = (int(n) for n in batch.cu_seqlens_q[number : number + 2])
            start, table = end - (last - first), batch.block_tables[number]
            if first < last:
                source = int(table[(start - 1) // self._block_size]) if start else -1
                rows.append(
                    Row(slice(first, last), source, int(table[(end - 1) // self._block_size]))
                )
        return rows

    def forward(
        self,
        x: Tensor,
        dt: Tensor | None,
        beta: Tensor | None,
        weights: StateWeights,
        cache: tuple[Tensor, ...],
        metadata: list[Row],
    ) -> Tensor:
        """[num_tokens, channels]."""
        xp, (kept,), out = self._xp, cache, self._xp.zeros_like(x)
        for row in metadata:
            old = xp.zeros_like(kept[0]) if row.source < 0 else kept[row.source]
            both = xp.cat([old, x[row.tokens]], 0)  # [conv_width - 1 + tokens, channels]
            count = int(both.shape[0]) - int(old.shape[0])
            y = sum(
                both[n : n + count].float() * weights.conv[:, n].float()
                for n in range(self.spec.conv_width)
            )
            if weights.conv_bias is not None:
                y = y + weights.conv_bias.float()
            out[row.tokens] = y.to(x.dtype)
            kept[row.target] = both[count:]
        return out
