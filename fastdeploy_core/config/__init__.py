"""Frozen configuration records, and the functions that build them from names and files."""

from .engine import (
    BatchConfig,
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    GraphConfig,
    HandoverConfig,
    KVEventsConfig,
    ModelConfig,
    ParallelConfig,
    RequestSchedulerConfig,
    SpeculativeConfig,
    StructuredOutputsConfig,
    WatchdogConfig,
)

__all__ = [
    "BatchConfig",
    "CacheConfig",
    "DeviceConfig",
    "EngineConfig",
    "GraphConfig",
    "HandoverConfig",
    "KVEventsConfig",
    "ModelConfig",
    "ParallelConfig",
    "RequestSchedulerConfig",
    "SpeculativeConfig",
    "StructuredOutputsConfig",
    "WatchdogConfig",
]
