"""Rules of the house that a machine can check: sizes, names, imports, unsafe calls."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hatchling.builders.sdist import SdistBuilder

from fastdeploy_core import layers, models
from fastdeploy_core.plugins.known import providers

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
MAX_FUNCTION_LINES = 60
# What a reader must hold in mind at once: the files of a room, a constructor's parameters, the
# fields of a record. __init__.py is not counted, nor is `self`.
MAX_ROOM_FILES = 15
MAX_PARAMETERS = 8
MAX_FIELDS = 12
# Rooms whose files are one of a kind each: a kernel, a part of the contract. A reader opens one of
# those.
LARGER_ROOMS = {
    "plugins/fastdeploy-testing/fastdeploy_testing/conformance",
    "plugins/fd-cuda/fd_cuda/kernels",
}
LARGER_RECORDS = {
    # One field for each thing that a user may ask for, flat because the user's form is flat.
    "fastdeploy_core/config/argument_table.py Argument",
    "fastdeploy_core/config/engine.py EngineConfig",
    "fastdeploy_core/config/engine.py ModelConfig",
    "fastdeploy_core/config/server.py ServerConfig",
    "fastdeploy_core/serving/openai/schemas/chat.py ChatCompletionRequest",
    "fastdeploy_core/serving/openai/schemas/common.py SamplingFields",
    "fastdeploy_core/types/request.py Request",
    "plugins/fd-agent-apis/fd_agent_apis/responses_request.py ResponsesRequest",
    "fastdeploy_core/types/sampling.py SamplingParams",
    "fastdeploy/sampling_params.py SamplingParams",
    # One field for each number that a report shows.
    "fastdeploy_core/types/engine.py EngineInfo",
    "fastdeploy_core/types/engine.py EngineStats",
    "fastdeploy_core/types/worker.py WorkerInfo",
    # What a device states of itself, and what a step hands to a driver.
    "fastdeploy_core/contracts/attention.py AttentionBatch",
    "fastdeploy_core/contracts/model.py AttentionSpec",
    "fastdeploy_core/contracts/device.py DeviceLimits",
    "fastdeploy_core/contracts/speculative.py DraftBatch",
    # Being redesigned.
    "plugins/fd-kv-shm/fd_kv_shm/link.py Link",
    "plugins/fastdeploy-testing/fastdeploy_testing/null_worker.py NullOptions",
    "fastdeploy_core/types/step.py ModelRunnerOutput",
    "fastdeploy_core/worker/step.py Launched",
}
LONGER_FUNCTIONS = {"product", "rows_product"}  # of fd-cuda's quant_native.py
VENDORS = (
    "nvidia", "cuda", "cublas", "hopper", "h100", "h200", "kunlun", "xpu", "hygon", "dcu", "rocm",
    "enflame", "gcu", "iluvatar", "metax", "maca", "gaudi", "habana", "hpu", "ascend",
)  # fmt: skip
# Flags as others spell them are no branches on a vendor.
VENDOR_EXEMPT = {"fastdeploy_core/config/graphs.py"}
UNSAFE_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}


def _relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def _nodes(path: Path) -> list[ast.AST]:
    """A file's syntax tree, node by node; a dozen tests walk over the same files."""
    return list(ast.walk(ast.parse(path.read_text("utf-8"))))


def _names(nodes: list[ast.AST]) -> set[str]:
    """Every identifier and string constant, split into words, docstrings and comments left out."""
    docstrings = {
        id(node.body[0].value)
        for node in nodes
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
        and isinstance(node.body[0].value, ast.Constant)
    }
    words: set[str] = set()
    for node in nodes:
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


def test_rooms_are_small_enough_to_enter() -> None:
    rooms = Counter(_relative(p.parent) for p in CORE + PLUGINS if p.name != "__init__.py")
    large = [
        f"{room} has {files} files; give it rooms of its own or join files (limit {MAX_ROOM_FILES})"
        for room, files in rooms.items()
        if files > MAX_ROOM_FILES and room not in LARGER_ROOMS
    ]
    assert not large, "\n".join(large)


def _classes() -> Iterator[tuple[str, ast.ClassDef]]:
    for path in CORE + PLUGINS:
        for node in _nodes(path):
            if isinstance(node, ast.ClassDef):
                yield f"{_relative(path)} {node.name}", node


def _constructor(node: ast.ClassDef) -> ast.FunctionDef | None:
    """The class's own `__init__`, if it writes one."""
    methods = [item for item in node.body if isinstance(item, ast.FunctionDef)]
    return next((method for method in methods if method.name == "__init__"), None)


