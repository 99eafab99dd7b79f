"""PaddleOCR-VL (transformers: PaddleOCRVLForConditionalGeneration): ERNIE 4.5's dense decoder,
which turns halves of a head here, after a SigLIP-like tower."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastdeploy_core.contracts.model import MediaRules
from fastdeploy_core.layers import Linear, LinearPart, LinearShape
from fastdeploy_core.models.ernie import Ernie4_5ForCausalLM

from .decoder import VisionLM
from .processor import GridProcessor, image_rule, media_tokens
from .tower import (
    Block,
    LearnedPositions,
    Sequential,
    TowerShape,
    Trunk,
    VisionTower,
    activation,
    linear,
    products,
    tower_shape,
    vision_reader,
)

if TYPE_CHECKING:
    from fastdeploy_core.layers import ModelBuilder
    from fastdeploy_core.tensor import Tensor
    from fastdeploy_core.types import MediaItem

PROJECTOR_EPS = 1e-5


class PaddleOCRTower(VisionTower):
    """Pictures alone; learned positions, and a projector after a norm of its own."""

    @staticmethod
    def read(config: Mapping[str, Any]) -> TowerShape:
        """See VisionTower."""
        return tower_shape(vision_reader(config), frames=1, activation="gelu_pytorch_tanh")

    def __init__(self, build: ModelBuilder, config: Mapping[str, Any]) -> None:
        shape, read = self.read(config), vision_reader(config)
        hidden, self._cell = shape.hidden, shape.cell
        eps, model = read.number("layer_norm_eps", default=1e-6), "visual.vision_model"

        def joined(prefix: str) -> Linear:
            parts = [LinearPart(f"{prefix}.{name}_proj", hidden) for name in ("q", "k", "v")]
            name = f"{prefix}.qkv_proj"
            return Linear(build, LinearShape(name, parts, hidden, bias=True, quantize=False))

        def block(prefix: str) -> Block:
            return Block(
                build,
                shape,
                norms=[build.layer_norm(f"{prefix}.layer_norm{n}", hidden, eps) for n in (1, 2)],
                qkv=joined(f"{prefix}.self_attn"),
                output=linear(build, f"{prefix}.self_attn.out_proj", hidden, hidden),
                mlp=products(
                    build,
                    (f"{prefix}.mlp.fc1", f"{prefix}.mlp.fc2"),
                    (hidden, shape.intermediate, hidden),
                    activation(build.xp, shape.activation),
                ),
            )

        self._trunk = Trunk(
            build,
            shape,
            [block(f"{model}.encoder.layers.{n}") for n in range(shape.depth)],
            weight=f"{model}.embeddings.patch_embedding.weight",
            weight_shape=(hidden, 3, shape.patch, shape.patch),
            bias=f"{model}.embeddings.patch_embedding.bias",
            positions=LearnedPositions(
                build,
                f"{model}.embeddings.position_embedding.weight",
                (read.size("image_size", default=384) // shape.patch) ** 2,
                hidden,
                corners=False,
            ),
        )
        self._norms = Sequential(
            build.layer_norm(f"{model}.post_layernorm", hidden, eps),
            build.layer_norm("mlp_AR.pre_norm", hidden, PROJECTOR_EPS),
        )
        names, widths = [f"mlp_AR.linear_{n}" for n in (1, 2)], (self._cell, self._cell)
        self._project = products(build, names, (*widths, config["hidden_size"]), build.xp.gelu)

    def __call__(self, items: Sequence[MediaItem]) -> Tensor:
        """See VisionTower."""
        (x,) = self._trunk(items)
        return self._project(self._norms(x).reshape([-1, self._cell]))


class PaddleOCRVLForConditionalGeneration(VisionLM, Ernie4_5ForCausalLM):
    """One instance per rank."""

    interleaved = False
    tied = False
    vision = PaddleOCRTower
    tower_names = ("visual.", "mlp_AR.")

    def __init__(self, config: Mapping[str, Any], build: ModelBuilder) -> None:
        # Released checkpoints have them, and the model has no use for them.
        for unused in ("packing_position_embedding", "vision_model.head."):
            build.weights.ignore(unused)
        super().__init__(config, build)

    @staticmethod
    def media(config: Mapping[str, Any], folder: Path, rules: MediaRules) -> GridProcessor:
        """Pictures; the model was not trained on video."""
        rule = image_rule(config, folder, enlarges=True)
        tokens = media_tokens(config, folder, image="image_token_id")
        video = config.get("video_token_id")  # a place that no part can fill
        return GridProcessor(
            rules, rule, None, tokens | ({} if video is None else {"video": video})
        )
