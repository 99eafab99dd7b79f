"""Layers hold weights and call the kernel they were given; ModelBuilder makes them.

Nothing here imports a tensor library: it comes with the device (`device.xp`).
"""

from .builder import ModelBuilder
from .context import ForwardContext
from .rotary import RotarySpec

__all__ = ["ForwardContext", "ModelBuilder", "RotarySpec"]
