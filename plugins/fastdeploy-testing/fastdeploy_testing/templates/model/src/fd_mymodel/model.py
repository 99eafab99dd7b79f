"""MyModel: a list of parts. As it stands, Llama's with the biases that config.json asks for."""

from __future__ import annotations

from fastdeploy_core.errors import UnsupportedModel
from fastdeploy_core.models.decoder import GroupedQueryLM
from fastdeploy_core.models.reading import ConfigReader


class MyModelForCausalLM(GroupedQueryLM):
    """One instance per rank. Its name is the architecture that config.json names."""

    rope_theta = 10000.0  # where config.json says nothing
    head_norms = False  # True: each query and key head is normalised
    qkv_bias = "attention_bias"  # a key of config.json that says so, or True or False
    output_bias = "attention_bias"
    mlp_bias = "mlp_bias"
    tied = False  # the head shares the embedding's weight where config.json says nothing

    @classmethod
    def check(cls, read: ConfigReader) -> None:
        """What would change the answers and is not computed here is refused by its name."""
        for key in ("sliding_window", "logit_scale", "final_logit_softcapping"):
            value = read.config.get(key)
            if value is not None:
                raise UnsupportedModel(
                    f"{key}={value!r} of config.json is not supported by this "
                    f"{read.architecture}; possible: no {key}"
                )
