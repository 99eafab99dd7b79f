"""KV blocks from GPU memory to GPU memory, between processes of one host; driver `cuda_ipc`.

The connections are those of `tcp`, at 127.0.0.1: they prove who is there, carry notes and the names
of memory, and notice a lost peer. The destination maps the source's memory and copies blocks on a
stream of its own, so that only its own process writes its memory, whatever the peer does.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import msgspec
import numpy as np
import torch
from fastdeploy_core.contracts.kv_transport import (
    DeviceMemory,
    Region,
    TransportCapabilities,
    TransportOptions,
)
from fastdeploy_core.errors import CapabilityError, ResourceError
from fd_kv_tcp import wire
from fd_kv_tcp.peer import Fetcher, Peer
from fd_kv_tcp.transport import TcpTransport
from fd_scale_out.receiver_driven import DECODE_ERRORS, Transfer, WireError, check_size

from fd_cuda.device import wait
from fd_cuda.kernels.cache import sum_blocks
from fd_cuda.torch_device import tensor_at

from .driver import Driver, Mappings, name_of

_BATCH_BYTES: Final = 256 << 20  # who cancels waits for so much: 1.6 ms by NVLink
_driver: Driver | None = None
_mappings: Mappings | None = None


class GpuMemory:
    """A region as this process sees it."""

    readonly = False

    def __init__(self, memory: DeviceMemory) -> None:
        """CapabilityError for memory that cannot be shared."""
        self.index, self.name, self.nbytes = _index(memory.device), memory.handle, memory.nbytes
        driver, mappings = _cuda()
        driver.bind(self.index)
        try:
            self.address = mappings.open(self.index, self.name)
        except (ResourceError, ValueError) as error:
            raise CapabilityError(f"memory of {memory.device} cannot be shared: {error}") from error

    def close(self) -> None:
        """It is not used any more."""
        _cuda()[1].close(self.index, self.name)


class SharedBytes:
    """Memory of GPU 0 that other processes can map, and its content."""

    def __init__(self, num_bytes: int) -> None:
        self._driver = _cuda()[0]
        self._driver.bind(0)
        self._address = self._driver.allocate(num_bytes)
        name = name_of(self._driver, self._address)
        self.memory = DeviceMemory("cuda:0", self._address, num_bytes, name)
        self._content = tensor_at(self._address, num_bytes, 0)

    def read(self) -> np.ndarray:
        """All bytes."""
        content: np.ndarray = self._content.cpu().numpy()
        return content

    def write(self, content: np.ndarray) -> None:
        """Other content."""
        self._content.copy_(torch.from_numpy(np.ascontiguousarray(content)))
        _finish()

    def __del__(self) -> None:
        """Its last user is gone."""
        with suppress(ResourceError, AttributeError):
            self._driver.bind(0)
            self._driver.free(self._address)


class CudaIpcTransport(TcpTransport):
    """See contracts.kv_transport.KVTransport. Thread-safe."""

    name = "cuda_ipc"
    contract = (1, 0)
    capabilities = TransportCapabilities(
        read=True, device_memory=True, receiver_driven=True, fenced=True, max_regions=16
    )

    def __init__(self, options: TransportOptions) -> None:
        """CapabilityError without an NVIDIA driver."""
        self.driver, self.mappings = _cuda()
        self.peer_type = _IpcPeer
        self.moving: dict[Transfer, list[int]] = {}  # streams with copies of it
        self._sum_streams: dict[int, torch.cuda.Stream] = {}
        super().__init__(options)

    @classmethod
    def test_memory(cls, num_bytes: int) -> SharedBytes:
        """Memory of GPU 0 for the conformance kit."""
        return SharedBytes(num_bytes)

    def memory_of(self, region: Region) -> GpuMemory:
        """CapabilityError for memory of the host."""
        if not isinstance(region.buffer, DeviceMemory):
            raise CapabilityError(
                f"region {region.region_id} is memory of the host; transport {self.name} moves "
                "memory of GPUs"
            )
        check_size(region)
        return GpuMemory(region.buffer)

    def shown(self) -> wire.Shown:
        """The names of all regions' memory."""
        with self.lock:
            names = {number: memory.name for number, (_, memory) in self.regions.items()}
        return wire.Shown({}, msgspec.msgpack.encode(names))

    def checksums(self, region_id: int, blocks: Sequence[int]) -> list[int]:
        """Of each block 32 bits of its content and of where in the block what lies; from any
        thread. The device is waited for once."""
        region, memory = self.regions[region_id]
        size, index = region.block_bytes, memory.index
        with torch.cuda.device(index), torch.cuda.stream(self._sum_stream(index)):
            words = tensor_at(memory.address, memory.nbytes, index).view(-1, size)
            words = words if size % 4 else words.view(torch.int32)
            found = sum_blocks(words, torch.tensor(list(blocks), device=words.device))
            _finish()
            totals: list[int] = found.tolist()
        return [(total ^ total >> 32) & 0xFFFFFFFF for total in totals]

    def _sum_stream(self, index: int) -> torch.cuda.Stream:
        """Goes before the steps of the engine, which may be long. Kept: to make a stream takes
        longer than to sum a block."""
        if index not in self._sum_streams:
            self._sum_streams[index] = torch.cuda.Stream(priority=-1)
        return self._sum_streams[index]

    def _end(self, transfer: Transfer) -> None:
        super()._end(transfer)
        for stream in self.moving.pop(transfer, ()):
            self.driver.wait(stream)  # what was queued has landed: a batch at most

    def _shut_down(self) -> None:
        super()._shut_down()
        for _, memory in self.regions.values():
            memory.close()


