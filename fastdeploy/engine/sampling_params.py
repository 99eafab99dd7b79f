"""Sampling parameters under their FastDeploy 2.x path and names."""

from fastdeploy.sampling_params import GuidedDecodingParams, SamplingParams, StructuredOutputsParams

__all__ = ["GuidedDecodingParams", "SamplingParams", "StructuredOutputsParams"]
