"""Checkpoint files: safetensors only, header checked before anything is mapped, read part by part.

Files are memory-mapped, so a rank touches only the pages it needs and no second copy of the weights
exists. Formats that can contain code are refused by name (reliability rule S-03).
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import weakref
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fastdeploy_core.config.model import read_json
from fastdeploy_core.errors import ConfigError, WeightError
from fastdeploy_core.tensor import DTYPE_BYTES

if TYPE_CHECKING:
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.layers.weight_map import Placement
    from fastdeploy_core.tensor import Tensor

INDEX_NAME: Final = "model.safetensors.index.json"
_UNSAFE_SUFFIXES: Final = (".bin", ".pt", ".pth", ".ckpt", ".pdparams", ".pkl", ".pickle", ".npy")
_MAX_HEADER_BYTES: Final = 100_000_000

# safetensors dtype -> (numpy dtype of the bytes, name here). numpy has no bfloat16 and no float8:
# their bits are read as unsigned integers, which the tensor library reinterprets.
_DTYPES: Final[dict[str, tuple[str, str]]] = {
    "F64": ("<f8", "float64"),
    "F32": ("<f4", "float32"),
    "F16": ("<f2", "float16"),
    "BF16": ("<u2", "bfloat16"),
    "F8_E4M3": ("u1", "float8_e4m3fn"),
    "F8_E5M2": ("u1", "float8_e5m2"),
    "I64": ("<i8", "int64"),
    "I32": ("<i4", "int32"),
    "I16": ("<i2", "int16"),
    "I8": ("i1", "int8"),
    "U8": ("u1", "uint8"),
    "BOOL": ("?", "bool"),
}


def find_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint, each checked to be inside the folder."""
    if not folder.is_dir():
        raise WeightError(f"{folder} is no folder; expected one with *.safetensors")
    if list(folder.glob("rank*/*.safetensors")):
        raise WeightError(
            f"the checkpoint in {folder} is divided into rank folders for one parallel size; "
            "expected whole tensors in *.safetensors; merge it with the tool that divided it"
        )
    index = folder / INDEX_NAME
    single = folder / "model.safetensors"
    if index.is_file():
        files = _indexed_files(index)
    elif single.is_file():
        files = [single]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if files:
        return files
    unsafe = sorted(p.name for p in folder.iterdir() if p.suffix in _UNSAFE_SUFFIXES)
    if unsafe:
        raise WeightError(
            f"the weights in {folder} are in a format that can carry code: "
            f"{', '.join(unsafe[:5])}; "
            "only *.safetensors files are read; convert them with the library that wrote them"
        )
    raise WeightError(
        f"no weights in {folder}; expected model.safetensors or {INDEX_NAME} with its parts; "
        "finish the download, or pass --load-format dummy for random weights"
    )


def _indexed_files(index: Path) -> list[Path]:
    try:
        names = sorted(set(read_json(index)["weight_map"].values()))
    except (ConfigError, KeyError, TypeError, AttributeError) as error:
        raise WeightError(f"{index} is not a safetensors index: {error!r}") from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or name in ("", ".", ".."):
            raise WeightError(f"{index} names {name!r}; expected plain file names beside it")
        if not name.endswith(".safetensors"):
            raise WeightError(
                f"{index} names {name!r}, a format that can carry code; only *.safetensors is read"
            )
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise WeightError(
            f"{len(missing)} of {len(names)} weight files named by {index} are missing: "
            f"{', '.join(missing[:5])}; finish the download"
        )
    return [index.parent / name for name in names]


