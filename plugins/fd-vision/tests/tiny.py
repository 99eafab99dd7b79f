"""Tiny checkpoints with random weights of each family, made here; and what transformers computes
from them."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf
from PIL import Image
from tokenizers import AddedToken, Tokenizer

BASE = Path(__file__).resolve().parents[3] / "models" / "ernie-tiny" / "tokenizer.json"
VOCAB = 3136
QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
BAIDU_TOKENS = (
    *("<|IMAGE_START|>", "<|IMAGE_END|>", "<|IMAGE_PLACEHOLDER|>"),
    *("<|VIDEO_PLACEHOLDER|>", "<|VIDEO_START|>", "<|VIDEO_END|>"),
)
CLIP = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
HALVES = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
TEXT = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 4096, "bos_token_id": None, "eos_token_id": 4,
}  # fmt: skip
TOWER = {"hidden_size": 32, "intermediate_size": 48}


def rope(theta: float, section: list[int], **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta, "mrope_section": section, **more}


def _qwen2_5(ids: dict[str, int]) -> Any:
    text = TEXT | {"rope_parameters": rope(1e6, [2, 3, 3])}
    del text["head_dim"]
    vision = TOWER | {
        "depth": 3, "num_heads": 2, "patch_size": 14, "window_size": 56,
        "fullatt_block_indexes": [1], "out_hidden_size": 64, "tokens_per_second": 2,
    }  # fmt: skip
    return hf.Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, tie_word_embeddings=False, **ids
    )


def _qwen3_parts(**more: Any) -> dict[str, Any]:
    parameters = rope(5e6, [4, 2, 2], mrope_interleaved=True)
    return {
        "text_config": TEXT | {"num_hidden_layers": 4, "rope_parameters": parameters, **more},
        "vision_config": TOWER | {
            "depth": 4, "num_heads": 2, "patch_size": 16, "out_hidden_size": 64,
            "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1, 2],
        },
    }  # fmt: skip


def _qwen3(ids: dict[str, int]) -> Any:
    return hf.Qwen3VLConfig(**_qwen3_parts(), tie_word_embeddings=True, **ids)


def _qwen3_moe(ids: dict[str, int]) -> Any:
    moe = {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    }  # fmt: skip
    return hf.Qwen3VLMoeConfig(**_qwen3_parts(**moe), tie_word_embeddings=False, **ids)


def _paddleocr(ids: dict[str, int]) -> Any:
    text = TEXT | {
        "rope_parameters": rope(5e5, [2, 3, 3]), "use_bias": False, "tie_word_embeddings": False
    }  # fmt: skip
    vision = TOWER | {"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 112}
    return hf.PaddleOCRVLConfig(
        text_config=text, vision_config=vision, tie_word_embeddings=False, **ids
    )


def _ernie(ids: dict[str, int]) -> Any:
    text = TEXT | {
        "rope_parameters": rope(5e5, [3, 3, 2]), "use_bias": False, "tie_word_embeddings": True,
        "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": [24, 16],
        "moe_num_shared_experts": 2, "mlp_layer_types": ["dense", "sparse", "sparse"],
    }  # fmt: skip
    vision = TOWER | {"depth": 2, "num_heads": 2, "patch_size": 14}
    return hf.Ernie4_5_VLMoeConfig(
        text_config=text, vision_config=vision, tie_word_embeddings=True, **ids
    )


@dataclass(frozen=True)
class Family:
    """How its tiny checkpoint is made, and what transformers names its parts."""

    config: Callable[[dict[str, int]], Any]
    model: str
    tokens: tuple[str, ...]  # start, end, picture, video; of the video: start, end
    keys: tuple[str, ...]  # of config.json, for these tokens
    processor: str
    patch: int = 14
    frames: int = 1  # of a patch
    norm: dict[str, Any] = field(default_factory=lambda: CLIP)
    is_raster: bool = False  # transformers' patches, row by row

    @property
    def step(self) -> int:
        """Sides of pictures that are not resized are multiples of it."""
        return 2 * self.patch

    @property
    def size(self) -> dict[str, int]:
        """Of the preprocessor file, in pixels."""
        return {"shortest_edge": (4 * self.patch) ** 2, "longest_edge": self.step**2 * 64}

    @property
    def place(self) -> str:
        """What a chat template writes for a picture."""
        start, end, image = self.tokens[:3]
        return start + image + end

    @property
    def film(self) -> str:
        """What a chat template writes for a video."""
        start, end = self.tokens[4:6] or self.tokens[:2]
        return start + self.tokens[3] + end


_QWEN_KEYS = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
_ERNIE_KEYS = (
    *("image_start_token_id", "image_end_token_id", "image_token_id", "video_token_id"),
    *("video_start_token_id", "video_end_token_id"),
)
FAMILIES = {
    "qwen2_5_vl": Family(
        _qwen2_5, "Qwen2_5_VLForConditionalGeneration", QWEN_TOKENS, _QWEN_KEYS,
        "Qwen2VLImageProcessorPil", frames=2,
    ),
    "qwen3_vl": Family(
        _qwen3, "Qwen3VLForConditionalGeneration", QWEN_TOKENS, _QWEN_KEYS,
        "Qwen2VLImageProcessorPil", patch=16, frames=2, norm=HALVES,
    ),
    "qwen3_vl_moe": Family(
        _qwen3_moe, "Qwen3VLMoeForConditionalGeneration", QWEN_TOKENS, _QWEN_KEYS,
        "Qwen2VLImageProcessorPil", patch=16, frames=2, norm=HALVES,
    ),
    "paddleocr_vl": Family(
        _paddleocr, "PaddleOCRVLForConditionalGeneration", BAIDU_TOKENS, _QWEN_KEYS,
        "PaddleOCRVLImageProcessorPil", is_raster=True,
    ),
    "ernie4_5_vl": Family(
        _ernie, "Ernie4_5_VLMoeForConditionalGeneration", BAIDU_TOKENS, _ERNIE_KEYS,
        "Ernie4_5_VLMoeImageProcessorPil",
    ),
}  # fmt: skip


def template_of(family: Family) -> str:
    return (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
        "{% if p.type == 'image' %}" + family.place + "{% elif p.type == 'video' %}" + family.film
        + "{% else %}{{ p.text }}{% endif %}"
        "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )  # fmt: skip


def make(
    folder: Path,
    name: str = "qwen2_5_vl",
    seed: int = 0,
    more: dict[str, Any] | None = None,
    prepared: dict[str, Any] | None = None,
) -> Path:
    """Write a family's checkpoint, its tokenizer and its preprocessor file. more: what its
    config.json says otherwise, part by part ("" is the outermost). prepared: what its preprocessor
    file says otherwise, of pictures and of videos; None takes a key away."""
    family = FAMILIES[name]
    core = Tokenizer.from_file(str(BASE))
    core.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in family.tokens])
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<pad>"
    )
    tokenizer.chat_template = template_of(family)
    ids = [tokenizer.convert_tokens_to_ids(token) for token in family.tokens]
    torch.manual_seed(seed)
    config = family.config(dict(zip(family.keys, ids, strict=False)))
    for part, values in (more or {}).items():
        for key, value in values.items():
            setattr(getattr(config, part) if part else config, key, value)
    model = getattr(hf, family.model)(config).float().eval()
    with torch.no_grad():
        for tensor, weight in model.named_parameters():
            # What transformers starts with hides mistakes: norms of 1 and biases of 0.
            if weight.dim() == 1:
                weight.copy_(float(not tensor.endswith("bias")) + 0.1 * torch.randn_like(weight))
            elif "e_score_correction_bias" in tensor:
                weight.copy_(0.05 * torch.randn_like(weight))
            else:
                weight.copy_(torch.randn_like(weight) * (0.7 / weight.shape[-1] ** 0.5))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    image = {
        "patch_size": family.patch, "merge_size": 2, "temporal_patch_size": family.frames,
        "size": family.size, **family.norm,
        "do_resize": True, "do_normalize": True, "do_rescale": True, "resample": 3,
    }  # fmt: skip
    video = {
        **image,
        "fps": 2,
        "min_frames": 2,
        "max_frames": 64,
        "do_sample_frames": True,
        "draw_on_frames": False,
    }
    for said in (image, video):
        said |= {"patch_size": config.vision_config.patch_size}
        said |= {"merge_size": config.vision_config.spatial_merge_size}
        said |= prepared or {}
        for key in [key for key, value in said.items() if value is None]:
            del said[key]
    (folder / "processor_config.json").write_text(
        json.dumps({"image_processor": image, "video_processor": video})
    )
    return folder


def picture(width: int, height: int, seed: int) -> Image.Image:
    """RGB, smooth enough that resizing does not decide everything."""
    y, x = np.mgrid[0:height, 0:width]
    waves = np.random.default_rng(seed).uniform(0.02, 0.25, (3, 2))
    planes = [127 + 127 * np.sin(a * x + b * y + seed) for a, b in waves]
    return Image.fromarray(np.stack(planes, -1).astype(np.uint8))


def film(frames: int, width: int, height: int, seed: int) -> np.ndarray:
    """[frames, height, width, 3] uint8."""
    return np.stack([np.asarray(picture(width, height, seed + 7 * n)) for n in range(frames)])


def file_of(frames: np.ndarray, codec: str = "libx264", kind: str = "mp4", rate: int = 8) -> bytes:
    """A video file of these frames, `rate` a second."""
    import av

    buffer = io.BytesIO()
    with av.open(buffer, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=rate)
        stream.height, stream.width, stream.pix_fmt = *frames.shape[1:3], "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return buffer.getvalue()


def prompt_of(count: int, words: str = "What", place: str = FAMILIES["qwen2_5_vl"].place) -> str:
    """A turn of a user in which a place stands for each of so many pictures."""
    places = "".join(f"{place} and " for _ in range(count))
    return f"<|im_start|>user\n{words} {places}?<|im_end|>\n<|im_start|>assistant\n"


def runner_of(llm: Any) -> Any:
    """The model runner of rank 0, which lives in this process."""
    return llm._engine._core._executor._worker._runner


class Oracle:
    """transformers' model and Pillow processor on the same folder."""

    def __init__(self, folder: Path, name: str = "qwen2_5_vl") -> None:
        self.family = FAMILIES[name]
        self.model = getattr(hf, self.family.model).from_pretrained(folder, dtype=torch.float32)
        self.model.eval()
        self.own_positions = self.model.model.get_rope_index  # before greedy() sets another rule
        kept = json.loads((folder / "processor_config.json").read_text())["image_processor"]
        # Its class for ERNIE takes the older spelling for nothing.
        size = {"shortest_edge": kept.get("min_pixels"), "longest_edge": kept.get("max_pixels")}
        kept = {**kept, "size": kept.get("size", size)}
        self.processor = getattr(hf, self.family.processor)(**kept)
        self.tokenizer = hf.AutoTokenizer.from_pretrained(folder)
        self.ids = [self.tokenizer.convert_tokens_to_ids(t) for t in self.family.tokens]
        self.image = self.ids[2]
        vision = self.model.config.vision_config
        self.patch, self.merge = vision.patch_size, vision.spatial_merge_size
        self.norm = [np.array(kept[key], np.float32) for key in ("image_mean", "image_std")]
        self.per_second = getattr(vision, "tokens_per_second", 0)

    def pixels(self, images: Sequence[Image.Image]) -> Any:
        """pixel_values and image_grid_thw."""
        return self.processor(list(images), return_tensors="pt")

    @torch.no_grad()
    def features(self, images: Sequence[Image.Image]) -> np.ndarray:
        """[rows, (1 + levels) * hidden] of all pictures."""
        made = self.pixels(images)
        output = self.model.model.get_image_features(
            made["pixel_values"], made["image_grid_thw"], return_dict=True
        )
        levels = getattr(output, "deepstack_features", None) or []
        parts = [
            rows if isinstance(rows, torch.Tensor) else torch.cat(list(rows))
            for rows in (output.pooler_output, *levels)
        ]
        return torch.cat(parts, -1).numpy()

    @torch.no_grad()
    def greedy(
        self,
        prompt: str,
        images: Sequence[Image.Image],
        count: int,
        videos: Sequence[tuple[np.ndarray, float]] = (),
    ) -> list[int]:
        """The tokens after a prompt in which a place stands for each picture, and for each video:
        frames that are not resized, and how many there are for a second."""
        given, grids = dict[str, Any](), {1: [], 2: []}
        if images:
            made = self.pixels(images)
            grids[1] = [
                (1, h // self.merge, w // self.merge, 1.0)
                for _, h, w in made["image_grid_thw"].tolist()
            ]
            given |= made
        if videos:
            given |= self._videos(videos, grids[2])
            for frames, fps in videos:
                prompt = self._stamped(prompt, len(frames), fps)
        ids = self.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        kinds = {self.ids[2]: 1, self.ids[3]: 2}
        expanded, types, runs = [], [], {kind: iter(own) for kind, own in grids.items()}
        positions: list[tuple[int, int, int]] = []
        for token in ids:
            start, kind = 1 + max((max(p) for p in positions), default=-1), kinds.get(token, 0)
            time, tall, wide, step = next(runs[kind]) if kind else (1, 1, 1, 1.0)
            new = [
                (start + int(t * step), start + y, start + x)
                for t in range(time) for y in range(tall) for x in range(wide)
            ]  # fmt: skip
            positions += new
            expanded += [token] * len(new)
            types += [kind] * len(new)
        if given:
            given["mm_token_type_ids"] = torch.tensor([types])
            offset = max(max(p) for p in positions) + 1 - len(positions)
            # The rule of training. transformers has another after videos that last long.
            rule = torch.tensor(positions).T[:, None], torch.tensor([[offset]])
            self.model.model.get_rope_index = lambda *args, **more: rule
        return self._generate(expanded, given, count)

    def _videos(
        self, videos: Sequence[tuple[np.ndarray, float]], grids: list[tuple[int, int, int, float]]
    ) -> dict[str, Any]:
        pixels, shapes, family = [], [], self.family
        for frames, fps in videos:
            frames = frames if len(frames) % 2 == 0 else np.concatenate((frames, frames[-1:]))
            x = (frames.astype(np.float32) / 255 - self.norm[0]) / self.norm[1]
            n, p, m = family.frames, self.patch, self.merge
            time, tall, wide = len(x) // n, x.shape[1] // p, x.shape[2] // p
            x = x.transpose(0, 3, 1, 2).reshape(time, n, 3, tall // m, m, p, wide // m, m, p)
            x = x.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8)
            pixels.append(torch.tensor(x.reshape(time * tall * wide, -1)))
            shapes.append((time, tall, wide))
            if family.model.startswith("Qwen3"):
                grids += [(1, tall // m, wide // m, 1.0)] * time
            else:
                step = 2 / fps * self.per_second if self.per_second else 1.0
                grids.append((len(frames) // 2, tall // m, wide // m, step))
        return {"pixel_values_videos": torch.cat(pixels), "video_grid_thw": torch.tensor(shapes)}

    def _stamped(self, prompt: str, count: int, fps: float) -> str:
        """Qwen3-VL: the first place in the prompt as a text with the time of each frame pair."""
        if not self.family.model.startswith("Qwen3"):
            return prompt
        start, end, _, video = self.family.tokens
        times = [(n + min(n + 1, count - 1)) / 2 / fps for n in range(0, count, 2)]
        parts = "".join(f"<{time:.1f} seconds>{start}\0{end}" for time in times)
        return prompt.replace(self.family.film, parts, 1).replace("\0", video)

    def _generate(self, ids: list[int], given: dict[str, Any], count: int) -> list[int]:
        if given and self.family.model.startswith("Ernie"):
            given["moe_mm_token_type_ids"] = torch.tensor([[int(i in self.ids) for i in ids]])
        self.model.model.rope_deltas = None
        output = self.model.generate(
            input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=5, **given,
        )  # fmt: skip
        return output[0, len(ids) :].tolist()
