"""Settings of this plugin, all through environment variables FD_CUDA_*."""

from __future__ import annotations

import functools
import os

from fastdeploy_core.errors import ConfigError

# name: (possible values, default, effect)
VARIABLES: dict[str, tuple[tuple[str, ...], str, str]] = {
    "FD_CUDA_ALL_REDUCE": (
        ("auto", "nccl"),
        "auto",
        "small sums over NVLink by one kernel where the GPUs reach each other, or NCCL for all",
    ),
    "FD_CUDA_NATIVE": (
        ("0", "1"),
        "1",
        "CUDA C++ kernels, compiled by NVRTC at first use and kept; 0: Triton and cuBLAS alone",
    ),
    "FD_SAMPLING_CLASS": (
        ("base", "base_non_truncated", "air", "rejection"),
        "base",
        "FastDeploy's names of sampling methods; all mean the same exact one without sorting",
    ),
    "FD_BATCH_INVARIANT": (
        ("0", "1"),
        "0",
        "a token's results are the same, bit for bit, in every batch, scored or generated; slower",
    ),
}


def setting(name: str) -> str:
    """The variable's value; ConfigError names the possible ones."""
    return _read(name, os.environ.get(name, ""))


@functools.cache
def _read(name: str, text: str) -> str:
    possible, default, _ = VARIABLES[name]
    value = text.strip() or default
    if value not in possible:
        raise ConfigError(
            f"environment variable {name} cannot be read: got {value!r:.80}; "
            f"possible: {', '.join(possible)}; unset it for the default ({default!r})"
        )
    return value
