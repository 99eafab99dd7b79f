"""The device backend: what an accelerator must offer, and what it may decline to offer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from fastdeploy_core.config.model import DTYPES
from fastdeploy_core.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

    from fastdeploy_core.tensor import Tensor, TensorLibrary


@dataclass(frozen=True, slots=True)
class StepBuckets:
    """Shapes of steps where every shape is compiled. A step is padded to a rectangle of rows with
    as many tokens each; all rectangles run once at start-up, and no other is run afterwards.

    Steps are then of prompts or of decodes, never of both. Attention drivers get such a step as
    AttentionBatch.is_padded says.
    """

    prompt_rows: tuple[int, ...]  # rows of a step of prompts
    prompt_tokens: tuple[int, ...]  # tokens of each of these rows
    decode_rows: tuple[int, ...]  # rows of a step of decodes, with one token each
    table_blocks: tuple[int, ...]  # width of the block table; beyond the last: the widest there is


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """What the scheduler and the model runner must respect. Unknown means unsupported."""

    dtypes: tuple[str, ...] = ("float32",)  # of float32, float16, bfloat16
    preferred_dtype: str = ""  # what an automatic dtype becomes; empty: the checkpoint's own
    block_sizes: tuple[int, ...] | None = None  # None: any
    default_block_size: int = 64
    # [block, token, head, dim] or [block, head, token, dim]; what transports tell the other side.
    # Kernel kv_write is NHD: with HND, the device's attention drivers claim "rope_kv".
    kv_layout: Literal["NHD", "HND"] = "NHD"
    block_sharing: bool = True  # False: every sequence owns its blocks, no prefix cache
    mixed_batches: bool = True  # prefill chunks and decodes in one forward pass
    max_prefills_per_step: int | None = None
    chunked_prefill: bool = True  # False: a prompt runs in one step, whole
    step_buckets: StepBuckets | None = None  # None: steps of any shape
    graph_capture: bool = False
    # Padding rows at the end of a captured step cost nothing, so one graph of the largest batch
    # serves every batch, and one of the largest step every prompt: that one is captured without
    # having run. A SizedGraph may say otherwise of itself.
    graph_any_size: bool = False
    graph_collectives: bool = False  # a captured graph may hold the communicator's collectives
    # Decode steps that may run one after the other before the host sees a token: above 1 where it
    # takes the host about as long as the device. Needs graph_capture; with overlap, and with
    # drafts, a PostingDevice.
    decodes_per_step: int = 1
    # A step may be queued before the previous one's tokens reached the host. False, too, where
    # nothing is gained: whoever computes on all processors takes them from the scheduler.
    overlap: bool = True
    # Calls only queue work, so that launching a step returns at once and needs no thread of its
    # own.
    asynchronous: bool = False
    logprobs: bool = True
    host_tier: bool = True  # blocks can move to host memory and back
    max_tensor_parallel_size: int = 1
    shares_host_memory: bool = False  # memory() is the host's: leave room for everybody else
    # Memory of the KV pool where the device cannot measure what a step needs; 0: it is measured.
    kv_memory_bytes: int = 0

    def __post_init__(self) -> None:
        """A dtype that no model can be served in is a ConfigError: nothing would ever use it."""
        for field, names in (("dtypes", self.dtypes), ("preferred_dtype", (self.preferred_dtype,))):
            for name in names:
                if name and name not in DTYPES:
                    raise ConfigError(
                        f"DeviceLimits.{field} has {name!r}, which no model is served in; "
                        f"possible: {', '.join(DTYPES)}"
                    )


@dataclass(frozen=True, slots=True)
class DeviceOptions:
    """How one process uses the device."""

    index: int = 0  # which accelerator of this host
    tensor_library: str = ""  # empty: the driver's own choice
    num_threads: int = 0  # 0: the driver's own choice
    seed: int = 0
    # Processes of this server that use such devices; those of a host device divide its processors.
    num_ranks: int = 1


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Bytes, as the device's own driver reports them."""

    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class DeviceQuestion:
    """Asked of `fd_device_probe`: is the hardware here, and is its software usable?"""

    tensor_library: str = ""  # empty: any


