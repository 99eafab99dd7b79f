"""Rules of the house that a machine can check: sizes, names, imports, unsafe calls."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CORE = sorted((ROOT / "fastdeploy_core").rglob("*.py")) + sorted(
    (ROOT / "fastdeploy").rglob("*.py")
)
# The packages of plugins, their tests and benchmarks left out.
PLUGINS = sorted(
    path
    for package in ROOT.glob("plugins/*/**/py.typed")
    for path in package.parent.rglob("*.py")
    if "build" not in path.relative_to(ROOT).parts
)
MAX_LINES = 400
MAX_FUNCTION_LINES = 60
# Files allowed to be longer, and why; nothing above 600.
LONGER: dict[str, int] = {}
LONGER_FUNCTIONS = {"product", "rows_product"}  # of fd-cuda's quant_native.py
VENDORS = (
    "nvidia", "cuda", "cublas", "hopper", "h100", "h200", "kunlun", "xpu", "hygon", "dcu", "rocm",
    "enflame", "gcu", "iluvatar", "metax", "maca", "gaudi", "habana", "hpu", "ascend",
)  # fmt: skip
# The one table that names distributions to install when a driver is missing, and words that contain
# a vendor's letters by accident, are not branches on a vendor; nor are flags as others spell them.
VENDOR_EXEMPT = {"fastdeploy_core/plugins/known.py", "fastdeploy_core/config/graphs.py"}
UNSAFE_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}


def _relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _names(tree: ast.AST) -> set[str]:
    """Every identifier and string constant, split into words, docstrings and comments left out."""
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
        and isinstance(node.body[0].value, ast.Constant)
    }
    words: set[str] = set()
    for node in ast.walk(tree):
        texts: list[str] = []
        if isinstance(node, ast.Name):
            texts = [node.id]
        elif isinstance(node, ast.Attribute):
            texts = [node.attr]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts = [] if id(node) in docstrings else [node.value]
        elif isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            texts = [node.name]
        for text in texts:
            words |= set("".join(c if c.isalnum() else " " for c in text.lower()).split())
    return words


@pytest.mark.parametrize("path", CORE + PLUGINS, ids=_relative)
def test_file_is_one_room_of_readable_size(path: Path) -> None:
    limit = min(LONGER.get(_relative(path), MAX_LINES), 600)
    lines = len(path.read_text().splitlines())
    assert lines <= limit, f"{_relative(path)} has {lines} lines; split it (limit {limit})"


def _is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(ast.unparse(d).startswith("triton.jit") for d in node.decorator_list)


def test_functions_fit_a_screen() -> None:
    long = [
        f"{_relative(path)}:{node.lineno} {node.name} ({node.end_lineno - node.lineno + 1} lines)"
        for path in CORE + PLUGINS
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES
        and not _is_kernel(node)
        and node.name not in LONGER_FUNCTIONS
    ]
    assert not long, "\n".join(long)


def test_no_vendor_name_in_core() -> None:
    found = {
        _relative(path): sorted(hit)
        for path in CORE
        if _relative(path) not in VENDOR_EXEMPT
        and (hit := _names(ast.parse(path.read_text())) & set(VENDORS))
    }
    assert not found, found


# Files whose library is torch, whose waits release the lock; whose tensors lie in the host's memory; and the
# plain tensor code of a number format, which is there to be compared with.
MAY_WAIT = {
    f"plugins/{name}.py"
    for name in (
        "fd-cuda/fd_cuda/torch_device",
        "fd-cuda/fd_cuda/communicator",
        "fd-cuda/fd_cuda/peer_memory",
        "fd-cuda/fd_cuda/kernels/tune",
        "fd-cpu/python/fd_cpu/formats",
        "fd-quant-wint2/src/fd_quant_wint2/code",
    )
}


def test_nothing_waits_holding_the_interpreter_lock() -> None:
    """PaddlePaddle's synchronize() calls and Tensor.item() freeze every thread while a device hangs, the
    watchdog's heartbeat included. Poll an event's query(), and read with to_host()."""
    rooms = (
        "loading",
        "worker",
        "models",
        "layers",
        "sampling",
        "reference",
        "tensor",
        "contracts",
        "devices",
        "testing",
    )
    sources = PLUGINS + [
        p for room in rooms for p in (ROOT / "fastdeploy_core" / room).rglob("*.py")
    ]
    found = [
        f"{_relative(path)}:{node.lineno} {node.func.attr}()"
        for path in sources
        if _relative(path) not in MAY_WAIT
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and (node.func.attr == "synchronize" or (node.func.attr == "item" and not node.args))
    ]
    assert not found


def test_nothing_unpickles_or_evaluates() -> None:
    """Reliability S-01 and S-14: data that crossed a process is never turned into code."""
    found: list[str] = []
    for path in CORE + PLUGINS:
        for node in ast.walk(ast.parse(path.read_text())):
            imported: set[str] = set()
            if isinstance(node, ast.Import):
                imported = {a.name.split(".")[0] for a in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported = {(node.module or "").split(".")[0]}
                if node.module == "multiprocessing.managers":
                    found.append(f"{_relative(path)}:{node.lineno} multiprocessing.managers")
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                if node.func.id in ("eval", "exec"):
                    found.append(f"{_relative(path)}:{node.lineno} {node.func.id}()")
            elif isinstance(node, ast.Attribute) and node.attr in ("recv_pyobj", "send_pyobj"):
                found.append(f"{_relative(path)}:{node.lineno} {node.attr}")
            found += [f"{_relative(path)}:{node.lineno} {m}" for m in imported & UNSAFE_MODULES]
    assert not found, "\n".join(found)


PUBLIC = {"contracts", "devices", "types", "errors", "tensor"}


def test_plugins_import_what_is_public() -> None:
    """fd-simdevice is for tests, so it may use the conformance kit, too."""
    found: list[str] = []
    for path in PLUGINS:
        rooms = PUBLIC | ({"testing"} if "fd-simdevice" in path.parts else set())
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
            else:
                modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            for module in modules:
                package, _, rest = module.partition(".")
                if package in ("fastdeploy_core", "fastdeploy") and rest.split(".")[0] not in rooms:
                    found.append(f"{_relative(path)}:{node.lineno} {module}")
    assert not found, "\n".join(found)


def test_every_public_contract_item_is_documented() -> None:
    missing: list[str] = []
    core = ROOT / "fastdeploy_core"
    for path in sorted([*core.glob("contracts/*.py"), *core.glob("devices/*.py")]):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if not isinstance(node, ast.ClassDef | ast.FunctionDef) or node.name.startswith("_"):
                continue
            if not ast.get_docstring(node):
                missing.append(f"{path.name}:{node.lineno} {node.name}")
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize(
    "module",
    [
        "fastdeploy",
        "fastdeploy_core",
        "fastdeploy_core.contracts",
        "fastdeploy_core.devices.paddle_device",
        "fastdeploy_core.devices.torch_device",
        "fastdeploy_core.types",
        "fastdeploy_core.plugins",
        "fastdeploy_core.scheduler",
        "fastdeploy_core.kvcache",
        "fastdeploy_core.engine.core",
        "fastdeploy_core.serving.app",
        "fastdeploy_core.cli.main",
    ],
)
def test_control_plane_imports_no_tensor_library(module: str) -> None:
    code = (
        f"import sys, {module}\n"
        "loaded = sorted({'torch', 'paddle'} & set(sys.modules))\n"
        "assert not loaded, loaded\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
