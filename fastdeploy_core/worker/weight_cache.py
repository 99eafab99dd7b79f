"""`--weight-cache DIR`: weights as a device has laid them out, kept in a file between starts.

The first start reads the checkpoint, and what the device makes of each matrix goes into a file; the next
one takes it from there and reads of the checkpoint only what is not laid out (norms, biases). A file
belongs to one checkpoint, number format, dtype, device and rank: its name is made of them.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fastdeploy_core.contracts.device import PackingDevice
from fastdeploy_core.errors import ConfigError, WeightError

from .packed_file import PackedFile, PackedWriter
from .weights import find_files

if TYPE_CHECKING:
    from fastdeploy_core.config import ModelConfig

logger = logging.getLogger(__name__)

_NUM_SAMPLES: Final = 16  # places of a file that are looked at
_SAMPLE_BYTES: Final = 4096


class WeightCache:
    """What layers ask before their weights are read (`get`) and tell when these are laid out (`put`)."""

    def __init__(self, device: PackingDevice, path: Path) -> None:
        self._device, self.path = device, path
        self._file: PackedFile | None = None
        self._writer: PackedWriter | None = None
        self._num_kept = 0
        self.num_bytes = 0  # of weights that came from the file
        if path.exists():
            self._file = PackedFile(path, device.weight_layout)
        else:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._writer = PackedWriter(path, device.weight_layout)
            except OSError as error:
                raise ConfigError(
                    f"--weight-cache {path.parent} cannot be written: {error}; pass a folder of yours"
                ) from None

    def get(self, name: str) -> Any:
        """The laid-out weight of that name; None if it is not kept."""
        found = None if self._file is None else self._file.get(name)
        if found is None:
            return None
        try:
            prepared = self._device.restore_weight(*found)
        except (ValueError, KeyError, TypeError) as error:
            raise WeightError(
                f"{self.path} of --weight-cache holds a weight {name} that the device cannot take: "
                f"{error}; delete this file, and the next start writes it anew"
            ) from None
        self._num_kept += 1
        self.num_bytes += sum(array.nbytes for array in found[1])
        return prepared

    def put(self, name: str, prepared: Any) -> None:
        """Keep it, if the device made it."""
        dumped = None if self._writer is None else self._device.dump_weight(prepared)
        if self._writer is None or dumped is None:
            return
        try:
            self._writer.add(name, *dumped)
            self._num_kept += 1
        except OSError as error:
            self._give_up(error)

    def finish(self) -> str:
        """Everything was loaded; a line for the start-up report."""
        if self._file is not None:
            self._file = None  # the mapping goes with it
            size = self.num_bytes / 1e6
            return f"weight cache: {self._num_kept} weights, {size:.0f} MB, from {self.path}"
        if self._writer is None:
            return f"weight cache: {self.path} could not be written"
        try:
            size = self._writer.finish() / 1e6
        except OSError as error:
            self._give_up(error)
            return self.finish()
        self._writer = None
        return f"weight cache: {self._num_kept} weights, {size:.0f} MB, written to {self.path}"

    def close(self) -> None:
        """Leave no half of a file behind."""
        if self._writer is not None:
            self._writer.drop()
            self._writer = None

    def _give_up(self, error: OSError) -> None:
        """The model can be served all the same."""
        logger.warning("the weight cache %s is not written: %s", self.path, error)
        self.close()


@contextmanager
def weight_cache(
    config: ModelConfig,
    device: Any,
    facts: Mapping[str, Any],
    rank: int,
) -> Iterator[WeightCache | None]:
    """The cache of this rank, if one is asked for and the device can keep weights. `facts`: all but the
    checkpoint that weights depend on."""
    if not (config.weight_cache and isinstance(device, PackingDevice)):
        yield None
        return
    own = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode())
    own.update(_fingerprint(config.path))
    name = f"{config.path.name}-{own.hexdigest()[:16]}-{device.name}-{rank}.packed"
    cache = WeightCache(device, Path(config.weight_cache) / name)
    try:
        yield cache
    finally:
        cache.close()


def _fingerprint(path: Path) -> bytes:
    """Of a checkpoint: its files' names, sizes and times, and what stands at some places in them."""
    digest = hashlib.sha256()
    for file in [path] if path.is_file() else find_files(path):
        status = file.stat()
        digest.update(f"{file.name} {status.st_size} {status.st_mtime_ns}".encode())
        with file.open("rb") as opened:
            for place in np.linspace(0, max(0, status.st_size - _SAMPLE_BYTES), _NUM_SAMPLES):
                opened.seek(int(place))
                digest.update(opened.read(_SAMPLE_BYTES))
    return digest.digest()
