"""gpt-oss (transformers: GptOssForCausalLM; arXiv 2508.10925)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from fastdeploy_core.contracts.attention import AttentionSpec
from fastdeploy_core.contracts.quantizer import LayerSpec
from fastdeploy_core.layers import Placement
from fastdeploy_core.models.reading import ConfigReader

from .fields import StrictLM

if TYPE_CHECKING:
    from fastdeploy_core.layers import ModelBuilder, RMSNorm
    from fastdeploy_core.models.decoder import MakeFeedForward
    from fastdeploy_core.tensor import Tensor

# Tokens up to which a device that captures steps is not asked which experts were chosen.
MOST_AT_ONCE = 1024


class ClampedExperts:
    """Experts with biases, between whose matrices stands (clamp(up) + 1) * gate *
    sigmoid(alpha * gate), gate cut at the limit, too. Softmax is over the chosen logits alone.

    Plain tensor code: no kernel of a device takes these experts yet. Ranks hold a share of every
    expert's width; rows of gate and up alternate, so that a share is one piece.
    """

    def __init__(self, build: ModelBuilder, prefix: str, read: ConfigReader) -> None:
        self._xp, self._build = build.xp, build
        self._top_k = read.size("num_experts_per_tok", "experts_per_token")
        self._limit = read.number("swiglu_limit", default=7.0)
        self._alpha = read.number("swiglu_alpha", default=1.702)
        count, hidden = read.size("num_local_experts"), read.size("hidden_size")
        width = read.size("intermediate_size")
        both, experts, whole = build.piece.of(2 * width), slice(0, count), slice(0, hidden)
        self._router = self._weight(f"{prefix}.router.weight", (count, hidden), (experts, whole))
        self._router_bias = self._weight(f"{prefix}.router.bias", (count,), (experts,))
        name = f"{prefix}.experts"
        self._gate_up = self._matrices(f"{name}.gate_up_proj", count, hidden, 2 * width, "column")
        shape_2, region_2 = (count, 2 * width), (experts, both)
        self._gate_up_bias = self._weight(f"{name}.gate_up_proj_bias", shape_2, region_2)
        self._down = self._matrices(f"{name}.down_proj", count, width, hidden, "row")
        bias = self._weight(f"{name}.down_proj_bias", (count, hidden), (experts, whole))
        self._down_bias = bias if build.tp_rank == 0 else None  # once in the sum over ranks

    def _matrices(
        self,
        name: str,
        count: int,
        inputs: int,
        outputs: int,
        parallel: Literal["column", "row"],
    ) -> Tensor:
        """[experts, inputs, outputs] of this rank, in the model's dtype; the checkpoint's may be
        quantized."""
        build, quantizer = self._build, self._build.quantizer
        mine_in = build.piece.of(inputs) if parallel == "row" else slice(0, inputs)
        mine_out = build.piece.of(outputs) if parallel == "column" else slice(0, outputs)
        sizes = (mine_in.stop - mine_in.start, mine_out.stop - mine_out.start)
        layer = LayerSpec(
            name, "experts", *sizes, count, build.dtype, parallel=parallel, shards=build.tp_size
        )
        if quantizer is None or not quantizer.supports(layer):
            return self._weight(
                name, (count, inputs, outputs), (slice(0, count), mine_in, mine_out)
            )
        held = build.empty((count, *sizes), build.xp.dtype(build.dtype))
        parameters, stored = quantizer.parameters(layer), dict[str, Any]()

        def accept(suffix: str, tensor: Tensor) -> None:
            stored[suffix] = tensor
            if len(stored) == len(parameters):
                for expert in range(count):
                    one = {key: value[expert] for key, value in stored.items()}
                    held[expert] = quantizer.dequantize(layer, one).transpose(0, 1).to(held.dtype)
                stored.clear()

        for suffix, own in parameters.items():
            shape, region = list(own.shape), [slice(0, size) for size in own.shape]
            if own.shard_dim is not None:
                shape[own.shard_dim] *= build.tp_size
                region[own.shard_dim] = build.piece.of(shape[own.shard_dim])
            build.weights.add(
                Placement(
                    f"{name}_{suffix}",
                    tuple(shape),
                    tuple(region),
                    partial(accept, suffix),
                    fill="bits" if own.dummy is None else own.dummy,
                    dtype=own.dtype,
                )
            )
        return held

    def _weight(self, name: str, shape: tuple[int, ...], region: tuple[slice, ...]) -> Tensor:
        build = self._build
        sizes = tuple(part.stop - part.start for part in region)
        held = build.empty(sizes, build.xp.dtype(build.dtype))

        def accept(tensor: Tensor) -> None:
            held[:] = tensor.to(held.dtype)

        build.weights.add(Placement(name, shape, region, accept))
        return held

    def __call__(self, x: Tensor) -> Tensor:
        """x: [num_tokens, hidden], model dtype; so is the result."""
        xp = self._xp
        logits = xp.linear(x, self._router) + self._router_bias
        chosen, ids = xp.topk(logits, self._top_k, -1)
        shares = xp.softmax(chosen, -1)
        if self._build.device.limits.graph_capture and x.shape[0] <= MOST_AT_ONCE:
            return self._build.all_reduce(self._at_once(x, ids, shares).to(x.dtype))
        total = xp.zeros(list(x.shape), dtype=xp.float32, device=x.device)
        chosen_ids = xp.to_numpy(ids)
        for expert in np.unique(chosen_ids).tolist():
            tokens, nth = np.nonzero(chosen_ids == expert)
            rows = self._build.device.to_device(tokens)
            places = self._build.device.to_device(tokens * self._top_k + nth)
            share = xp.index_select(shares.reshape([-1]), 0, places).unsqueeze(1)
            y = self._run(xp.index_select(x, 0, rows), itemgetter(expert)) * share
            total = xp.index_add_(total, 0, rows, y.float())
        return self._build.all_reduce(total.to(x.dtype))

    def _at_once(self, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        """[num_tokens, hidden] float32, without asking the device who chose what, as captured steps
        need it: by copies of the chosen experts while those are few, else by all experts."""
        xp, (tokens, top_k), count = self._xp, ids.shape, self._gate_up.shape[0]
        if 3 * tokens * top_k <= count:
            flat = ids.reshape([-1])
            each = xp.repeat_interleave(x, top_k, 0).unsqueeze(1)
            y = self._run(each, lambda w: _rows(xp.index_select(w, 0, flat)))
            return (y.reshape([tokens, top_k, -1]).float() * shares.float().unsqueeze(-1)).sum(1)
        experts = xp.arange(count, dtype=ids.dtype, device=ids.device)
        is_chosen = (ids.unsqueeze(-1) == experts).to(shares.dtype)  # [tokens, top_k, experts]
        share = (is_chosen * shares.unsqueeze(-1)).sum(1).float().transpose(0, 1)
        y = self._run(x.unsqueeze(0).expand([count, *x.shape]), _rows)
        return (y.float() * share.unsqueeze(-1)).sum(0)

    def _run(self, x: Tensor, of: Callable[[Tensor], Tensor]) -> Tensor:
        """[..., tokens, hidden] by the experts that `of` takes from all experts' tensors."""
        xp, limit = self._xp, self._limit
        both = xp.matmul(x, of(self._gate_up)) + of(self._gate_up_bias)
        gate, up = both[..., 0::2], both[..., 1::2]
        gate, up = xp.clamp(gate, None, limit), xp.clamp(up, -limit, limit)
        hidden = (up + 1) * gate * xp.sigmoid(gate * self._alpha)
        y = xp.matmul(hidden, of(self._down))
        return y if self._down_bias is None else y + of(self._down_bias)

    def after(
        self, norm: RMSNorm, x: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Two addends of t + experts(norm(t)) with t = x + residual."""
        normed, total = norm.add(x, residual)
        return self(normed), total


def _rows(x: Tensor) -> Tensor:
    """Biases [experts, n] as [experts, 1, n], to be added to every token; matrices as they are."""
    return x.unsqueeze(1) if x.ndim == 2 else x


class GptOssForCausalLM(StrictLM):
    """Windows in every other block, sinks in all; biases; experts whose activation is clamped."""

    qkv_bias = output_bias = "attention_bias"
    reads = frozenset({"experts_per_token", "swiglu_alpha", "swiglu_limit", "use_sliding_window"})

    @classmethod
    def has_window(cls, read: ConfigReader, number: int) -> bool:
        """Every other block, the first included."""
        return number % 2 == 0

    @classmethod
    def attention(cls, read: ConfigReader, dtype: str) -> AttentionSpec:
        """With sinks."""
        return replace(super().attention(read, dtype), sinks=True)

    def make_feed_forward(self, read: ConfigReader, dtype: str) -> MakeFeedForward:
        """Experts."""
        make: MakeFeedForward
        make = lambda build, prefix, _: cast("Any", ClampedExperts(build, prefix, read))  # noqa: E731
        return make
