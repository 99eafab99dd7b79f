"""Layers hold weights and call the kernels they were given; ModelBuilder makes layers.

The names below are public: model families of plugins are made of them
(docs/how-to/write-a-model.md).
No file imports a tensor library: the device brings it (`device.xp`).
"""

from .attention import Attention, HeadShape, PagedAttention
from .builder import DriverFactories, ModelBuilder, ModelRanks, WeightFormats
from .context import EmbeddedRows, ForwardContext
from .embedding import Embedding, LMHead
from .experts import ExpertShare
from .linear import Linear, LinearPart, LinearShape
from .mlp import GatedMLP
from .moe import MoEBlock, SharedExperts
from .norm import LayerNorm, RMSNorm
from .rotary import RotarySpec, yarn_magnitude
from .stored import StoredLayer, StoredPart
from .weight_map import Placement

__all__ = [
    "Attention",
    "DriverFactories",
    "EmbeddedRows",
    "Embedding",
    "ExpertShare",
    "ForwardContext",
    "GatedMLP",
    "HeadShape",
    "LMHead",
    "LayerNorm",
    "Linear",
    "LinearPart",
    "LinearShape",
    "MoEBlock",
    "ModelBuilder",
    "ModelRanks",
    "PagedAttention",
    "Placement",
    "RMSNorm",
    "RotarySpec",
    "SharedExperts",
    "StoredLayer",
    "StoredPart",
    "WeightFormats",
    "yarn_magnitude",
]
