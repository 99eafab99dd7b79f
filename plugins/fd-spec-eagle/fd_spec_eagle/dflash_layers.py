"""The layers of a DFlash checkpoint, and what their attention is told of a step.

    g[t] = norm(W [h_a[t]; h_b[t]; ...])            h: hidden states between the target's blocks
    x = embedding([token[n]; mask; mask; ...]),     n: the place of the newest token, after all t
    x = x + attention(norm(x)),  x = x + feed_forward(norm(x))   in each layer
    token[n + j] ~ head(norm(x[j]))

Every layer attends from all tokens of a block to keys and values that it makes of g[t] for every
t < n, and to those of the whole block, in front and behind (arXiv 2602.06036; z-lab/dflash).

Attention drivers are causal: a row's tokens see those before them. So a layer writes a block's keys
in one call of a driver, and in another the block's tokens attend as further heads of its last one,
which sees all of them. Keys are rotated here, and drivers turn them by nothing: then a row may seem
to have no token before the fed ones where only its keys are to be written.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fastdeploy_core.errors import CapabilityError
from fastdeploy_core.layers import ForwardContext
from fastdeploy_core.models.reading import ConfigReader

from .vocabulary import Vocabulary

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastdeploy_core.contracts.attention import AttentionBatch
    from fastdeploy_core.contracts.small import ExtensibleLM
    from fastdeploy_core.layers import RMSNorm
    from fastdeploy_core.tensor import Tensor

    from .layout import DraftFolder


@dataclass(slots=True)
class Block:
    """What attention is told of one block in each of B rows, of n tokens each."""

    positions: Tensor  # [B * n] int64
    write: ForwardContext  # B rows that feed n tokens
    attend: ForwardContext  # B rows that feed one, the block's last


class BlockAttention:
    """Attention of one layer."""

    def __init__(self, build: Any, prefix: str, read: ConfigReader, size: int) -> None:
        """size: tokens of a block."""
        bias, dim = read.flag("attention_bias", default=False), read.head_dim()
        own = build.gqa(
            prefix,
            read.heads(),
            read.gqa(build.dtype),
            read.rotary(dim),
            qkv_bias=bias,
            output_bias=bias,
        )
        self.qkv, self.output, self.paged = own.qkv, own.output, own.paged
        # The same cache, as the last token of a block sees it for all of them.
        self.wide = copy.copy(own.paged)
        self.wide.spec = replace(own.paged.spec, num_heads=size * own.paged.spec.num_heads)
        self.wide.backend = build.attention(self.wide.spec)
        drivers = type(self.paged.backend), type(self.wide.backend)
        if drivers[0] is not drivers[1] or self.paged.backend.unit == "projections":
            raise CapabilityError(
                f"method 'dflash' needs an attention driver that serves heads of {dim} with "
                f"{own.paged.spec.num_heads} and {self.wide.spec.num_heads} of them over the same "
                f"cache, without the projections around; chosen were {drivers[0].__name__} and "
                f"{drivers[1].__name__}; possible: fewer num_speculative_tokens, or method eagle3"
            )
        eps = read.number("rms_norm_eps", default=1e-6)
        self._q_norm = build.norm(f"{prefix}.q_norm", dim, eps)
        self._k_norm = build.norm(f"{prefix}.k_norm", dim, eps)
        self._qk_norm = build.kernels["qk_norm"]
        self._heads, self._kv_heads, self._dim = (
            own.paged.spec.num_heads, own.paged.spec.num_kv_heads, dim,
        )  # fmt: skip
        self._size = size

    def _turned(self, qkv: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [num_tokens, heads, dim] of these products."""
        end = self._heads + self._kv_heads
        heads = qkv.reshape(qkv.shape[0], end + self._kv_heads, self._dim)
        q, k, v = heads[:, : self._heads], heads[:, self._heads : end], heads[:, end:]
        q, k = self._qk_norm(q, k, self._q_norm.weight, self._k_norm.weight, self._q_norm.eps)
        return (*self.paged.rotate(q, k, positions), v)

    def write(self, states: Tensor, positions: Tensor, context: ForwardContext) -> None:
        """Keys and values of states [num_tokens, hidden] into the cache."""
        q, k, v = self._turned(self.qkv(states), positions)
        self.paged.attend(q, k, v, (k, v), context)

    def attend(self, qkv: Tensor, block: Block) -> Tensor:
        """[B * n, heads * dim] of the products of all blocks' tokens."""
        q, k, v = self._turned(qkv, block.positions)
        self.paged.attend(q, k, v, (k, v), block.write)
        size, kv_heads, dim = self._size, self._kv_heads, self._dim
        rows, group = int(qkv.shape[0]) // size, self._heads // kv_heads
        # Heads of one key head lie beside each other, of each token in turn.
        q = q.reshape(rows, size, kv_heads, group * dim).transpose(1, 2)
        q = q.reshape(rows, kv_heads * size * group, dim)
        k, v = (x.reshape(rows, size, kv_heads, dim)[:, -1].contiguous() for x in (k, v))
        out = self.wide.attend(q, k, v, (k, v), block.attend)
        out = out.reshape(rows, kv_heads, size, group * dim).transpose(1, 2)
        return out.reshape(rows * size, self._heads * dim)


