"""Families that publish multi-token-prediction modules, and the modules' names in checkpoints.

Imports no tensor library. A module has a norm for the embedding of the next token, one for the
hidden state, a projection of the two (embedding first), one decoder block, and a final norm with a
head. Parts that a family's checkpoints lack are shared with the target.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from fastdeploy_core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ModuleNames:
    """Checkpoint names of one module's parts; an empty name means: the target's own part."""

    prefixes: tuple[str, ...]  # every tensor of the module begins with one of these
    embedding_norm: str
    hidden_norm: str
    projection: str
    block: str
    norm: str = ""
    embedding: str = ""
    head: str = ""


def _ernie(number: int, num_layers: int) -> ModuleNames:
    parts = ("mtp_emb_norm", "mtp_hidden_norm", "mtp_linear_proj", "mtp_block")
    names = tuple(f"model.{part}.{number}" for part in parts)
    return ModuleNames(tuple(f"{name}." for name in names), *names)


def _deepseek(number: int, num_layers: int) -> ModuleNames:
    """arXiv 2412.19437, section 2.2; the modules are numbered as further layers after the last."""
    base = f"model.layers.{num_layers + number}"
    return ModuleNames(
        prefixes=(f"{base}.",),
        embedding_norm=f"{base}.enorm",
        hidden_norm=f"{base}.hnorm",
        projection=f"{base}.eh_proj",
        block=base,
        norm=f"{base}.shared_head.norm",
        embedding=f"{base}.embed_tokens",
        head=f"{base}.shared_head.head",
    )


def _qwen(number: int, num_layers: int) -> ModuleNames:
    """Qwen3-Next and Qwen3.5: one module beside the model, whose block has full attention."""
    if number:
        raise ConfigError(
            f"config.json announces {number + 1} multi-token-prediction modules or more; those of "
            "Qwen3-Next and Qwen3.5 share their projection, which is not supported; possible: 1"
        )
    names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "layers.0", "norm")
    return ModuleNames(("mtp.",), *(f"mtp.{name}" for name in names))


LAYOUTS: Final[dict[str, Callable[[int, int], ModuleNames]]] = {
    "DeepseekV3ForCausalLM": _deepseek,
    "Ernie4_5ForCausalLM": _ernie,
    "Ernie4_5_ForCausalLM": _ernie,
    "Ernie4_5_MoeForCausalLM": _ernie,
    "Ernie4_5_VLMoeForConditionalGeneration": _ernie,
    "Qwen3NextForCausalLM": _qwen,
    "Qwen3_5ForCausalLM": _qwen,
    "Qwen3_5MoeForCausalLM": _qwen,
}
# Spellings of the number of modules in config.json.
COUNT_KEYS: Final = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")

# Modules of families whose releases have some and do not say so.
UNSAID: Final = {"Qwen3NextForCausalLM": 1}


def architecture(hf_config: Mapping[str, Any]) -> str:
    """The first of config.json's architectures."""
    return str((hf_config.get("architectures") or ["?"])[0])


def num_modules(hf_config: Mapping[str, Any]) -> int:
    """The number of modules that config.json announces, or that such releases have."""
    for key in COUNT_KEYS:
        value = hf_config.get(key)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ConfigError(
                f"config.json has {key}={value!r}; expected a whole number, 0 or above"
            )
        return value
    return UNSAID.get(architecture(hf_config), 0)


def modules(hf_config: Mapping[str, Any], count: int) -> list[ModuleNames]:
    """Names of the first `count` modules of this config.json's family."""
    name = architecture(hf_config)
    if name not in LAYOUTS:
        raise ConfigError(
            f"method 'mtp' does not know multi-token-prediction modules of {name}; possible: "
            f"{', '.join(sorted(LAYOUTS))}; a method without weights such as 'ngram' works with any"
        )
    num_layers = int(hf_config["num_hidden_layers"])
    return [LAYOUTS[name](number, num_layers) for number in range(count)]
