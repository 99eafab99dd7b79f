"""What a plugin's tests need of an installation: a driver by its name, a device's kernel table."""

from __future__ import annotations

from fastdeploy_core.plugins.drivers import lookup
from fastdeploy_core.plugins.kernels import build_kernel_table

__all__ = ["build_kernel_table", "lookup"]
