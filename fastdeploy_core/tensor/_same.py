"""What torch and PaddlePaddle spell alike and mean alike."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

from fastdeploy_core.errors import ConfigError

from .library import DTYPE_BYTES

FUNCTIONS = (
    *("zeros", "ones", "empty", "full", "zeros_like", "empty_like", "cat", "stack", "nonzero"),
    *("matmul", "addmm", "outer", "exp", "log", "log1p", "sqrt", "rsqrt", "sin", "cos", "tanh"),
    *("erf", "abs", "maximum", "minimum", "isfinite", "isnan"),
)


class SameNames:
    """Base of both libraries. dtypes and functions are attributes of the class, so a call costs
    nothing more than the library's own."""

    def __init_subclass__(cls, module: ModuleType) -> None:
        super().__init_subclass__()
        for name in DTYPE_BYTES:
            setattr(cls, name, getattr(module, name))
        for name in FUNCTIONS:
            setattr(cls, name, staticmethod(getattr(module, name)))

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def dtype(self, name: str) -> Any:
        """See TensorLibrary."""
        if name not in DTYPE_BYTES:
            raise ConfigError(f"unknown dtype {name!r}; possible: {', '.join(DTYPE_BYTES)}")
        return getattr(self, name)
