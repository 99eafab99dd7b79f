"""Families whose released checkpoints take pictures, too: their text alone.

Gemma 3 from 4B on, Gemma 4 without experts, Mistral Small 3, Llama 4 and Qwen3.5 (transformers:
...ForConditionalGeneration of each). The decoder's fields stand in config.json's text_config, which
the core has read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from fastdeploy_core.errors import UnsupportedModel
from fastdeploy_core.models.reading import ConfigReader
from fd_models.fields import StrictLM
from fd_models.gemma3 import Gemma3ForCausalLM
from fd_models.llama4 import Llama4ForCausalLM
from fd_models.mistral import MistralForCausalLM
from fd_models.recurrent.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM

from .gemma4 import Gemma4ForCausalLM

if TYPE_CHECKING:
    from fastdeploy_core.layers import ModelBuilder

# Beginnings of the decoder's names in releases, and in checkpoints of text.
_DECODER: Final = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
_TOWERS: Final = (
    *("vision_tower.", "vision_model.", "multi_modal_projector.", "model.visual."),
    *("audio_tower.", "model.embed_audio.", "model.embed_vision."),
)


class TextAlone(StrictLM):
    """Reads the decoder and leaves the rest."""

    def __init__(self, config: Mapping[str, Any], build: ModelBuilder) -> None:
        for old, new in _DECODER.items():
            build.weights.rename(old, new)
        for tower in _TOWERS:
            build.weights.ignore(tower)
        super().__init__(config, build)


class Gemma3ForConditionalGeneration(TextAlone, Gemma3ForCausalLM):
    """Releases leave out what the 4B model has in common with transformers' defaults."""

    defaults = {  # noqa: RUF012 - never changed
        **Gemma3ForCausalLM.defaults,
        "head_dim": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 262208,
    }


class Gemma4ForConditionalGeneration(TextAlone, Gemma4ForCausalLM):
    """Prompts of text; use_bidirectional_attention concerns tokens of pictures."""


class Llama4ForConditionalGeneration(TextAlone, Llama4ForCausalLM):
    """With one expert a token."""


class Mistral3ForConditionalGeneration(TextAlone, MistralForCausalLM):
    """Mistral Small 3.1 and 3.2."""

    reads = frozenset({"projector_hidden_act"})

    @classmethod
    def check(cls, read: ConfigReader) -> None:
        """Around other decoders, such as Ministral 3's, the architecture has the same name."""
        super().check(read)
        text = read.config.get("text_config") or {}
        if text.get("model_type", "mistral") != "mistral":
            raise UnsupportedModel(
                f"config.json of this {read.architecture} has a text_config of model_type "
                f"{text['model_type']!r}, which is not supported; possible: mistral"
            )


class Qwen3_5ForConditionalGeneration(TextAlone, Qwen3_5ForCausalLM):
    """Dense."""


class Qwen3_5MoeForConditionalGeneration(TextAlone, Qwen3_5MoeForCausalLM):
    """With experts."""
