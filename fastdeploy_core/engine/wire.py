"""What crosses a socket or a pipe between our own processes: typed records, MessagePack, no pickle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from fastdeploy_core.config import EngineConfig
from fastdeploy_core.plugins.resolved import ResolvedPlugins
from fastdeploy_core.types import Request, RequestOutputDelta
from fastdeploy_core.types.engine import EngineInfo, EngineStats
from fastdeploy_core.types.worker import WorkerInfo


class EngineInit(msgspec.Struct, kw_only=True):
    """What an engine process needs to start."""

    config: EngineConfig
    resolved: ResolvedPlugins
    folder: str
    digest: str


class WorkerInit(msgspec.Struct, kw_only=True):
    """What a worker process needs to start."""

    config: EngineConfig
    resolved: ResolvedPlugins
    rank: int
    world_size: int
    folder: str
    address: str
    digest: str


class Put(msgspec.Struct, tag=True):
    """Client to engine: queue this request."""

    request: Request


class Abort(msgspec.Struct, tag=True):
    """Client to engine: end these requests."""

    request_ids: list[str]


class AskStats(msgspec.Struct, tag=True):
    """Client to engine: send Stats with this number."""

    number: int


class Stop(msgspec.Struct, tag=True):
    """Client to engine: end the process."""


class Ready(msgspec.Struct, tag=True):
    """Engine to client: the model is loaded."""

    info: EngineInfo


class Failed(msgspec.Struct, tag=True):
    """Engine to client: why the process is about to end."""

    error_type: str
    message: str


class Deltas(msgspec.Struct, tag=True):
    """Engine to client: output."""

    deltas: list[RequestOutputDelta]


class Stats(msgspec.Struct, tag=True):
    """Engine to client: the answer to AskStats."""

    number: int
    stats: EngineStats


ToEngine = Put | Abort | AskStats | Stop
FromEngine = Ready | Failed | Deltas | Stats


class Load(msgspec.Struct, tag=True):
    """Executor to worker process: load the model."""


class InitializeCache(msgspec.Struct, tag=True):
    """Executor to worker process: allocate the KV pool."""

    num_blocks: int
    num_host_blocks: int


class Close(msgspec.Struct, tag=True):
    """Executor to worker process: end."""


ToWorker = Load | InitializeCache | Close  # and SchedulerOutput, in frames of their own


class Loaded(msgspec.Struct, tag=True):
    """Worker process to executor: the model is loaded."""

    rank: int
    info: WorkerInfo


class CacheReady(msgspec.Struct, tag=True):
    """Worker process to executor: the KV pool is allocated."""

    rank: int


class WorkerFailed(msgspec.Struct, tag=True):
    """Worker process to executor: why it is about to end."""

    rank: int
    error_type: str
    message: str


FromWorker = Loaded | CacheReady | WorkerFailed


def _encode_extra(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"{type(value).__name__} cannot be sent to another process")


def _decode_extra(kind: type, value: Any) -> Any:
    if issubclass(kind, Path):
        return Path(value)
    raise NotImplementedError(f"{kind.__name__} cannot be received from another process")


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_extra)


def encode(message: Any) -> bytes:
    """Any of the records above, or a SchedulerOutput."""
    return _encoder.encode(message)


def decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """A decoder for one record or a union of them; it raises msgspec.ValidationError."""
    return msgspec.msgpack.Decoder(kind, dec_hook=_decode_extra)
