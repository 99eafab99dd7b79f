"""What vLLM's ERNIE-4.5-VL expects of a released folder's own code: a configuration whose numbers
are not nested, and a processor that leaves pictures under `images` and `grid_thw`. transformers'
own classes have neither. Importing this module registers both."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import transformers
from transformers import (
    AutoConfig,
    AutoProcessor,
    AutoTokenizer,
    BatchFeature,
    PreTrainedConfig,
)
from transformers.processing_utils import ProcessorMixin

PLACE = 100290  # what stands for a picture in a prompt, before it is as many placeholders
WORDS = {
    "</s>": 2, "<|image@placeholder|>": PLACE, "<|video@placeholder|>": 100291,
    "<|IMAGE_PLACEHOLDER|>": 100295, "<|IMAGE_START|>": 101304, "<|IMAGE_END|>": 101305,
    "<|VIDEO_START|>": 101306, "<|VIDEO_END|>": 101307,
}  # fmt: skip
# What config.json says in other words, or leaves out.
MORE = {
    "hidden_act": "silu", "pixel_hidden_size": 1280, "spatial_conv_size": 2,
    "temporal_conv_size": 2, "use_temporal_conv": True,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 500000.0, "mrope_section": [22, 22, 20]
    },
}  # fmt: skip
VISION = {"embed_dim": 1280, "in_channels": 3}


class ErnieVisionConfig(PreTrainedConfig):
    """The tower's part of it."""

    model_type = "ernie4_5_moe_vl_vision"


class ErnieConfig(PreTrainedConfig):
    """config.json, with its numbers as attributes."""

    model_type = "ernie4_5_moe_vl"

    def __init__(self, vision_config: Any = None, **more: Any) -> None:
        if isinstance(vision_config, dict):
            vision_config = ErnieVisionConfig(**{**vision_config, **VISION})
        self.vision_config = vision_config
        more.pop("rope_scaling", None)
        super().__init__(**{**MORE, **more})


class ErnieProcessor(ProcessorMixin):
    """Pictures by transformers' processor, not yet normalised: vLLM does that."""

    spatial_conv_size = temporal_conv_size = 2

    def __init__(self, image_processor: Any = None, tokenizer: Any = None) -> None:
        super().__init__(image_processor, tokenizer)

    @classmethod
    def from_pretrained(cls, folder: str, *, tokenizer: Any = None, **_: Any) -> ErnieProcessor:  # type: ignore[override]
        """Of a folder that pictures.py wrote. vLLM makes a first one without a tokenizer."""
        kept = json.loads((Path(folder) / "preprocessor_config.json").read_text())
        size = {"shortest_edge": kept["min_pixels"], "longest_edge": kept["max_pixels"]}
        # The faster of the two, where it can run.
        name = "" if importlib.util.find_spec("torchvision") else "Pil"
        kind = getattr(transformers, f"Ernie4_5_VLMoeImageProcessor{name}")
        return cls(kind(size=size), tokenizer or AutoTokenizer.from_pretrained(folder))

    def __call__(  # type: ignore[override]
        self, text: list[str], images: Any = None, videos: Any = None, **_: Any
    ) -> BatchFeature:
        """input_ids with a picture's placeholders, images [patches, 3 * patch * patch], grid_thw
        [pictures, 3]."""
        found: dict[str, Any] = {"images": None, "grid_thw": None}
        counts: Iterator[int] = iter(())
        if images:
            made = self.image_processor(
                images, return_tensors="pt", do_rescale=False, do_normalize=False
            )
            found |= {"images": made["pixel_values"], "grid_thw": made["image_grid_thw"]}
            counts = iter((made["image_grid_thw"].prod(-1) // self.spatial_conv_size**2).tolist())
        found["input_ids"] = [
            [n for token in self.tokenizer.encode(one) for n in _expanded(token, counts)]
            for one in text
        ]
        return BatchFeature(found, tensor_type="pt", skip_tensor_conversion=["images", "grid_thw"])


def _expanded(token: int, counts: Iterator[int]) -> list[int]:
    """What stands for a token; without pictures, as for vLLM's text alone, the token itself."""
    count = next(counts, 0) if token == PLACE else 0
    return [WORDS["<|IMAGE_PLACEHOLDER|>"]] * count or [token]


# vLLM's other processes import this module with the configuration that they are sent.
AutoConfig.register(ErnieConfig.model_type, ErnieConfig, exist_ok=True)
AutoProcessor.register(ErnieConfig, ErnieProcessor, exist_ok=True)
