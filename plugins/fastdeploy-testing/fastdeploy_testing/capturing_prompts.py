"""An attention driver whose steps with prompts can be recorded, on a device that records on a
processor."""

from __future__ import annotations

from typing import Any

from .capturing import OnCapturingDevice, RecordableAttention, _Metadata


class RecordablePrompts(RecordableAttention):
    """Steps of any rows, of which the host knows nothing."""

    can_capture_mixed = True

    def prepare(self, batch: Any) -> _Metadata:
        if batch.is_exact or batch.tokens_per_row:
            return super().prepare(batch)
        xp, device = self._xp, self._device.device
        token = xp.arange(batch.num_tokens, dtype=xp.int64, device=device)
        starts = batch.cu_seqlens_q_dev.to(xp.int64)
        behind = starts[1:].unsqueeze(0) <= token.unsqueeze(1)
        row = behind.to(xp.int64).sum(-1)
        row = xp.where(row < batch.num_seqs, row, xp.zeros_like(row))
        nth_last = xp.index_select(starts, 0, row + 1) - token
        width = batch.block_tables.shape[1] * self.block_size
        where = xp.arange(width, dtype=xp.int64, device=device)
        tables = batch.block_tables_dev.to(xp.int64)
        block = xp.index_select(tables, 1, where // self.block_size)
        lengths = batch.seq_lens_dev.to(xp.int64)
        own = xp.index_select(lengths, 0, row) - nth_last
        return _Metadata(
            num_tokens=batch.num_tokens,
            slots=block * self.block_size + where % self.block_size,
            rows=row,
            hidden=where.unsqueeze(0) > own.unsqueeze(1),
            foreign=where.unsqueeze(0) >= lengths.unsqueeze(1),
        )


class WithPrompts(OnCapturingDevice):
    """Plugins as resolved, but on that device and with that driver."""

    def load(self, kind: str, name: str = "") -> Any:
        return RecordablePrompts if kind == "attention" else super().load(kind, name)
