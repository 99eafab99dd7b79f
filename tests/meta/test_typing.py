"""What `mypy` is asked covers what there is: every distribution, every driver, every function of
Python's."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

from fastdeploy_testing.new import SHARED, TEMPLATE_FOLDER, TEMPLATES

ROOT = Path(__file__).resolve().parents[2]
PROJECTS = [
    ROOT / "pyproject.toml",
    *sorted((ROOT / "plugins").glob("*/pyproject.toml")),
    *(p for p in sorted(TEMPLATE_FOLDER.glob("*/pyproject.toml")) if p.parent.name != SHARED),
]
NOT_DRIVERS = {"fastdeploy.hooks", "fastdeploy.kernels"}
CUDA = ROOT / "plugins" / "fd-cuda" / "fd_cuda"
JIT = ("triton.jit", "jit")


def project(path: Path) -> dict:
    return tomllib.loads(path.read_text("utf-8"))


def packages(path: Path) -> list[Path]:
    """The packages of a distribution, whichever tool builds it."""
    tools = project(path)["tool"]
    if "hatch" in tools:
        names = tools["hatch"]["build"]["targets"]["wheel"]["packages"]
    else:
        names = tools["scikit-build"]["wheel"]["packages"]
    return [path.parent / name for name in names]


@pytest.mark.parametrize("path", PROJECTS, ids=lambda p: p.parent.name)
def test_mypy_reads_every_distribution(path: Path) -> None:
    patterns = project(ROOT / "pyproject.toml")["tool"]["mypy"]["files"]
    read = {found for pattern in patterns for found in ROOT.glob(pattern)}
    assert all({package, *package.parents} & read for package in packages(path))


@pytest.mark.parametrize("path", PROJECTS, ids=lambda p: p.parent.name)
def test_every_distribution_says_that_it_is_typed(path: Path) -> None:
    """Else the contract is untyped to a plugin that is checked elsewhere."""
    assert all((package / "py.typed").is_file() for package in packages(path))


def test_every_driver_is_held_to_its_protocol() -> None:
    tree = ast.parse((Path(__file__).parent / "drivers.py").read_text("utf-8"))
    imported = {
        alias.asname or alias.name: f"{node.module}:{alias.name}"
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    held = {
        imported[name.id]
        for node in tree.body
        if isinstance(node, ast.AnnAssign)
        for name in ast.walk(node.value)
        if isinstance(name, ast.Name)
    }
    named = {
        target
        for path in PROJECTS
        for group, entries in project(path)["project"].get("entry-points", {}).items()
        if group not in NOT_DRIVERS
        for target in entries.values()
    }
    named |= {  # the shared pyproject.toml is filled in when it is copied
        f"fd_{template.placeholder}.{template.target}"
        for template in TEMPLATES.values()
        if template.target and template.kind != "kernels"
    }
    assert held == named


def test_only_kernels_of_triton_lack_annotations() -> None:
    """Their modules are excused from mypy's and ruff's rules, for they are compiled from their
    source."""
    found = []
    for path in CUDA.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.FunctionDef):
                continue
            decorators = [ast.unparse(d).split("(")[0] for d in node.decorator_list]
            if any(d in JIT for d in decorators):
                continue
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            bare = [a.arg for a in given if a.annotation is None and a.arg not in ("self", "cls")]
            if bare or node.returns is None:
                found.append(f"{path.relative_to(CUDA)}:{node.lineno} {node.name}")
    assert not found
