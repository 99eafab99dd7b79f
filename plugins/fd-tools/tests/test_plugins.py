"""`fastdeploy plugins show`, `why` and `doctor`: forms of output, exit codes."""

from __future__ import annotations

import json
import site
from pathlib import Path

import pytest
from chip_plugin import command, installed, run
from fd_tools import plugins_doctor, plugins_why

from fastdeploy_core.cli.main import main
from fastdeploy_core.errors import ConfigError, PluginNotFound
from fastdeploy_core.plugins import discovery
from fastdeploy_testing.tiny_model import CONFIG


@pytest.fixture
def stranger(tmp_path, monkeypatch):
    yield from installed(tmp_path, monkeypatch)


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def test_show_a_distribution(capsys, stranger):
    code, out = run(capsys, "show", "fd-chip")
    assert code == 0
    for words in ("fd-chip 0.3  Sand", "Docs: https://example.org/sand", "One chip.",
                  "contract: 1.0", "speed: how fast", "fd_device_probe", "unit: core"):  # fmt: skip
        assert words in out.out, words


def test_show_a_driver_by_name_as_json(capsys, stranger):
    code, out = run(capsys, "show", "flash", "--json")
    provided = json.loads(out.out)["distributions"][0]["provides"]
    assert code == 0 and [p["name"] for p in provided] == ["flash"]


def test_show_of_something_absent(stranger):
    with pytest.raises(PluginNotFound, match="fd-chip"):
        command("show", "nothing")


def test_why_device_prints_declines(capsys, stranger):
    code, out = run(capsys, "why", "device")
    assert code == 0 and "no sand here" in out.out and "winner: cpu" in out.out
    code, out = run(capsys, "why", "device", "--device", "chip")
    assert code == 1 and "no winner: chip declines: no sand here" in out.out


def test_why_attention_reads_the_models_shapes(capsys, stranger, model):
    code, out = run(capsys, "why", "attention", "--model", str(model))
    assert code == 0 and "winner: flash (score 120, tuned; best of 2)" in out.out
    assert "num_kv_heads=2" in out.out


def test_why_moe_as_json(capsys, stranger, model):
    code, out = run(capsys, "why", "moe", "--model", str(model), "--json")
    decision = json.loads(out.out)["decisions"][0]
    assert code == 0 and decision["winner"] == "reference"
    assert decision["candidates"][0]["accepted"] is True


def test_why_model_is_that_of_its_architecture(capsys, stranger, model):
    def why(architecture, **more):
        config = CONFIG | {"architectures": [architecture]} | more
        (model / "config.json").write_text(json.dumps(config))
        code, out = run(capsys, "why", "model", "--model", str(model), "--json")
        (decision,) = json.loads(out.out)["decisions"]
        return code, decision

    code, decision = why("Qwen3ForCausalLM")
    assert code == 0 and decision["winner"] == "Qwen3ForCausalLM"
    assert [c["distribution"] for c in decision["candidates"]] == ["fastdeploy-core"]
    code, decision = why("NoSuchForCausalLM")
    assert code == 1 and not decision["candidates"]
    assert "no model 'NoSuchForCausalLM'; installed: " in decision["why"]
    code, decision = why("Qwen3ForCausalLM", num_attention_heads=None)
    assert code == 1 and "num_attention_heads=None" in decision["why"]


@pytest.mark.parametrize("kind", ["tool_parser", "reasoning_parser"])
def test_why_parsers_are_those_of_the_models_type(capsys, stranger, model, kind):
    pytest.importorskip("fd_parsers")
    (model / "config.json").write_text(json.dumps({**CONFIG, "model_type": "qwen3"}))
    code, out = run(capsys, "why", kind, "--model", str(model))
    assert code == 0 and "winner: qwen3 (named as the model's type" in out.out
    (model / "config.json").write_text(json.dumps({**CONFIG, "model_type": "unheard"}))
    code, out = run(capsys, "why", kind, "--model", str(model))
    assert code == 1 and "no winner: none is named as the model's type, 'unheard'" in out.out
    assert "-parser names one" in out.out


def test_why_without_what_it_needs_says_so(stranger):
    with pytest.raises(ConfigError, match="--model DIR"):
        command("why", "attention")
    with pytest.raises(ConfigError, match="--quantization"):
        command("why", "quantizer")


