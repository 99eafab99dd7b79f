"""The plugin template, as a stranger meets it: wheels, a separate environment, the kit."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fastdeploy_core.contracts.base import CONTRACT
from tests.plugins.wheels import REPOSITORY


def run(
    *command: str | Path, cwd: Path | None = None, timeout_s: float = 110
) -> subprocess.CompletedProcess[str]:
    """One command without this checkout on its path."""
    kept = {n: v for n, v in os.environ.items() if not n.startswith(("FD_", "PYTHON"))}
    return subprocess.run(
        [str(c) for c in command], cwd=cwd, env={**kept, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=timeout_s, check=False,
    )  # fmt: skip


def build(project: Path, folder: Path) -> Path:
    """The project's wheel, made by its own build backend."""
    pytest.importorskip("hatchling", reason="building wheels needs hatchling")
    before = set(folder.glob("*.whl"))
    done = run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=project)
    assert done.returncode == 0, done.stderr
    return (set(folder.glob("*.whl")) - before).pop()


class Stranger:
    """A virtual environment with wheels of its own; third-party libraries come from this one."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "bin"
        made = run(sys.executable, "-m", "venv", "--without-pip", folder)
        assert made.returncode == 0, made.stderr
        site = next(folder.glob("lib*/python*/site-packages"))
        libraries = folder / "libraries"
        _link_libraries(libraries)
        (site / "libraries.pth").write_text(f"{libraries}\n")

    def install(self, *wheels: Path) -> None:
        done = run(
            sys.executable, "-m", "pip", "--python", self.bin / "python", "install", "-q",
            "--no-deps", "--no-index", "--disable-pip-version-check", *wheels,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr

    def fastdeploy(
        self, *arguments: str | Path, **settings: float
    ) -> subprocess.CompletedProcess[str]:
        return run(self.bin / "fastdeploy", *arguments, **settings)


def _link_libraries(folder: Path) -> None:
    """What third parties have installed in this environment; nothing of this project."""
    folder.mkdir()
    own = ("fastdeploy", "fd_", "_fd_", "__editable__", "_editable_", "__pycache__")
    for place in (Path(p) for p in sys.path if Path(p).name.endswith("-packages")):
        for path in place.iterdir():
            there = folder / path.name
            if not path.name.startswith(own) and path.suffix != ".pth" and not there.exists():
                there.symlink_to(path)


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> Stranger:
    """An environment with the core alone, from its wheel."""
    folder = tmp_path_factory.mktemp("user")
    environment = Stranger(folder / "venv")
    environment.install(build(REPOSITORY, folder))
    return environment


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Stranger:
    """An environment with the core, fastdeploy-testing, fd-tools and a plugin made by `plugins
    new`, all from wheels."""
    folder = tmp_path_factory.mktemp("stranger")
    wheels = folder / "wheels"
    wheels.mkdir()
    environment = Stranger(folder / "venv")
    environment.install(build(REPOSITORY, wheels))
    for distribution in ("fastdeploy-testing", "fd-quant-formats", "fd-tools"):
        environment.install(build(REPOSITORY / "plugins" / distribution, wheels))
    made = environment.fastdeploy("plugins", "new", "fd-wonder", "--dir", folder)
    assert made.returncode == 0, made.stderr
    environment.install(build(folder / "fd-wonder", wheels))
    return environment


def test_the_core_alone_has_no_fakes(user: Stranger) -> None:
    listed = json.loads(user.fastdeploy("plugins", "list", "--json").stdout)
    devices = {p["name"] for p in listed["plugins"] if p["kind"] == "device"}
    assert devices == {"cpu"}
    assert {p["distribution"] for p in listed["plugins"]} == {"fastdeploy-core"}
    everything = user.fastdeploy("serve", "--help").stdout + user.fastdeploy("--help").stdout
    assert "faulty" not in everything and not re.search(r"\bnull\b", everything)


@pytest.mark.parametrize(
    "words",
    [
        ("plugins", "check", "cpu"),
        ("plugins", "new", "fd-wonder"),
        ("serve", REPOSITORY / "models" / "ernie-tiny", "--device", "null"),
        ("serve", REPOSITORY / "models" / "ernie-tiny", "--device", "faulty"),
    ],
    ids=lambda words: words[-1],
)
def test_the_core_alone_says_what_installs_the_kit(
    user: Stranger, words: tuple[str | Path, ...]
) -> None:
    done = user.fastdeploy(*words)
    assert done.returncode != 0
    assert "pip install fastdeploy-testing" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def test_help_of_the_core_alone_names_commands_for_authors(user: Stranger) -> None:
    words = user.fastdeploy("plugins", "--help").stdout
    assert "run the conformance kit against a driver (pip install fastdeploy-testing)" in words


def test_core_comes_from_its_wheel(stranger: Stranger) -> None:
    where = run(
        stranger.bin / "python", "-P", "-c", "import fastdeploy_core as f; print(f.__file__)"
    )
    assert where.stdout.startswith(str(stranger.bin.parent)), where.stdout


def test_new_plugin_is_found_and_explained(stranger: Stranger) -> None:
    listed = json.loads(stranger.fastdeploy("plugins", "list", "--json").stdout)
    mine = {p["kind"]: p for p in listed["plugins"] if p["distribution"] == "fd-wonder"}
    assert set(mine) == {"device", "kernels", "hooks"}
    assert all(p["status"] == "ok" and p["version"] == "0.1.0" for p in mine.values())
    assert not listed["problems"]
    why = stranger.fastdeploy("plugins", "why", "device")
    assert "wonder" in why.stdout and "winner: cpu" in why.stdout
    shown = stranger.fastdeploy("plugins", "show", "fd-wonder")
    assert shown.returncode == 0
    assert f"contract: {CONTRACT[0]}.{CONTRACT[1]}" in shown.stdout


def test_the_kits_distribution_brings_its_fakes(stranger: Stranger) -> None:
    listed = json.loads(stranger.fastdeploy("plugins", "list", "--json").stdout)
    mine = {p["name"]: p["status"] for p in listed["plugins"]
            if p["distribution"] == "fastdeploy-testing"}  # fmt: skip
    fakes = {"faulty", "null"}
    commands = {"plugins.check", "plugins.examine", "plugins.new"}
    assert mine == dict.fromkeys(fakes | commands, "ok")


def test_doctor_passes(stranger: Stranger) -> None:
    done = stranger.fastdeploy("plugins", "doctor", "--json")
    rows = json.loads(done.stdout)["checks"]
    mine = [r for r in rows if r["origin"] == "fd-wonder 0.1.0"]
    # The driver, the hooks, the kernels; what the device can do, and one collective.
    assert len(mine) == 5 and all(r["verdict"] == "PASS" for r in mine), mine


def test_new_plugin_passes_the_kit(stranger: Stranger, tensor_library: str, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = stranger.fastdeploy(
        "plugins", "check", "wonder", "--tensor", tensor_library, "--report", report, timeout_s=580
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr
    assert "capabilities of wonder" in done.stdout
    tests = json.loads(report.read_text())["tests"]
    suites = {t["suite"] for t in tests if t["outcome"] == "passed"}
    assert suites == {
        "TestHygiene", "TestDevice", "TestOps", "TestQuantizedOps", "TestAttention",
        "TestKVFormats",
        "TestMoE", "TestEndToEnd",
    }  # fmt: skip
    skipped = [t for t in tests if t["outcome"] == "skipped"]
    assert skipped and all(t["reason"] for t in skipped), "a skip without a reason"


@pytest.fixture(scope="module")
def drafter(stranger: Stranger) -> Path:
    """A drafter made by `plugins new`, installed from its wheel beside the other one."""
    folder = stranger.bin.parent.parent
    made = stranger.fastdeploy(
        "plugins", "new", "fd-spec-wise", "--kind", "drafter", "--dir", folder
    )
    assert made.returncode == 0, made.stderr
    stranger.install(build(folder / "fd-spec-wise", folder / "wheels"))
    return folder / "fd-spec-wise"


@pytest.mark.slow
def test_new_drafter_passes_the_kit(
    stranger: Stranger, drafter: Path, tensor_library: str, tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    done = stranger.fastdeploy(
        "plugins", "check", "wise", "--tensor", tensor_library, "--report", report, timeout_s=580
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr
    tests = json.loads(report.read_text())["tests"]
    passed = {t["test"] for t in tests if t["outcome"] == "passed"}
    assert {t["suite"] for t in tests} == {"TestHygiene", "TestDrafter"}
    assert {"test_it_drafts", "test_two_ranks_give_the_same_answers"} <= passed


def test_new_drafter_drafts_in_an_engine(
    stranger: Stranger, drafter: Path, tensor_library: str, tmp_path: Path
) -> None:
    """Through the command line's own settings, refusals included."""
    from fastdeploy_testing.tiny_model import write_tiny_model

    model = write_tiny_model(tmp_path / "model")
    code = (
        "import sys\n"
        "from fastdeploy import LLM, SamplingParams\n"
        f"llm = LLM({str(model)!r}, skip_tokenizer_init=True, num_threads=1,\n"
        f"    tensor_library={tensor_library!r}, num_gpu_blocks_override=32,\n"
        "    speculative_config={'method': 'wise', 'num_speculative_tokens': 3,\n"
        "        'adaptive_length': False, **eval(sys.argv[1])})\n"
        "params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, "
        "detokenize=False)\nllm.generate([[5, 6] * 9], params, use_tqdm=False)\n"
        "print(llm.get_metrics()['draft_tokens_total'])\n"
        "llm.close()\n"
    )
    command = (stranger.bin / "python", "-P", "-c", code)
    done = run(*command, "{}")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.strip().splitlines()[-1]) > 0
    refused = run(*command, "{'min_cuont': 2}")
    assert refused.returncode != 0
    assert "fd-spec-wise" in refused.stderr and "unknown setting min_cuont" in refused.stderr