class _Layer:
    """One decoder layer."""

    def __init__(self, build: Any, prefix: str, read: ConfigReader, size: int) -> None:
        hidden, eps = read.size("hidden_size"), read.number("rms_norm_eps", default=1e-6)
        width = read.size("intermediate_size")
        read.divided("intermediate_size", width)
        self._before: RMSNorm = build.norm(f"{prefix}.input_layernorm", hidden, eps)
        self.attention = BlockAttention(build, f"{prefix}.self_attn", read, size)
        self._after: RMSNorm = build.norm(f"{prefix}.post_attention_layernorm", hidden, eps)
        self._feed_forward = build.mlp(f"{prefix}.mlp", hidden, width)

    def __call__(
        self, x: Tensor, residual: Tensor | None, block: Block
    ) -> tuple[Tensor, Tensor | None]:
        attention = self.attention
        qkv, total = attention.qkv.after(self._before, x, residual)
        x, residual = attention.output.add_to(total, attention.attend(qkv, block))
        both: tuple[Tensor, Tensor | None] = self._feed_forward.after(self._after, x, residual)
        return both


class DFlashLayers:
    """All of them, divided among ranks as the target's are."""

    def __init__(self, target: ExtensibleLM, build: Any, draft: DraftFolder, size: int) -> None:
        """build: a layers.ModelBuilder of its own; size: tokens of a block."""
        read = ConfigReader(draft.config, build.tp_size)
        read.require_activation("silu", "swish")
        hidden, eps = read.size("hidden_size"), read.number("rms_norm_eps", default=1e-6)
        self._xp, self._build, self.size = build.xp, build, size
        build.weights.rename("model.", "")
        inputs = len(draft.reads) * draft.target_hidden_size
        self._projection = build.linear("fc", inputs, hidden, quantize=False)
        self._states_norm = build.norm("hidden_norm", hidden, eps)
        self._layers = [
            _Layer(build, f"layers.{number}", read, size)
            for number in range(read.size("num_hidden_layers"))
        ]
        self._norm = build.norm("norm", hidden, eps)
        self.vocabulary = Vocabulary(target, build, draft, read)
        # Turns by nothing: as many cosines of 1, then sines of 0.
        half = read.head_dim() // 2
        table = np.zeros((build.max_positions, 2 * half), np.float32)
        table[:, :half] = 1
        self._unturned = build.device.to_device(table)

    def fill(self, states: Tensor, batch: AttentionBatch, caches: Sequence[Any]) -> None:
        """Write keys and values made of the target's hidden states of all tokens of a step.
        states: [num_tokens, all that are read]."""
        context = self._context(self._alone(batch), caches)
        states = self._states_norm(self._projection(states))
        for layer in self._layers:
            layer.attention.write(states, batch.positions, context)

    def block(self, steps: Sequence[AttentionBatch], caches: Sequence[Any]) -> Block:
        """steps: that feed a block's first token, its second ..., one of each row."""
        xp, last, size = self._xp, steps[-1], self.size
        slots = xp.stack([step.slot_mapping for step in steps], 1)
        positions = xp.stack([step.positions for step in steps], 1).reshape(-1)
        rows = last.num_seqs
        starts = np.arange(rows + 1, dtype=np.int32) * size
        ones = {"dtype": xp.int32, "device": slots.device}
        fits = (last.slot_mapping >= 0).to(xp.int32)  # others are padding rows here
        write = replace(
            last,
            num_tokens=rows * size,
            cu_seqlens_q=starts,
            cu_seqlens_q_dev=xp.arange(0, rows * size + 1, size, **ones),
            seq_lens=np.full_like(last.seq_lens, size) if last.is_exact else last.seq_lens,
            seq_lens_dev=fits * 0 + size if last.is_exact else fits * size,
            slot_mapping=slots.reshape(-1),
            positions=positions,
            tokens_per_row=size,
        )
        attend = self._context(last, caches, self._layers[0].attention.wide)
        return Block(positions, self._context(write, caches), attend)

    def forward(self, ids: Tensor, block: Block, count: int) -> Tensor:
        """ids: [B * n] int64, the blocks' tokens. What the head reads of the first `count` drafts:
        [B * count, hidden]."""
        x, residual = self.vocabulary.embedding(ids), None
        for layer in self._layers:
            x, residual = layer(x, residual, block)
        x, residual = (
            part if part is None else self._drafts(part, count) for part in (x, residual)
        )
        normed, _ = self._norm.add(x, residual)
        return normed

    def _drafts(self, x: Tensor, count: int) -> Tensor:
        width = int(x.shape[1])
        return x.reshape(-1, self.size, width)[:, 1 : 1 + count].reshape(-1, width)

    def _alone(self, batch: AttentionBatch) -> AttentionBatch:
        """The step's rows as if there were nothing before what they feed."""
        xp, starts = self._xp, batch.cu_seqlens_q_dev
        fed = (starts[1:] - starts[:-1]) * (batch.seq_lens_dev > 0).to(xp.int32)
        lens = batch.seq_lens
        if batch.is_exact:
            lens = np.diff(batch.cu_seqlens_q).astype(np.int32)
        return replace(batch, seq_lens=lens, seq_lens_dev=fed)

    def _context(
        self, batch: AttentionBatch, caches: Sequence[Any], paged: Any = None
    ) -> ForwardContext:
        paged = paged or self._layers[0].attention.paged
        metadata = {paged.spec: paged.backend.prepare(batch)}
        return ForwardContext(batch, metadata, list(caches), rotary=self._unturned)
