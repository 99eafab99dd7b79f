"""A tiny Qwen2.5-VL with random weights, made here; and what transformers computes from it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf
from PIL import Image
from tokenizers import AddedToken, Tokenizer

BASE = Path(__file__).resolve().parents[3] / "models" / "ernie-tiny" / "tokenizer.json"
SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
PLACE = "<|vision_start|><|image_pad|><|vision_end|>"
VOCAB = 3136
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}" + PLACE + "{% else %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PIXELS = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 64}


def make(folder: Path, seed: int = 0) -> Path:
    """Write the checkpoint, its tokenizer and its preprocessor file."""
    core = Tokenizer.from_file(str(BASE))
    core.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<pad>"
    )
    tokenizer.chat_template = TEMPLATE
    start, end, image, video = map(tokenizer.convert_tokens_to_ids, SPECIAL)
    text = {
        "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
        "bos_token_id": None, "eos_token_id": 4,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [2, 3, 3]
        },
    }  # fmt: skip
    vision = {
        "depth": 3, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "patch_size": 14,
        "window_size": 56, "fullatt_block_indexes": [1], "out_hidden_size": 64,
        "tokens_per_second": 2,
    }  # fmt: skip
    config = hf.Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, tie_word_embeddings=False, image_token_id=image,
        video_token_id=video, vision_start_token_id=start, vision_end_token_id=end,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = hf.Qwen2_5_VLForConditionalGeneration(config).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # What transformers starts with hides mistakes: norms of 1 and biases of 0.
            if weight.dim() == 1:
                weight.copy_(float(not name.endswith("bias")) + 0.1 * torch.randn_like(weight))
            else:
                weight.copy_(torch.randn_like(weight) * (0.7 / weight.shape[-1] ** 0.5))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": {
        "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2, "size": PIXELS,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "do_resize": True, "do_normalize": True, "do_rescale": True, "resample": 3,
    }}))  # fmt: skip
    return folder


def picture(width: int, height: int, seed: int) -> Image.Image:
    """RGB, smooth enough that resizing does not decide everything."""
    y, x = np.mgrid[0:height, 0:width]
    waves = np.random.default_rng(seed).uniform(0.02, 0.25, (3, 2))
    planes = [127 + 127 * np.sin(a * x + b * y + seed) for a, b in waves]
    return Image.fromarray(np.stack(planes, -1).astype(np.uint8))


def prompt_of(count: int, words: str = "What") -> str:
    """A turn of a user in which a place stands for each of so many pictures."""
    places = "".join(f"{PLACE} and " for _ in range(count))
    return f"<|im_start|>user\n{words} {places}?<|im_end|>\n<|im_start|>assistant\n"


def runner_of(llm: Any) -> Any:
    """The model runner of rank 0, which lives in this process."""
    return llm._engine._core._executor._worker._runner


class Oracle:
    """transformers' model and Pillow processor on the same folder."""

    def __init__(self, folder: Path) -> None:
        self.model = hf.Qwen2_5_VLForConditionalGeneration.from_pretrained(
            folder, dtype=torch.float32
        ).eval()
        kept = json.loads((folder / "processor_config.json").read_text())["image_processor"]
        self.processor = hf.Qwen2VLImageProcessorPil(**kept)
        self.tokenizer = hf.AutoTokenizer.from_pretrained(folder)
        self.image = self.model.config.image_token_id

    def pixels(self, images: Sequence[Image.Image]) -> Any:
        """pixel_values and image_grid_thw."""
        return self.processor(list(images), return_tensors="pt")

    @torch.no_grad()
    def features(self, images: Sequence[Image.Image]) -> np.ndarray:
        """[rows, hidden] of all pictures."""
        made = self.pixels(images)
        output = self.model.model.get_image_features(
            made["pixel_values"], made["image_grid_thw"], return_dict=True
        )
        return torch.cat(list(output.pooler_output)).numpy()

    @torch.no_grad()
    def greedy(self, prompt: str, images: Sequence[Image.Image], count: int) -> list[int]:
        """The tokens behind a prompt in which a place stands for each picture."""
        ids = self.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        given: dict[str, Any] = {}
        if images:
            made = self.pixels(images)
            sizes = iter((made["image_grid_thw"].prod(-1) // 4).tolist())
            ids = [t for i in ids for t in ([i] * next(sizes) if i == self.image else [i])]
            types = torch.tensor([[int(i == self.image) for i in ids]])
            given = {**made, "mm_token_type_ids": types}
        self.model.model.rope_deltas = None
        output = self.model.generate(
            input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=5, **given,
        )  # fmt: skip
        return output[0, len(ids) :].tolist()