def test_constructors_take_few_parameters() -> None:
    large: list[str] = []
    for name, node in _classes():
        if (init := _constructor(node)) is None:
            continue
        args = init.args
        count = len(args.posonlyargs + args.args + args.kwonlyargs) - 1
        if count > MAX_PARAMETERS:
            large.append(f"{name} takes {count} parameters (limit {MAX_PARAMETERS})")
    assert not large, "\n".join(large)


def test_records_have_few_fields() -> None:
    large: list[str] = []
    for name, node in _classes():
        is_protocol = any("Protocol" in ast.unparse(base) for base in node.bases)
        if is_protocol or _constructor(node) is not None or name in LARGER_RECORDS:
            continue
        count = sum(
            isinstance(item, ast.AnnAssign) and "ClassVar" not in ast.unparse(item.annotation)
            for item in node.body
        )
        if count > MAX_FIELDS:
            large.append(f"{name} has {count} fields (limit {MAX_FIELDS})")
    assert not large, "\n".join(large)


def _is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(ast.unparse(d).startswith("triton.jit") for d in node.decorator_list)


def test_functions_fit_a_screen() -> None:
    long = [
        f"{_relative(path)}:{node.lineno} {node.name} ({node.end_lineno - node.lineno + 1} lines)"
        for path in CORE + PLUGINS
        for node in _nodes(path)
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
        if _relative(path) not in VENDOR_EXEMPT and (hit := _names(_nodes(path)) & set(VENDORS))
    }
    assert not found, found


def test_core_names_no_checkpoint_format_of_a_plugin() -> None:
    formats = set(providers("checkpoint_format"))
    found = {
        _relative(path): sorted(hit) for path in CORE if (hit := _names(_nodes(path)) & formats)
    }
    assert formats and not found, found


# Files whose library is torch, whose waits release the lock; whose tensors lie in the host's
# memory; and the plain tensor code of a number format, which is there to be compared with.
MAY_WAIT = {
    f"plugins/{name}.py"
    for name in (
        "fd-cuda/fd_cuda/torch_device",
        "fd-cuda/fd_cuda/communicator",
        "fd-cuda/fd_cuda/peer_memory",
        "fd-cpu/python/fd_cpu/formats",
        "fd-quant-wint2/src/fd_quant_wint2/code",
    )
}


def test_nothing_waits_holding_the_interpreter_lock() -> None:
    """PaddlePaddle's synchronize() calls and Tensor.item() freeze every thread while a device
    hangs, the watchdog's heartbeat included. Poll an event's query(), and read with to_host()."""
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
    )
    sources = PLUGINS + [
        p for room in rooms for p in (ROOT / "fastdeploy_core" / room).rglob("*.py")
    ]
    found = [
        f"{_relative(path)}:{node.lineno} {node.func.attr}()"
        for path in sources
        if _relative(path) not in MAY_WAIT
        for node in _nodes(path)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and (node.func.attr == "synchronize" or (node.func.attr == "item" and not node.args))
    ]
    assert not found


def test_nothing_unpickles_or_evaluates() -> None:
    """Reliability S-01 and S-14: data that crossed a process is never turned into code."""
    found: list[str] = []
    for path in CORE + PLUGINS:
        for node in _nodes(path):
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


PUBLIC = {"contracts", "devices", "types", "errors", "tensor", "__version__"}
# Rooms of which the names in `__all__` are public and nothing else is.
PUBLIC_NAMES = {
    "layers": layers.__all__,
    "models": models.__all__,
}
# Parts of the core that few deployments need, as distributions of their own: they are released
# with the core and require exactly its version, so they may import these private rooms.
PRIVATE = {
    "fastdeploy-testing": {
        *("api", "config", "engine", "plugins", "reference"),
    },
    "fd-agent-apis": {"serving", "tokenizer"},
    "fd-beam-search": {"api", "engine", "serving"},
    "fd-bench": {"fastdeploy", "cli"},
    "fd-calibrate": {
        *("cli", "config", "envs", "layers", "loading", "models", "plugins", "reference"),
        "tokenizer",
    },
    "fd-hub": {"cli", "envs", "plugins"},
    "fd-launch": {"plugins"},
    "fd-pooling": {"api", "config", "engine", "models", "serving", "tokenizer"},
    "fd-lora": {"config", "engine", "layers", "loading", "serving"},
    "fd-rollout": {"api", "config", "engine", "layers", "loading", "plugins", "serving", "worker"},
    "fd-scale-out": {
        *("config", "engine", "envs", "kvcache", "loading", "plugins", "scheduler", "serving"),
    },
    "fd-tools": {"cli", "config", "envs", "models", "parsers", "plugins", "serving", "tokenizer"},
    "fd-vision": {"models"},
    "fd-web": {"serving"},
}
# For tests alone: it may use the conformance kit.
PRIVATE_OF_TESTS = {"fd-simdevice": {"fastdeploy_testing"}}


