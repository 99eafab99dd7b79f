"""FastDeploy: serve large language models on any accelerator.

    from fastdeploy import LLM, SamplingParams

Names are looked up on first use, so importing this package imports neither a tensor library nor an
engine. Everything lives in fastdeploy_core; this package has the names that users of FastDeploy 2.x
and vLLM know.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastdeploy_core import __version__

if TYPE_CHECKING:
    from fastdeploy_core.types import (
        CompletionOutput,
        Logprob,
        RequestMetrics,
        RequestOutput,
        StructuredOutputsParams,
    )

    from .engine.args_utils import EngineArgs
    from .inputs import TextPrompt, TokensPrompt
    from .llm import LLM
    from .lora.request import LoRARequest
    from .outputs import PoolingRequestOutput
    from .pooling_params import PoolingParams
    from .sampling_params import BeamSearchParams, SamplingParams

_HOMES = {
    "BeamSearchParams": "fastdeploy.sampling_params",
    "CompletionOutput": "fastdeploy_core.types",
    "EngineArgs": "fastdeploy.engine.args_utils",
    "LLM": "fastdeploy.llm",
    "LoRARequest": "fastdeploy.lora.request",
    "Logprob": "fastdeploy_core.types",
    "PoolingParams": "fastdeploy.pooling_params",
    "PoolingRequestOutput": "fastdeploy.outputs",
    "RequestMetrics": "fastdeploy_core.types",
    "RequestOutput": "fastdeploy_core.types",
    "SamplingParams": "fastdeploy.sampling_params",
    "StructuredOutputsParams": "fastdeploy_core.types",
    "TextPrompt": "fastdeploy.inputs",
    "TokensPrompt": "fastdeploy.inputs",
}

__all__ = [
    "LLM",
    "BeamSearchParams",
    "CompletionOutput",
    "EngineArgs",
    "LoRARequest",
    "Logprob",
    "PoolingParams",
    "PoolingRequestOutput",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
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
