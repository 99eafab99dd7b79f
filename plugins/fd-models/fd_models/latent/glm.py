"""GLM-4.7-Flash and GLM-5 (transformers: Glm4MoeLiteForCausalLM and GlmMoeDsaForCausalLM): the
blocks of DeepSeek V3 and V3.2, without groups of experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastdeploy_core.errors import UnsupportedModel

from .deepseek_v3 import DeepseekV3ForCausalLM
from .deepseek_v32 import DeepseekV32ForCausalLM, SparseLatentAttention

if TYPE_CHECKING:
    from fastdeploy_core.contracts.attention import AttentionSpec
    from fastdeploy_core.models.reading import ConfigReader

_NO_GROUPS = {**DeepseekV3ForCausalLM.defaults, "n_group": 1, "topk_group": 1}


class Glm4MoeLiteForCausalLM(DeepseekV3ForCausalLM):
    """One dense block is the first."""

    norm_eps = 1e-5
    defaults = {  # noqa: RUF012 - never changed
        **_NO_GROUPS,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.8,
    }


class _NeighboursTurn(SparseLatentAttention):
    index_interleaved = True


class GlmMoeDsaForCausalLM(DeepseekV32ForCausalLM):
    """Every block has an indexer of its own, whose neighbours turn as the attention's do."""

    norm_eps = 1e-5
    defaults = {**_NO_GROUPS, "index_n_heads": 32}  # noqa: RUF012 - never changed
    attention_layer = _NeighboursTurn

    @classmethod
    def attention_spec(cls, read: ConfigReader, dtype: str) -> AttentionSpec:
        """UnsupportedModel for blocks that take the choice of the block before them."""
        for key, possible in (
            ("indexer_types", ["full"]),
            ("index_topk_pattern", ["F", "full"]),
            ("index_topk_freq", [1]),
        ):
            value = read.config.get(key) or possible
            kinds = value if isinstance(value, list | str) else [value]
            if not set(kinds) <= set(possible):
                raise UnsupportedModel(
                    f"config.json of this {read.architecture} has {key}={value!r}: blocks without "
                    f"an indexer, which are not supported; possible: {possible[0]} in every block"
                )
        return super().attention_spec(read, dtype)
