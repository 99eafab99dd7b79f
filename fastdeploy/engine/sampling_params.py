"""Sampling parameters under their FastDeploy 2.x path and names."""

from fastdeploy_core.types import SamplingParams, StructuredOutputsParams

# The name that FastDeploy 2.x uses for the same idea.
GuidedDecodingParams = StructuredOutputsParams

__all__ = ["GuidedDecodingParams", "SamplingParams", "StructuredOutputsParams"]
