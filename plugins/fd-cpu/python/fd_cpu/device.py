"""The device `x86`: this machine's processor through native kernels and one team of threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from fastdeploy_core.contracts.device import CapturedGraph, DeviceLimits, DeviceOptions
from fastdeploy_core.devices.host_device import MAX_TENSOR_PARALLEL, HostDevice

from . import keeping
from .capture import Capturer
from .formats import FORMATS
from .team import close_team, open_team


class X86Device(HostDevice):
    """Tensors are the library's own; a captured step is a native plan."""

    name = "x86"

    def __init__(self, options: DeviceOptions) -> None:
        super().__init__(options)
        self.limits = DeviceLimits(
            # The library computes everything around the kernels, and paddle cannot even add
            # bfloat16 here.
            dtypes=("float32", "bfloat16") if self.xp.name == "torch" else ("float32",),
            block_sizes=(16, 32, 64, 128, 256),
            default_block_size=64,
            kv_layout="HND",
            graph_capture=True,
            graph_any_size=True,
            # Scheduling the next step meanwhile would take a processor on which a kernel thread
            # spins.
            overlap=False,
            decodes_per_step=8,
            max_tensor_parallel_size=MAX_TENSOR_PARALLEL,
            shares_host_memory=True,
        )
        # The library's own operations are rare and small; a second team of threads would only
        # disturb the kernels' team.
        self.xp.set_num_threads(1)
        # With a single rank every index means all processors, as index 0 does.
        rank = options.index % options.num_ranks
        self._team = open_team(self.xp, self.num_threads, rank, options.num_ranks)
        self._capturer = Capturer(self._team)

    def capture(
        self, run: Callable[[], None], beside: CapturedGraph | None = None
    ) -> CapturedGraph:
        """A native plan, or the call itself if the tensor library takes part in the work."""
        return self._capturer.capture(run)

    def replay_times(self, graphs: Sequence[CapturedGraph], times: int) -> None:
        """The threads walk through all plans without coming back to Python."""
        self._capturer.replay_times(graphs, times)

    @property
    def weight_layout(self) -> str:
        """The layout of weights that are kept in files."""
        return keeping.layout(self._team.native.isa)

    def dump_weight(self, prepared: Any) -> tuple[dict[str, Any], list[np.ndarray]] | None:
        """Packed matrices, as they are in memory."""
        return keeping.dump(prepared)

    def restore_weight(self, facts: dict[str, Any], arrays: list[np.ndarray]) -> Any:
        """Copy them into new memory, in huge pages if there are some."""
        return keeping.restore(facts, arrays)

    def report(self) -> list[str]:
        """Instructions and threads in use, and the effect of quantized weights here."""
        native = self._team.native
        return [
            f"native kernels: {native.isa}, {native.num_threads} threads",
            f"products with {', '.join(FORMATS)} round activations to int8, for each token and "
            "group",
        ]

    def close(self) -> None:
        """The threads end with the last device of the process."""
        close_team(self._team)
