"""Llama 2, 3 and 3.x (transformers: LlamaForCausalLM). Linear and llama3 rope scaling."""

from .decoder import GroupedQueryLM


class LlamaForCausalLM(GroupedQueryLM):
    """A gated feed-forward block; biases where config.json says so."""

    mlp_bias = "mlp_bias"
