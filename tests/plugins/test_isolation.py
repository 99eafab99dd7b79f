"""Broken, hostile and outdated plugins, as real wheels: the core goes on and says what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from fastdeploy_core.contracts import CONTRACT
from fastdeploy_testing.tiny_model import write_tiny_model
from tests import server_process
from tests.plugins.wheels import build_wheel, environment, fastdeploy, install, python

BOTH = "[fastdeploy.hooks]\n{0} = {0}\n[fastdeploy.devices]\n{0} = {0}:Device\n"
GOOD = """
from fastdeploy_core.contracts import Accept, Candidate, hookimpl
class Device:
    name = "{0}"
    contract = (1, 0)
@hookimpl
def fd_device_probe():
    return Candidate("{0}", Accept(0))
"""
# What each asked device resolves to ("": none is asked), and what was said meanwhile; nothing else
# is printed.
RESOLVE = """
import json, logging, sys
from pathlib import Path
from fastdeploy_core.config import DeviceConfig, EngineConfig, ModelConfig
from fastdeploy_core.errors import FastDeployError
from fastdeploy_core.plugins.resolve import resolve
logging.basicConfig(level="WARNING", stream=sys.stderr)
for device in sys.argv[1:]:
    config = EngineConfig(model=ModelConfig(path=Path("m"), tokenizer_path=Path("m")),
                          device=DeviceConfig(device=device))
    try:
        resolved = resolve(config)
        resolved.load("device")
        answer = {"device": resolved.name("device"), "notes": resolved.notes}
    except FastDeployError as error:
        answer = {"error": type(error).__name__, "text": str(error)}
    print(json.dumps(answer))
"""


@dataclass(frozen=True)
class Case:
    """A plugin `bad`: its module, and the words by which each command speaks of it."""

    module: str
    listed: str = "ok"  # its status in `plugins list`
    noted: str = ""  # what the start-up report says; empty: nothing worth a word
    named: str = ""  # what --device bad says; empty: there is no such device
    error: str = "PluginLoadError"
    entry_points: str = BOTH
    requires: tuple[str, ...] = ("fastdeploy-core>=0.1,<0.2",)
    more: dict[str, str] = field(default_factory=dict)  # a second distribution fd-other


CASES = {
    "raises on import": Case(
        "raise RuntimeError('the runtime is absent')",
        noted="RuntimeError: the runtime is absent",
        named="RuntimeError: the runtime is absent",
    ),
    "lacks a dependency": Case(
        "import vendor_sdk",
        noted="No module named 'vendor_sdk'",
        named="No module named 'vendor_sdk'",
    ),
    "has a syntax error": Case("def (:", noted="SyntaxError", named="SyntaxError"),
    "hangs on import": Case(
        "import time\ntime.sleep(600)",
        noted="did not finish within 2 s",
        named="did not finish within",
    ),
    "calls sys.exit": Case("import sys\nsys.exit(3)", noted="SystemExit: 3", named="SystemExit: 3"),
    "calls os._exit": Case("import os\nos._exit(4)", noted="exit code 4", named="exit code 4"),
    "crashes the interpreter": Case(
        "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)",
        noted="signal SIGSEGV",
        named="signal SIGSEGV",
    ),
    "leaves a thread running": Case(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), "
        "name='ghost').start()",
        noted="leaves threads running: ghost",
        named="leaves threads running: ghost",
    ),
    "hangs when asked": Case(
        GOOD.format("bad").replace("    return", "    import time; time.sleep(600)\n    return"),
        noted="did not finish within 2 s",
        named="",
    ),
    "unknown hook": Case(
        GOOD.format("bad") + "@hookimpl\ndef fd_no_such_hook():\n    pass\n",
        noted="no such hook",
    ),
    "hook with unknown arguments": Case(
        GOOD.format("bad") + "@hookimpl\ndef fd_shutdown(now):\n    pass\n",
        noted="it wants now",
    ),
    "hook that returns nonsense": Case(
        GOOD.format("bad").replace('Candidate("bad", Accept(0))', "['bad']"),
        noted="",
    ),
    "name of the core": Case(
        GOOD.format("cpu"),
        entry_points="[fastdeploy.devices]\ncpu = bad:Device\n",
        listed="duplicate",
        noted="the core's own stays in use",
    ),
    "name of another": Case(
        GOOD.format("bad"),
        listed="duplicate",
        noted="neither is used",
        named="fd-bad 0.1.0 and fd-other 0.1.0",
        error="PluginConflict",
        more={"other.py": GOOD.format("bad")},
    ),
    "newer contract in the driver": Case(
        GOOD.format("bad").replace("(1, 0)", "(2, 0)"),
        named=f"written for contract 2.0; this core speaks {CONTRACT[0]}.{CONTRACT[1]}",
        error="ContractMismatch",
    ),
    "group of a later contract": Case(
        GOOD.format("bad"),
        entry_points="[fastdeploy.devices.v2]\nbad = bad:Device\n",
        listed="other contract",
        noted="made for contract 2",
        named="made for contract 2",
        error="ContractMismatch",
    ),
    "requires another core": Case(
        "raise AssertionError('imported although incompatible')",
        requires=("fastdeploy-core>=9,<10",),
        listed="incompatible",
        noted="requires fastdeploy-core<10,>=9",
        named="requires fastdeploy-core<10,>=9",
        error="ContractMismatch",
    ),
    "unknown group": Case(
        GOOD.format("bad"),
        entry_points="[fastdeploy.gadgets]\nbad = bad:Device\n",
        listed="unknown group",
        noted="no group 'fastdeploy.gadgets'",
    ),
}


def put_in(site: Path, folder: Path, case: Case, name: str = "bad") -> None:
    """Build and install a case's wheels."""
    points = (
        case.entry_points.format(name).replace("bad:", f"{name}:").replace("bad =", f"{name} =")
    )
    wheels = [
        build_wheel(
            folder, f"fd-{name}", {f"{name}.py": case.module}, points, requires=case.requires
        )
    ]
    if case.more:
        wheels.append(
            build_wheel(
                folder, "fd-other", case.more, f"[fastdeploy.devices]\n{name} = other:Device\n"
            )
        )
    install(site, *wheels)


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture
def site(tmp_path: Path, case: Case) -> Path:
    put_in(tmp_path / "site", tmp_path, case)
    return tmp_path / "site"


