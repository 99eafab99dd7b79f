"""`fastdeploy plugins examine DEVICE`: what a device really does here. Each operation, one
collective, versions.

An operation is native when it runs with the library's detour over the CPU switched off; kernels of
plugins are compared with the reference. `doctor` runs this module in a process of its own.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fastdeploy_core.contracts.command import CommandParser
from fastdeploy_core.contracts.device import DeviceOptions, FallbackDevice, ReportingDevice
from fastdeploy_core.contracts.moe import RoutingSpec
from fastdeploy_core.contracts.ops import OPERATIONS
from fastdeploy_core.errors import FastDeployError
from fastdeploy_core.plugins.drivers import lookup
from fastdeploy_core.plugins.kernels import REFERENCE, build_kernel_table
from fastdeploy_core.plugins.report import table

if TYPE_CHECKING:
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.contracts.ops import KernelTable

Row = tuple[str, bool, str]
# These may overwrite their arguments; all others change them as the contract says, or not at all.
MAY_OVERWRITE: Final = (
    "apply_penalties",
    "apply_bitmask",
    "filter_logits",
    "linear_add",
    "qk_norm",
)
TOLERANCE: Final = 1e-3  # absolute, of values around 1 in float32
EPS: Final = 0.1  # so large that a norm which takes another one is off


class _Make:
    """Small tensors on the device, the same at every call."""

    def __init__(self, device: DeviceBackend) -> None:
        self._device, self._xp = device, device.xp

    def floats(self, *shape: int, seed: int = 0) -> Any:
        """Normal numbers."""
        values = np.random.default_rng(seed).standard_normal(shape)
        return self._device.to_device(values.astype(np.float32))

    def ids(self, *values: int, dtype: str = "int64") -> Any:
        """These integers."""
        return self._device.to_device(np.array(values, dtype=dtype))

    def cache(self) -> tuple[Any, Any]:
        """Keys and values of four blocks."""
        return self.floats(4, 4, 2, 8, seed=8), self.floats(4, 4, 2, 8, seed=9)

    def column(self, value: float) -> Any:
        """One number for each of two rows."""
        return self._device.to_device(np.full(2, value, dtype=np.float32))

    def zeros(self, shape: list[int], dtype: str) -> Any:
        """Zeros."""
        return self._xp.zeros(shape, dtype=self._xp.dtype(dtype), device=self._device.device)


Arguments = dict[str, Callable[[], tuple[Any, ...]]]


def sample_arguments(device: DeviceBackend) -> Arguments:
    """For every operation a maker of small arguments: fresh ones, for some change them in place."""
    make = _Make(device)
    routing = RoutingSpec(num_experts=4, top_k=2)
    return (
        _drawing_arguments(make)
        | _fused_arguments(make)
        | _step_arguments(make)
        | _history_arguments(make)
        | {
            "embedding": lambda: (make.ids(1, 3), make.floats(8, 16)),
            "linear": lambda: (
                make.floats(3, 16),
                make.floats(8, 16, seed=1),
                make.floats(8, seed=2),
            ),
            "rms_norm": lambda: (make.floats(3, 16), make.floats(16, seed=1), EPS),
            "add_rms_norm": lambda: (
                make.floats(3, 16),
                make.floats(3, 16, seed=1),
                make.floats(16, seed=2),
                EPS,
            ),
            "silu_and_mul": lambda: (make.floats(3, 16),),
            "select_rows": lambda: (make.floats(4, 16), make.ids(1, 3)),
            "rotary_embedding": lambda: (
                *(
                    make.floats(3, 4, 8),
                    make.floats(3, 2, 8, seed=1),
                    make.ids(0, 1, 5),
                    make.floats(8, 8, seed=2),
                    False,
                ),
            ),
            "kv_write": lambda: (
                (make.floats(2, 2, 8), make.floats(2, 2, 8, seed=1)),
                make.cache(),
                make.ids(5, 6),
            ),
            "kv_copy_blocks": lambda: (make.cache(), make.ids(0), make.ids(2)),
            "kv_read_blocks": lambda: (make.cache(), make.ids(1, 3)),
            "kv_write_blocks": lambda: (
                make.cache(),
                make.ids(1),
                (make.floats(1, 4, 2, 8), make.floats(1, 4, 2, 8)),
            ),
            "moe_routing": lambda: (make.floats(3, 4), None, routing),
            "moe_experts": lambda: (
                *(
                    make.floats(2, 8),
                    make.ids(0, 2, 1, 3).reshape([2, 2]),
                    make.floats(2, 2, seed=1),
                ),
                *(make.floats(4, 12, 8, seed=2), make.floats(4, 8, 6, seed=3)),
            ),
        }
    )


def _drawing_arguments(make: _Make) -> Arguments:
    """Operations between logits and tokens."""
    mask = make.zeros([2, 1], "int32") + 7
    return {
        "apply_penalties": lambda: (
            *(make.floats(2, 32), make.column(0.5), make.column(0.5), make.column(1.5)),
            make.zeros([2, 32], "int32"),
            make.zeros([2, 32], "bool"),
        ),
        "apply_bitmask": lambda: (make.floats(2, 32), mask),
        "filter_logits": lambda: (
            make.floats(2, 32),
            make.ids(5, 0),
            make.column(0.9),
            make.column(0.0),
        ),
        "sample": lambda: (make.floats(2, 32), make.ids(1, 2), make.ids(3, 4)),
        "draw": lambda: (
            *(make.floats(2, 32), make.ids(1, 0), make.ids(5, 0), make.ids(1, 2)),
            *(make.column(0.7), make.column(0.9), make.column(0.0), make.ids(3, 4), True),
        ),
        "greedy": lambda: (make.floats(2, 32),),
        "log_softmax": lambda: (make.floats(2, 32),),
    }


def _fused_arguments(make: _Make) -> Arguments:
    """Operations that a device may do in one."""
    return {
        "norm_linear": lambda: (
            *(make.floats(3, 16), make.floats(16, seed=1), EPS),
            make.floats(8, 16),
            None,
        ),
        "gated_linear": lambda: (
            *(make.floats(3, 16), None, EPS),
            make.floats(8, 16, seed=1),
            None,
        ),
        "linear_add": lambda: (
            make.floats(3, 16),
            make.floats(8, 16, seed=1),
            None,
            make.floats(3, 8, seed=2),
        ),
        "concat_rms_norm": lambda: (
            *(make.floats(3, 16), make.floats(16, seed=1)),
            *(make.floats(3, 16, seed=2), make.floats(16, seed=3), EPS),
        ),
        "qk_norm": lambda: (
            *(
                make.floats(3, 4, 8),
                make.floats(3, 2, 8, seed=1),
                make.floats(8, seed=2),
                make.floats(8, seed=3),
                EPS,
            ),
        ),
        "linear_float32": lambda: (make.floats(3, 16), make.floats(8, 16, seed=1)),
        "linear_logits": lambda: (make.floats(3, 16), make.floats(8, 16, seed=1), None),
        "greedy_linear": lambda: (make.floats(3, 16), make.floats(32, 16, seed=1), None),
        "mark_broken": lambda: (make.ids(4, 5), make.column(1.0), None),
    }


def _step_arguments(make: _Make) -> Arguments:
    """Operations around a decode step."""
    return {
        # Three slots, the last of which is nobody's; two rows with a token each.
        "prepare_decode": lambda: (
            *(
                make.ids(1, 0),
                make.ids(2, 3, 4, 5, 0, 0, dtype="int32").reshape([3, 2]),
                make.ids(3, 6, 0),
            ),
            *(
                make.ids(7, 8, 0),
                make.zeros([3, 0], "int64"),
                make.ids(0, 0, 0),
                make.ids(8, 8, 0),
                *(4, make.ids(6)),
            ),
            *(make.ids(0, 0), make.ids(0, 0), make.ids(0, 0), make.ids(0, 0, dtype="int32")),
            make.ids(0, 0, 0, 0, dtype="int32").reshape([2, 2]),
        ),
        "place_tokens": lambda: (
            make.ids(5, 3),
            make.ids(8, 3),
            make.ids(2, 1, 3, 4, dtype="int32").reshape([2, 2]),
            4,
        ),
        "keep_drafts": lambda: (
            make.ids(1, 0),
            *(make.ids(9, 8, 7, -1).reshape([2, 2]), make.ids(6, 5).reshape([2, 1])),
            *(make.ids(2), 32, make.ids(3, 6, 0), make.ids(8, 8, 0)),
            *(make.zeros([3, 2], "int64"), make.ids(0, 0, 0), None),
        ),
        "finish_decode": lambda: (
            *(make.ids(1, 0), make.ids(9, 8, 7, 6), make.ids(9, 8, 7, -3), make.floats(4)),
            *(make.ids(7, 0, 9, 0, 0, 0).reshape([3, 2]), make.ids(1, 1, 0)),
            *(make.ids(3, 6, 0), make.ids(7, 8, 0), make.ids(0, 0, 0, 0).reshape([2, 2]), None),
        ),
    }


def _history_arguments(make: _Make) -> Arguments:
    """Operations on the tokens that several steps have sampled."""
    return {
        "keep_results": lambda: (
            *(make.ids(1, 0), make.ids(9, -2).reshape([2, 1]), make.ids(3, 6, 0)),
            make.zeros([2, 4], "int64"),
        ),
        "append_history": lambda: (
            make.ids(1, 0),
            make.ids(9, -1, 7, 8).reshape([2, 2]),
            make.ids(3, 6, 0),
            make.zeros([3, 9], "int32"),
        ),
        "match_ngrams": lambda: (
            make.ids(5, 6, 5, 6, 5, 0, 0, 0, 0, 0, 0, 0, dtype="int32").reshape([2, 6]),
            *(make.ids(0), make.ids(4), 1, 3, 2),
        ),
    }


def operations(device: DeviceBackend) -> list[Row]:
    """One row for what runs on the device, one for each operation that does not, or not rightly."""
    chosen, reference = build_kernel_table(device.name), build_kernel_table(REFERENCE)
    arguments, num_native = sample_arguments(device), 0
    rows: list[Row] = [("kernels", False, problem) for problem in chosen.problems]
    for name in OPERATIONS:
        if name not in arguments:
            rows.append((name, True, "not examined"))
            continue
        missing = _missing_kernel(device, chosen[name], arguments[name])
        if missing:
            rows.append((name, True, f"runs over the CPU: the device has no kernel {missing}"))
        else:
            num_native += 1
        rows += _compare(device, chosen, reference, name, arguments[name])
    words = f"{num_native} of {len(OPERATIONS)} run on the device alone"
    if not isinstance(device, FallbackDevice):
        words = (
            f"{num_native} of {len(OPERATIONS)} examined; "
            "the library does not tell which run on the CPU"
        )
    rows.insert(0, ("operations", True, words))
    return rows


def _missing_kernel(
    device: DeviceBackend, kernel: Callable[..., Any], make: Callable[[], tuple[Any, ...]]
) -> str:
    if not isinstance(device, FallbackDevice):
        return ""
    arguments = make()
    try:
        with device.without_fallback():
            kernel(*arguments)
    except Exception as error:
        return device.missing_kernel(error)  # any other error shows in the comparison
    return ""


def _compare(
    device: DeviceBackend,
    chosen: KernelTable,
    reference: KernelTable,
    name: str,
    make: Callable[[], tuple[Any, ...]],
) -> list[Row]:
    """Rows only for what is wrong."""
    results = []
    for kernels in (chosen, reference):
        arguments = make()
        try:
            result = kernels[name](*arguments)
            kept = () if name in MAY_OVERWRITE else arguments
            results.append(_values(device, (result, kept)))
        except Exception as error:
            return [(name, False, f"fails: {type(error).__name__}: {error}"[:300])]
    worst = max(
        (float(np.max(np.abs(a - b))) for a, b in zip(*results, strict=True) if a.size), default=0.0
    )
    if worst > TOLERANCE:
        return [(name, False, f"differs from the reference by {worst:.3g}")]
    return []


def _values(device: DeviceBackend, tree: Any) -> list[np.ndarray]:
    """All tensors in nested tuples, as float64; infinities become numbers that can be compared."""
    if isinstance(tree, tuple | list):
        return [v for part in tree for v in _values(device, part)]
    if isinstance(tree, device.xp.tensor_type):
        tensor: Any = tree
        values = np.array(device.to_host(tensor.float()), dtype=np.float64)
        return [np.nan_to_num(values, nan=1e30, posinf=1e20, neginf=-1e20)]
    return []


def collective(name: str, library: str, device: DeviceBackend) -> Row:
    """Two ranks on two chips."""
    from .rank import run_ranks

    if device.limits.max_tensor_parallel_size < 2:
        return ("collective", True, "the device runs alone")
    with contextlib.suppress(FastDeployError):
        options = DeviceOptions(index=1, tensor_library=library, num_threads=1)
        lookup("device", name)(options).close()
        try:
            first, second = run_ranks(name, library, 2)
        except RuntimeError as error:
            return ("collective", False, str(error).strip().splitlines()[-1][:300])
        wrong = [check for check, passed in first.items() if not passed]
        if wrong or first != second:
            return ("collective", False, f"wrong: {', '.join(wrong) or 'ranks disagree'}")
        return ("collective", True, "two ranks agree")
    return ("collective", True, "not tried: only one chip is here")


def main(argv: Sequence[str]) -> int:
    """Print the rows; exit code 1 if one of them did not pass."""
    parser = CommandParser(
        prog="fastdeploy plugins examine",
        description="Run each operation of a device, compare it with the reference, and join two "
        "ranks for one collective.",
    )
    parser.add_argument("device", help="a device driver by name; its hardware must be here")
    parser.add_argument(
        "--tensor-library", default="", help="default: what the device driver names"
    )
    parser.add_argument("--json", action="store_true", help="the stable form for programs")
    arguments = parser.parse_args(argv)
    with contextlib.redirect_stdout(sys.stderr):  # what plugins print when they are imported
        rows = examine(arguments.device, arguments.tensor_library)
    if arguments.json:
        print(json.dumps(rows))
    else:
        shown = [(what, "PASS" if passed else "FAIL", words) for what, passed, words in rows]
        print(table(("what", "result", "words"), shown))
    return 0 if all(passed for _, passed, _ in rows) else 1


def examine(name: str, library: str = "") -> list[Row]:
    """What the device says of itself, its operations, one collective."""
    options = DeviceOptions(tensor_library=library, num_threads=1)
    device: DeviceBackend = lookup("device", name)(options)
    rows = [("device", True, line) for line in device.report()] if isinstance(
        device, ReportingDevice
    ) else []  # fmt: skip
    with device.xp.no_grad():
        rows += operations(device)
    rows.append(collective(name, device.xp.name, device))
    device.close()
    return rows


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
