"""ERNIE 4.5 VL (transformers: Ernie4_5_VLMoeForConditionalGeneration): ERNIE 4.5's mixture of
experts with a second set of experts for the tokens of pictures and videos.

Which set a token visits follows from the token alone: placeholders, and the tokens of start and end
around them, visit the vision experts; all others, and all that the model generates, visit the text
experts. So a step without pictures computes the text experts alone. An item's vectors therefore
begin and end with the embeddings of start and end: whatever comes as a vector is for the vision
experts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import numpy as np

from fastdeploy_core.contracts.model import MediaRules, ModelShapes, StoredTensor
from fastdeploy_core.errors import ConfigError
from fastdeploy_core.models.ernie import Ernie4_5_MoeForCausalLM
from fastdeploy_core.models.reading import ConfigReader

from .decoder import VisionLM, plain_rotary, sees
from .positions import Run
from .processor import GridProcessor, Made, Place, Written, image_rule
from .qwen3_vl import Swapped
from .tower import (
    Block,
    Sequential,
    TowerShape,
    Trunk,
    VisionTower,
    layer_norm_block,
    linear,
    products,
    tower_shape,
    vision_reader,
)
from .video import read_video_rule

if TYPE_CHECKING:
    from fastdeploy_core.layers import ForwardContext, ModelBuilder, MoEBlock, RMSNorm
    from fastdeploy_core.tensor import Tensor
    from fastdeploy_core.types import MediaItem

EXPERT = re.compile(r"\.mlp\.experts\.(\d+)\.")
# Between start and end a template writes a placeholder, as one token or as text.
MAX_PLACE = 16
FONT = "Roboto-Regular.ttf"
# Where the folder only speaks of pictures: pixels of a frame, and frames of a video.
FRAME_PIXELS, FRAMES = (299 * 28 * 28, 1196 * 28 * 28), (16, 180)
MARKS = {
    "image": ("<|IMAGE_START|>", "<|IMAGE_END|>"),
    "video": ("<|VIDEO_START|>", "<|VIDEO_END|>"),
}


class ErnieTower(VisionTower):
    """A tower that sees single frames, and a resampler that joins cells, then frame pairs; a
    picture is paired with itself."""

    @staticmethod
    def read(config: Mapping[str, Any]) -> TowerShape:
        """See VisionTower."""
        read = vision_reader(config)
        if read.size("temporal_merge_size", "temporal_conv_size", default=2) != 2:
            raise ConfigError("vision_config joins other than two frames; possible: 2")
        return tower_shape(read, frames=1, activation="quick_gelu")

    def __init__(self, build: ModelBuilder, config: Mapping[str, Any]) -> None:
        shape, read = self.read(config), vision_reader(config)
        self._cell = shape.cell
        self._patches = shape.merge**2  # of a cell
        self._xp, self._to_device = build.xp, build.device.to_device
        eps, model = read.number("rms_norm_eps", default=1e-6), "model.vision_model"

        def block(prefix: str) -> Block:
            return layer_norm_block(build, shape, prefix, eps, ("fc1", "fc2"))

        def joined(prefix: str, width: int) -> Sequential:
            names, widths = (f"{prefix}.0", f"{prefix}.2"), (width, shape.cell, shape.cell)
            return Sequential(
                products(build, names, widths, build.xp.gelu),
                build.layer_norm(f"{prefix}.3", shape.cell, eps),
            )

        self._trunk = Trunk(
            build,
            shape,
            [block(f"{model}.blocks.{n}") for n in range(shape.depth)],
            weight=f"{model}.patch_embed.proj.weight",
            weight_shape=(shape.hidden, 3 * shape.patch**2),
        )
        self._norm = build.layer_norm(f"{model}.ln", shape.hidden, eps)
        resampler, width = "model.resampler_model", config["hidden_size"]
        self._cells = joined(f"{resampler}.spatial_linear", shape.cell)
        self._pairs = Sequential(
            joined(f"{resampler}.temporal_linear", 2 * shape.cell),
            linear(build, f"{resampler}.mlp", shape.cell, width),
            build.norm(
                f"{resampler}.after_norm",
                width,
                ConfigReader(config).number("rms_norm_eps", default=1e-6),
            ),
        )

    def __call__(self, items: Sequence[MediaItem]) -> Tensor:
        """See VisionTower; without the vectors of start and end."""
        (x,) = self._trunk(items)
        cells = self._cells(self._norm(x).reshape([-1, self._cell]))
        firsts, seconds, at = [], [], 0
        for item in items:
            frames, rows, columns = item.grid
            count = rows * columns // self._patches
            firsts.append(np.arange(at, at + count))
            seconds.append(firsts[-1] + (count if frames == 2 else 0))
            at += frames * count
        pair = [
            self._xp.index_select(cells, 0, self._to_device(np.concatenate(index)))
            for index in (firsts, seconds)
        ]
        return self._pairs(self._xp.cat(pair, -1))


class Routes:
    """Which tokens of the step visit the vision experts; written by the model, read by its
    blocks."""

    # Text tokens and vision tokens, [n] int64 each; None: all are text.
    divided: tuple[Tensor, Tensor] | None = None


class ModalityExperts:
    """Text and vision experts, with shared ones that all tokens visit."""

    def __init__(
        self, build: ModelBuilder, text: MoEBlock, vision: MoEBlock, routes: Routes
    ) -> None:
        self._xp, self._text, self._vision, self._routes = build.xp, text, vision, routes
        # Engines that share experts compute all in each step: others may have tokens for them.
        ranks = build.expert_ranks
        self._calls_all = ranks is not None and ranks.most_recorded == 0

    def after(
        self, norm: RMSNorm, x: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """See MoEBlock.after."""
        if self._routes.divided is None and not self._calls_all:
            return self._text.after(norm, x, residual)
        xp, (normed, total) = self._xp, norm.add(x, residual)
        if self._routes.divided is None:
            result = self._text(normed)
            self._vision(normed[:0])
            return result, total
        result = xp.empty_like(normed)
        for block, index in zip((self._text, self._vision), self._routes.divided, strict=True):
            if int(index.shape[0]) or self._calls_all:
                made = block(xp.index_select(normed, 0, index))
                xp.index_copy_(result, 0, index, made)
        return result, total


class Ernie4_5_VLMoeForConditionalGeneration(VisionLM, Ernie4_5_MoeForCausalLM):
    """One instance per rank."""

    head_bias: ClassVar[str | bool] = False  # unlike the text family, whatever use_bias says
    vision = ErnieTower
    tower_names = (".vision_model.", ".resampler_model.", ".mlp.vision.")
    axes = "pairs"

    @classmethod
    def shapes(cls, config: Mapping[str, Any], tp_size: int, dtype: str) -> ModelShapes:
        """Shapes of one rank's decoder, with its text experts."""
        rope = plain_rotary(config)["rope_parameters"]
        if rope["rope_type"] != "default":
            raise ConfigError(
                f"config.json of this ERNIE has rope_type={rope['rope_type']!r}; possible: default"
            )
        return super().shapes(one_set(config), tp_size, dtype)

    def __init__(self, config: Mapping[str, Any], build: ModelBuilder) -> None:
        self._routes, self._device = Routes(), build.device
        self._num_experts = one_set(config)["moe_num_experts"]
        super().__init__(one_set(config), build)
        self.vector_width = 0  # the host divides a step's tokens between two sets of experts

    def make_feed_forward(self, read: ConfigReader, dtype: str) -> Any:
        """Two sets of experts, or a dense block."""
        dense = super(Ernie4_5_MoeForCausalLM, self).make_feed_forward(read, dtype)
        widths, sparse = read.config["expert_widths"], set(read.config["sparse_layers"])
        sets = [
            (
                self.moe(
                    ConfigReader({**read.config, "moe_intermediate_size": w}, read.tp_size), dtype
                ),
                w,
            )
            for w in widths
        ]
        shared_width = widths[0] * read.count("moe_num_shared_experts", default=0)
        bias = read.flag("use_bias", default=False)
        kinds = ("", ".vision") if sees(read.config) else ("",)

        def make(build: ModelBuilder, prefix: str, number: int) -> Any:
            if number not in sparse:
                return dense(build, prefix, number)
            shared = None
            if shared_width:
                shared = build.mlp(
                    f"{prefix}.shared_experts", read.size("hidden_size"), shared_width, bias=bias,
                    reduce=False,
                )  # fmt: skip
            text, *vision = (
                build.moe_block(
                    name,
                    spec,
                    width,
                    shared=shared,
                    bias_name=f"{name}.moe_statics.e_score_correction_bias"
                    if spec.routing.has_correction_bias
                    else "",
                    bias_shape=(1, spec.routing.num_experts),
                )
                for name, (spec, width) in zip([prefix + k for k in kinds], sets, strict=False)
            )
            return ModalityExperts(build, text, vision[0], self._routes) if vision else text

        return make

    def encode(self, items: Sequence[MediaItem]) -> Tensor:
        """[sum of num_rows, hidden]: vectors, with the embeddings of start and end around them."""
        rows = self._tower(items)
        marks: list[int] = []
        order: list[np.ndarray] = []
        first, behind = 0, int(rows.shape[0])
        for item in items:
            start, end = (int(token) for token in item.numbers[6:8])
            count = item.num_rows - (start >= 0) - (end >= 0)
            if start >= 0:
                order.append(np.array([behind + len(marks)]))
                marks.append(start)
            order.append(np.arange(first, first + count))
            if end >= 0:
                order.append(np.array([behind + len(marks)]))
                marks.append(end)
            first += count
        if marks:
            ids = self._device.to_device(np.array(marks, dtype=np.int64))
            rows = self._xp.cat([rows, self.embedding(ids)])
        return self._xp.index_select(rows, 0, self._device.to_device(np.concatenate(order)))

    def forward(self, input_ids: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        """See VisionLM.forward."""
        embedded, rows = context.embedded, context.rows
        if embedded is None:
            return super().forward(input_ids, positions, context)
        xp, total, count = self._xp, int(input_ids.shape[0]), int(embedded.tokens.shape[0])
        is_vision = xp.zeros_like(input_ids)
        xp.index_copy_(
            is_vision, 0, embedded.tokens, xp.ones([count], dtype=xp.int64, device=input_ids.device)
        )
        order = xp.argsort(is_vision, stable=True)
        self._routes.divided = order[: total - count], order[total - count :]
        # The blocks' tokens are those of the step, in the last one, too.
        context.rows = None
        try:
            hidden = super().forward(input_ids, positions, context)
        finally:
            context.rows, self._routes.divided = rows, None
        return hidden if rows is None else xp.index_select(hidden, 0, rows)

    def load_weights(self, tensors: Iterable[tuple[str, StoredTensor]]) -> list[str]:
        """See DecoderLM; checkpoints number vision experts after the text experts."""
        return super().load_weights(self._two_sets(tensors))

    def _two_sets(
        self, tensors: Iterable[tuple[str, StoredTensor]]
    ) -> Iterator[tuple[str, StoredTensor]]:
        for name, stored in tensors:
            expert = EXPERT.search(name)
            if expert and int(expert[1]) >= self._num_experts:
                number = int(expert[1]) - self._num_experts
                yield EXPERT.sub(f".mlp.vision.experts.{number}.", name), stored
            elif name.endswith((".mlp.gate.weight", ".mlp.gate.weight_1")):
                # Stored as [hidden, experts], which Paddle's checkpoints have of every product.
                upright = self.weights.swap_linear or stored.shape[-1] == self._hidden
                router = name.replace(".mlp.gate.weight_1", ".mlp.vision.gate.weight")
                yield router, stored if upright else Swapped(stored)
            elif name.endswith("moe_statics.e_score_correction_bias") and stored.shape[0] == 2:
                own = self.weights.canonical(name)
                yield own, Row(stored, 0)
                yield own.replace(".mlp.", ".mlp.vision."), Row(stored, 1)
            else:
                yield name, stored

    @staticmethod
    def media(config: Mapping[str, Any], folder: Path, rules: MediaRules) -> GridProcessor:
        """Pictures and videos."""
        return ErnieProcessor.of(config, folder, rules)


class Row:
    """One row of a stored matrix, as [1, n]."""

    def __init__(self, stored: StoredTensor, number: int) -> None:
        self._stored, self._number, self.dtype = stored, number, stored.dtype
        self.shape = (1, *stored.shape[1:])

    def read(self, *region: slice | int) -> Tensor:
        """See StoredTensor."""
        return self._stored.read(slice(self._number, self._number + 1), *region[1:])


def one_set(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json as the text family reads it: of its text experts. Released folders have numbers
    of both sets in lists, transformers 5 has one number of experts and a word for each layer."""

    def first(key: str, default: Any = None) -> Any:
        value = config.get(key, default)
        return value[0] if isinstance(value, list) and value else value

    widths = config.get("moe_intermediate_size")
    counts = config.get("moe_num_experts")
    if not isinstance(widths, list) or len(widths) != 2:
        raise ConfigError(
            f"config.json of this ERNIE has moe_intermediate_size={widths!r}; expected two "
            "numbers, of text experts and of vision experts"
        )
    if isinstance(counts, list) and len(set(counts)) != 1:
        raise ConfigError(
            f"config.json of this ERNIE has moe_num_experts={counts!r}; possible: as many of both"
        )
    plain = {
        **config,
        "moe_intermediate_size": widths[0],
        "moe_num_experts": first("moe_num_experts"),
    }
    number, kinds = ConfigReader(config).size("num_hidden_layers"), config.get("mlp_layer_types")
    if isinstance(kinds, list):
        sparse = [n for n, kind in enumerate(kinds) if kind == "sparse"]
    else:
        end = first("moe_layer_end_index", number - 1)
        last = number - 1 if end in (None, -1) else min(end, number - 1)
        interval = first("moe_layer_interval", 1)
        start = first("moe_layer_start_index", 1)
        sparse = [n for n in range(start, last + 1) if (n + 1) % interval == 0]
    return plain | {"expert_widths": widths, "sparse_layers": sparse}


class ErnieProcessor(GridProcessor):
    """Places are tokens of start and end with a placeholder between, which released templates write
    as text."""

    marks: dict[str, tuple[int, int]]  # start and end by kind

    @classmethod
    def of(cls, config: Mapping[str, Any], folder: Path, rules: MediaRules) -> ErnieProcessor:
        """Of the model in this folder."""
        image = image_rule(config, folder)
        video = read_video_rule(
            folder, image, sampling="steps", is_joined=False, counts_all=False, font=FONT,
            pixels=FRAME_PIXELS, frames=FRAMES,
        )  # fmt: skip
        patch = next((config[k] for k in ("image_token_id", "im_patch_id") if k in config), None)
        known = added_tokens(folder)
        marks = {
            kind: tuple(
                config.get(f"{kind}_{side}_token_id", known.get(mark))
                for side, mark in zip(("start", "end"), pair, strict=True)
            )
            for kind, pair in MARKS.items()
        }
        if not all(isinstance(token, int) for token in (patch, *marks["image"], *marks["video"])):
            raise ConfigError(
                f"config.json and tokenizer of {folder} do not name the tokens of pictures: "
                f"image_token_id or im_patch_id is {patch!r}, start and end are {marks!r}"
            )
        # Released folders have one placeholder for both kinds.
        tokens = {"image": patch, "video": config.get("video_token_id", patch)}
        made = cls(rules, image, video, tokens)
        made.marks = marks
        return made

    def places(self, ids: list[int]) -> list[Place]:
        """See GridProcessor. A token that stands alone counts as a place, too, so that a prompt
        with one is refused."""
        ends = {start: (kind, end) for kind, (start, end) in self.marks.items()}
        media = {token for pair in self.marks.values() for token in pair} | set(
            self.tokens.values()
        )
        found, at = [], 0
        while at < len(ids):
            token, stop = ids[at], at + 1
            if token in ends:
                kind, end = ends[token]
                inside = ids[at + 1 : at + 2 + MAX_PLACE]
                stop = at + 2 + inside.index(end) if end in inside else stop
                found.append(Place(kind, at, stop))
            elif token in media:
                found.append(Place("image", at, stop))
            at = stop
        return found

    def largest(self, num_vectors: int, most: int) -> list[MediaItem]:
        """See GridProcessor; without tokens of start and end."""
        items = super().largest(num_vectors, most)
        return [msgspec.structs.replace(i, numbers=[*i.numbers, -1, -1]) for i in items]

    def write(self, written: Written, made: Made, ids: list[int]) -> None:
        """See GridProcessor."""
        start, end = self.marks[made.kind]
        rows, columns = made.merged
        for n, item in enumerate(made.items):
            before = [start] if n == 0 else []
            after = [end] if n == len(made.items) - 1 else []
            inside = [self.tokens[made.kind]] * (rows * columns)
            own = msgspec.structs.replace(
                item,
                num_rows=item.num_rows + len(before) + len(after),
                numbers=[*item.numbers, *(before or [-1]), *(after or [-1])],
            )
            written.span(own, [*before, *inside, *after])
        grid = (len(made.items), rows, columns)
        written.runs += [Run(1), Run(len(made.items) * rows * columns, grid), Run(1)]


def added_tokens(folder: Path) -> dict[str, int]:
    """Tokens by their text, from whichever files of a tokenizer the folder has."""
    found: dict[str, int] = {}
    for name in ("added_tokens.json", "tokenizer_config.json", "tokenizer.json"):
        path = folder / name
        if not path.is_file():
            continue
        said = json.loads(path.read_text(encoding="utf-8"))
        if name == "added_tokens.json":
            found |= said
        elif name == "tokenizer_config.json":
            entries = said.get("added_tokens_decoder") or {}
            found |= {entry["content"]: int(token) for token, entry in entries.items()}
        else:
            found |= {entry["content"]: entry["id"] for entry in said.get("added_tokens") or ()}
    return found
