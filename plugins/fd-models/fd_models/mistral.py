"""Mistral, with one window for all blocks or none (transformers: MistralForCausalLM)."""

from .fields import StrictLM


class MistralForCausalLM(StrictLM):
    """Llama without biases."""

    qkv_bias = output_bias = False
    only = {"attention_bias": (False,)}  # noqa: RUF012 - never changed