def resolve(site: Path, *devices: str, **variables: str) -> tuple[list[dict[str, Any]], str]:
    """RESOLVE's answers, one a device, and what it logged."""
    done = python(site, "-c", RESOLVE, *devices, **variables)
    return [json.loads(line) for line in done.stdout.splitlines()[-len(devices) :]], done.stderr


def test_core_goes_on_and_says_what_is_wrong(site: Path, case: Case) -> None:
    listed = fastdeploy(site, "plugins", "list", "--json")
    assert listed.returncode == 0, listed.stderr
    entries = json.loads(listed.stdout)["plugins"]
    mine = [e for e in entries if e["distribution"] == "fd-bad"]
    assert mine and any(e["status"] == case.listed for e in mine)
    assert all(bool(e["reason"]) == (e["status"] != "ok") for e in mine)
    assert any(e["name"] == "cpu" and e["distribution"] == "fastdeploy-core" for e in entries)

    # Where fd-cpu is installed it would be chosen.
    (chosen, cpu, bad), logged = resolve(site, "", "cpu", "bad", FD_PLUGINS_DISABLED="fd-cpu")
    assert chosen.get("device") == "cpu" and cpu.get("device") == "cpu", (chosen, cpu)
    if case.noted:
        notes = "\n".join(chosen["notes"])
        assert case.noted in notes and "fd-bad 0.1.0" in notes
        assert case.noted in logged, "nothing was logged"
    if case.named:
        assert bad["error"] == case.error, bad
        assert case.named in bad["text"] and "fd-bad 0.1.0" in bad["text"]


def test_disabling_silences_it(tmp_path: Path) -> None:
    put_in(tmp_path / "site", tmp_path, CASES["hangs on import"])
    answers, logged = resolve(tmp_path / "site", "cpu", FD_PLUGINS_DISABLED="fd-bad")
    assert answers == [{"device": "cpu", "notes": []}] and not logged


