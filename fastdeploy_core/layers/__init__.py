"""Layers hold weights and call the kernels they were given; ModelBuilder makes layers.

No file imports a tensor library: the device brings it (`device.xp`).
"""

from .builder import DriverFactories, ModelBuilder, ModelRanks, WeightFormats
from .context import ForwardContext
from .rotary import RotarySpec

__all__ = [
    "DriverFactories",
    "ForwardContext",
    "ModelBuilder",
    "ModelRanks",
    "RotarySpec",
    "WeightFormats",
]
