"""The simulated device behind torch's PrivateUse1: build it, and register it under a vendor's
names.

`install_torch(folder, "torch_mychip", "mychip", "mccl")` writes a module torch_mychip that stands
in for the vendor's: importing it makes torch know device `mychip` and collectives backend `mccl`.
One device type per process, as with vendors' torch.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from .build import SimulationUnavailable, compiled

SOURCE = Path(__file__).parent / "torch_native" / "device.cc"
FLAGS = ("-std=c++20", "-O0", "-fPIC", "-shared", "-w")
_STAND_IN = '''"""Stands in for the vendor's module: a simulated device and its collectives."""
from fd_simdevice.torch_side import register

register({type_name!r}, {backend!r})
'''


def build_torch() -> Path:
    """The compiled library; made if there is none of this source and this torch yet."""
    found = importlib.util.find_spec("torch")
    if found is None or not found.submodule_search_locations:
        raise SimulationUnavailable("torch is not installed; run: pip install torch")
    package = Path(found.submodule_search_locations[0])
    digest = hashlib.sha256(importlib.metadata.version("torch").encode())
    digest.update(SOURCE.read_bytes())
    include = package / "include"
    options = [
        *FLAGS,
        *(f"-I{include}", f"-I{include / 'torch' / 'csrc' / 'api' / 'include'}"),
        *(str(SOURCE), f"-L{package / 'lib'}", "-lc10", "-ltorch_cpu"),
    ]
    return compiled(f"torch-{digest.hexdigest()[:16]}.so", options)


def install_torch(folder: Path, module: str, type_name: str, backend: str) -> dict[str, str]:
    """Write the stand-in module into `folder`; returns the environment to set for processes that
    use it."""
    build_torch()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    text = _STAND_IN.format(type_name=type_name, backend=backend)
    (folder / f"{module}.py").write_text(text, "utf-8")
    path = [str(folder), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(part for part in path if part)}


def register(type_name: str, backend: str) -> None:
    """Make torch know the device and the collectives in this process."""
    import torch
    import torch.distributed as dist

    torch.ops.load_library(str(build_torch()))
    torch.utils.rename_privateuse1_backend(type_name)
    module = _device_module(type_name, torch.ops.fd_simdevice)
    sys.modules[module.__name__] = module
    torch._register_device_module(type_name, module)
    dist.Backend.register_backend(backend, _make_group, devices=[type_name])


def _device_module(type_name: str, ops: Any) -> ModuleType:
    """What becomes torch.<type_name>."""
    module: Any = ModuleType(f"torch.{type_name}")
    module.is_available = lambda: True
    module.device_count = ops.count
    module.current_device = ops.current
    module.set_device = ops.use
    module.mem_get_info = lambda device=0: (ops.free(device), ops.total())
    module.manual_seed_all = lambda seed: None
    module._is_in_bad_fork = lambda: False
    found: ModuleType = module
    return found


def _make_group(store: Any, rank: int, size: int, timeout: Any) -> Any:
    """Collectives between processes: gloo's, over copies in host memory."""
    import torch
    import torch.distributed as dist

    # torch's stubs leave out a backend's collectives, a group's second constructor and a future's
    # work.
    native: Any = torch._C._distributed_c10d
    gloo = native.ProcessGroupGloo(store, rank, size, timeout)

    class HostCollectives(dist.ProcessGroup):
        """Those that a tensor-parallel group uses."""

        def allreduce(self, tensors: list[Any], opts: Any = None) -> Any:  # type: ignore[override]
            host = [x.cpu() for x in tensors]
            gloo.allreduce(host, opts or dist.AllreduceOptions()).wait()
            return self._back(tensors, host)

        def broadcast(self, tensors: list[Any], opts: Any = None) -> Any:  # type: ignore[override]
            host = [x.cpu() for x in tensors]
            gloo.broadcast(host, opts or dist.BroadcastOptions()).wait()
            return self._back(tensors, host)

        def _allgather_base(self, output: Any, input: Any, opts: Any = None) -> Any:
            host = list(torch.empty(output.shape, dtype=output.dtype).chunk(size))
            gloo.allgather([host], [input.cpu()]).wait()
            return self._back([output], [torch.cat(host)])

        all_gather_single = _allgather_base  # its name in newer torch

        def getBackendName(self) -> str:
            return "simulated"

        @staticmethod
        def _back(tensors: list[Any], host: list[Any]) -> Any:
            for x, values in zip(tensors, host, strict=True):
                x.copy_(values)
            done: Any = torch.futures.Future()
            done.set_result(tensors)
            return native._create_work_from_future(done)

    make: Any = HostCollectives
    return make(rank, size)
