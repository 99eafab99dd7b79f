"""The model family of docs/how-to/write-a-model.md, as a wheel, against transformers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.plugins.wheels import REPOSITORY, build_wheel, fastdeploy, install, python

PAGE = REPOSITORY / "docs" / "how-to" / "write-a-model.md"


def family() -> str:
    found = re.search(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert found is not None
    return found[1]


def site_with(folder: Path, architecture: str, source: str) -> Path:
    site = folder / "site"
    entry_points = f"[fastdeploy.models]\n{architecture} = fd_family.model:{architecture}\n"
    files = {"fd_family/__init__.py": "", "fd_family/py.typed": "", "fd_family/model.py": source}
    install(site, build_wheel(folder, "fd-family", files, entry_points))
    return site


@pytest.mark.parametrize("is_right", [True, False])
def test_the_documented_family_has_the_tokens_of_transformers(
    is_right: bool, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(5)
    config = transformers.Starcoder2Config(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        sliding_window=None,
        initializer_range=0.3,
    )
    model = transformers.Starcoder2ForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path / "model")
    source = family()
    assert "xp.gelu(" in source
    if not is_right:
        source = source.replace("xp.gelu(", "xp.silu(").replace(', "tanh")', ")")
    site = site_with(tmp_path, "Starcoder2ForCausalLM", source)
    done = fastdeploy(
        site, "plugins", "check", "Starcoder2ForCausalLM", "--kind", "model",
        "--model", str(tmp_path / "model"), "--tensor", "torch", timeout_s=300,
    )  # fmt: skip
    if is_right:
        assert re.search(r"TestModel +PASS +5 +0 +0", done.stdout), done.stdout[-3000:]
    else:
        assert done.returncode == 1 and "transformers prefers" in " ".join(done.stdout.split())


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
