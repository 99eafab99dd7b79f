"""gpt-oss (transformers: GptOssForCausalLM; arXiv 2508.10925)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

from fastdeploy_core.contracts.attention import AttentionSpec
from fastdeploy_core.contracts.moe import RoutingSpec
from fastdeploy_core.contracts.quantizer import LayerSpec, PackingQuantizer
from fastdeploy_core.layers import Linear, LinearPart, LinearShape, Placement
from fastdeploy_core.models.reading import ConfigReader

from .fields import StrictLM

if TYPE_CHECKING:
    from fastdeploy_core.layers import ModelBuilder, RMSNorm
    from fastdeploy_core.models.decoder import MakeFeedForward
    from fastdeploy_core.tensor import Tensor

_OPERATION = "moe_experts_clamped"


class ClampedExperts:
    """Router and experts with biases; clamped.py says what stands between their matrices.

    Ranks hold a share of every expert's width; rows of gate and up alternate, so that a share is
    one piece. Quantized experts stay as they are where the device's cell multiplies with their
    format, and are computed in the model's dtype elsewhere.
    """

    def __init__(self, build: ModelBuilder, prefix: str, read: ConfigReader) -> None:
        self._build = build
        self._experts = build.kernels[_OPERATION]
        self._choose = build.kernels["moe_routing_widened"]
        limit = read.number("swiglu_limit", default=7.0)
        self._alpha_and_limit = read.number("swiglu_alpha", default=1.702), limit
        count, hidden = read.size("num_local_experts"), read.size("hidden_size")
        # Softmax over the chosen logits alone is the softmax over all, scaled to a sum of 1.
        self._routing = RoutingSpec(count, read.size("num_experts_per_tok", "experts_per_token"))
        width = read.size("intermediate_size")
        both, experts, whole = build.piece.of(2 * width), slice(0, count), slice(0, hidden)
        name = f"{prefix}.router"
        router = LinearShape(name, [LinearPart(name, count)], hidden, bias=True, quantize=False)
        self._router, name = Linear(build, router), f"{prefix}.experts"
        self._matrices: dict[str, Any] = {}
        self._read(f"{name}.gate_up_proj", count, hidden, 2 * width, "column")
        shape_2, region_2 = (count, 2 * width), (experts, both)
        self._gate_up_bias = self._weight(f"{name}.gate_up_proj_bias", shape_2, region_2)
        self._read(f"{name}.down_proj", count, width, hidden, "row")
        bias = self._weight(f"{name}.down_proj_bias", (count, hidden), (experts, whole))
        self._down_bias = bias if build.tp_rank == 0 else None  # once in the sum over ranks

    def _read(
        self,
        name: str,
        count: int,
        inputs: int,
        outputs: int,
        parallel: Literal["column", "row"],
    ) -> None:
        """Have all experts' matrix loaded, this rank's part; the checkpoint's may be quantized."""
        build, quantizer = self._build, self._build.quantizer
        mine_in = build.piece.of(inputs) if parallel == "row" else slice(0, inputs)
        mine_out = build.piece.of(outputs) if parallel == "column" else slice(0, outputs)
        sizes = (mine_in.stop - mine_in.start, mine_out.stop - mine_out.start)
        layer = LayerSpec(
            name, "experts", *sizes, count, build.dtype, parallel=parallel, shards=build.tp_size
        )
        key = name.rpartition(".")[2]
        if quantizer is None or not quantizer.supports(layer):
            held = build.empty((count, sizes[1], sizes[0]), build.xp.dtype(build.dtype))

            def accept(tensor: Tensor) -> None:
                held[:] = tensor.transpose(1, 2).to(held.dtype)
                self._matrices[key] = build.kernels.prepare(_OPERATION, held)

            mine = (slice(0, count), mine_in, mine_out)
            build.weights.add(Placement(name, (count, inputs, outputs), mine, accept))
            return
        parameters, stored = quantizer.parameters(layer), dict[str, Any]()

        def collect(suffix: str, tensor: Tensor) -> None:
            stored[suffix] = tensor
            if len(stored) == len(parameters):
                self._matrices[key] = self._prepared(layer, stored)
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
                    partial(collect, suffix),
                    fill="bits" if own.dummy is None else own.dummy,
                    dtype=own.dtype,
                )
            )

    def _prepared(self, layer: LayerSpec, stored: dict[str, Tensor]) -> Any:
        """Packed if the device multiplies with the format, else in the model's dtype."""
        build, quantizer = self._build, self._build.quantizer
        if isinstance(quantizer, PackingQuantizer):
            packed = quantizer.packed(layer, stored)
            if packed is not None and build.kernels.takes(_OPERATION, packed.format.name):
                build.hold(packed.tensors)
                return build.kernels.prepare(_OPERATION, packed)
        sizes = (layer.num_experts, layer.out_features, layer.in_features)
        held = build.empty(sizes, build.xp.dtype(build.dtype))
        for expert in range(layer.num_experts):
            one = {suffix: tensor[expert] for suffix, tensor in stored.items()}
            held[expert] = cast("Any", quantizer).dequantize(layer, one).to(held.dtype)
        return build.kernels.prepare(_OPERATION, held)

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
        given = self._choose(self._router(x), None, self._routing)
        gate_up = self._matrices["gate_up_proj"], self._gate_up_bias
        down = self._matrices["down_proj"], self._down_bias
        y = self._experts(x, *given, *gate_up, *down, *self._alpha_and_limit)
        return self._build.all_reduce(y)

    def after(
        self, norm: RMSNorm, x: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Two addends of t + experts(norm(t)) with t = x + residual."""
        normed, total = norm.add(x, residual)
        return self(normed), total


class GptOssForCausalLM(StrictLM):
    """Windows in every other block, sinks in all; biases; experts whose activation is clamped."""

    norm_eps = 1e-5
    rope_theta = 150_000.0
    qkv_bias = output_bias = "attention_bias"
    defaults = {"attention_bias": True, "sliding_window": 128}  # noqa: RUF012 - never changed
    sliding_window_pattern = 2
    reads = frozenset({"experts_per_token", "swiglu_alpha", "swiglu_limit", "use_sliding_window"})

    @classmethod
    def attention(cls, read: ConfigReader, dtype: str) -> AttentionSpec:
        """With sinks."""
        return replace(super().attention(read, dtype), sinks=True)

    def make_feed_forward(self, read: ConfigReader, dtype: str) -> MakeFeedForward:
        """Experts."""
        make: MakeFeedForward
        make = lambda build, prefix, _: cast("Any", ClampedExperts(build, prefix, read))  # noqa: E731
        return make
