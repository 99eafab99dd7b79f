"""Reference attention for steps in which every row feeds the same number of tokens: captured and
padded steps.

The queued operations depend only on the shapes of the batch: every row attends to its whole block
table, and a mask, computed from numbers on the device, hides what it must not see.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastdeploy_core.contracts.attention import AttentionBatch
    from fastdeploy_core.tensor import Tensor

    from .attention_plan import Heads

# Query tokens of a row whose scores are held at once.
MAX_CHUNK = 512
NEVER = -1e30


@dataclass(slots=True)
class FixedStep:
    """B rows of L tokens that see K keys each."""

    num_rows: int
    num_tokens: int  # of each row
    kv_rows: Tensor  # [B * H * K] rows of the pool; after a row's end its last one is repeated
    mask: Tensor  # [B, 1, L, 1, K] float32
    is_real: Tensor  # [B, 1, 1] bool


def prepare(xp: Any, batch: AttentionBatch, heads: Heads) -> FixedStep:
    """Runs on the device; nothing waits for it."""
    rows, tokens, device = batch.num_seqs, batch.tokens_per_row, batch.seq_lens_dev.device
    num_keys = batch.block_tables.shape[1] * heads.block_size
    position = xp.arange(num_keys, dtype=xp.int64, device=device)
    ends = batch.seq_lens_dev.to(xp.int64).reshape([rows, 1])
    stored = (
        (batch.slot_mapping >= 0).to(xp.int64).reshape([rows, tokens]).sum(1).reshape([rows, 1])
    )
    last = xp.clamp(ends - tokens + stored - 1, 0)  # later positions have not been written
    where = xp.minimum(position.reshape([1, num_keys]).expand([rows, num_keys]), last)
    tables = batch.block_tables_dev.to(xp.int64)
    block = xp.gather(tables, 1, where // heads.block_size)
    slots = block * heads.block_size + where % heads.block_size
    head = xp.arange(heads.num_kv_heads, dtype=xp.int64, device=device).reshape([1, -1, 1])
    kv_rows = slots.reshape([rows, 1, num_keys]) * heads.num_kv_heads + head
    own = ends - tokens + xp.arange(tokens, dtype=xp.int64, device=device).reshape([1, tokens])
    hidden = position.reshape([1, 1, num_keys]) > own.reshape([rows, tokens, 1])
    return FixedStep(
        num_rows=rows,
        num_tokens=tokens,
        kv_rows=kv_rows.reshape([-1]),
        mask=(hidden.float() * NEVER).reshape([rows, 1, tokens, 1, num_keys]),
        is_real=(ends > 0).reshape([rows, 1, 1]),
    )


def attend(
    xp: Any,
    step: FixedStep,
    heads: Heads,
    queries: Tensor,
    read: Callable[[int, Tensor], Tensor],
    value_dim: int,
    weigh: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """[tokens, num_heads * value_dim] float32. queries: [tokens, num_heads, dim] float32, scaled;
    read(i, rows): rows of cache tensor i (0: keys, 1: values) as float32; weigh(scores, mask):
    their softmax."""
    rows, tokens, kv_heads = step.num_rows, step.num_tokens, heads.num_kv_heads
    lanes, dim = rows * kv_heads, queries.shape[-1]
    keys = read(0, step.kv_rows).reshape([lanes, -1, dim])
    values = read(1, step.kv_rows).reshape([lanes, keys.shape[1], -1])
    folded = queries.reshape([rows, tokens, kv_heads, heads.group, dim]).transpose(1, 2)
    parts = []
    for begin in range(0, tokens, MAX_CHUNK):
        count = min(MAX_CHUNK, tokens - begin)
        part = folded[:, :, begin : begin + count].reshape([lanes, count * heads.group, dim])
        scores = xp.matmul_nt(part, keys)
        shape = [rows, kv_heads, count, heads.group, keys.shape[1]]
        weights = weigh(scores.reshape(shape), step.mask[:, :, begin : begin + count])
        weights = weights.reshape([lanes, count * heads.group, keys.shape[1]])
        out = xp.matmul(weights, values)[..., :value_dim]
        out = out.reshape([rows, kv_heads, count, heads.group, value_dim]).transpose(1, 2)
        parts.append(out.reshape([rows, count, heads.num_heads * value_dim]))
    out = parts[0] if len(parts) == 1 else xp.cat(parts, 1)
    nothing = xp.zeros_like(out)
    out = xp.where(step.is_real, out, nothing)
    return out.reshape([rows * tokens, int(np.prod(out.shape[2:]))])