@dataclass(frozen=True, slots=True)
class _Entry:
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class SafetensorsFile:
    """One open file. Keep it, or one of its tensors, until all parts have been read."""

    def __init__(self, path: Path, device: DeviceBackend) -> None:
        self.path, self.device = path, device
        with path.open("rb") as file:
            size = path.stat().st_size
            if size < 8:
                raise WeightError(f"{path} is no safetensors file: it has {size} bytes")
            (header_bytes,) = struct.unpack("<Q", file.read(8))
            if header_bytes > min(size - 8, _MAX_HEADER_BYTES):
                raise WeightError(
                    f"{path} is no safetensors file or is cut off: its header claims "
                    f"{header_bytes} bytes, the file has {size}; finish the download"
                )
            self._base = 8 + header_bytes
            self.entries = _parse_header(path, file.read(header_bytes), size - self._base)
            # A private writable mapping: tensor libraries use its memory without a copy, and writes
            # never reach the file.
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            self._descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._descriptor)

    def names(self) -> Iterable[str]:
        """Checkpoint names of all tensors."""
        return self.entries.keys()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.stop - entry.start for entry in self.entries.values())

    def read_into(self, buffer: np.ndarray, offset: int) -> None:
        """Fill a uint8 buffer from `offset` after the header on. Reading takes a fraction of the
        time of first touching the pages of a mapping."""
        left = buffer.data
        while left:
            count = os.preadv(self._descriptor, [left], self._base + offset)
            if not count:
                raise WeightError(f"{self.path} became shorter while it was read")
            left, offset = left[count:], offset + count

    def tensors(self) -> Iterator[tuple[str, SafetensorsTensor]]:
        """Every tensor in file order, which is the cheapest order to read."""
        for name, entry in sorted(self.entries.items(), key=lambda item: item[1].start):
            yield name, SafetensorsTensor(self, entry)

    def array(self, entry: _Entry) -> np.ndarray:
        """The tensor's bits as an array over the mapping."""
        numpy_dtype = np.dtype(_DTYPES[entry.dtype][0])
        count = (entry.stop - entry.start) // numpy_dtype.itemsize
        flat = np.frombuffer(self._map, numpy_dtype, count, self._base + entry.start)
        return flat.reshape(entry.shape)


