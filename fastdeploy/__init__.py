"""FastDeploy: serve large language models on any accelerator.

    from fastdeploy import LLM, SamplingParams

Names are looked up on first use, so importing this package imports neither a tensor library nor an
engine. Everything lives in fastdeploy_core; this package is the name that users know.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastdeploy_core import __version__

if TYPE_CHECKING:
    from fastdeploy_core.api.llm import LLM
    from fastdeploy_core.types import (
        CompletionOutput,
        Logprob,
        LoRARequest,
        RequestMetrics,
        RequestOutput,
        SamplingParams,
        StructuredOutputsParams,
    )

_HOMES = {
    "LLM": "fastdeploy_core.api.llm",
    "CompletionOutput": "fastdeploy_core.types",
    "LoRARequest": "fastdeploy_core.types",
    "Logprob": "fastdeploy_core.types",
    "RequestMetrics": "fastdeploy_core.types",
    "RequestOutput": "fastdeploy_core.types",
    "SamplingParams": "fastdeploy_core.types",
    "StructuredOutputsParams": "fastdeploy_core.types",
}

__all__ = [
    "LLM",
    "CompletionOutput",
    "LoRARequest",
    "Logprob",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'fastdeploy' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
