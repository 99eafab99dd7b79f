"""Outputs under their FastDeploy 2.x path."""

from fastdeploy_core.types import CompletionOutput, RequestMetrics, RequestOutput

__all__ = ["CompletionOutput", "RequestMetrics", "RequestOutput"]
