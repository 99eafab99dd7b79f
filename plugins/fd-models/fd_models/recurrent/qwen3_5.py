"""Qwen3.5, text (transformers: Qwen3_5ForCausalLM and Qwen3_5MoeForCausalLM): the blocks of
Qwen3-Next, dense or with experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fastdeploy_core.contracts.model import ModelShapes
from fastdeploy_core.layers import Linear, LinearPart, LinearShape
from fastdeploy_core.models.reading import ConfigReader

from .qwen3_next import DELTA_FIELDS, DeltaLM, DeltaNet, Qwen3NextForCausalLM

if TYPE_CHECKING:
    from fastdeploy_core.contracts.model import StateSpec
    from fastdeploy_core.layers import ModelBuilder
    from fastdeploy_core.models.decoder import AttentionLayer
    from fastdeploy_core.tensor import Tensor

_MROPE = ("mrope_section", "mrope_interleaved")  # of positions of pictures; of text all are equal


class DividedDeltaNet(DeltaNet):
    """A gated delta net whose products are four, their rows in plain order."""

    def _place_products(self, build: ModelBuilder, prefix: str, hidden: int) -> None:
        sizes = [part * build.tp_size for part in self.spec.conv_parts]
        parts = [
            LinearPart(f"{prefix}.in_proj_{name}", size, build.piece)
            for name, size in zip("qkv", sizes, strict=True)
        ]
        # The checkpoint has these three joined under the layer's name.
        column = LinearShape(f"{prefix}.in_proj_qkv", parts, hidden, parallel="column")
        self._qkv = Linear(build, column)
        self._z, self._b, self._a = (
            build.linear(
                f"{prefix}.in_proj_{name}", hidden, size, parallel="column", quantize=name == "z"
            )
            for name, size in (
                ("z", sizes[2]),
                *((gate, self.spec.num_heads * build.tp_size) for gate in "ba"),
            )
        )

    def _products(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self._qkv(x), self._z(x), self._b(x), self._a(x)


class _Text(DeltaLM):
    reads = DELTA_FIELDS

    @classmethod
    def shapes(cls, config: Mapping[str, Any], tp_size: int, dtype: str) -> ModelShapes:
        """Shapes of one rank."""
        return super().shapes(_plain(config), tp_size, dtype)

    def __init__(self, config: Mapping[str, Any], build: ModelBuilder) -> None:
        super().__init__(_plain(config), build)

    def recur(
        self, read: ConfigReader, build: ModelBuilder, prefix: str, spec: StateSpec
    ) -> AttentionLayer:
        """A gated delta net."""
        return DividedDeltaNet(build, prefix, read, spec)


class Qwen3_5ForCausalLM(_Text):
    """Dense blocks."""


class Qwen3_5MoeForCausalLM(_Text, Qwen3NextForCausalLM):
    """Experts beside a gated shared one in every block."""

    reads = Qwen3NextForCausalLM.reads


def _plain(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Without what concerns positions of pictures. Models with experts name no width of dense
    blocks, since they have none."""
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rope = dict(config.get(key) or {})
    width = config.get("intermediate_size") or config.get("moe_intermediate_size")
    plain = {name: value for name, value in rope.items() if name not in _MROPE}
    return {**config, key: plain or None, "intermediate_size": width}
