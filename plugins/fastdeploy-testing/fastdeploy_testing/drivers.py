"""What a plugin's tests ask of an installation: a driver by its name, and a device's table of kernels."""

from __future__ import annotations

from fastdeploy_core.plugins.drivers import lookup
from fastdeploy_core.plugins.kernels import build_kernel_table

__all__ = ["build_kernel_table", "lookup"]
