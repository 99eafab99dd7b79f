"""Kernels run under Triton's interpreter where there is no GPU.

One process uses one tensor library: what is torch's runs unless `--fd-tensor paddle` is given, and
then only test_paddle_device.py does.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

pytest_plugins = ["fastdeploy_testing.pytest_plugin"]


def _mend_interpreter() -> None:
    """Gaps of Triton's interpreter. Of 3.6: its scalars are arrays of one element, which numpy 2.4
    no longer takes for integers, so that `range(n)` of a loaded n fails; and it keeps bfloat16 and
    float8 as bits, which `dot` multiplies as if they were integers. Of 3.9: masks that came about
    by arithmetic of bits are no bools to it."""
    import torch
    import triton.language as tl
    from triton.runtime import interpreter

    patch, builder = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder
    dot = builder.create_dot
    masked_load, masked_store = builder.create_masked_load, builder.create_masked_store

    def as_mask(x: Any) -> Any:
        if not isinstance(x, interpreter.TensorHandle):  # of a tensor descriptor
            return x
        return interpreter.TensorHandle(x.data.astype(bool), x.dtype)

    def load(self: Any, ptrs: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        return masked_load(self, ptrs, as_mask(mask), *rest, **named)

    def store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        return masked_store(self, ptrs, value, as_mask(mask), *rest, **named)

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def widened(x: Any) -> Any:
        if x.dtype.scalar == tl.float8e4nv:
            wide = torch.from_numpy(x.data.view("uint8")).view(torch.float8_e4m3fn).float()
            return interpreter.TensorHandle(wide.numpy(), tl.float32)
        if x.dtype.scalar != tl.bfloat16:
            return x
        bits = x.data.astype("uint32") << 16
        return interpreter.TensorHandle(bits.view("float32"), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, widened(a), widened(b), *rest)

    interpreter._patch_lang_tensor = patched
    builder.create_dot = create_dot
    builder.create_masked_load, builder.create_masked_store = load, store


def pytest_configure(config: pytest.Config) -> None:
    """Before any test module imports Triton."""
    if config.getoption("--fd-tensor") == "paddle":
        return
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
        _mend_interpreter()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The other library's tests."""
    if collection_path.suffix != ".py":
        return None
    of_paddle = collection_path.name == "test_paddle_device.py"
    is_other = (config.getoption("--fd-tensor") == "paddle") != of_paddle
    return is_other or None  # False would keep what `--ignore` names
