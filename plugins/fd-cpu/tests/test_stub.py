"""_native.pyi says what the compiled module takes and returns, and names everything in it."""

from __future__ import annotations

import ast
import types
from pathlib import Path

import fd_cpu
import pytest
from fd_cpu import _native

STUB = ast.parse(Path(fd_cpu.__file__).with_name("_native.pyi").read_text("utf-8"))


def signature(function: ast.FunctionDef) -> tuple[list[str], str]:
    """Types of the arguments but for self, and of the result: the compiled module has no names."""
    given = [a for a in (*function.args.posonlyargs, *function.args.args) if a.arg != "self"]
    annotations = [a.annotation for a in given] + [function.returns]
    texts = [ast.unparse(a).replace("fd_cpu._native.", "") for a in annotations if a is not None]
    assert len(texts) == len(annotations)
    return [t.replace("collections.abc.", "") for t in texts[:-1]], texts[-1]


def declared(native: object) -> tuple[list[str], str]:
    """The same of a compiled function, whose getters have no name."""
    ((text, *_),) = native.__nb_signature__
    return signature(ast.parse(f"{text.replace('def (', 'def getter(')}: ...").body[0])


def stubbed() -> dict[str, ast.stmt]:
    """Functions, methods and attributes by qualified name."""
    found: dict[str, ast.stmt] = {}
    for node in STUB.body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.ClassDef):
            for member in node.body:
                name = member.target.id if isinstance(member, ast.AnnAssign) else member.name
                found[f"{node.name}.{name}"] = member
    return found


def compiled() -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in vars(_native).items():
        if isinstance(value, type):
            # A class that Python cannot make has an __init__ without a signature.
            special = [
                n
                for n in ("__init__", "__len__")
                if hasattr(vars(value).get(n), "__nb_signature__")
            ]
            own = [*special, *(n for n in vars(value) if not n.startswith("_"))]
            found |= {f"{name}.{n}": vars(value)[n] for n in own}
        elif not name.startswith("_") and not isinstance(value, types.ModuleType):
            found[name] = value
    return found


def test_the_stub_names_what_there_is() -> None:
    assert set(stubbed()) == set(compiled())


@pytest.mark.parametrize("name", sorted(stubbed()))
def test_the_stub_has_the_compiled_types(name) -> None:
    native, node = compiled()[name], stubbed()[name]
    if isinstance(node, ast.AnnAssign) or node.decorator_list:
        wanted = node.annotation if isinstance(node, ast.AnnAssign) else node.returns
        assert declared(native.fget)[1] == ast.unparse(wanted)
        return
    arguments, result = declared(native)
    wanted_arguments, wanted = signature(node)
    assert arguments == wanted_arguments
    assert wanted.split("[")[0] == result.split("[")[0]  # a dict's types are the stub's alone
