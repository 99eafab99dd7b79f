"""PoolingParams under vLLM's path; needs fd-pooling."""

from fd_pooling.offline import PoolingParams

__all__ = ["PoolingParams"]