class DeviceEvent(Protocol):
    """A point in the device's work queue. Polled, never waited on with the interpreter lock."""

    def query(self) -> bool:
        """Whether all work queued before the event has finished."""
        ...


class Communicator(Protocol):
    """Collectives among the ranks of one tensor-parallel group."""

    rank: int
    world_size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over ranks; any shape; the result has x's dtype and may be x itself."""
        ...

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """Concatenate every rank's x along dim, in rank order."""
        ...

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """Every rank gets the source rank's x."""
        ...

    def barrier(self) -> None:
        """Return when every rank has arrived."""
        ...

    def close(self) -> None:
        """Leave the group; later calls fail."""
        ...


class CapturedGraph(Protocol):
    """Captured work over fixed buffers."""

    def replay(self) -> None:
        """Queue the captured work again; it reads the buffers' current contents."""
        ...


@runtime_checkable
class SizedGraph(Protocol):
    """A graph that says whether padding rows cost nothing in it, too, where
    DeviceLimits.graph_any_size does. One in which they cost what the others do serves no prompts.

    Added in contract 1.0.
    """

    is_any_size: bool


@runtime_checkable
class RepeatingDevice(Protocol):
    """A device that goes through captured work again and again by itself, where decodes_per_step
    says so. On others the core replays each graph.

    Added in contract 1.0.
    """

    def replay_times(self, graphs: Sequence[CapturedGraph], times: int) -> None:
        """Queue all of the graphs, one after the other, so many times."""
        ...


@runtime_checkable
class AttendingDevice(Protocol):
    """A device that attends within runs of unequal length in one call, as towers of pictures do.
    For others runs of one length are computed together.

    Added in contract 1.4.
    """

    def attend_packed(
        self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int
    ) -> Tensor | None:
        """softmax(q k^T / sqrt(dim)) v: all [tokens, heads, dim], starts [runs + 1] int32, longest:
        tokens of a run. None: not of these dtypes or sizes."""
        ...


@runtime_checkable
class ReportingDevice(Protocol):
    """A device with more to say in the start-up table, such as its versions."""

    def report(self) -> list[str]:
        """One line each."""
        ...


@runtime_checkable
class FallbackDevice(Protocol):
    """A device whose library detours over the CPU where it has no kernel, unless told not to."""

    def without_fallback(self) -> AbstractContextManager[None]:
        """Inside, such an operation is an error."""
        ...

    def missing_kernel(self, error: BaseException) -> str:
        """Name of the kernel whose absence the error reports; empty for any other error."""
        ...


@runtime_checkable
class CompilingDevice(Protocol):
    """A device that compiles kernels when they are first met, and can do so side by side.

    Added in contract 1.0.
    """

    def compile_only(self) -> AbstractContextManager[None]:
        """Inside, kernels that the calling thread launches are compiled and do not run; what they
        would have written is zero. Afterwards all are compiled, and memory is as it was."""
        ...


@runtime_checkable
class PackingDevice(Protocol):
    """A device that lays weights out for its kernels and can keep the result in a file between
    starts (`--weight-cache`). What is kept are flat uint8 arrays and a few facts that JSON can
    hold.

    Added in contract 1.0.
    """

    name: str

    @property
    def weight_layout(self) -> str:
        """Another text for another layout: files of a layout that is not this one are refused."""
        ...

    def dump_weight(self, prepared: Any) -> tuple[dict[str, Any], list[np.ndarray]] | None:
        """Facts and arrays of what a kernel's or driver's `prepare` made; None for what is not this
        device's own."""
        ...

    def restore_weight(self, facts: dict[str, Any], arrays: list[np.ndarray]) -> Any:
        """The same weight again, in memory of its own: the arrays end with the call. ValueError,
        KeyError or TypeError where facts and arrays do not fit."""
        ...


