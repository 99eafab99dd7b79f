"""Collectives of one group of GPUs: NCCL, and one kernel over peer memory for small sums.

NCCL comes with torch. Its group is made without torch's global one, so a process may be in several
groups. All calls are queued on the current stream and can be captured. NCCL's own variables apply
(NCCL_NVLS_ENABLE=0 turns multicast off); the kernel of one_shot.py never uses multicast.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from fastdeploy_core.errors import CapabilityError, ConfigError, FastDeployError, WorkerError
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    BroadcastOptions,
)

from .alive import Ring
from .device import wait
from .settings import setting

if TYPE_CHECKING:
    from torch import Tensor

    from .torch_device import TorchCudaDevice

logger = logging.getLogger(__name__)

_JOIN_LIMIT: Final = timedelta(seconds=300)  # ranks start at their own pace
_CALL_LIMIT: Final = timedelta(seconds=120)
_ONE_SHOT_DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16)
_PAYING_BYTES: Final = 512 << 10  # that the kernel reads of all ranks


class CudaCommunicator:
    """One rank's end; see Communicator. All ranks issue the same calls in the same order."""

    def __init__(self, device: TorchCudaDevice, rank: int, world_size: int, address: str) -> None:
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank {rank} is outside a group of {world_size}")
        self.rank, self.world_size = rank, world_size
        self.one_shot_bytes = 0  # sums of up to this many bytes use the one-shot kernel
        self._device = device
        self._failure = ""  # why every call fails from now on
        self._left = ""  # the rank that has left and will not join later calls
        self._nccl: Any = None
        self._ring: Ring | None = None
        self._one_shot: Any = None
        if world_size == 1:
            return
        if not dist.is_available() or not hasattr(dist, "ProcessGroupNCCL"):
            raise CapabilityError(
                f"a group of {world_size} GPUs needs NCCL, which torch {torch.__version__} is "
                "built without; install a CUDA build of torch for Linux"
            )
        try:
            self._join(address)
        except RuntimeError as error:
            self.close()
            raise WorkerError(f"rank {rank} could not join {world_size} ranks: {error}") from error
        except BaseException:
            self.close()
            raise

    def _join(self, address: str) -> None:
        folder = Path(address) if Path(address).is_dir() else None
        host, _, port = address.rpartition(":")
        store: dist.Store
        if folder is not None:
            store = dist.FileStore(str(folder / "nccl"), self.world_size)
        elif port.isdecimal():
            store = dist.TCPStore(
                host, int(port), self.world_size, is_master=self.rank == 0, timeout=_JOIN_LIMIT
            )
        else:
            raise ConfigError(f"address {address!r} is neither a folder nor host:port")
        store.set_timeout(_JOIN_LIMIT)
        self._ring = Ring(
            dist.PrefixStore("ring", store), self.rank, self.world_size, folder, host, self._lost,
            self._leave,
        )  # fmt: skip
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = _CALL_LIMIT
        self._nccl = dist.ProcessGroupNCCL(
            dist.PrefixStore("nccl", store), self.rank, self.world_size, options
        )
        self.barrier()  # connects the ranks
        self._open_one_shot(dist.PrefixStore("peers", store))

    # -- collectives ------------------------------------------------------------------------------

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over ranks; every rank gets the same bits."""
        if self.world_size == 1 or not x.numel():
            return x
        self._check("all_reduce")
        x = x.contiguous()
        if x.nbytes <= self.one_shot_bytes and x.dtype in _ONE_SHOT_DTYPES:
            result: Tensor = self._one_shot.all_reduce(x)
            return result
        return self._nccl_sum(x)

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """Every rank's x along dim, in rank order."""
        if self.world_size == 1:
            return x
        self._check("all_gather")
        x = x.contiguous()
        gathered = x.new_empty((self.world_size, *x.shape))
        if x.numel():
            self._queue(self._nccl._allgather_base(gathered, x, _options(AllgatherOptions())))
        dim %= x.ndim
        if dim == 0:
            return gathered.flatten(0, 1)
        return torch.cat(gathered.unbind(0), dim)

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """Every rank gets the source's x."""
        if self.world_size == 1 or not x.numel():
            return x
        self._check("broadcast")
        result = x.contiguous() if self.rank == source else torch.empty_like(x)
        options = _options(BroadcastOptions())
        options.rootRank = source
        self._queue(self._nccl.broadcast([result], options))
        return result

    def barrier(self) -> None:
        """Return when every rank has arrived; other threads run meanwhile."""
        if self.world_size == 1:
            return
        self._check("barrier")
        self._nccl_sum(torch.zeros(1, device=self._device.device))
        wait(self._device.record_event())
        if self._failure:  # a rank that left meanwhile had arrived before
            self._check("barrier")

    def close(self) -> None:
        """Leave the group; the next call of the other ranks fails unless they leave, too."""
        self._failure = self._failure or "the communicator is closed"
        if self._ring is not None:
            self._ring.close()
        if self._one_shot is not None:
            torch.cuda.synchronize()
            self._one_shot.close()
        if self._nccl is not None:
            self._nccl.abort()
        self._ring = self._one_shot = self._nccl = None

    # -- inside -----------------------------------------------------------------------------------

    def _nccl_sum(self, x: Tensor) -> Tensor:
        self._queue(self._nccl.allreduce([x], _options(AllreduceOptions())))
        return x

    @staticmethod
    def _queue(work: Any) -> None:
        """Make the current stream wait for the work; the host does not wait."""
        if work is not None:
            work.wait()

    def _check(self, operation: str) -> None:
        reason = self._failure or self._left
        if reason:
            raise WorkerError(f"{operation} on rank {self.rank} failed: {reason}")

    def _leave(self, reason: str) -> None:
        self._left = self._left or reason

    def _lost(self, reason: str) -> None:
        """Another rank is gone: end the work that the GPU waits for, so that the host can
        continue."""
        self._failure = self._failure or reason
        if self._one_shot is not None:
            self._one_shot.stop()
        if self._nccl is not None:
            self._nccl.abort()

    # -- small sums -------------------------------------------------------------------------------

    def _open_one_shot(self, store: dist.Store) -> None:
        """Use peer memory if every GPU reaches every other one."""
        reason = ""
        if setting("FD_CUDA_ALL_REDUCE") == "nccl":
            reason = "FD_CUDA_ALL_REDUCE is nccl"
        else:
            try:
                from .one_shot import OneShot

                self._one_shot = OneShot(store, self.rank, self.world_size)
            except (FastDeployError, ImportError, OSError) as error:
                reason = str(error)
        # One rank without peer memory is enough to turn it off, because the kernel waits for all
        # ranks.
        store.set(f"reason/{self.rank}", reason)
        reasons = [store.get(f"reason/{rank}").decode() for rank in range(self.world_size)]
        why_not = next((r for r in reasons if r), "")
        self.barrier()
        if why_not:
            if self._one_shot is not None:
                self._one_shot.close()
                self._one_shot = None
            logger.info("sums over ranks: NCCL for all sizes (%s)", why_not)
            return
        # Every rank reads all parts, so the more ranks there are, the sooner the kernel stops
        # paying: between 256 and 512 KiB on two H200.
        self.one_shot_bytes = _PAYING_BYTES // self.world_size
        logger.info(
            "sums over ranks: one kernel over peer memory up to %d KiB, NCCL above",
            self.one_shot_bytes >> 10,
        )


def _options(options: Any) -> Any:
    """Run on the current stream instead of one of NCCL's own, which saves an event in a graph."""
    if hasattr(options, "asyncOp"):
        options.asyncOp = False
    return options
