"""Which operations this distribution brings for the device `myops`. Strings only: nothing is
imported before a layer asks."""

from fastdeploy_core.contracts.ops import Kernel

TABLE = {"rms_norm": Kernel("fd_myops.ops:rms_norm")}
