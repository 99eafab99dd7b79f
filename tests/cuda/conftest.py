"""Settings of the tests on a GPU: kernels are chosen by rule, since shapes of tests are not worth
measuring."""

from __future__ import annotations

import os

os.environ.setdefault("FD_CUDA_TUNE", "0")
