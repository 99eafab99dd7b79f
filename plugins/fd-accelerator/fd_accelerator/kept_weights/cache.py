"""`--weight-cache DIR`: weights in the layout of a device, kept in a file between starts.

The first start reads the checkpoint and writes each matrix, as the device laid it out, to a file.
The next start reads these matrices from the file, and from the checkpoint only tensors that are not
laid out (norms, biases). The core names the file (fastdeploy_core/loading/loader.py).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from fastdeploy_core.errors import ConfigError, WeightError

from .packed_file import PackedFile, PackedWriter

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    from fastdeploy_core.contracts.device import PackingDevice

logger = logging.getLogger(__name__)


class WeightCache:
    """Layers call `get` before they read a weight and `put` after they laid it out. Use it as a
    context around loading: the file is kept if loading succeeds."""

    def __init__(self, device: PackingDevice, path: Path) -> None:
        self._device, self._path = device, path
        self._file: PackedFile | None = None
        self._writer: PackedWriter | None = None
        self._num_weights = 0
        self.num_bytes = 0  # of weights that came from the file
        self.report: list[str] = []  # for the start-up report
        if path.exists():
            self._file = PackedFile(path, device.weight_layout)
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._writer = PackedWriter(path, device.weight_layout)
        except OSError as error:
            raise ConfigError(
                f"--weight-cache {path.parent} cannot be written: {error}; pass a folder of yours"
            ) from None

    def __enter__(self) -> WeightCache:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file = None  # releases the mapping as well
            self._say(self.num_bytes, "from")
        if self._writer is None:
            return
        try:
            if error is None:
                self._say(self._writer.finish(), "written to")
                self._writer = None
        except OSError as failure:
            self._give_up(failure)
        finally:
            self._drop()

    def get(self, name: str) -> Any:
        """The laid-out weight of that name; None if it is not kept."""
        found = None if self._file is None else self._file.get(name)
        if found is None:
            return None
        try:
            prepared = self._device.restore_weight(*found)
        except (ValueError, KeyError, TypeError) as error:
            raise WeightError(
                f"{self._path} of --weight-cache holds a weight {name} that the device cannot "
                f"take: {error}; delete this file, and the next start writes it anew"
            ) from None
        self._num_weights += 1
        self.num_bytes += sum(array.nbytes for array in found[1])
        return prepared

    def put(self, name: str, prepared: Any) -> None:
        """Keep a weight, if the device laid it out."""
        if self._writer is None:
            return
        dumped = self._device.dump_weight(prepared)
        if dumped is None:
            return
        try:
            self._writer.add(name, *dumped)
            self._num_weights += 1
        except OSError as error:
            self._give_up(error)

    def _say(self, num_bytes: int, how: str) -> None:
        size = f"{num_bytes / 1e6:.0f} MB"
        self.report.append(f"weight cache: {self._num_weights} weights, {size}, {how} {self._path}")

    def _give_up(self, error: OSError) -> None:
        """Stop keeping weights; the model can be served without."""
        logger.warning("the weight cache %s is not written: %s", self._path, error)
        self.report.append(f"weight cache: {self._path} could not be written")
        self._drop()

    def _drop(self) -> None:
        """Remove an unfinished file."""
        if self._writer is not None:
            self._writer.drop()
            self._writer = None
