"""Sampling parameters under their FastDeploy 2.x path and names."""

from fastdeploy_core.types import SamplingParams, StructuredOutputsParams

# FastDeploy 2.x's name of the same class.
GuidedDecodingParams = StructuredOutputsParams

__all__ = ["GuidedDecodingParams", "SamplingParams", "StructuredOutputsParams"]
