"""The device: the kit on a GPU; without one, its reasons, its errors, and what needs no GPU."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fastdeploy_core.contracts import Accept, Decline
from fastdeploy_core.contracts.attention import AttentionQuestion, AttentionSpec
from fastdeploy_core.contracts.device import DeviceOptions, DeviceQuestion
from fastdeploy_core.contracts.model import IndexSpec
from fastdeploy_core.errors import ConfigError
from ranks_in_turn import RanksInTurn

from fastdeploy_testing.conformance.test_device import DeviceConformance
from fastdeploy_testing.drivers import build_kernel_table
from fd_cuda import hooks, kernels, probe
from fd_cuda.alive import Ring
from fd_cuda.attention.question import why_not
from fd_cuda.device import CudaDevice
from fd_cuda.failures import is_lost, is_oom
from fd_cuda.one_shot import BLOCKS
from fd_cuda.settings import setting

HAS_GPU = torch.cuda.is_available()
without_gpu = pytest.mark.skipif(HAS_GPU, reason="there is a GPU")


class _OnTorch:
    @pytest.fixture(scope="class")
    @classmethod
    def fd_tensor(cls) -> str:
        return "torch"


@pytest.mark.skipif(not HAS_GPU, reason="needs an NVIDIA GPU")
class TestDevice(_OnTorch, DeviceConformance):
    """The whole kit."""

    driver_name = "cuda"


@pytest.mark.skipif(not HAS_GPU, reason="needs an NVIDIA GPU")
def test_what_graphs_held_goes_back_to_the_driver() -> None:
    device = CudaDevice(DeviceOptions(tensor_library="torch"))
    size = 1 << 28

    def run() -> None:
        torch.zeros(size, dtype=torch.uint8, device="cuda")

    run()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    graph = device.capture(run)
    assert torch.cuda.memory_reserved() >= before + size
    del graph
    assert torch.cuda.memory_reserved() < before + size


@without_gpu
def test_probe_declines_with_a_reason() -> None:
    candidate = hooks.fd_device_probe(DeviceQuestion())
    assert candidate.name == "cuda" and isinstance(candidate.verdict, Decline)
    assert "driver" in candidate.verdict.reason


@without_gpu
def test_opening_it_says_what_is_missing() -> None:
    with pytest.raises(ConfigError, match=r"device 'cuda' cannot be used: .*plugins doctor"):
        CudaDevice(DeviceOptions(tensor_library="torch"))


def test_old_drivers_and_cpu_builds_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "too old" in probe.why_not_torch(probe.Driver((12, 4), 1, ("GPU",)))
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "without CUDA" in probe.why_not_torch(probe.Driver((13, 0), 1, ("GPU",)))


def test_what_torch_is_built_for_is_read_without_importing_it(tmp_path: Path) -> None:
    """The installed one says the same both ways; other builds are told apart by their files."""
    assert probe._built_for(torch.__file__) == (torch.__version__, torch.version.cuda or "")
    file = tmp_path / "version.py"
    for line, cuda in (("cuda: Optional[str] = '13.0'", "13.0"), ("cuda = None", "")):
        file.write_text(f"__version__ = '2.11.0'\n{line}\nhip: Optional[str] = '6.1'\n")
        assert probe._built_for(str(tmp_path / "__init__.py")) == ("2.11.0", cuda)
    file.write_text("something else")
    assert probe._built_for(str(tmp_path / "__init__.py")) is None


STUB = """
int cuInit(unsigned flags) {{ return {code}; }}
int cuDriverGetVersion(int *version) {{ *version = 12040; return 0; }}
int cuDeviceGetCount(int *count) {{ *count = {count}; return 0; }}
int cuDeviceGet(int *device, int index) {{ *device = index; return 0; }}
int cuDeviceGetName(char *name, int size, int device) {{ name[0] = 'G'; name[1] = 0; return 0; }}
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
@pytest.mark.parametrize(
    ("code", "count", "words"),
    [
        (100, 0, "the driver sees no GPU; check CUDA_VISIBLE_DEVICES"),
        (803, 0, "driver library and kernel module have different versions; reboot"),
        (999, 0, "the driver failed; see dmesg"),
        (12345, 0, "could not be initialised (cuInit returned 12345)"),
        (0, 0, "the driver sees no GPU"),
        (0, 2, "2 x G, but torch: "),
    ],
)
def test_wrong_drivers_are_named(tmp_path: Path, code: int, count: int, words: str) -> None:
    """A library in the driver's place, in a process of its own that finds it first."""
    (tmp_path / "stub.c").write_text(STUB.format(code=code, count=count))
    command = ["gcc", "-shared", "-fPIC", "stub.c", "-o", "libcuda.so.1"]
    subprocess.run(command, cwd=tmp_path, check=True)
    probe = (
        "from fd_cuda.hooks import fd_device_probe\n"
        "from fastdeploy_core.contracts.device import DeviceQuestion\n"
        "print(fd_device_probe(DeviceQuestion(tensor_library='torch')).verdict.reason)"
    )
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = os.environ | {"LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, env=environment, check=True
    )
    assert words in done.stdout
    if count:  # torch of another kind, or too new for the driver
        assert "without CUDA" in done.stdout or "too old" in done.stdout