class SafetensorsTensor:
    """A tensor on disk: contracts.model.StoredTensor."""

    def __init__(self, file: SafetensorsFile, entry: _Entry) -> None:
        self._file, self._entry = file, entry
        self.shape = entry.shape
        self.dtype = _DTYPES[entry.dtype][1]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self._entry.stop - self._entry.start

    def bits(self) -> np.ndarray:
        """The bits of the whole tensor on the host, over the mapping."""
        return self._file.array(self._entry)

    def fill(self, region: tuple[slice | int, ...], first: int, buffer: np.ndarray) -> None:
        """Copy bits of the region's rows, from `first` on, into a uint8 buffer of whole rows."""
        whole = self.bits()
        part = whole[region]
        rows = part[first : first + buffer.nbytes // part[0].nbytes]
        if rows.flags.c_contiguous:
            start = self._entry.start + rows.ctypes.data - whole.ctypes.data
            self._file.read_into(buffer, start)
        else:
            np.copyto(buffer.view(part.dtype).reshape(rows.shape), rows)

    def read(self, *region: slice | int) -> Tensor:
        """The region on the device, in the stored dtype."""
        part = np.ascontiguousarray(self._file.array(self._entry)[region])
        xp = self._file.device.xp
        host = xp.from_numpy(part, xp.dtype(self.dtype))
        return xp.to_device(host, self._file.device.device)


def _parse_header(path: Path, raw: bytes, data_bytes: int) -> dict[str, _Entry]:
    """Parse the header; offsets must lie inside the file, match the shapes and not overlap."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if len(set(names)) != len(names):
            raise ValueError("a name occurs twice")
        return dict(pairs)

    try:
        header = json.loads(raw, object_pairs_hook=unique)
        if not isinstance(header, dict):
            raise ValueError("the header is not an object")
        entries = {n: _entry(n, v) for n, v in header.items() if n != "__metadata__"}
        position = 0
        for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
            if entry.start != position:
                raise ValueError(f"tensor {name!r} starts at {entry.start}, expected {position}")
            position = entry.stop
        if position != data_bytes:
            raise ValueError(f"tensors take {position} bytes, the file has {data_bytes}")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise WeightError(
            f"{path} is no safetensors file or is damaged: {error}; download it again"
        ) from None
    return entries


def _entry(name: str, value: Any) -> _Entry:
    dtype, shape, (start, stop) = value["dtype"], value["shape"], value["data_offsets"]
    if dtype not in _DTYPES:
        raise ValueError(f"tensor {name!r} has dtype {dtype!r}; possible: {', '.join(_DTYPES)}")
    numbers = [*shape, start, stop]
    if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in numbers):
        raise ValueError(f"tensor {name!r} has a shape or offset that is not a whole number")
    count = 1
    for size in shape:
        count *= size
    if count * np.dtype(_DTYPES[dtype][0]).itemsize != stop - start:
        raise ValueError(f"tensor {name!r} of shape {shape} does not fill its {stop - start} bytes")
    return _Entry(dtype, tuple(shape), start, stop)


# A larger dummy tensor repeats this many numbers on the device, each tensor from another start:
# generating the numbers of a large model would take many minutes. Odd, so that rows differ.
DUMMY_NUMBERS: Final = (1 << 20) - 3


class DummyTensor:
    """Seeded random numbers with the interface of a stored tensor; equal for any number of ranks.

    `pools` holds the numbers that large tensors repeat, by kind; all tensors of a model share it.
    """

    def __init__(
        self,
        placement: Placement,
        seed: int,
        device: DeviceBackend,
        pools: dict[tuple[str, str], Tensor],
    ) -> None:
        self._placement, self._seed, self._device, self._pools = placement, seed, device, pools
        self.shape = placement.shape
        self.dtype = placement.dtype or "float32"

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return DTYPE_BYTES[self.dtype] * int(np.prod(self.shape, dtype=np.int64))

    def read(self, *region: slice | int) -> Tensor:
        """The region: N(0, 0.02), random bits, or one number where noise would be wrong."""
        fill, xp = self._placement.fill, self._device.xp
        place = zlib.crc32(self._placement.name.encode())
        count = int(np.prod(self.shape, dtype=np.int64))
        if count <= DUMMY_NUMBERS:
            whole = self._dummy_numbers(fill, np.random.default_rng([self._seed, place]), count)
        else:
            key = (str(fill), self.dtype)
            if key not in self._pools:
                stream = np.random.default_rng([self._seed, len(str(fill))])
                self._pools[key] = self._dummy_numbers(fill, stream, DUMMY_NUMBERS)
            first = place % DUMMY_NUMBERS & -256  # as aligned as what an allocator returns
            times = -(-(first + count) // DUMMY_NUMBERS)
            many = self._pools[key].unsqueeze(0).expand([times, DUMMY_NUMBERS])
            whole = many.reshape([times * DUMMY_NUMBERS])[first : first + count]
        part = whole.reshape(list(self.shape))[region].contiguous()
        is_float8 = fill == "bits" and self.dtype.startswith("float8")
        return part.view(xp.dtype(self.dtype)) if is_float8 else part

    def _dummy_numbers(self, fill: float | str, stream: np.random.Generator, count: int) -> Tensor:
        """`count` numbers on the device; those of float8 as bytes."""
        xp = self._device.xp
        if fill == "bits":
            numbers = self._bits(stream, count)
        elif fill == "normal":
            numbers = stream.standard_normal(count, dtype=np.float32) * np.float32(0.02)
        else:
            is_whole_number = self.dtype.startswith(("int", "uint"))
            numbers = np.full(count, fill, dtype=self.dtype if is_whole_number else np.float32)
        return xp.to_device(xp.from_numpy(numbers), self._device.device)

    def _bits(self, stream: np.random.Generator, count: int) -> np.ndarray:
        width = DTYPE_BYTES[self.dtype]
        raw = np.frombuffer(stream.bytes(count * width), np.uint8)
        if self.dtype.startswith("float8"):
            return raw & np.uint8(0xBF)  # magnitudes below 2, no NaN
        return raw.view(f"{'u' if self.dtype == 'uint8' else 'i'}{width}").copy()


def dummy_tensors(
    placements: Mapping[str, Placement], seed: int, device: DeviceBackend
) -> Iterator[tuple[str, DummyTensor]]:
    """The tensors of `--load-format dummy`: one for every placement."""
    pools: dict[tuple[str, str], Tensor] = {}
    for name, placement in placements.items():
        yield name, DummyTensor(placement, seed, device, pools)
