"""Kernels of a first start, compiled side by side before any of them runs.

Inside `compile_only()` what the calling thread launches is handed to compilers in threads of their
own and does not run; memory that kernels would have filled holds zeros, so that what torch itself
computes meanwhile stays within bounds. Triton gives the interpreter lock up in its passes, LLVM and
ptxas.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Final

import torch
from fastdeploy_core.devices.host_device import usable_cores
from torch.overrides import TorchFunctionMode

_EMPTY: Final = {torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty}
_ALIGNED: Final = 16
_MOST_THREADS: Final = 24  # beyond, the interpreter lock is what they wait for
_state = threading.local()
_lock = threading.Lock()


def is_on() -> bool:
    """Whether this thread's launches are compiled only."""
    return getattr(_state, "is_on", False)


@contextmanager
def compile_only() -> Iterator[None]:
    """See the module; leaving waits for the compilers of Triton kernels. A Triton that compiles
    nothing side by side compiles when kernels are met, and they run."""
    try:
        from triton import AsyncCompileMode
    except ImportError:
        yield
        return
    from triton.runtime.jit import JITFunction

    num_threads = min(_MOST_THREADS, max(2, usable_cores() - 1))
    with _lock, ThreadPoolExecutor(num_threads, "fd-cuda-triton") as pool:
        run, seen = JITFunction.run, set[tuple[Any, ...]]()
        JITFunction.run = _compiling(run, seen)
        _state.is_on = True
        try:
            with AsyncCompileMode(pool), _Zeros():
                yield
        finally:
            _state.is_on = False
            JITFunction.run = run


def _compiling(run: Callable[..., Any], seen: set[tuple[Any, ...]]) -> Callable[..., Any]:
    """JITFunction.run that starts compilers in a thread that is_on(), once for each
    specialization."""
    from triton import FutureKernel

    def only_compile(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if not is_on():
            return run(self, *args, grid=grid, warmup=warmup, **options)
        key = (id(self), *map(_kind, args), *((k, _kind(v)) for k, v in options.items()))
        if key not in seen:
            seen.add(key)
            kernel = run(self, *args, grid=grid, warmup=True, **options)
            if isinstance(kernel, FutureKernel) and torch.cuda.is_available():
                kernel.future.add_done_callback(partial(_load, torch.cuda.current_device()))
        return None

    return only_compile


def _load(device: int, compiled: Future[Any]) -> None:
    """Make what launches it, which takes a C compiler, and load it: in the thread that compiled
    it."""
    with suppress(Exception):  # whoever launches it hears why it cannot be
        torch.cuda.set_device(device)
        compiled.result().run  # noqa: B018 - made at first access


def _kind(value: Any) -> Any:
    """What Triton tells apart of an argument, or more."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % _ALIGNED == 0
    if hasattr(value, "block_shape"):  # a tensor descriptor
        return value.base.dtype, *value.block_shape
    return value


class _Zeros(TorchFunctionMode):
    """What is allocated without a value becomes zero."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.zero_() if func in _EMPTY else made
