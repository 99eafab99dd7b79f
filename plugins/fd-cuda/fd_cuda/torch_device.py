"""One GPU on torch: memory, page-locked staging, events, graphs, collectives."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from fastdeploy_core.contracts.device import (
    CapturedGraph,
    Communicator,
    DeviceEvent,
    DeviceLimits,
    DeviceOptions,
    MemoryInfo,
)
from fastdeploy_core.errors import ConfigError, WorkerError
from fastdeploy_core.tensor import load

from .device import CudaDevice, wait
from .probe import why_not_triton
from .settings import setting

if TYPE_CHECKING:
    from fastdeploy_core.tensor import Tensor
    from torch.cuda import _POOL_HANDLE

    from .ipc.tier import DeviceTier

_ALLOCATOR_VARIABLES: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_OLDEST_WITH_BFLOAT16: Final = (8, 0)
_HOPPER: Final = (9, 0)
# Queries times keys from which on our kernel saves the GPU more than the host needs to launch it.
_LONG_ATTENTION: Final = 2048**2


class TorchCudaDevice(CudaDevice):
    """See DeviceBackend. Any thread may call; each call makes this GPU the thread's current one."""

    def __init__(self, options: DeviceOptions) -> None:
        _check(options.index)
        _configure_allocator()
        self.xp = load("torch")
        self.index = options.index
        self.device = f"cuda:{options.index}"
        self._torch_device = torch.device(self.device)
        self._capture_stream: torch.cuda.Stream | None = None
        try:
            torch.cuda.synchronize(self.index)  # opens the GPU
        except RuntimeError as error:
            raise WorkerError(
                f"GPU {self.index} cannot be opened: {str(error).splitlines()[0]}; nvidia-smi "
                "shows who uses it and its errors, dmesg lines with Xid"
            ) from error
        self._bind()
        setting("FD_SAMPLING_CLASS")  # every method is the same here; an unknown name is refused
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
        torch.cuda.manual_seed(options.seed)
        if options.num_threads:
            torch.set_num_threads(options.num_threads)
        capability = torch.cuda.get_device_capability(self.index)
        new_enough = capability >= _OLDEST_WITH_BFLOAT16
        self._is_hopper = capability == _HOPPER and not why_not_triton()
        self.limits = DeviceLimits(
            dtypes=("float32", "float16", "bfloat16") if new_enough else ("float32", "float16"),
            graph_capture=True,
            graph_collectives=True,
            decodes_per_step=2,
            asynchronous=True,
            max_tensor_parallel_size=torch.cuda.device_count(),
        )

    # -- memory -----------------------------------------------------------------------------------

    def memory(self) -> MemoryInfo:
        """The driver's figures; they include other processes on the GPU."""
        free, total = torch.cuda.mem_get_info(self.index)
        return MemoryInfo(total_bytes=total, free_bytes=free)

    def to_device(self, array: np.ndarray) -> Tensor:
        """Through page-locked memory, so that the call returns before the copy is done."""
        self._bind()
        x = self.xp.from_numpy(np.ascontiguousarray(array) if array.ndim else array)
        if not x.numel():
            return x.to(self._torch_device)
        return x.pin_memory().to(self._torch_device, non_blocking=True)

    def to_host(self, x: Tensor) -> np.ndarray:
        """The values, once they have arrived; other threads run meanwhile."""
        self._bind()
        if x.is_cuda and x.numel():
            pinned = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
            pinned.copy_(x.detach(), non_blocking=True)
            wait(self.record_event())
            x = pinned
        return self.xp.to_numpy(x)

    def host_buffer(self, num_bytes: int) -> np.ndarray:
        """Page-locked memory; freed with its last view."""
        self._bind()
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True).numpy()

    def host_box(self, num_words: int) -> tuple[Tensor, np.ndarray]:
        """See PostingDevice: page-locked memory has one address for the host and for the GPU."""
        self._bind()
        memory = torch.zeros(num_words, dtype=torch.int64, pin_memory=True)
        box = tensor_at(memory.data_ptr(), memory.nbytes, self.index, memory)
        return box.view(torch.int64), memory.numpy()

    def block_tier(self, *of: Any) -> DeviceTier:
        """See TierDevice."""
        from .ipc.tier import DeviceTier

        self._bind()
        return DeviceTier(self, *of)

    def upload(self, source: np.ndarray, target: Tensor) -> None:
        """Queue the copy on the current stream."""
        self._bind()
        target.copy_(torch.from_numpy(source), non_blocking=True)

    def download(self, source: Tensor, target: np.ndarray) -> None:
        """Queue the copy on the current stream."""
        self._bind()
        if source.numel():
            flat = source.detach().view(-1).view(torch.uint8)
            torch.from_numpy(target).copy_(flat, non_blocking=True)

    # -- work -------------------------------------------------------------------------------------

    def attend_packed(
        self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int
    ) -> Tensor | None:
        """For 16 bits: on Hopper a kernel of this plugin where there is much to do, else
        FlashAttention of torch."""
        if q.dtype == torch.float32 or q.shape[-1] % 8 or q.shape[-1] > 256:
            return None
        if self._is_hopper and q.shape[0] * longest >= _LONG_ATTENTION:
            from .attention import packed

            if packed.serves(q, k, v):
                return packed.attend(q, k, v, starts, longest)
        # What torch.nn.attention.varlen calls after an operator written in Python, which takes the
        # host longer than a tower's layer takes the GPU.
        attend = torch.ops.aten._flash_attention_forward
        sizes = starts, starts, longest, longest
        result: Tensor = attend(q, k, v, *sizes, 0.0, is_causal=False, return_debug_mask=False)[0]
        return result

    def record_event(self) -> DeviceEvent:
        """On the current stream."""
        self._bind()
        event = torch.cuda.Event()
        # Without the device's number, torch asks the driver for the number of devices each time.
        event.record(torch.cuda.current_stream(self.index))
        return event

    def capture(self, run: Callable[[], None], beside: CapturedGraph | None = None) -> TorchGraph:
        """One CUDA graph, in the memory pool of `beside` if that is given."""
        self._bind()
        graph = torch.cuda.CUDAGraph()
        pool = beside.pool if isinstance(beside, TorchGraph) else torch.cuda.graph_pool_handle()
        torch.cuda.synchronize()
        self._capture_stream = self._capture_stream or torch.cuda.Stream()
        with torch.cuda.stream(self._capture_stream), _no_garbage_collection():
            # Only errors of this thread end the capture: other threads may copy and allocate
            # meanwhile.
            graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                run()
            except BaseException:
                with suppress(RuntimeError):  # the first error is the one to report
                    graph.capture_end()
                raise
            graph.capture_end()
        return TorchGraph(graph)

    @contextmanager
    def compile_only(self) -> Iterator[None]:
        """See CompilingDevice; without Triton, kernels run when they are called."""
        from .probe import has_triton

        self._bind()
        if not has_triton():
            yield
            return
        from .kernels.native import load_met
        from .kernels.rehearsal import compile_only

        with compile_only():
            yield
        load_met()
        gc.collect()
        torch.cuda.empty_cache()  # the following steps are measured

    def communicator(self, rank: int, world_size: int, address: str) -> Communicator:
        """NCCL, and a kernel of this plugin for small sums."""
        from .communicator import CudaCommunicator

        self._bind()
        return CudaCommunicator(self, rank, world_size, address)

    def close(self) -> None:
        """Give cached memory back to the driver; tensors still in use stay."""
        torch.cuda.empty_cache()

    def _bind(self) -> None:
        if torch.cuda.current_device() != self.index:
            torch.cuda.set_device(self.index)


