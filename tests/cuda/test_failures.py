"""What goes wrong on a GPU is said in words, and what can run on does: no Triton, no NVRTC, no
memory, a GPU that is lost. Each in processes of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fastdeploy_testing.generate import sampled_tokens

pytestmark = pytest.mark.device("cuda")

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "models" / "ernie-tiny"
PROMPTS = [[5, 6, 7, 8], list(range(3, 90)), [9]]
SETTINGS = {"device": "cuda", "tensor_library": "torch", "max_model_len": 512, "max_num_seqs": 8}
# Run by every Python process that finds it on its path.
WITHOUT_TRITON = """
import importlib.machinery, sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError("No module named 'triton'", name="triton")
sys.meta_path.insert(0, Blocked())
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: (
    None if name.partition(".")[0] == "triton" else find_spec(name, package)
)
"""
WITHOUT_NVRTC = """
import ctypes
opened = ctypes.CDLL
class Library(opened):
    def __init__(self, name, *args, **kwargs):
        if "nvrtc" in str(name):
            raise OSError(f"{name}: cannot open shared object file: No such file or directory")
        super().__init__(name, *args, **kwargs)
ctypes.CDLL = Library
"""


@pytest.fixture(autouse=True)
def demo_is_here() -> None:
    if not list(DEMO.glob("*.safetensors")):
        pytest.skip("this tree holds no demo weights (models/ernie-tiny/*.safetensors)")


def patched(folder: Path, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Children of this test run `code` when they start."""
    (folder / "sitecustomize.py").write_text(code)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *filter(None, sys.path)]))


def run(code: str, **environment: str) -> dict[str, Any]:
    """The JSON that a fresh interpreter prints last, with what it wrote to standard error."""
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=110,
        env={**os.environ, "PYTHONPATH": path, **environment},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {**json.loads(done.stdout.splitlines()[-1]), "log": done.stderr}


def greedy(**settings: Any) -> list[list[int]]:
    runs = sampled_tokens(DEMO, PROMPTS, [{}], max_tokens=16, **{**SETTINGS, **settings})["runs"]
    return runs[0]["together"]


def test_without_triton_the_reference_operations_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = greedy(dtype="float32")
    patched(tmp_path, WITHOUT_TRITON, monkeypatch)
    assert greedy(dtype="float32") == expected


def test_without_nvrtc_triton_and_the_library_do_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patched(tmp_path, WITHOUT_NVRTC, monkeypatch)
    assert [len(tokens) for tokens in greedy(dtype="bfloat16")] == [16, 16, 16]
    said = run(
        "import json, logging; logging.basicConfig()\n"
        "from fd_cuda.kernels import native\n"
        "print(json.dumps({'available': native.available()}))"
    )
    assert not said["available"]
    assert "NVRTC was not found" in said["log"] and "do the work" in said["log"]


FULL = """
import json, torch
from fastdeploy_core.errors import FastDeployError
held = torch.empty(torch.cuda.mem_get_info()[0] - ({left} << 20), dtype=torch.uint8, device="cuda")
from fastdeploy_core.api.llm import LLM
try:
    LLM({model!r}, device="cuda", tensor_library="torch", max_model_len=512, {settings})
    print(json.dumps({{"error": "", "kind": ""}}))
except FastDeployError as error:
    print(json.dumps({{"error": str(error), "kind": type(error).__name__}}))
"""


@pytest.mark.parametrize(
    ("left", "settings", "words"),
    [
        (60, "", ("do not fit", "--tensor-parallel-size")),
        (1500, "num_gpu_blocks_override=200_000", ("KV cache of 200000 blocks", "does not fit")),
    ],
)
def test_full_memory_is_said_at_start_up(left: int, settings: str, words: tuple[str, ...]) -> None:
    said = run(FULL.format(left=left, model=str(DEMO), settings=settings))
    assert said["kind"] == "ResourceError", said
    assert all(word in said["error"] for word in words), said["error"]


FULL_IN_A_STEP = """
import json, torch
from fastdeploy_core.api.llm import LLM
from fastdeploy_core.types import SamplingParams
llm = LLM({model!r}, device="cuda", tensor_library="torch", max_model_len=8192, dtype="float32",
          num_gpu_blocks_override=300, max_num_batched_tokens=8192, enable_prefix_caching=False,
          enforce_eager={eager})
params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
short, long = [[5, 6, 7]], [[7] * 8000]
before = llm.generate(short, params, False)[0].outputs[0].token_ids
torch.cuda.empty_cache()
held = []
for size in (1 << 30, 1 << 24, 1 << 21):
    try:
        while True:
            held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError:
        pass
held.pop(); held.pop()
failed = llm.generate(long, params, False)[0]
again = llm.generate(short, params, False)[0].outputs[0].token_ids
held.clear()
torch.cuda.empty_cache()
after = llm.generate(long, params, False)[0]
print(json.dumps({{"failed": failed.error or "", "same": list(again) == list(before),
                  "after": after.error or "", "tokens": len(after.outputs[0].token_ids)}}))
"""


@pytest.mark.parametrize("eager", [False, True])
def test_a_step_that_does_not_fit_fails_alone(eager: bool) -> None:
    """A captured step has its memory, so only one that runs operation by operation can fail."""
    said = run(FULL_IN_A_STEP.format(model=str(DEMO), eager=eager))
    assert ("ResourceError" in said["failed"]) if eager else not said["failed"], said
    assert ("device memory ran out in step" in said["log"]) == eager, said["log"][-2000:]
    assert said["same"] and said["after"] == "" and said["tokens"] == 4, said


LOST = """
import json, time, torch
from fastdeploy_core.api.llm import LLM
from fastdeploy_core.errors import FastDeployError
from fastdeploy_core.types import SamplingParams
llm = LLM({model!r}, device="cuda", tensor_library="torch", max_model_len=512,
          num_gpu_blocks_override=64)
params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
llm.generate([[5, 6, 7]], params, False)
# An index outside of a tensor: the device asserts, and no later call of this process works.
torch.zeros(4, device="cuda")[torch.tensor([9], device="cuda")]
began = time.monotonic()
try:
    output = llm.generate([[5, 6, 7]], params, False)[0]
    said, kind = output.error or "", "output"
except FastDeployError as error:
    said, kind = str(error), type(error).__name__
print(json.dumps({{"error": said, "kind": kind, "seconds": time.monotonic() - began}}), flush=True)
import os
os._exit(0)
"""


def test_a_lost_gpu_ends_the_engine_with_its_reason() -> None:
    said = run(LOST.format(model=str(DEMO)))
    assert said["kind"] == "WorkerError", said
    assert "lost" in said["error"] and "assert" in said["error"], said
    assert said["seconds"] < 10
