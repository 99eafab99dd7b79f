"""From config.json to shapes and model class, by architecture. Imports no tensor library."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Final

from fastdeploy_core import envs
from fastdeploy_core.contracts.model import ModelShapes
from fastdeploy_core.errors import PluginNotFound, UnsupportedModel

__all__ = ["ARCHITECTURES", "ModelShapes", "model_class", "read_shapes"]

# The core's own families; group fastdeploy.models has the same entries.
ARCHITECTURES: Final[dict[str, str]] = {
    "Ernie4_5ForCausalLM": "fastdeploy_core.models.ernie:Ernie4_5ForCausalLM",
    "Ernie4_5_ForCausalLM": "fastdeploy_core.models.ernie:Ernie4_5ForCausalLM",
    "Ernie4_5_MoeForCausalLM": "fastdeploy_core.models.ernie:Ernie4_5_MoeForCausalLM",
    "LlamaForCausalLM": "fastdeploy_core.models.llama:LlamaForCausalLM",
    "Qwen2ForCausalLM": "fastdeploy_core.models.qwen:Qwen2ForCausalLM",
    "Qwen3ForCausalLM": "fastdeploy_core.models.qwen:Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM": "fastdeploy_core.models.qwen:Qwen3MoeForCausalLM",
}


def read_shapes(
    hf_config: Mapping[str, Any], tp_size: int = 1, dtype: str = "float32"
) -> ModelShapes:
    """The shapes of one rank of `tp_size`. UnsupportedModel names the architectures there are, or
    what of this model's layers cannot be served."""
    shapes: ModelShapes = model_class(hf_config).shapes(hf_config, tp_size, dtype)
    if not 0 < len(shapes.layers) <= shapes.num_layers:
        raise UnsupportedModel(
            f"{shapes.architecture} states {len(shapes.layers)} layers that keep something of a "
            f"sequence, of {shapes.num_layers} in all; at least one and at most all are possible"
        )
    return shapes


def model_class(hf_config: Mapping[str, Any]) -> Any:
    """The class (contracts.small.CausalLM) that serves this config.json."""
    names = hf_config.get("architectures") or []
    name = str(names[0]) if isinstance(names, list) and names else ""
    if name in ARCHITECTURES and not envs.read("FD_PLUGINS_PREFERRED"):
        module, _, attribute = ARCHITECTURES[name].partition(":")
        return getattr(importlib.import_module(module), attribute)
    try:
        # The plugins room is only needed for models of plugins.
        from fastdeploy_core.plugins import lookup

        return lookup("model", name)
    except PluginNotFound:
        from fastdeploy_core.plugins.known import providers

        if provider := providers("model").get(name):
            raise UnsupportedModel(
                f"architecture {name!r} is served by {provider}, which is not installed; "
                f"run: pip install {provider}"
            ) from None
        raise UnsupportedModel(
            f"no installed model family serves architecture {name!r}; possible: "
            f"{', '.join(sorted(ARCHITECTURES))}, or one that a plugin registers in group "
            "fastdeploy.models; run: fastdeploy plugins list --kind model"
        ) from None
