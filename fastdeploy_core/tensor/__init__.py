"""The only door to a tensor library: PaddlePaddle (3.3 or newer) or torch (2.6 or newer).

`load("torch")` or `load("paddle")` imports the library and returns a `TensorLibrary`;
`namespace(x)` gives the library of a tensor, so nothing is global. Importing this package imports
neither.

What data-plane code may use, because both libraries agree on it:

* every function and dtype of `TensorLibrary` (see library.py, which documents each of them);
* tensor methods and attributes: `view reshape transpose(a, b) t() permute expand unsqueeze squeeze
  flatten contiguous clone`, `float() long() int() to(dtype)`, `sum mean amax all any` with `dim=`
  and `keepdim=`, `cumsum(dim=)`, `argmax(dim=)`, `exp log sqrt rsqrt abs sigmoid clamp`,
  `copy_ fill_ zero_ add_(tensor) sub_(tensor) mul_(tensor) div_(tensor) exp_`, `masked_fill`,
  `tolist data_ptr element_size is_contiguous shape ndim dtype`;
* `+ - * / // % **` and comparisons with tensors and scalars, `x[i:j]`, `x[:, i:j]`, reading with an
  integer or boolean tensor, writing to slices.

What they do not agree on goes through the library object: split, sort, log_softmax, index_copy_,
bit operations (paddle takes no Python integer, and a large one loses bits in `x * 3`), amax over
several dimensions, sizes (`numel` is a tensor in paddle: use `xp.size(x)`), arange of uint8,
inference mode, numpy conversion of bfloat16 and float8, thread counts.

The reference device multiplies matrices in float32 and, under torch, bfloat16: paddle's CPU
kernels know only float32 and float64.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
import warnings
from typing import Any, TypeAlias

from fastdeploy_core.errors import ConfigError
from fastdeploy_core.metadata import tolerate_damage

from .library import DTYPE_BYTES, TensorLibrary

__all__ = [
    "DTYPE_BYTES",
    "LIBRARIES",
    "Tensor",
    "TensorLibrary",
    "available",
    "load",
    "loaded",
    "namespace",
]

# A torch.Tensor or a paddle.Tensor. Not a union, because naming either would import its library.
Tensor: TypeAlias = Any

LIBRARIES = ("torch", "paddle")
_loaded: dict[str, TensorLibrary] = {}
_lock = threading.Lock()


def available() -> list[str]:
    """Names of installed tensor libraries; imports none."""
    return [name for name in LIBRARIES if importlib.util.find_spec(name) is not None]


def early_import(asked: str) -> str:
    """A module that a process may import before it is told its device; empty if there is none.
    `asked`: the library that the operator named. Never paddle's, which reads the device driver's
    variables when it is imported."""
    found = available()
    name = asked or (found[0] if len(found) == 1 else "")
    return f"{__name__}._torch" if name == "torch" and name in found else ""


def loaded() -> list[str]:
    """Names of the libraries in use in this process."""
    return list(_loaded)


def load(name: str) -> TensorLibrary:
    """The library of that name, imported by the first call and usable in the calling thread.
    ConfigError if it is not installed."""
    library = _loaded.get(name)
    if library is not None:
        library.enter_thread()
        return library
    if name not in LIBRARIES:
        raise ConfigError(
            f"unknown tensor library {name!r}; possible: {', '.join(LIBRARIES)}; "
            "choose one with --tensor-library"
        )
    if name not in available():
        found = ", ".join(available()) or "none"
        raise ConfigError(
            f"tensor library {name!r} is not installed; installed: {found}; "
            f'run: pip install "fastdeploy-core[{name}]"'
        )
    with _lock:
        if name not in _loaded:
            tolerate_damage()
            with warnings.catch_warnings():
                # Warnings at import, about compilers (ccache), deprecated imports within the
                # library and new features, which an operator of a server cannot act on.
                warnings.simplefilter("ignore")
                _loaded[name] = importlib.import_module(f"{__name__}._{name}").library()
    _loaded[name].enter_thread()
    return _loaded[name]


def namespace(x: Tensor) -> TensorLibrary:
    """The library of the tensor `x`."""
    root = type(x).__module__.partition(".")[0]
    if root in _loaded:
        return _loaded[root]
    # Subclasses (torch.nn.Parameter is one) may be defined in other modules.
    for name in LIBRARIES:
        module = sys.modules.get(name)
        if module is not None and isinstance(x, module.Tensor):
            return load(name)
    raise TypeError(f"{type(x).__name__} is not a tensor; expected one of {', '.join(LIBRARIES)}")
