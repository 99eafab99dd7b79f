"""Seed-OSS (transformers: SeedOssForCausalLM)."""

from fd_models.fields import StrictLM


class SeedOssForCausalLM(StrictLM):
    """Llama with biases on q, k and v, and heads of a width of their own."""

    output_bias = "attention_out_bias"
    mlp_bias = "mlp_bias"
    defaults = {"attention_bias": True, "head_dim": 128}  # noqa: RUF012 - never changed
    reads = frozenset({"attention_out_bias", "mlp_bias", "residual_dropout"})  # the last: training
