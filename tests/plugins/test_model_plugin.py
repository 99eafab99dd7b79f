"""The model family of docs/how-to/write-a-model.md, as a wheel, against transformers."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from tests.plugins.wheels import REPOSITORY, build_wheel, fastdeploy, install, python

PAGE = REPOSITORY / "docs" / "how-to" / "write-a-model.md"


EXAMPLE = REPOSITORY / "examples" / "fd-gpt-neox" / "fd_gpt_neox" / "model.py"


def family() -> str:
    found = re.search(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert found is not None
    return found[1]


def test_the_page_shows_the_example() -> None:
    source = EXAMPLE.read_text("utf-8")
    assert family() == source and len(source.splitlines()) < 100


def site_with(folder: Path, architecture: str, source: str) -> Path:
    site = folder / "site"
    entry_points = f"[fastdeploy.models]\n{architecture} = fd_family.model:{architecture}\n"
    files = {"fd_family/__init__.py": "", "fd_family/py.typed": "", "fd_family/model.py": source}
    install(site, build_wheel(folder, "fd-family", files, entry_points))
    return site


# What the kit must see: a wrong activation, a forgotten bias, the norm of the other branch, parts
# of the checkpoint's tensor in another order, a rotation as wide as the head.
FAULTS = {
    "self.gelu(self.up": "self.gelu(-self.up",
    "qkv_bias=bias, output_bias=bias": "qkv_bias=bias",
    "self.up(self.norm2(seen))": "self.up(self.norm1(seen))",
    "parts[:, self._number]": "parts[:, (self._number + 1) % 3]",
    "int(spec.head_dim * share)": "spec.head_dim",
}


@pytest.fixture(scope="module", params=[True, False], ids=["parallel", "in turn"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(5)
    config = transformers.GPTNeoXConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        rotary_pct=0.5,
        use_parallel_residual=request.param,
        initializer_range=0.3,
    )
    model = transformers.GPTNeoXForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    folder = tmp_path_factory.mktemp("neox")
    model.save_pretrained(folder)
    return folder


def check(folder: Path, source: str, checkpoint: Path, tensor: str) -> Any:
    site = site_with(folder, "GPTNeoXForCausalLM", source)
    return fastdeploy(
        site, "plugins", "check", "GPTNeoXForCausalLM", "--kind", "model",
        "--model", str(checkpoint), "--tensor", tensor, timeout_s=300,
    )  # fmt: skip


def test_the_documented_family_is_transformers(
    tmp_path: Path, checkpoint: Path, tensor_library: str
) -> None:
    done = check(tmp_path, family(), checkpoint, tensor_library)
    assert re.search(r"TestModel +PASS +7 +0 +0", done.stdout), done.stdout[-3000:]


class Fault(ast.NodeTransformer):
    """Leaves one thing of a block out, by its number among all that may be left out."""

    def __init__(self, number: int) -> None:
        self.left, self.words = number, ""

    def is_it(self, node: ast.AST) -> bool:
        self.left -= 1
        if self.left == -1:
            self.words = ast.unparse(node)
        return self.left == -1

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        """A sum: its second part is taken away instead."""
        self.generic_visit(node)
        if isinstance(node.op, ast.Add) and self.is_it(node):
            node.op = ast.Sub()
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """A norm or an activation: its argument goes on as it is. A bias: there is none."""
        self.generic_visit(node)
        name = ast.unparse(node.func)
        if name in ("self.gelu", "self.norm1", "self.norm2", "self.norm") and self.is_it(node):
            return node.args[0]
        for keyword in list(node.keywords):
            if keyword.arg and keyword.arg.endswith("bias") and self.is_it(keyword.value):
                node.keywords.remove(keyword)
                self.words = f"{keyword.arg} of {name}"
        return node


def faulty_families() -> dict[str, str]:
    """What is wrong, and the source."""
    found: dict[str, str] = {}
    while True:
        tree, fault = ast.parse(family()), Fault(len(found))
        for each in ast.walk(tree):
            names = ("__init__", "__call__", "forward")
            if isinstance(each, ast.FunctionDef) and each.name in names:
                fault.visit(each)
        if not fault.words:
            return found
        found[f"{len(found)}: {fault.words}"] = ast.unparse(tree)


def test_there_are_enough_faults() -> None:
    assert len(faulty_families()) >= 8


@pytest.mark.slow
@pytest.mark.parametrize("what", faulty_families())
@pytest.mark.parametrize("checkpoint", [True], ids=["parallel"], indirect=True)
def test_the_kit_sees_what_a_family_leaves_out(
    what: str, tmp_path: Path, checkpoint: Path, tensor_library: str
) -> None:
    done = check(tmp_path, faulty_families()[what], checkpoint, tensor_library)
    assert done.returncode == 1, f"{what} lives"
    assert re.search(r"TestModel +FAIL", done.stdout), done.stdout[-3000:]


@pytest.mark.parametrize(
    "right",
    [pytest.param(f, marks=[] if "gelu" in f else [pytest.mark.slow]) for f in FAULTS],
)
@pytest.mark.parametrize("checkpoint", [True], ids=["parallel"], indirect=True)
def test_the_kit_sees_a_family_with_a_fault(
    right: str, tmp_path: Path, checkpoint: Path, tensor_library: str
) -> None:
    source = family()
    assert source.count(right) == 1
    done = check(tmp_path, source.replace(right, FAULTS[right]), checkpoint, tensor_library)
    assert done.returncode == 1
    assert re.search(r"TestModel +FAIL", done.stdout), done.stdout[-3000:]


def test_a_family_of_the_core_is_replaced_when_the_operator_prefers_the_plugin(
    tmp_path: Path,
) -> None:
    source = (
        "from fastdeploy_core.models.qwen import Qwen2ForCausalLM as Core\n"
        "class Qwen2ForCausalLM(Core):\n    pass\n"
    )
    site = site_with(tmp_path, "Qwen2ForCausalLM", source)
    code = (
        "from fastdeploy_core.models.shapes import model_class\n"
        "from fastdeploy_core.plugins import lookup\n"
        "name = 'Qwen2ForCausalLM'\n"
        "print(model_class({'architectures': [name]}).__module__, lookup('model', name).__module__)"
    )
    core, plugin = "fastdeploy_core.models.qwen", "fd_family.model"
    for preferred, module in (("", core), ("fd-family", plugin)):
        done = python(site, "-c", code, FD_PLUGINS_PREFERRED=preferred)
        assert done.stdout.split() == [module, module], done.stderr
