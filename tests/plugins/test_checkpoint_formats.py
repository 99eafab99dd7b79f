"""Checkpoint formats as wheels: one made of the how-to page, a broken one, and fd-gguf."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.gguf_files import write_gguf
from tests.plugins.test_template import Stranger, build, run
from tests.plugins.wheels import REPOSITORY, build_wheel, fastdeploy, install, python

DEMO = REPOSITORY / "models" / "ernie-tiny"
PAGE = REPOSITORY / "docs" / "how-to" / "write-a-checkpoint-format.md"
POINTS = "[fastdeploy.checkpoint_formats]\nnpy = fd_npy:NpyCheckpoint\n"
TOKENS = """
import json, sys
from fastdeploy import LLM, SamplingParams
path, library, ranks = sys.argv[1:]
with LLM(path, tensor_library=library, device="cpu", dtype="float32", max_model_len=64,
         num_gpu_blocks_override=16, num_threads=1, skip_tokenizer_init=True,
         tensor_parallel_size=int(ranks)) as llm:
    (out,) = llm.generate({"prompt_token_ids": [5, 9, 77, 3]},
                          SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    print(json.dumps(list(out.outputs[0].token_ids)))
"""
CHAT = """
import json, sys
from fastdeploy import LLM, SamplingParams
with LLM(sys.argv[1], tensor_library=sys.argv[2], dtype="float32", max_model_len=256,
         num_gpu_blocks_override=16, num_threads=1) as llm:
    (out,) = llm.chat([{"role": "user", "content": "What is 12 + 30?"}],
                      SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    print(json.dumps(out.outputs[0].text))
"""


def npy_wheel(folder: Path, source: str = "") -> Path:
    """The driver of the page, or another text in its place."""
    if not source:
        found = re.search(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
        assert found is not None
        source = found[1]
    return build_wheel(folder, "fd-npy", {"fd_npy.py": source}, POINTS)


def write_npy(source: Path, folder: Path) -> Path:
    """The checkpoint with a file for each tensor."""
    folder.mkdir()
    (folder / "config.json").write_text((source / "config.json").read_text())
    for name, array in load_file(source / "model.safetensors").items():
        np.save(folder / f"{name}.npy", array)
    return folder


@pytest.fixture
def site(tmp_path: Path) -> Path:
    return tmp_path / "site"


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_the_driver_of_the_page_gives_the_tokens_of_the_folder(
    ranks: str, site: Path, tmp_path: Path, tiny_model: Path, tensor_library: str
) -> None:
    install(site, npy_wheel(tmp_path))
    folder = write_npy(tiny_model, tmp_path / "npy")
    answers = []
    for path in (tiny_model, folder):
        done = python(site, "-c", TOKENS, str(path), tensor_library, ranks, timeout_s=300)
        assert done.returncode == 0, done.stderr[-3000:]
        answers.append(json.loads(done.stdout.splitlines()[-1]))
    assert answers[0] == answers[1] and len(answers[0]) == 8


def test_a_file_that_is_lacking_is_named(
    site: Path, tmp_path: Path, tiny_model: Path, tensor_library: str
) -> None:
    install(site, npy_wheel(tmp_path))
    folder = write_npy(tiny_model, tmp_path / "npy")
    (folder / "model.norm.weight.npy").unlink()
    done = python(site, "-c", TOKENS, str(folder), tensor_library, "1", timeout_s=300)
    assert f"WeightError: the checkpoint in {folder} lacks 1 weights" in done.stderr
    assert "model.norm.weight" in done.stderr


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("raise RuntimeError('the runtime is absent')", "RuntimeError: the runtime is absent"),
        ("import sys\nsys.exit(3)", "SystemExit: 3"),
        ("import time\ntime.sleep(600)", "did not finish within 3 s"),
    ],
)
def test_a_broken_format_breaks_its_own_models_alone(
    source: str, words: str, site: Path, tmp_path: Path, tiny_model: Path
) -> None:
    install(site, npy_wheel(tmp_path, source))
    folder = write_npy(tiny_model, tmp_path / "npy")
    why = ("plugins", "why", "attention", "--device", "cpu", "--model")
    broken = fastdeploy(site, *why, str(folder))
    assert broken.returncode == 1 and len(broken.stderr.splitlines()) == 1
    assert "'npy' of fd-npy 0.1.0 failed to load" in broken.stderr and words in broken.stderr
    whole = fastdeploy(site, *why, str(tiny_model))
    assert whole.returncode == 0 and not whole.stderr


def test_the_operators_lists_hold_for_formats(site: Path, tmp_path: Path, tiny_model: Path) -> None:
    install(site, npy_wheel(tmp_path))
    why = ("plugins", "why", "attention", "--device", "cpu", "--model")
    folder = str(write_npy(tiny_model, tmp_path / "npy"))
    assert fastdeploy(site, *why, folder, FD_PLUGINS="fd-npy").returncode == 0
    for lists in ({"FD_PLUGINS": ""}, {"FD_PLUGINS_DISABLED": "fd-npy"}):
        done = fastdeploy(site, *why, folder, **lists)
        assert done.returncode == 1 and f"named by {next(iter(lists))}" in done.stderr


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Stranger:
    """An environment with the core and fd-tools, whose `doctor` the test asks."""
    folder = tmp_path_factory.mktemp("gguf")
    environment = Stranger(folder / "venv")
    environment.install(build(REPOSITORY, folder))
    environment.install(build(REPOSITORY / "plugins" / "fd-tools", folder))
    return environment


def test_fd_gguf_is_asked_for_and_once_installed_serves(
    stranger: Stranger, tmp_path: Path, tensor_library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not list(DEMO.glob("*.safetensors")):
        pytest.skip("this tree holds no demo weights (models/ernie-tiny/*.safetensors)")
    monkeypatch.setenv("FD_CACHE_DIR", str(tmp_path / "cache"))
    file = write_gguf(DEMO, tmp_path / "model.gguf", "Q8_0", tokenizer=DEMO)
    missing = f"{file} is a gguf checkpoint: no checkpoint format driver 'gguf'"
    install_it = "provided by: fd-gguf (pip install fd-gguf)"
    chat = (stranger.bin / "python", "-W", "ignore", "-c", CHAT, file, tensor_library)
    refused = run(*chat)
    assert missing in refused.stderr and refused.stderr.rstrip().endswith(install_it)
    served = stranger.fastdeploy("serve", str(file))
    assert served.returncode == 2 and served.stderr.startswith(f"fastdeploy: error: {missing}")
    assert served.stderr.rstrip().endswith(install_it)
    for distribution in ("fd-gguf", "fd-quant-formats"):  # the second: what the first depends on
        stranger.install(build(REPOSITORY / "plugins" / distribution, tmp_path))
    answered = run(*chat)
    assert answered.returncode == 0, answered.stderr[-3000:]
    assert "42" in json.loads(answered.stdout.splitlines()[-1])
    checks = json.loads(stranger.fastdeploy("plugins", "doctor", "--json").stdout)["checks"]
    rows = [r for r in checks if r["origin"].startswith("fd-gguf ")]
    assert len(rows) == 3 and all(r["verdict"] == "PASS" for r in rows), rows