@pytest.mark.parametrize(
    ("kind", "suite"), [("tool_parser", "TestStreamParser"), ("launcher", "TestLauncher")]
)
def test_new_driver_passes_the_kit(
    stranger: Stranger, tmp_path: Path, kind: str, suite: str
) -> None:
    folder, name = stranger.bin.parent.parent, f"fd-loud-{kind.replace('_', '')}"
    made = stranger.fastdeploy("plugins", "new", name, "--kind", kind, "--dir", folder)
    assert made.returncode == 0, made.stderr
    stranger.install(build(folder / name, folder / "wheels"))
    report = tmp_path / "report.json"
    driver = name.rpartition("-")[2]
    done = stranger.fastdeploy("plugins", "check", driver, "--report", report)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    tests = json.loads(report.read_text())["tests"]
    assert {t["suite"] for t in tests} == {"TestHygiene", suite}


def test_new_model_passes_the_kit(stranger: Stranger, tensor_library: str) -> None:
    """Its own tests: they write a checkpoint and compare with transformers."""
    pytest.importorskip("transformers")
    folder = stranger.bin.parent.parent
    words = ("plugins", "new", "fd-wonder-lm", "--kind", "model", "--dir", folder)
    made = stranger.fastdeploy(*words)
    assert made.returncode == 0, made.stderr
    assert "fastdeploy plugins check LmForCausalLM --kind model --model DIR" in made.stdout
    stranger.install(build(folder / "fd-wonder-lm", folder / "wheels"))
    done = run(
        stranger.bin / "python", "-P", "-m", "pytest", "-q", "--fd-tensor", tensor_library,
        cwd=folder / "fd-wonder-lm", timeout_s=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    assert re.search(r"\b7 passed", done.stdout), done.stdout


def test_new_quantizer_passes_the_kit_and_serves(
    stranger: Stranger, tensor_library: str, tmp_path: Path
) -> None:
    from fastdeploy_testing.tiny_model import write_tiny_model

    folder = stranger.bin.parent.parent
    words = ("plugins", "new", "fd-quant-coarse", "--kind", "quantizer", "--dir", folder)
    made = stranger.fastdeploy(*words)
    assert made.returncode == 0, made.stderr
    stranger.install(build(folder / "fd-quant-coarse", folder / "wheels"))
    report = tmp_path / "report.json"
    done = stranger.fastdeploy(
        "plugins", "check", "coarse", "--tensor", tensor_library, "--report", report
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    suites = {t["suite"] for t in json.loads(report.read_text())["tests"]}
    assert suites == {"TestHygiene", "TestQuantizer"}

    model = write_tiny_model(tmp_path / "model")
    code = (
        "import sys\n"
        "from fastdeploy import LLM, SamplingParams\n"
        f"llm = LLM({str(model)!r}, skip_tokenizer_init=True, num_threads=1,\n"
        f"    tensor_library={tensor_library!r}, num_gpu_blocks_override=32,\n"
        "    quantization=sys.argv[1])\n"
        "params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True,\n"
        "    detokenize=False)\n"
        "out = llm.generate([[5, 6, 7, 8]], params, use_tqdm=False)\n"
        "print(len(out[0].outputs[0].token_ids))\n"
        "llm.close()\n"
    )
    command = (stranger.bin / "python", "-P", "-c", code)
    done = run(*command, '{"quantization": "coarse", "bits": 6}')
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().splitlines()[-1] == "8"
    refused = run(*command, '{"quantization": "coarse", "bits": 9}')
    assert refused.returncode != 0 and "bits is 9; possible: 2 to 8" in refused.stderr


def test_its_own_tests_run_the_kit(stranger: Stranger, tensor_library: str) -> None:
    project = stranger.bin.parent.parent / "fd-wonder"
    done = run(
        stranger.bin / "python", "-m", "pytest", "-q", "-p", "no:cacheprovider",
        "--fd-tensor", tensor_library, "-k", "float32 or limits or memory", cwd=project,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    assert " passed" in done.stdout
