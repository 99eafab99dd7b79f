"""Kernels run under Triton's interpreter where there is no GPU; torch is the library."""

from __future__ import annotations

import os
from typing import Any

import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

os.environ.setdefault("FD_CUDA_TUNE", "0")  # shapes of tests are not worth measuring

pytest_plugins = ["fastdeploy_core.testing.pytest_plugin"]


def _mend_interpreter() -> None:
    """Two gaps of Triton 3.6's interpreter. Its scalars are arrays of one element, which numpy 2.4 no
    longer takes for integers, so that `range(n)` of a loaded n fails; and it keeps bfloat16 as bits,
    which `dot` multiplies as if they were integers."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch, builder = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder
    dot = builder.create_dot

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def widened(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        bits = x.data.astype("uint32") << 16
        return interpreter.TensorHandle(bits.view("float32"), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, widened(a), widened(b), *rest)

    interpreter._patch_lang_tensor = patched
    builder.create_dot = create_dot


if not HAS_GPU:
    _mend_interpreter()
