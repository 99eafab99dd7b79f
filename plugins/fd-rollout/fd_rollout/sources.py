"""Where new weights come from: drivers of entry-point group `fd_rollout.weight_sources`.

A source gives whole tensors under their names in a checkpoint of the model, in the layout that the
model's own checkpoint has; each rank reads its share of them. Nothing that can carry code is read.
"""

from __future__ import annotations

import array
import os
import socket
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from fastdeploy_core.errors import ConfigError, WeightError
from fastdeploy_core.loading.weights import SafetensorsFile, find_files

if TYPE_CHECKING:
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.contracts.model import StoredTensor

GROUP: Final = "fd_rollout.weight_sources"
CONNECT_S: Final = 30.0
MAX_FILES: Final = 64


class WeightSource(Protocol):
    """New weights for one rank. Constructed as `Driver(options, version)` on each rank for each
    update, with the `options` of the request; `version` is what the new weights are called."""

    path: Path  # names the source in messages

    def __init__(self, options: Mapping[str, Any], version: str) -> None: ...

    def tensors(self, device: DeviceBackend) -> Sequence[tuple[str, StoredTensor]]:
        """Every tensor of the model by its name in a checkpoint, unread. ConfigError or WeightError
        say what is wrong with the source."""
        ...

    def close(self) -> None:
        """All tensors have been read, or will not be."""
        ...


class Folder:
    """WeightSource `folder`: *.safetensors of options["path"]. Whoever writes them gives the folder
    its name last, so that it is never half a checkpoint."""

    def __init__(self, options: Mapping[str, Any], version: str) -> None:
        path = options.get("path")
        if not isinstance(path, str) or not path or "\0" in path:
            raise ConfigError('source "folder" needs options {"path": FOLDER}')
        self.path = Path(path).expanduser()

    def tensors(self, device: DeviceBackend) -> Sequence[tuple[str, StoredTensor]]:
        """In the order of the files."""
        return _tensors_of(find_files(self.path), device)

    def close(self) -> None:
        """Nothing is open but the files' mappings."""


class SharedMemory:
    """WeightSource `shared`: memory of another process on this host, which listens at the Unix
    socket options["socket"] (fd_rollout.trainer.WeightServer). It is asked for a version with one
    line, and sends descriptors of memory that holds safetensors files. Nothing is copied but from
    there to the device."""

    def __init__(self, options: Mapping[str, Any], version: str) -> None:
        path = options.get("socket")
        if not isinstance(path, str) or not path or "\0" in path:
            raise ConfigError('source "shared" needs options {"socket": PATH}')
        self.path = Path(path)
        self._descriptors = _ask(path, version)

    def tensors(self, device: DeviceBackend) -> Sequence[tuple[str, StoredTensor]]:
        """In the order of the memory."""
        paths = [Path(f"/proc/self/fd/{number}") for number in self._descriptors]
        return _tensors_of(paths, device)

    def close(self) -> None:
        """The other process may use its memory again once every rank has closed."""
        for number in self._descriptors:
            os.close(number)
        self._descriptors = []


def open_source(name: str, options: Mapping[str, Any], version: str) -> WeightSource:
    """The source of that name. ConfigError for one that is not installed."""
    known = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name not in known:
        raise ConfigError(
            f"no source of weights {str(name)[:80]!r}; possible: {', '.join(sorted(known))}"
        )
    source: WeightSource = known[name].load()(options, version)
    return source


def _tensors_of(paths: Sequence[Path], device: DeviceBackend) -> Sequence[tuple[str, StoredTensor]]:
    return [pair for path in paths for pair in SafetensorsFile(path, device).tensors()]


def _ask(path: str, version: str) -> list[int]:
    """Descriptors of the memory that holds this version."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.settimeout(CONNECT_S)
        try:
            link.connect(path)
            link.sendall(version.encode() + b"\n")
            numbers = array.array("i")
            room = socket.CMSG_SPACE(MAX_FILES * numbers.itemsize)
            text, ancillary, _, _ = link.recvmsg(4096, room)
        except OSError as error:
            raise WeightError(f"no weights from the socket {path}: {error}") from error
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
    if not numbers:
        said = text.decode("utf-8", "replace").strip() or "nothing"
        raise WeightError(f"the process at {path} sent no weights {version}; it said: {said}")
    return list(numbers)
