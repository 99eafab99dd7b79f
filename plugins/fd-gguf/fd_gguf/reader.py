"""The GGUF container: settings and tensor table of a file, with every number checked before use.

The file is memory-mapped; only the header is read here. A damaged or hostile header gives a
WeightError that names the file and the entry, and never takes more memory than the limits below.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from fastdeploy_core.errors import WeightError

from .blocks import FORMATS, KNOWN_TYPES, BlockFormat

_MAX_HEADER_BYTES: Final = 256 * 1024 * 1024
_MAX_ENTRIES: Final = 200_000  # settings, or tensors
_MAX_ITEMS: Final = 4_000_000  # of one array
_MAX_NAME_BYTES: Final = 65_535
_MAX_DIMS: Final = 4
_SCALARS: Final[dict[int, str]] = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8",
    11: "<i8", 12: "<f8",
}  # fmt: skip
_STRING: Final = 8
_ARRAY: Final = 9
_PART: Final = re.compile(r"^(.*)-(\d{5})-of-(\d{5})\.gguf$")


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor of the table. `shape` is outermost first; the blocks of a row are along the last
    dimension."""

    name: str
    shape: tuple[int, ...]
    format: BlockFormat
    file: GGUFFile
    start: int  # in the file

    @property
    def row_bytes(self) -> int:
        """Bytes of one row: of everything along the last dimension."""
        return self.shape[-1] // self.format.values * self.format.nbytes

    @property
    def num_rows(self) -> int:
        """Rows of all leading dimensions together."""
        return math.prod(self.shape[:-1])

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.num_rows * self.row_bytes

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Raw bytes of rows [stop - start, row_bytes], over the mapping."""
        count = stop - start
        position = self.start + start * self.row_bytes
        flat = np.frombuffer(self.file.map, np.uint8, count * self.row_bytes, position)
        return flat.reshape(count, self.row_bytes)


class _Header:
    """The bytes of a header, read in order."""

    def __init__(self, data: mmap.mmap, limit: int) -> None:
        self._data, self._limit = data, limit
        self.position = 0

    def bytes(self, count: int) -> bytes:
        start = self.position
        if count > self._limit - start:
            raise ValueError(f"it ends within {count} bytes that should follow byte {start}")
        self.position = start + count
        return self._data[start : self.position]

    def number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.bytes(struct.calcsize(f"<{code}")))[0]

    def count(self, what: str, most: int) -> int:
        value = int(self.number("Q"))
        if value > most:
            raise ValueError(f"{what} is {value}, more than {most}")
        return value

    def name(self, what: str) -> str:
        raw = self.bytes(self.count(f"the length of {what}", _MAX_NAME_BYTES))
        return _text(raw, what)

    def string(self, key: str) -> str:
        length = self.count(f"the length of a text of {key}", self._limit)
        return _text(self.bytes(length), key)

    def value(self, key: str) -> Any:
        kind = self.number("I")
        if kind == _STRING:
            return self.string(key)
        if kind == _ARRAY:
            return self.array(key)
        return self.scalar(key, kind).tolist()[0]

    def scalar(self, key: str, kind: int, count: int = 1) -> np.ndarray:
        if kind not in _SCALARS:
            raise ValueError(f"setting {key} has the unknown value type {kind}")
        dtype = np.dtype(_SCALARS[kind])
        raw = self.bytes(count * dtype.itemsize)
        return np.frombuffer(raw, np.uint8).astype(bool) if kind == 7 else np.frombuffer(raw, dtype)

    def array(self, key: str) -> Any:
        kind = self.number("I")
        count = self.count(f"the length of setting {key}", _MAX_ITEMS)
        if kind == _STRING:
            return [self.string(key) for _ in range(count)]
        if kind == _ARRAY:
            raise ValueError(f"setting {key} is an array of arrays")
        return self.scalar(key, kind, count)


def _text(raw: bytes, what: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise ValueError(f"{what} is not UTF-8: {raw[:40]!r}") from None


class GGUFFile:
    """One open file: `settings` by key (texts, numbers, lists of texts, arrays of numbers),
    `tensors`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        size = path.stat().st_size
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise WeightError(f"{path} is no GGUF file: it does not begin with GGUF")
            self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.settings: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        self._header_bytes = 0
        try:
            self._read_header(size)
        except (ValueError, struct.error) as error:
            raise WeightError(
                f"{path} is no GGUF file or is damaged: {error}; download it again"
            ) from None

    def header(self) -> bytes:
        """The settings and the tensor table, as stored in the file."""
        return self.map[: self._header_bytes]

    def _read_header(self, size: int) -> None:
        header = _Header(self.map, min(size, _MAX_HEADER_BYTES))
        header.bytes(4)
        version = header.number("I")
        if version not in (2, 3):
            swapped = version.to_bytes(4, "little")[::-1] in (b"\2\0\0\0", b"\3\0\0\0")
            order = "big-endian numbers" if swapped else f"version {version}"
            raise ValueError(f"it has {order}; possible: little-endian files of version 2 and 3")
        num_tensors = header.count("the number of tensors", _MAX_ENTRIES)
        num_settings = header.count("the number of settings", _MAX_ENTRIES)
        for _ in range(num_settings):
            key = header.name("the name of a setting")
            if key in self.settings:
                raise ValueError(f"setting {key} occurs twice")
            self.settings[key] = header.value(key)
        alignment = self.settings.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20:
            raise ValueError(f"general.alignment is {alignment!r}")
        found = [self._read_tensor(header) for _ in range(num_tensors)]
        self._header_bytes = header.position
        base = -(-header.position // alignment) * alignment
        self._place(found, base, size, alignment)

    def _read_tensor(self, header: _Header) -> tuple[str, tuple[int, ...], int, int]:
        name = header.name("the name of a tensor")
        num_dims = header.number("I")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise ValueError(
                f"tensor {name} has {num_dims} dimensions, more than {_MAX_DIMS} or none"
            )
        dims = [int(header.number("Q")) for _ in range(num_dims)]
        return name, tuple(reversed(dims)), int(header.number("I")), int(header.number("Q"))

    def _place(
        self,
        found: list[tuple[str, tuple[int, ...], int, int]],
        base: int,
        size: int,
        alignment: int,
    ) -> None:
        """Tensors that lie inside the file, fill whole blocks and do not overlap."""
        end = base
        for name, shape, kind, offset in sorted(found, key=lambda item: item[3]):
            if name in self.tensors:
                raise ValueError(f"tensor {name} occurs twice")
            tensor = GGUFTensor(name, shape, self._format(name, kind), self, base + offset)
            if min(shape) < 1 or shape[-1] % tensor.format.values:
                raise ValueError(
                    f"tensor {name} has shape {list(shape)}; {tensor.format.name} comes in rows of "
                    f"{tensor.format.values} numbers"
                )
            if offset % alignment:
                raise ValueError(f"tensor {name} starts at {offset}, no multiple of {alignment}")
            if tensor.start < end:
                raise ValueError(f"tensor {name} at {offset} overlaps the one before it")
            end = tensor.start + tensor.nbytes
            if end > size:
                raise ValueError(
                    f"tensor {name} of shape {list(shape)} ends at byte {end}; the file has {size}"
                )
            self.tensors[name] = tensor

    def _format(self, name: str, kind: int) -> BlockFormat:
        if kind not in FORMATS:
            what = KNOWN_TYPES.get(kind, f"number {kind}")
            raise WeightError(
                f"{self.path}: tensor {name} is stored as type {what}, which is not read; "
                f"possible: {', '.join(f.name for f in FORMATS.values())}; use a file of one of "
                "these types, such as Q4_K_M or Q8_0"
            )
        return FORMATS[kind]


class GGUFModel:
    """A model in one file or in the parts of a split one. The first part has the settings."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = [GGUFFile(part) for part in _parts(path)]
        self.settings = self.files[0].settings
        self.tensors: dict[str, GGUFTensor] = {}
        for file in self.files:
            for name, tensor in file.tensors.items():
                if name in self.tensors:
                    owner = self.tensors[name].file.path.name
                    raise WeightError(f"tensor {name} is both in {owner} and in {file.path.name}")
                self.tensors[name] = tensor
        count = self.settings.get("split.count", 0)
        if isinstance(count, int) and count > 1 and count != len(self.files):
            raise WeightError(
                f"{path} is one of {count} parts; expected all of them in one folder, under names "
                f"such as model-00001-of-{count:05d}.gguf, and the first as the model path"
            )


def _parts(path: Path) -> list[Path]:
    match = _PART.match(path.name)
    if match is None:
        return [path]
    stem, number, count = match[1], int(match[2]), int(match[3])
    if number != 1:
        raise WeightError(
            f"{path} is part {number} of a split model; pass {stem}-00001-of-{count:05d}.gguf"
        )
    parts = [path.with_name(f"{stem}-{n:05d}-of-{count:05d}.gguf") for n in range(1, count + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise WeightError(
            f"{len(missing)} of {count} parts of {path} are missing: {', '.join(missing[:5])}; "
            "finish the download"
        )
    return parts


def find_gguf(path: Path) -> Path:
    """The GGUF file of a model path: the path itself, or the only model of a folder.

    WeightError if a folder has none or several.
    """
    if path.is_file():
        return path
    models = [
        file
        for file in sorted(path.glob("*"))
        if file.suffix.lower() == ".gguf"
        and ((match := _PART.match(file.name)) is None or int(match[2]) == 1)
    ]
    if not models:
        raise WeightError(
            f"{path} has no first part of a GGUF model, such as m-00001-of-00002.gguf; finish the "
            "download"
        )
    if len(models) > 1:
        raise WeightError(
            f"{path} has {len(models)} GGUF models: {', '.join(f.name for f in models[:8])}; pass "
            "the path of one of them"
        )
    return models[0]
