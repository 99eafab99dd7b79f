"""Qwen2.5-VL (transformers: Qwen2_5_VLForConditionalGeneration): Qwen2's decoder after a tower
most of whose layers see windows, with positions on three axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastdeploy_core.contracts.model import MediaRules
from fastdeploy_core.errors import ConfigError
from fastdeploy_core.layers import Linear, LinearPart, LinearShape
from fastdeploy_core.models.qwen import Qwen2ForCausalLM
from fastdeploy_core.models.reading import ConfigReader

from .decoder import VisionLM
from .patches import PatchRule
from .processor import GridProcessor, Made, Written, image_rule, media_tokens
from .tower import (
    Block,
    TowerShape,
    Trunk,
    VisionTower,
    activation,
    linear,
    products,
    tower_shape,
    vision_reader,
)
from .video import VideoRule, read_video_rule

if TYPE_CHECKING:
    from fastdeploy_core.layers import ModelBuilder
    from fastdeploy_core.tensor import Tensor
    from fastdeploy_core.types import MediaItem

EPS = 1e-6
ALIGNED = 64  # numbers of a row that products of GPUs read at a time


class GatedMLP:
    """down(act(gate(x)) * up(x)), all with biases.

    Released towers are 3,420 wide between the products. Rows of so many 16-bit numbers do not begin
    at multiples of 16 bytes, and GPUs multiply them at a fraction of their speed; so they end in
    zeros."""

    def __init__(self, build: ModelBuilder, prefix: str, shape: TowerShape) -> None:
        hidden, wide = shape.hidden, shape.intermediate
        more = -wide % ALIGNED
        parts = [LinearPart(f"{prefix}.{n}_proj", wide, padding=more) for n in ("gate", "up")]
        name, is_silu = f"{prefix}.gate_up_proj", shape.activation == "silu"
        self._gate_up = Linear(
            build, LinearShape(name, parts, hidden, bias=True, gated=is_silu, quantize=False)
        )
        self._act = None if is_silu else activation(build.xp, shape.activation)
        name = f"{prefix}.down_proj"
        parts = [LinearPart(name, hidden)]
        self._down = Linear(
            build, LinearShape(name, parts, wide, bias=True, quantize=False, padding=more)
        )

    def __call__(self, x: Tensor) -> Tensor:
        """x: [n, hidden]; so is the result."""
        y = self._gate_up(x)
        if self._act is not None:
            half = int(y.shape[1]) // 2
            y = self._act(y[:, :half]) * y[:, half:]
        return self._down(y)


class Qwen2_5Tower(VisionTower):
    """Frame pairs, windows, a merger after an RMSNorm."""

    @staticmethod
    def read(config: Mapping[str, Any]) -> TowerShape:
        """See VisionTower."""
        read = vision_reader(config)
        check_sizes(read, config)
        cell = read.size("patch_size") * read.size("spatial_merge_size", default=2)
        window = read.size("window_size", default=112) // cell
        if window < 1:
            raise ConfigError(f"vision_config has windows smaller than a cell of {cell} pixels")
        full = frozenset(read.config.get("fullatt_block_indexes") or ())
        return tower_shape(read, frames=2, activation="silu", window=window, full=full)

    def __init__(self, build: ModelBuilder, config: Mapping[str, Any]) -> None:
        shape = self.read(config)
        hidden, self._cell = shape.hidden, shape.cell

        def block(prefix: str) -> Block:
            return Block(
                build,
                shape,
                norms=[build.norm(f"{prefix}.norm{n}", hidden, EPS) for n in (1, 2)],
                qkv=linear(build, f"{prefix}.attn.qkv", hidden, 3 * hidden),
                output=linear(build, f"{prefix}.attn.proj", hidden, hidden),
                mlp=GatedMLP(build, f"{prefix}.mlp", shape),
            )

        self._trunk = Trunk(
            build,
            shape,
            [block(f"visual.blocks.{n}") for n in range(shape.depth)],
            weight="visual.patch_embed.proj.weight",
            weight_shape=(hidden, 3, shape.frames, shape.patch, shape.patch),
        )
        self._norm = build.norm("visual.merger.ln_q", hidden, EPS)
        names, widths = [f"visual.merger.mlp.{n}" for n in (0, 2)], (self._cell, self._cell)
        self._merge = products(build, names, (*widths, config["hidden_size"]), build.xp.gelu)

    def __call__(self, items: Sequence[MediaItem]) -> Tensor:
        """See VisionTower."""
        (x,) = self._trunk(items)
        return self._merge(self._norm(x).reshape([-1, self._cell]))


def check_sizes(read: ConfigReader, config: Mapping[str, Any]) -> None:
    """ConfigError if a tower's patches are not of two frames, or its vectors are not as wide as the
    decoder. read: of vision_config."""
    if read.config.get("temporal_patch_size") not in (None, 2):
        raise ConfigError(
            f"vision_config has temporal_patch_size={read.config['temporal_patch_size']!r}; "
            "possible: 2"
        )
    width = read.config.get("out_hidden_size")
    if width not in (None, config.get("hidden_size")):
        raise ConfigError(
            f"vision_config makes vectors of {width}, and the decoder's hidden_size is "
            f"{config.get('hidden_size')}"
        )


class Qwen2_5Processor(GridProcessor):
    """The frames of a video are as far apart on the axis of time as they are in seconds."""

    def __init__(
        self,
        rules: MediaRules,
        image: PatchRule,
        video: VideoRule,
        tokens: Mapping[str, int],
        positions_per_second: float,
    ) -> None:
        super().__init__(rules, image, video, tokens)
        self._per_second = positions_per_second

    def write(self, written: Written, made: Made, ids: list[int]) -> None:
        """See GridProcessor."""
        step = made.pair_s * self._per_second
        written.vectors(self.tokens[made.kind], made, made.items, step)


class Qwen2_5_VLForConditionalGeneration(VisionLM, Qwen2ForCausalLM):
    """One instance per rank."""

    rope_theta = 1000000.0
    vision = Qwen2_5Tower

    @staticmethod
    def media(config: Mapping[str, Any], folder: Path, rules: MediaRules) -> GridProcessor:
        """Pictures and videos."""
        image = image_rule(config, folder)
        video = read_video_rule(folder, image, sampling="even", is_joined=True, counts_all=False)
        tokens = media_tokens(config, folder, image="image_token_id", video="video_token_id")
        per_second = vision_reader(config).number("tokens_per_second", default=4.0)
        return Qwen2_5Processor(rules, image, video, tokens, per_second)
