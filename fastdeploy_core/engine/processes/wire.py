"""What crosses a socket or a pipe between processes of this project: typed records as MessagePack,
no pickle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fastdeploy_core.config import EngineConfig
from fastdeploy_core.plugins.resolved import ResolvedPlugins
from fastdeploy_core.types import InstanceRole, Request, RequestOutputDelta, TokenDeltas
from fastdeploy_core.types.engine import EngineInfo, EngineStats
from fastdeploy_core.types.worker import WorkerInfo

ARRAY_TYPES = ("int64", "bool")
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError)  # the latter for names of fields and types


def request_address(folder: Path | str) -> str:
    """Address at which the engine of this folder receives requests."""
    return f"ipc://{folder}/requests"


def output_address(folder: Path | str) -> str:
    """Address at which a supervisor receives output of this folder's engine."""
    return f"ipc://{folder}/output"


class EngineInit(msgspec.Struct, kw_only=True):
    """What an engine process needs to start."""

    config: EngineConfig
    resolved: ResolvedPlugins
    folder: str
    digest: str
    front_ends: list[str]  # address of each front end for its output


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
    front_end: int = 0  # number of the front end that wants the output


class Abort(msgspec.Struct, tag=True):
    """Client to engine: end these requests."""

    request_ids: list[str]


class AskStats(msgspec.Struct, tag=True):
    """Client to engine: send Stats with this number."""

    number: int
    front_end: int = 0


class Gone(msgspec.Struct, tag=True):
    """Supervisor to engine: this front end has ended, so its requests have no reader."""

    front_end: int


class Stop(msgspec.Struct, tag=True):
    """Client to engine: end the process."""


class Drain(msgspec.Struct, tag=True):
    """Supervisor to front end: answer what is in flight and end; a second one: end now. Client to
    engine, where a queue is shared: take no more requests."""


class SetRole(msgspec.Struct, tag=True):
    """Client to engine: what routers are to use it for from now on. Stats say when it is."""

    role: InstanceRole


class Control(msgspec.Struct, tag=True):
    """Client to engine, for part `rollout-engine`, whose state is in Stats; executor to worker
    process, for part `rollout-worker`."""

    action: dict[str, Any]


class Ready(msgspec.Struct, tag=True):
    """Engine to client: the model is loaded."""

    info: EngineInfo


class Failed(msgspec.Struct, tag=True):
    """Engine to client: why the process is about to end."""

    error_type: str
    message: str


class Deltas(msgspec.Struct, tag=True):
    """Engine to client: output."""

    deltas: list[RequestOutputDelta | TokenDeltas]


class Stats(msgspec.Struct, tag=True):
    """Engine to client: the answer to AskStats."""

    number: int
    stats: EngineStats


class Attached(msgspec.Struct, tag=True):
    """Supervisor to front end: an engine takes requests from now on."""

    folder: str  # the engine's folder, with its sockets and its progress file
    info: EngineInfo
    num_restarts: int


class Detached(msgspec.Struct, tag=True):
    """Supervisor to front end: the engine ended; another one may be attached."""

    reason: str


class Dead(msgspec.Struct, tag=True):
    """Supervisor to front end: no engine runs, and none will be started."""

    error_type: str
    message: str


ToEngine = Put | Abort | AskStats | Gone | Drain | SetRole | Control | Stop
FromEngine = Ready | Failed | Deltas | Stats
ToFrontEnd = Attached | Detached | Dead | Drain | Deltas | Stats


class Load(msgspec.Struct, tag=True):
    """Executor to worker process: load the model."""


class InitializeCache(msgspec.Struct, tag=True):
    """Executor to worker process: allocate the KV pool."""

    num_blocks: list[int]  # of the first group of layers, in host memory; the others', likewise
    # "host_files": of each rank's host tier, group by group, where others read and fill it. It is
    # left out otherwise, since a device's own worker may be older than it.
    options: dict[str, list[str]] = {}


class Close(msgspec.Struct, tag=True):
    """Executor to worker process: end."""


ToWorker = Load | InitializeCache | Control | Close  # and SchedulerOutput, in frames of their own


class Loaded(msgspec.Struct, tag=True):
    """Worker process to executor: the model is loaded."""

    rank: int
    info: WorkerInfo


class CacheReady(msgspec.Struct, tag=True):
    """Worker process to executor: the KV pool is allocated."""

    rank: int


class Controlled(msgspec.Struct, tag=True):
    """Worker process to executor: what Control came to."""

    answer: dict[str, Any]


class WorkerFailed(msgspec.Struct, tag=True):
    """Worker process to executor: why it is about to end."""

    rank: int
    error_type: str
    message: str


FromWorker = Loaded | CacheReady | Controlled | WorkerFailed


def _encode_extra(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, np.ndarray) and value.dtype.name in ARRAY_TYPES and value.ndim <= 2:
        return [value.dtype.name, value.shape, value.tobytes()]
    raise NotImplementedError(f"{type(value).__name__} cannot be sent to another process")


def _decode_extra(kind: type, value: Any) -> Any:
    if issubclass(kind, Path):
        return Path(value)
    if kind is np.ndarray:
        name, shape, data = value
        if name not in ARRAY_TYPES:
            raise ValueError(f"an array of {name!r:.20} is not sent between processes")
        return np.frombuffer(data, dtype=name).reshape(shape)
    raise NotImplementedError(f"{kind.__name__} cannot be received from another process")


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_extra)


def encode(message: Any) -> bytes:
    """Any of the records above, or a SchedulerOutput."""
    return _encoder.encode(message)


def decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """A decoder for one record or a union of them; it raises one of UNREADABLE."""
    return msgspec.msgpack.Decoder(kind, dec_hook=_decode_extra)