def test_why_kernels_shows_where_each_comes_from_and_why_a_cell_is_not_used(capsys, stranger):
    (stranger / "chip_kernels.py").write_text(
        "from fastdeploy_core.contracts.ops import Deny, Kernel\n"
        "DENY = Deny('wrong sums on this model', sizes={'hidden_size': (1, 10**6)})\n"
        "TABLE = {'rms_norm': Kernel('chip_kernels:norm', denies=(DENY,)),\n"
        "         'silu_and_mul': 'chip_kernels:gate'}\n"
        "def norm(): ...\ndef gate(): ...\n"
    )
    info = stranger / "fd_chipk-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fd-chipk\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[fastdeploy.kernels]\nchip = chip_kernels:TABLE\n")
    discovery.forget()
    demo = Path(__file__).resolve().parents[3] / "models" / "ernie-tiny"
    code, out = run(capsys, "why", "kernels", "--device", "chip", "--model", str(demo), "--json")
    rows = json.loads(out.out)["decisions"][0]["candidates"]
    found = {
        (r["name"], r["distribution"]): (r["accepted"], r["reason"])
        for r in rows
        if r["name"] in ("rms_norm", "silu_and_mul")
    }
    assert code == 0
    assert found["rms_norm", "fd-chipk"] == (False, "denied: wrong sums on this model")
    assert found["rms_norm", "fastdeploy-core"][0]
    assert found["silu_and_mul", "fd-chipk"] == (True, "chip_kernels:gate")
    assert found["silu_and_mul", "fastdeploy-core"] == (False, "that of fd-chipk is used")


def test_why_of_a_kind_without_drivers_says_what_installs_one(capsys, stranger, monkeypatch):
    inventory = discovery.discover()
    transports = ("fd-cuda", "fd-kv-mooncake", "fd-kv-nixl", "fd-kv-shm", "fd-kv-tcp")
    others = tuple(e for e in inventory.entries if e.distribution not in transports)
    monkeypatch.setattr(plugins_why, "discover", lambda: discovery.Inventory(others))
    code, out = run(capsys, "why", "kv_transport")
    assert code == 1 and "none is installed; possible: cuda_ipc by pip install fd-cuda" in out.out
    assert "tcp by pip install fd-kv-tcp" in out.out
    monkeypatch.setattr(plugins_why, "discover", discovery.discover)
    monkeypatch.setenv("FD_PLUGINS_DISABLED", ",".join(transports))
    code, out = run(capsys, "why", "kv_transport")
    assert code == 1 and "named by FD_PLUGINS_DISABLED" in out.out and "pip" not in out.out


@pytest.mark.parametrize("kind", ["scheduler", "kv_transport", "grammar", "model", "kernels"])
def test_why_of_every_other_kind(capsys, stranger, kind):
    code, out = run(capsys, "why", kind)
    assert code in (0, 1) and "candidate" in out.out and kind in out.out


@pytest.mark.slow  # a process for each plugin that is installed
def test_doctor_reports_imports_checks_and_pth_files(capsys, stranger):
    (stranger / "chip2.py").write_text("import no_such_vendor_library\n")
    info = stranger / "fd_chip2-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fd-chip2\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[fastdeploy.devices]\nchip2 = chip2:Device\n")
    discovery.forget()
    code, out = run(capsys, "doctor", "--json")
    rows = json.loads(out.out)["checks"]
    mine = [r for r in rows if r["origin"].startswith("fd-chip")]
    verdicts = {(r["name"], r["kind"], r["verdict"]) for r in mine}
    assert code == 1
    assert {("chip", "device", "PASS"), ("chip2", "device", "FAIL")} <= verdicts
    hints = " ".join(r["hint"] for r in mine)
    assert "no_such_vendor_library" in hints and "optional dependency" in hints
    assert "sand is dry: warm it up" in hints
    core = [r for r in rows if r["origin"].startswith("fastdeploy-core")]
    assert core and all(r["verdict"] == "PASS" for r in core), core


def test_pth_files_without_owner_are_shown(monkeypatch, tmp_path):
    (tmp_path / "sneaky.pth").write_text("import os\n")
    monkeypatch.setattr(site, "getsitepackages", lambda: [str(tmp_path)])
    rows = [r for r in plugins_doctor.pth_rows() if r["name"] == "sneaky.pth"]
    assert len(rows) == 1 and "runs code" in rows[0]["hint"] and rows[0]["verdict"] == "WARN"


def test_a_question_without_its_kind_says_what_is_missing(capsys):
    assert main(["plugins", "why"]) == 1
    assert "required: kind; see `fastdeploy plugins why --help`" in capsys.readouterr().err
