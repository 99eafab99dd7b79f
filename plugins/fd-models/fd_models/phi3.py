"""Phi-3, Phi-3.5 and Phi-4 (transformers: Phi3ForCausalLM). Checkpoints hold q, k and v, and gate
and up, joined; longrope scaling works up to the trained length."""

from .fields import StrictLM


class Phi3ForCausalLM(StrictLM):
    """Llama without biases; a part of each head turns where config.json says so."""

    norm_eps = 1e-5
    qkv_bias = output_bias = False
    partial_rotary = 1.0
    only = {"attention_bias": (False,)}  # noqa: RUF012 - never changed
    reads = frozenset({"partial_rotary_factor"})