def test_doctor_finds_every_fault(tmp_path: Path) -> None:
    site = tmp_path / "site"
    for number, case in enumerate(CASES.values()):
        if case.entry_points == BOTH and not case.more:
            put_in(site, tmp_path, case, f"bad{number}")
    done = fastdeploy(site, "plugins", "doctor", "--json", "--timeout", "3", timeout_s=300)
    assert done.returncode == 1, done.stderr
    rows = json.loads(done.stdout)["checks"]
    assert all(r["verdict"] == "PASS" for r in rows if r["origin"].startswith("fastdeploy-core"))
    for number, case in enumerate(CASES.values()):
        mine = [r for r in rows if r["origin"] == f"fd-bad{number} 0.1.0"]
        if mine and case.named and case.error != "ContractMismatch":
            assert any(r["verdict"] == "FAIL" and case.named in r["hint"] for r in mine), case


@pytest.fixture
def crowded(tmp_path: Path) -> Path:
    """All of them installed side by side."""
    site = tmp_path / "site"
    for number, case in enumerate(CASES.values()):
        if not case.more:
            put_in(site, tmp_path, case, f"bad{number}")
    return site


def test_help_loads_none_of_them(crowded: Path) -> None:
    helped = fastdeploy(crowded, "--help")
    assert helped.returncode == 0 and "usage: fastdeploy" in helped.stdout and not helped.stderr


def test_list_answers_in_time_with_all_of_them(crowded: Path) -> None:
    listed = fastdeploy(crowded, "plugins", "list", timeout_s=300)
    assert listed.returncode == 0 and listed.stdout.count("fd-bad") >= len(CASES) - 1


@pytest.mark.slow  # a server with all of them is started below
def test_generation_is_the_same_with_all_of_them(crowded: Path, tmp_path: Path) -> None:
    """Tokens of the tiny model, with and without hostile neighbours."""
    order = json.dumps(
        {
            "model": str(write_tiny_model(tmp_path / "model")),
            "args": {"device": "cpu", "num_threads": 1},
            "prompts": [[5, 6, 7], [9]],
            "max_tokens": 6,
            "samplings": [{}],
            "num_logprobs": 0,
        }
    )
    answers = []
    for folder in (tmp_path / "empty", crowded):
        done = subprocess.run(
            [sys.executable, "-P", "-m", "fastdeploy_testing.generate"],
            input=order, env=environment(folder), capture_output=True, text=True,
            timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        answers.append(json.loads(done.stdout.splitlines()[-1])["runs"])
    assert answers[0] == answers[1] and len(answers[0][0]["together"][0]) == 6


def test_server_serves_with_all_of_them(
    crowded: Path, monkeypatch: pytest.MonkeyPatch, tensor_library: str
) -> None:
    monkeypatch.setattr(server_process, "environment", lambda: environment(crowded))
    model = server_process.REPOSITORY / "models" / "ernie-tiny"
    limits = ("--max-model-len", "512", "--num-gpu-blocks-override", "32", "--num-threads", "1")
    with server_process.serving(model, *limits, "--tensor-library", tensor_library) as server:
        with httpx.Client(base_url=server.url, timeout=300) as client:
            body = {"model": "ernie-tiny", "prompt": "1 + 1 =", "max_tokens": 4}
            answer = client.post("/v1/completions", json=body)
            assert answer.status_code == 200 and answer.json()["choices"][0]["text"]
        assert "fd-bad" in server.log, "the log does not name the broken plugins"


def test_pip_takes_these_wheels(tmp_path: Path) -> None:
    """So that the tests speak of wheels as the world knows them."""
    wheel = build_wheel(tmp_path, "fd-real", {"real.py": GOOD.format("real")}, BOTH.format("real"))
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target",
         str(tmp_path / "site"), str(wheel)],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    listed = fastdeploy(tmp_path / "site", "plugins", "show", "fd-real")
    assert listed.returncode == 0 and "fd_device_probe" in listed.stdout