class _IpcPeer(Peer):
    num_streams = max_asked = 1  # its copies are queued, and run side by side
    batch_bytes = _BATCH_BYTES
    _transport: CudaIpcTransport

    def fetcher(self) -> Fetcher:
        return _Copies(self._transport, self)


class _Copies:
    """A Fetcher: maps the peer's memory, and copies."""

    def __init__(self, transport: CudaIpcTransport, peer: _IpcPeer) -> None:
        self._transport, self._channel = transport, peer.connect()
        self._names: dict[int, bytes] = {}
        self._mapped: dict[tuple[int, bytes], int] = {}  # by GPU and name: addresses
        self._streams: dict[int, int] = {}  # by GPU

    def ask(self, transfer: Transfer, first: int, count: int) -> None:
        """Nobody: the copies are this side's."""

    def fetch(self, transfer: Transfer, first: int, count: int) -> None:
        own, plan = self._transport, transfer.plan
        self._look()  # memory is read only of who answers
        blocks = [
            (int(plan.source_blocks[i]), int(plan.target_blocks[i]))
            for i in range(first, first + count)
        ]
        try:
            places = [
                (memory, size, self._source(memory.index, region_id))
                for (memory, size), region_id in zip(transfer.views, plan.region_ids, strict=True)
            ]
            with own.lock:
                if transfer.is_over:
                    return
                for memory, size, source in places:
                    stream = self._stream(memory.index)
                    for there, here in blocks:
                        where = memory.address + here * size, source + there * size
                        own.driver.copy(*where, size, stream)
                own.moving[transfer] = list(self._streams.values())
            for stream in self._streams.values():
                own.driver.wait(stream)
            with own.lock:
                own.moving.pop(transfer, None)
                if not transfer.is_over:
                    own.landed(transfer, count)
        except ResourceError as error:
            raise WireError(str(error)) from error

    def close(self) -> None:
        own = self._transport
        for index, stream in self._streams.items():
            own.driver.bind(index)
            own.driver.end_stream(stream)
        for index, name in self._mapped:
            own.mappings.close(index, name)

    def _look(self) -> None:
        answer = self._channel.ask(wire.Look())
        try:
            data = answer.data if isinstance(answer, wire.Shown) else b""
            self._names = msgspec.msgpack.decode(data, type=dict[int, bytes])
        except DECODE_ERRORS as error:
            raise WireError(f"the peer shows no memory: {error}") from None

    def _stream(self, index: int) -> int:
        self._transport.driver.bind(index)
        if index not in self._streams:
            self._streams[index] = self._transport.driver.stream()
        return self._streams[index]

    def _source(self, index: int, region_id: int) -> int:
        """Where the peer's region is for GPU `index`."""
        key = index, self._names.get(region_id, b"")
        if key not in self._mapped:
            self._transport.driver.bind(index)
            try:
                self._mapped[key] = self._transport.mappings.open(*key)
            except ValueError as error:
                raise WireError(str(error)) from None
        return self._mapped[key]


def _cuda() -> tuple[Driver, Mappings]:
    """One for the process: memory of another one is mapped once."""
    global _driver, _mappings
    if _driver is None or _mappings is None:
        _driver = Driver()
        _mappings = Mappings(_driver)
    return _driver, _mappings


def _finish() -> None:
    """What was queued on the current stream is done."""
    event = torch.cuda.Event()
    event.record()
    wait(event)


def _index(device: str) -> int:
    kind, _, number = device.partition(":")
    if kind != "cuda" or not number.isdecimal():
        raise CapabilityError(f"{device!r:.40} is no GPU of NVIDIA's; expected cuda:0, ...")
    return int(number)
