"""The CUDA C++ kernels of packed weights on the CPU."""

from __future__ import annotations

import emulation


class Emulation(emulation.Emulation):
    header = "emulated_quant.h"