def _rooms_imported(path: Path) -> dict[str, str]:
    """Rooms of the core that a file imports, each with a place; `fastdeploy` and
    `fastdeploy_testing` count as rooms."""
    found: dict[str, str] = {}
    own = path.relative_to(ROOT).parts  # the checkout's own folder may have any name
    for node in _nodes(path):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            package, *rooms = name.split(".")
            if package == "fastdeploy_core" and rooms:
                package = rooms[0]
                if rooms[1:] and rooms[1] in PUBLIC_NAMES.get(package, ()):
                    continue
            elif package not in ("fastdeploy", "fastdeploy_testing") or package in own:
                continue
            found[package] = f"{_relative(path)}:{node.lineno} {name}"
    return found


def test_plugins_import_what_is_public() -> None:
    """The others name the private rooms that they import, no more and no fewer."""
    used: dict[str, dict[str, str]] = {}
    for path in PLUGINS:
        name = path.relative_to(ROOT / "plugins").parts[0]
        used.setdefault(name, {}).update(_rooms_imported(path))
    allowed = PRIVATE | PRIVATE_OF_TESTS
    found = [
        place
        for name, rooms in used.items()
        for room, place in rooms.items()
        if room not in PUBLIC | allowed.get(name, set())
    ]
    assert not found, "\n".join(found)
    assert {name: rooms - set(used[name]) for name, rooms in allowed.items()} == {
        name: set() for name in allowed
    }


@pytest.mark.parametrize("name", PRIVATE)
def test_who_imports_private_rooms_requires_exactly_this_core(name: str) -> None:
    own, core = (
        tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))["project"]
        for folder in (ROOT / "plugins" / name, ROOT)
    )
    assert f"{core['name']}=={core['version']}" in own["dependencies"]
    assert own["version"] == core["version"]


@pytest.mark.parametrize(
    "folder", [".", *sorted(p.parent.name for p in ROOT.glob("plugins/*/pyproject.toml"))]
)
def test_distributions_say_what_an_index_shows(folder: str) -> None:
    """A licence that travels in the wheel, and classifiers."""
    own = ROOT if folder == "." else ROOT / "plugins" / folder
    project = tomllib.loads((own / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["license-files"] == ["LICENSE"]
    assert (own / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    core = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert set(project["classifiers"]) | {"Typing :: Typed"} == set(core["classifiers"])
    assert project["description"] and (own / project["readme"]).exists()


def test_the_cores_source_distribution_has_its_own_files_alone() -> None:
    """A pattern without a leading slash would find files of that name in every folder."""
    builder = SdistBuilder(str(ROOT))
    packed = {Path(file.relative_path) for file in builder.recurse_included_files()}
    assert {path.parts[0] for path in packed} == {
        *("fastdeploy", "fastdeploy_core"),
        *("ARCHITECTURE.md", "LICENSE", "README.md"),
    }
    assert Path("fastdeploy_core/py.typed") in packed


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
        "fastdeploy_core.devices.host_device",
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
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


# Who may import a module by a name that only the running program knows: entry points and targets
# "module:attribute" of plugins, and commands that are loaded when they are called.
IMPORTING_BY_NAME = {
    "fastdeploy_core/cli/",
    "fastdeploy_core/engine/processes/",
    "fastdeploy_core/models/shapes.py",
    "fastdeploy_core/plugins/",
    "fastdeploy_core/sampling/processors.py",
    "fastdeploy_core/serving/launch.py",
    "fastdeploy_core/tensor/",
    "fastdeploy_testing/",
    "fastdeploy/__init__.py",
}


def test_no_room_reaches_another_past_the_import_rules() -> None:
    """import-linter sees import statements alone: who imports by name reaches any room."""
    found = []
    for path in CORE:
        name = path.relative_to(ROOT).as_posix()
        if not any(name.startswith(start) for start in IMPORTING_BY_NAME):
            calls = ("import_module(", "__import__(", "sys.modules[")
            found += [f"{name}: {call}" for call in calls if call in path.read_text("utf-8")]
    assert not found, f"imports past the rules of pyproject.toml: {found}"