@runtime_checkable
class PostingDevice(Protocol):
    """A device whose kernels write into the host's memory. What captured steps tell the host
    arrives by itself then: nobody queues a copy or an event for it, and tokens arrive before drafts
    are made.

    Added in contract 1.0.
    """

    def host_box(self, num_words: int) -> tuple[Tensor, np.ndarray]:
        """[num_words] int64 zeros in host memory, as kernels see it and as the host does. What a
        kernel writes there, the host sees soon, every number as a whole, in no certain order."""
        ...


@runtime_checkable
class TierDevice(Protocol):
    """A device whose memory can hold the host tier's blocks, for other processes to read and fill.
    Added in contract 1.0."""

    def block_tier(self, *of: Any) -> Any:
        """kernels, caches, num_blocks, path: of an object with `apply(BlockCopies)`; where it is,
        as JSON in the file."""


@runtime_checkable
class DeviceBackend(Protocol):
    """One accelerator as one process sees it.

    Constructed as `Driver(DeviceOptions(...))`; constructing may initialise the hardware. Every
    tensor handed to the core is of `xp`'s library and lives on `device`.
    """

    name: str
    contract: tuple[int, int]
    limits: DeviceLimits
    xp: TensorLibrary
    device: str
    # "module:Class" of the worker that runs steps on this device; empty: the core's own. For
    # devices that execute whole steps themselves, and for the fakes of fastdeploy-testing.
    worker: str

    def memory(self) -> MemoryInfo:
        """Free and total bytes now; asked of the driver, never guessed."""
        ...

    def to_device(self, array: np.ndarray) -> Tensor:
        """Copy a host array to the device; perhaps later, so it may not be changed."""
        ...

    def to_host(self, x: Tensor) -> np.ndarray:
        """Copy to the host and wait for it, releasing the interpreter lock while waiting."""
        ...

    def host_buffer(self, num_bytes: int) -> np.ndarray:
        """[num_bytes] uint8 of zeroed host memory that `upload` and `download` copy without a
        detour (page-locked where the device knows such memory)."""
        ...

    def upload(self, source: np.ndarray, target: Tensor) -> None:
        """Queue a copy of `source`, a contiguous part of a host_buffer, into `target`, a contiguous
        uint8 tensor of as many bytes. The caller leaves the source alone until an event recorded
        after this call has happened. A device without asynchronous copies copies now."""
        ...

    def download(self, source: Tensor, target: np.ndarray) -> None:
        """Queue a copy of `source`, any contiguous tensor, into `target`, a contiguous part of a
        host_buffer of as many bytes (uint8). The values are there once an event recorded after this
        call has happened; `source` may be overwritten by work that is queued later."""
        ...

    def record_event(self) -> DeviceEvent:
        """An event after everything queued so far, copies included."""
        ...

    def communicator(self, rank: int, world_size: int, address: str) -> Communicator:
        """Join a group; `address` is a fresh private folder or host:port shared by its ranks."""
        ...

    def capture(
        self, run: Callable[[], None], beside: CapturedGraph | None = None
    ) -> CapturedGraph:
        """Capture the work that `run` queues; only called when limits.graph_capture.

        `run` has been called once or twice before, so that whatever is made at first use exists. It
        is called exactly once here, possibly on another stream. Tensors it makes keep their memory,
        and what a replay left in them stays until the next replay of this graph or of one that
        shares its memory: `beside` is an earlier graph whose memory this one may use too, because
        the two never run at the same time. Everything that `run` reads and does not make itself has
        to stay where it is."""
        ...

    def is_oom(self, error: BaseException) -> bool:
        """Whether the error means that device memory ran out."""
        ...

    def is_lost(self, error: BaseException) -> bool:
        """Whether the error means that the device is gone for this process."""
        ...

    def close(self) -> None:
        """Give the device back."""
        ...
