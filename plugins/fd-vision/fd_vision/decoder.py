"""A decoder that sees: any family of the core with grouped-query attention, with vectors in the
place of some tokens and positions on three axes. A family's file says what is its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from fastdeploy_core.contracts.model import AttentionSpec, ModelShapes
from fastdeploy_core.errors import ConfigError
from fastdeploy_core.models.decoder import GroupedQueryLM
from fastdeploy_core.models.reading import ConfigReader

from .tower import VisionTower

if TYPE_CHECKING:
    from fastdeploy_core.layers import ForwardContext, ModelBuilder
    from fastdeploy_core.tensor import Tensor
    from fastdeploy_core.types import MediaItem


class VisionLM(GroupedQueryLM):
    """Stands before the decoder's family among a class' bases. One instance per rank. Without a
    vision_config in config.json (--language-model-only) it has no tower and reads text."""

    features = frozenset({"embeddings", "positions"})
    vision: ClassVar[type[VisionTower]]
    # What names of the tower's tensors contain, and those of the decoder that only pictures need.
    tower_names: ClassVar[tuple[str, ...]] = ("visual.",)
    # How mrope_section deals rotary frequencies to the axes (0 time, 1 row, 2 column). "sections":
    # as many as it says, axis after axis. "interleaved": in turn as far as rows and columns have
    # some, then time. "pairs" (its numbers are of rows, columns, time): rows and columns in turn,
    # then time.
    axes: ClassVar[Literal["sections", "interleaved", "pairs"]] = "sections"

    @classmethod
    def attention(cls, read: ConfigReader, dtype: str) -> AttentionSpec:
        """The decoder's, at positions that are not the tokens' indices."""
        return replace(super().attention(read, dtype), offsets=True)

    @classmethod
    def shapes(cls, config: Mapping[str, Any], tp_size: int, dtype: str) -> ModelShapes:
        """Shapes of one rank's decoder."""
        plain = plain_rotary(config)
        if sees(config):
            cls.vision.read(plain)
        axis_of_columns(config, cls.axes)
        return super().shapes(plain, tp_size, dtype)

    def __init__(self, config: Mapping[str, Any], build: ModelBuilder) -> None:
        plain = plain_rotary(config)
        # Newer checkpoints name both parts, older ones only the tower.
        build.weights.rename("model.language_model.", "model.")
        build.weights.rename("model.visual.", "visual.")
        super().__init__(plain, build)
        self._xp = build.xp
        if not sees(config):
            self.features = frozenset()
            for name in self.tower_names:
                build.weights.ignore(name)
            return
        self._tower = self.vision(build, plain)
        if self._tower.levels >= len(self.layers):
            raise ConfigError(
                f"vision_config has vectors for {self._tower.levels} layers of the decoder, which "
                f"has {len(self.layers)}; at least one more is needed"
            )
        self.vector_width = (1 + self._tower.levels) * self._hidden
        self._table = build.cos_sin(self.rotary(ConfigReader(plain, build.tp_size)))
        self._axis_of_column = build.device.to_device(axis_of_columns(config, self.axes))

    def encode(self, items: Sequence[MediaItem]) -> Tensor:
        """[sum of num_rows, hidden], wider if the tower has levels."""
        return self._tower(items)

    def forward(self, input_ids: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        """input_ids: [num_tokens] int64; positions: [num_tokens] or, on three axes,
        [3, num_tokens]. Returns hidden states as DecoderLM.forward."""
        x, residual = self.embedding(input_ids), None
        embedded, levels, parts = context.embedded, 0, list[Any]()
        if embedded is not None:
            levels, hidden = self._tower.levels, self._hidden
            parts = [
                embedded.vectors[:, n * hidden : (n + 1) * hidden].contiguous()
                for n in range(1 + levels)
            ]
            self._xp.index_copy_(x, 0, embedded.tokens, parts[0])
        if positions.ndim == 2:
            context.rotary = self._rotary(positions)
            positions = context.batch.positions
        *before, last = self.layers
        for number, layer in enumerate(before):
            x, residual = layer(x, residual, positions, context)
            if embedded is not None and number < levels:
                self._xp.index_add_(x, 0, embedded.tokens, parts[1 + number])
        x, residual = last(x, residual, positions, context, context.rows)
        return self.norm.add(x, residual)[0]

    def _rotary(self, positions: Tensor) -> Tensor:
        """[num_tokens, dim]: each column of the layers' table is of one axis' position."""
        xp, count = self._xp, int(positions.shape[1])
        rows = xp.index_select(self._table, 0, positions.reshape([-1]))
        rows = rows.reshape([3, count, -1])
        axis = self._axis_of_column.reshape([1, 1, -1]).expand([1, count, -1])
        return xp.gather(rows, 0, axis).squeeze(0)


def sees(config: Mapping[str, Any]) -> bool:
    """Whether the model is asked for with its tower."""
    return config.get("vision_config", ...) is not None


def plain_rotary(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json as the decoder's family reads it: its rotation is that of one axis, the same on
    all three. Older folders have the type mrope, which is the plain one, and name a rule for longer
    contexts (yarn) in its place."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise ConfigError(
            f"config.json of this {_name(config)} has rope parameters {rope!r:.80}; possible: an "
            "object with mrope_section"
        )
    kind = rope.get("rope_type", rope.get("type")) or "default"
    plain = {k: v for k, v in rope.items() if k not in ("type", "mrope_section")}
    plain["rope_type"] = "default" if kind == "mrope" else kind
    if "rope_theta" not in plain and config.get("rope_theta") is not None:
        plain["rope_theta"] = config["rope_theta"]
    without = {k: v for k, v in config.items() if k not in ("rope_scaling", "rope_parameters")}
    return {**without, "rope_parameters": plain}


def axis_of_columns(config: Mapping[str, Any], axes: str) -> np.ndarray:
    """[dim] int64: which axis each column of a rotary table is of, cosines then sines."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    half = ConfigReader(config).head_dim() // 2
    section = rope.get("mrope_section")
    if axes == "pairs" and section is None and isinstance(config.get("freq_allocation"), int):
        # ERNIE's released folders: how many are of time.
        time = config["freq_allocation"]
        section = [(half - time) // 2, (half - time) // 2, time]
    if not isinstance(section, list) or len(section) != 3 or sum(section) != half:
        raise ConfigError(
            f"config.json of this {_name(config)} has mrope_section={section!r}; expected three "
            f"numbers that sum to {half}, half of a head"
        )
    if axes == "pairs" and section[0] != section[1]:
        raise ConfigError(
            f"config.json of this {_name(config)} has mrope_section={section!r}; rows and columns "
            "take turns and need as many"
        )
    number = np.arange(half)
    if axes == "sections":
        found = np.repeat(np.arange(3), section)
    elif axes == "interleaved":
        turn = number % 3
        found = np.where(number < 3 * np.array(section)[turn], turn, 0)
    else:
        found = np.where(number < half - section[2], 1 + number % 2, 0)
    return np.tile(found.astype(np.int64), 2)


def _name(config: Mapping[str, Any]) -> str:
    return str((config.get("architectures") or ["model"])[0])
