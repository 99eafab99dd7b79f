"""Qwen3-VL, dense and mixture of experts (transformers: Qwen3VLForConditionalGeneration and
Qwen3VLMoeForConditionalGeneration): Qwen3's decoders. DeepStack: hidden states of some layers of
the tower are added after the first layers of the decoder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from fastdeploy_core.contracts.model import MediaRules, StoredTensor
from fastdeploy_core.contracts.moe import MoESpec
from fastdeploy_core.errors import ConfigError, WeightError
from fastdeploy_core.models.qwen import Qwen3ForCausalLM, Qwen3MoeForCausalLM
from fastdeploy_core.models.reading import ConfigReader

from .decoder import VisionLM
from .patches import PatchRule
from .processor import GridProcessor, Made, Place, Written, image_rule, media_tokens
from .qwen2_5_vl import check_sizes
from .tower import (
    Block,
    LearnedPositions,
    Sequential,
    TowerShape,
    Trunk,
    VisionTower,
    layer_norm_block,
    products,
    tower_shape,
    vision_reader,
)
from .video import VideoRule, read_video_rule

if TYPE_CHECKING:
    from fastdeploy_core.layers import ModelBuilder
    from fastdeploy_core.tensor import Tensor
    from fastdeploy_core.types import MediaItem

EPS, PRODUCTS = 1e-6, ("linear_fc1", "linear_fc2")


class Qwen3Tower(VisionTower):
    """Frame pairs, learned positions, and a merger for each level of DeepStack."""

    @staticmethod
    def read(config: Mapping[str, Any]) -> TowerShape:
        """See VisionTower."""
        read = vision_reader(config)
        check_sizes(read, config)
        shape = tower_shape(read, frames=2, activation="gelu_pytorch_tanh")
        taps = read.config.get("deepstack_visual_indexes") or []
        if sorted(set(taps)) != taps or any(not 0 <= n < shape.depth for n in taps):
            raise ConfigError(
                f"vision_config has deepstack_visual_indexes={taps!r}; expected rising numbers of "
                f"its {shape.depth} layers"
            )
        return shape

    def __init__(self, build: ModelBuilder, config: Mapping[str, Any]) -> None:
        shape, read = self.read(config), vision_reader(config)
        hidden, self._cell = shape.hidden, shape.cell
        self._taps = list(read.config.get("deepstack_visual_indexes") or [])
        self._xp, self.levels = build.xp, len(self._taps)

        def block(prefix: str) -> Block:
            return layer_norm_block(build, shape, prefix, EPS, PRODUCTS)

        def merger(prefix: str) -> Sequential:
            names = [f"{prefix}.{name}" for name in PRODUCTS]
            widths = (shape.cell, shape.cell, config["hidden_size"])
            return products(build, names, widths, build.xp.gelu)

        self._trunk = Trunk(
            build,
            shape,
            [block(f"visual.blocks.{n}") for n in range(shape.depth)],
            weight="visual.patch_embed.proj.weight",
            weight_shape=(hidden, 3, shape.frames, shape.patch, shape.patch),
            bias="visual.patch_embed.proj.bias",
            positions=LearnedPositions(
                build,
                "visual.pos_embed.weight",
                read.size("num_position_embeddings", default=2304),
                hidden,
                corners=True,
            ),
        )
        self._norm = build.layer_norm("visual.merger.norm", hidden, EPS)
        self._merge = merger("visual.merger")
        # Unlike the main merger's, their norms are of whole cells.
        prefixes = [f"visual.deepstack_merger_list.{n}" for n in range(self.levels)]
        self._deep = [
            Sequential(build.layer_norm(f"{p}.norm", shape.cell, EPS), merger(p)) for p in prefixes
        ]

    def __call__(self, items: Sequence[MediaItem]) -> Tensor:
        """See VisionTower."""
        *taps, x = self._trunk(items, self._taps)
        cells = [-1, self._cell]
        rows = [self._merge(self._norm(x).reshape(cells))]
        rows += [merge(tap.reshape(cells)) for merge, tap in zip(self._deep, taps, strict=True)]
        return self._xp.cat(rows, -1)


class Qwen3Processor(GridProcessor):
    """Each frame pair of a video has its time before it, as text, and tokens of start and end
    around it. The template's own tokens of start and end give way: so transformers wrote prompts
    when the models were trained (4.57), and so does vLLM; transformers 5 keeps them around all."""

    def __init__(
        self, rules: MediaRules, image: PatchRule, video: VideoRule, tokens: Mapping[str, int],
        tokenizer: Tokenizer,
    ) -> None:  # fmt: skip
        super().__init__(rules, image, video, {k: tokens[k] for k in ("image", "video")})
        self._start, self._end, self._tokenizer = tokens["start"], tokens["end"], tokenizer

    def places(self, ids: list[int]) -> list[Place]:
        """See GridProcessor."""
        return [self._wrapped(ids, place) for place in super().places(ids)]

    def _wrapped(self, ids: list[int], place: Place) -> Place:
        around = [self._start, self.tokens["video"], self._end]
        if place.kind != "video" or ids[max(0, place.first - 1) : place.end + 1] != around:
            return place
        return Place(place.kind, place.first - 1, place.end + 1)

    def write(self, written: Written, made: Made, ids: list[int]) -> None:
        """See GridProcessor."""
        if made.kind == "image":
            return super().write(written, made, ids)
        for item, seconds in zip(made.items, made.seconds, strict=True):
            stamp = self._tokenizer.encode(f"<{seconds:.1f} seconds>", add_special_tokens=False)
            written.text([*stamp.ids, self._start])
            written.vectors(self.tokens["video"], made, [item])
            written.text([self._end])
        return None


class Qwen3Vision(VisionLM):
    """What both families have beside their decoders."""

    rope_theta = 5000000.0
    vision = Qwen3Tower
    axes = "interleaved"

    @staticmethod
    def media(config: Mapping[str, Any], folder: Path, rules: MediaRules) -> GridProcessor:
        """Pictures and videos."""
        image = image_rule(config, folder)
        video = read_video_rule(folder, image, sampling="ends", is_joined=True, counts_all=True)
        tokens = media_tokens(
            config, folder, image="image_token_id", video="video_token_id",
            start="vision_start_token_id", end="vision_end_token_id",
        )  # fmt: skip
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(f"{folder} has no tokenizer.json, which writes the times of frames")
        return Qwen3Processor(rules, image, video, tokens, Tokenizer.from_file(str(file)))


class Qwen3VLForConditionalGeneration(Qwen3Vision, Qwen3ForCausalLM):
    """One instance per rank."""


class Qwen3VLMoeForConditionalGeneration(Qwen3Vision, Qwen3MoeForCausalLM):
    """One instance per rank. Checkpoints have all experts of a layer in one tensor: released ones
    [experts, in, out], those that transformers 5 writes [experts, out, in]."""

    @classmethod
    def moe(cls, read: ConfigReader, dtype: str) -> MoESpec:
        """One rank's experts. Their weights sum to 1, unless config.json says otherwise."""
        said = {"norm_topk_prob": True, **read.config}
        return super().moe(ConfigReader(said, read.tp_size), dtype)

    def load_weights(self, tensors: Iterable[tuple[str, StoredTensor]]) -> list[str]:
        """See DecoderLM; stacked experts in either layout."""
        return super().load_weights(self._upright(tensors))

    def _upright(
        self, tensors: Iterable[tuple[str, StoredTensor]]
    ) -> Iterator[tuple[str, StoredTensor]]:
        """Stacked experts as [experts, out, in]. A square matrix waits for one that is not: of gate
        and up together and down, one never is square."""
        is_swapped: bool | None = None
        waiting: list[tuple[str, StoredTensor]] = []
        for name, stored in tensors:
            if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                yield name, stored
                continue
            waiting.append((name, stored))
            if is_swapped is None and len(stored.shape) == 3:
                hidden_last = stored.shape[2] == self._hidden
                if hidden_last != (stored.shape[1] == self._hidden):
                    is_swapped = hidden_last == name.endswith("down_proj")
            if is_swapped is not None:
                yield from ((n, Swapped(s) if is_swapped else s) for n, s in waiting)
                waiting.clear()
        if waiting:
            raise WeightError(
                f"weight {waiting[0][0]} has shape {list(waiting[0][1].shape)}; neither side of "
                f"its matrices alone is the model's {self._hidden}, so that it is not known which "
                "side is which; expected [experts, out, in] or [experts, in, out]"
            )


class Swapped:
    """A stored tensor whose last two dimensions change places."""

    def __init__(self, stored: StoredTensor) -> None:
        self._stored, self.dtype = stored, stored.dtype
        *lead, rows, columns = stored.shape
        self.shape = (*lead, columns, rows)

    def read(self, *region: slice | int) -> Tensor:
        """See StoredTensor."""
        whole = [*region, *[slice(None)] * (len(self.shape) - len(region))]
        return self._stored.read(*whole[:-2], whole[-1], whole[-2]).transpose(-1, -2)