def test_without_triton_the_plugin_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastdeploy_core.contracts.moe import MoEQuestion, MoESpec, RoutingSpec

    from fd_cuda.kernels import runs_here

    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "triton" else found(name)
    )
    assert not runs_here({"tensor_library": "torch"})
    for candidate in hooks.fd_attention_backends(question()):
        assert isinstance(candidate.verdict, Decline)
    assert "triton is not installed" in hooks.fd_attention_backends(question())[0].verdict.reason
    spec = MoESpec(RoutingSpec(8, 2), 64, 64, "bfloat16")
    (answer,) = hooks.fd_moe_backends(MoEQuestion("cuda", "torch", spec))
    assert isinstance(answer.verdict, Decline) and "pip install triton" in answer.verdict.reason


def test_unknown_settings_name_the_possible_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FD_CUDA_NATIVE", "maybe")
    with pytest.raises(ConfigError, match=r"FD_CUDA_NATIVE.*maybe.*possible: 0, 1"):
        setting("FD_CUDA_NATIVE")


def question(**changes: Any) -> AttentionQuestion:
    kind = changes.pop("kind", "gqa")
    heads, width = changes.pop("num_heads", 8), changes.pop("head_dim", 128)
    spec = AttentionSpec(
        kind, heads, changes.pop("num_kv_heads", 1), width, width, 1.0,
        changes.pop("dtype", "bfloat16"), kv_lora_rank=changes.pop("kv_lora_rank", 0),
        index=changes.pop("index", None),
    )  # fmt: skip
    told = {"device": "cuda", "tensor_library": "torch", "block_size": 64, "kv_dtype": "auto"}
    return AttentionQuestion(spec=spec, **{**told, **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device": "cpu"}, "not on cpu"),
        ({"tensor_library": "paddle"}, "needs torch"),
        ({"dtype": "float64"}, "float64"),
        ({"kv_dtype": "float64"}, "cache dtype 'float64'"),
        ({"kv_dtype": "int8"}, "own numbers only"),
        ({"head_dim": 512}, "at most 256"),
        ({"num_heads": 300}, "at most 128"),
    ],
)
def test_attention_declines_in_words(changes: dict[str, Any], words: str) -> None:
    first, second, *_ = hooks.fd_attention_backends(question(**changes))
    assert isinstance(first.verdict, Decline) and words in first.verdict.reason
    assert isinstance(second.verdict, Decline) and "mla" in second.verdict.reason


def test_one_driver_for_each_kind() -> None:
    verdicts = [c.verdict for c in hooks.fd_attention_backends(question())]
    assert [type(v) for v in verdicts] == [Accept, Decline, Decline, Decline]
    quantized = hooks.fd_attention_backends(question(kv_dtype="int4_zp"))
    assert [type(c.verdict) for c in quantized] == [Decline, Decline, Accept, Decline]
    latent = question(kind="mla", num_heads=128, head_dim=576, kv_lora_rank=512)
    verdicts = [c.verdict for c in hooks.fd_attention_backends(latent)]
    assert [type(v) for v in verdicts] == [Decline, Accept, Decline, Decline]
    latent = question(kind="mla", num_heads=128, head_dim=576, kv_lora_rank=512, kv_dtype="int8")
    assert all(isinstance(c.verdict, Decline) for c in hooks.fd_attention_backends(latent))
    sizes = {"kind": "mla", "num_heads": 128, "head_dim": 576, "kv_lora_rank": 512}
    indexed = hooks.fd_attention_backends(question(**sizes, index=IndexSpec(64, 128, 2048)))[3]
    assert indexed.name == "cuda_indexed" and isinstance(indexed.verdict, Accept)
    blocks = hooks.fd_attention_backends(question(**sizes, index=IndexSpec(64, 128, 16, 64)))[3]
    assert isinstance(blocks.verdict, Decline) and "single tokens" in blocks.verdict.reason


# -- errors ---------------------------------------------------------------------------------------


def fine() -> bool:
    """The GPU answers."""
    return True


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ],
)
def test_full_memory_is_recognised(error: Exception) -> None:
    assert is_oom(error, fine) and not is_lost(error, fine)


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: an illegal memory access was encountered",
        "CUDA error: device-side assert triggered",
        "Triton Error [CUDA]: unspecified launch failure",
        "CUDA error: uncorrectable ECC error encountered",
        "NVML: GPU is lost",
        "CUDA error: unknown error",
    ],
)
def test_lost_gpus_are_recognised(text: str) -> None:
    assert is_lost(RuntimeError(text), fine) and not is_oom(RuntimeError(text), fine)


