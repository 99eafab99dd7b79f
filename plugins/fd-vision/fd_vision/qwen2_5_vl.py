"""Qwen2.5-VL (transformers: Qwen2_5_VLForConditionalGeneration): Qwen2's decoder behind a vision
tower, with positions on three axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fastdeploy_core.contracts.model import AttentionSpec, MediaRules, ModelShapes
from fastdeploy_core.errors import ConfigError
from fastdeploy_core.models.qwen import Qwen2ForCausalLM
from fastdeploy_core.models.reading import ConfigReader

from .processor import ImageProcessor
from .tower import VisionShape, VisionTower

if TYPE_CHECKING:
    from fastdeploy_core.layers import ForwardContext, ModelBuilder
    from fastdeploy_core.tensor import Tensor
    from fastdeploy_core.types import MediaItem


class Qwen2_5_VLForConditionalGeneration(Qwen2ForCausalLM):
    """One instance per rank."""

    features = frozenset({"embeddings", "positions"})
    rope_theta = 1000000.0

    @classmethod
    def attention(cls, read: ConfigReader, dtype: str) -> AttentionSpec:
        """As Qwen2's, at positions that are not the tokens' indices."""
        return replace(super().attention(read, dtype), offsets=True)

    @staticmethod
    def media(config: Mapping[str, Any], folder: Path, rules: MediaRules) -> ImageProcessor:
        """Pictures alone: a prompt with a video's token is refused."""
        return ImageProcessor.of(config, folder, rules, "image_token_id", "video_token_id")

    @classmethod
    def shapes(cls, config: Mapping[str, Any], tp_size: int, dtype: str) -> ModelShapes:
        """Shapes of one rank's decoder."""
        plain = _decoder(config)
        vision = VisionShape(plain)
        if vision.out != plain.get("hidden_size"):
            raise ConfigError(
                f"vision_config makes vectors of {vision.out}, and the decoder's hidden_size is "
                f"{plain.get('hidden_size')}"
            )
        _axes(config, plain)
        return super().shapes(plain, tp_size, dtype)

    def __init__(self, config: Mapping[str, Any], build: ModelBuilder) -> None:
        plain = _decoder(config)
        # Newer checkpoints name both parts, older ones only the tower.
        build.weights.rename("model.language_model.", "model.")
        build.weights.rename("model.visual.", "visual.")
        super().__init__(plain, build)
        self._build = build
        self._tower = VisionTower(build, "visual", VisionShape(plain))
        self._table = build.cos_sin(self.rotary(ConfigReader(plain, build.tp_size)))
        self._axis_of_column = build.device.to_device(_axes(config, plain))

    def encode(self, items: Sequence[MediaItem]) -> Tensor:
        """[sum of num_rows, hidden]."""
        return self._tower(items)

    def forward(self, input_ids: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        """input_ids: [num_tokens] int64; positions: [num_tokens] or, on three axes,
        [3, num_tokens]. Returns hidden states as DecoderLM.forward."""
        x, residual = self.embedding(input_ids), None
        if context.embedded is not None:
            xp = self._build.xp
            xp.index_copy_(x, 0, context.embedded.tokens, context.embedded.vectors)
        if positions.ndim == 2:
            context.rotary = self._rotary(positions)
            positions = context.batch.positions
        *before, last = self.layers
        for layer in before:
            x, residual = layer(x, residual, positions, context)
        x, residual = last(x, residual, positions, context, context.rows)
        return self.norm.add(x, residual)[0]

    def _rotary(self, positions: Tensor) -> Tensor:
        """[num_tokens, dim]: each column of the layers' table is of one axis' position."""
        xp = self._build.xp
        count = int(positions.shape[1])
        rows = xp.index_select(self._table, 0, positions.reshape([-1]))
        rows = rows.reshape([3, count, -1])
        axis = self._axis_of_column.reshape([1, 1, -1]).expand([1, count, -1])
        return xp.gather(rows, 0, axis).squeeze(0)


def _decoder(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json as Qwen2's decoder reads it: its rotation is the plain one, on three axes."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping) or rope.get("rope_type", rope.get("type", "default")) not in (
        *("default", "mrope"),
    ):
        raise ConfigError(
            f"config.json of this Qwen2.5-VL has rope parameters {rope!r:.80}; possible: the types "
            "default and mrope, with mrope_section"
        )
    theta = rope.get("rope_theta", config.get("rope_theta"))
    plain = {"rope_type": "default"} | ({} if theta is None else {"rope_theta": theta})
    without = {k: v for k, v in config.items() if k not in ("rope_scaling", "rope_parameters")}
    return {**without, "rope_parameters": plain}


def _axes(config: Mapping[str, Any], plain: Mapping[str, Any]) -> np.ndarray:
    """[dim] int64: which axis each column of a rotary table is of, cosines then sines."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    section = rope.get("mrope_section")
    heads, hidden = plain.get("num_attention_heads", 0), plain.get("hidden_size", 0)
    dim = plain.get("head_dim") or hidden // max(1, heads)
    if not isinstance(section, list) or len(section) != 3 or 2 * sum(section) != dim:
        raise ConfigError(
            f"config.json of this Qwen2.5-VL has mrope_section={section!r}; expected three numbers "
            f"that sum to {dim // 2}, half of a head"
        )
    return np.tile(np.repeat(np.arange(3, dtype=np.int64), section), 2)
