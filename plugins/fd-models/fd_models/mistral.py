"""Mistral, with one window for all blocks or none (transformers: MistralForCausalLM)."""

from .fields import StrictLM


class MistralForCausalLM(StrictLM):
    """Llama without biases."""

    qkv_bias = output_bias = False
    defaults = {"sliding_window": 4096}  # noqa: RUF012 - never changed
    only = {"attention_bias": (False,)}  # noqa: RUF012 - never changed