def test_an_internal_error_of_the_library_is_memory_where_the_gpu_still_answers() -> None:
    error = RuntimeError("CUDA error: CUBLAS_STATUS_INTERNAL_ERROR when calling `cublasCreate`")
    assert is_oom(error, fine) and not is_lost(error, fine)
    assert is_lost(error, lambda: False) and not is_oom(error, lambda: False)


def test_numbers_of_the_runtime_count() -> None:
    class AcceleratorError(RuntimeError):
        error_code = 719

    assert is_lost(AcceleratorError("words that nobody knows"), fine)
    AcceleratorError.error_code = 2
    assert is_oom(AcceleratorError("words that nobody knows"), fine)
    AcceleratorError.error_code = 1
    assert not is_lost(AcceleratorError("invalid argument"), fine)


# -- ranks ----------------------------------------------------------------------------------------

CHILD = """
import sys, time
from pathlib import Path
import torch.distributed as dist
from fd_cuda.alive import Ring
rank, folder = int(sys.argv[1]), Path(sys.argv[2])
ring = Ring(dist.FileStore(str(folder / "store"), 3), rank, 3, folder, "", print, print)
print("joined", flush=True)
time.sleep(60)
"""


def join(folder: Path, rank: int, world_size: int) -> tuple[Ring, list[str], list[str]]:
    lost: list[str] = []
    left: list[str] = []
    store = dist.FileStore(str(folder / "store"), world_size)
    return Ring(store, rank, world_size, folder, "", lost.append, left.append), lost, left


def eventually(condition: Any) -> bool:
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(condition())


def test_a_rank_that_leaves_says_goodbye(tmp_path: Path) -> None:
    others: list[Any] = []
    thread = threading.Thread(target=lambda: others.append(join(tmp_path, 1, 2)))
    thread.start()
    ring, lost, left = join(tmp_path, 0, 2)
    thread.join()
    others[0][0].close()
    assert eventually(lambda: left), "nobody noticed"
    assert "rank 1 has left" in left[0] and not lost
    ring.close()


def test_a_rank_that_dies_is_noticed_by_all(tmp_path: Path) -> None:
    children = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD, str(rank), str(tmp_path)],
            stdout=subprocess.PIPE, text=True,
        )
        for rank in (1, 2)
    ]  # fmt: skip
    try:
        ring, lost, left = join(tmp_path, 0, 3)
        assert all(child.stdout.readline() == "joined\n" for child in children)
        children[0].kill()
        assert eventually(lambda: lost), "the death of rank 1 was not noticed"
        assert "left the group" in lost[0] and not left
        # Rank 2 heard of it, too.
        assert "left the group" in children[1].stdout.readline()
        ring.close()
    finally:
        for child in children:
            child.kill()
            child.wait()
            child.stdout.close()


@without_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_one_kernel(dtype: torch.dtype) -> None:
    ranks = RanksInTurn(2, "cpu")
    for call in (1, 2, 3):
        x = [torch.randn(5000 + call).to(dtype) for _ in range(2)]
        sums = ranks.all_reduce(x)
        assert torch.equal(sums[0], sums[1])
        # The interpreter cuts bfloat16 off where a GPU rounds.
        tolerance = 0 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(
            sums[0].float(), x[0].float() + x[1].float(), rtol=tolerance, atol=0
        )
    assert ranks.calls() == [3] * BLOCKS


# -- what a card can run --------------------------------------------------------------------------


def on_card(monkeypatch: pytest.MonkeyPatch, *capability: int, compiler: str = "gcc") -> None:
    monkeypatch.setattr(probe, "capability", lambda: capability)
    monkeypatch.setattr(kernels, "capability", lambda: capability)
    monkeypatch.setattr(probe, "c_compiler", lambda: compiler)


@pytest.mark.parametrize(
    ("capability", "codes", "fp8_cache"),
    [((8, 0), False, False), ((8, 9), False, True), ((9, 0), True, True), ((12, 0), False, True)],
)
def test_cards_say_what_they_cannot_run(
    capability: tuple[int, int], codes: bool, fp8_cache: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_card(monkeypatch, *capability)
    facts = {"tensor_library": "torch", "dtype": "bfloat16"}
    assert kernels.runs_here(facts)
    assert kernels.reads_codes(facts) is codes
    assert not kernels.reads_codes({**facts, "dtype": "float32"})
    table = build_kernel_table("cuda", facts)
    assert table.origins()["linear_wint4"] == "fd-cuda"
    said = {c.operation: c for c in table.cells if c.distribution == "fd-cuda"}
    assert said["linear_ccq2"].is_used is codes
    assert ("8.9" not in why_not(replace(question(), kv_dtype="float8_e4m3fn"))) is fp8_cache


def test_without_a_c_compiler_or_on_an_old_card_the_reason_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_card(monkeypatch, 9, 0, compiler="")
    assert "apt-get install gcc" in probe.why_not_triton()
    assert not kernels.runs_here({})
    on_card(monkeypatch, 7, 5)
    assert "7.5" in probe.why_not_triton() and not kernels.runs_here({})