class _Memory:
    """In the form in which torch takes memory of a GPU; keeps its owner."""

    def __init__(self, address: int, num_bytes: int, owner: torch.Tensor | None) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def tensor_at(
    address: int, num_bytes: int, index: int, owner: torch.Tensor | None = None
) -> torch.Tensor:
    """Bytes of GPU `index`, or page-locked ones as it sees them."""
    return torch.as_tensor(_Memory(address, num_bytes, owner), device=torch.device("cuda", index))


class TorchGraph:
    """See CapturedGraph."""

    __slots__ = ("_graph", "replay")

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self._graph = graph
        # without a Python frame of this class in the decode loop
        self.replay: Callable[[], None] = graph.replay

    @property
    def pool(self) -> _POOL_HANDLE:
        """The memory pool, for graphs captured beside this one."""
        return self._graph.pool()

    def __del__(self) -> None:
        """The driver gets back what no other graph holds: torch would keep it for graphs of the
        same pool, whose last one this may be."""
        if not sys.is_finalizing():
            with suppress(RuntimeError):  # a lost GPU has nothing to give back
                self._graph.reset()
                torch.cuda.empty_cache()


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """During the capture: freeing a GPU object at a random moment would break the graph."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _check(index: int) -> None:
    """ConfigError unless the GPU is there."""
    from .probe import ask_driver, why_not_torch

    driver = ask_driver()
    reason = driver.error or why_not_torch(driver)
    if reason:
        raise ConfigError(f"device 'cuda' cannot be used: {reason}; run: fastdeploy plugins doctor")
    count = torch.cuda.device_count()
    if index >= count:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        limited = "" if visible is None else f" (CUDA_VISIBLE_DEVICES is {visible!r})"
        raise ConfigError(
            f"GPU {index} is asked for; this process sees {count}{limited}; lower "
            "--tensor-parallel-size or make more of them visible"
        )


def _configure_allocator() -> None:
    """Growing segments, unless the operator chose; only before torch's first allocation."""
    is_chosen = any(os.environ.get(name) for name in _ALLOCATOR_VARIABLES)
    if not is_chosen and not torch.cuda.is_initialized():
        configure = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
        configure = configure or torch.cuda.memory._set_allocator_settings  # before torch 2.9
        configure("expandable_segments:True")
