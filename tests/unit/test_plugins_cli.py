"""`fastdeploy plugins ...`: forms of output, exit codes, what is imported."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path

import pytest

from fastdeploy_core.cli import commands, plugins_why
from fastdeploy_core.cli.main import main
from fastdeploy_core.errors import ConfigError, PluginNotFound
from fastdeploy_core.plugins import discovery
from fastdeploy_core.plugins.manager import shared_manager


@pytest.fixture
def stranger(tmp_path, monkeypatch):
    """A distribution fd-chip with a device, hooks and an attention driver, on sys.path."""
    if find_spec("fd_cpu") is not None:  # its device would win
        monkeypatch.setenv("FD_PLUGINS_DISABLED", "fd-cpu")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "chip", raising=False)  # another test's
    (tmp_path / "chip.py").write_text(
        textwrap.dedent(
            '''
            """Made of sand."""
            from fastdeploy_core.contracts import Accept, Candidate, Decline, hookimpl
            class Device:
                """One chip."""
                name = "chip"
                contract = (1, 0)
                option_docs = {"speed": "how fast"}
            class Flash:
                contract = (1, 0)
                unit = "core"
            @hookimpl
            def fd_device_probe():
                return Candidate("chip", Decline("no sand here"))
            @hookimpl
            def fd_attention_backends(question):
                if question.spec.kind == "mla":
                    return [Candidate("flash", Decline("no mla"))]
                return [Candidate("flash", Accept(120, "tuned"))]
            @hookimpl
            def fd_doctor_checks():
                return [("fan turns", True, ""), ("sand is dry", False, "warm it up")]
            '''
        )
    )
    info = tmp_path / "fd_chip-0.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: fd-chip\nVersion: 0.3\nSummary: Sand\n"
        "Project-URL: Docs, https://example.org/sand\n"
    )
    (info / "entry_points.txt").write_text(
        "[fastdeploy.devices]\nchip = chip:Device\n[fastdeploy.hooks]\nchip = chip\n"
        "[fastdeploy.attention]\nflash = chip:Flash\n"
    )
    discovery.forget()
    shared_manager.cache_clear()
    yield tmp_path
    discovery.forget()
    shared_manager.cache_clear()


@pytest.fixture
def model(tmp_path):
    from fastdeploy_testing.tiny_model import CONFIG

    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def command(name, *arguments):
    return commands.find(f"plugins.{name}")(arguments)


def run(capsys, *argv):
    code = command(*argv)
    return code, capsys.readouterr()


def test_list_shows_everything_once(capsys, stranger):
    code, out = run(capsys, "list")
    assert code == 0
    rows = [line.split() for line in out.out.splitlines()]
    assert rows[0] == ["name", "kind", "distribution", "version", "status"]
    assert ["chip", "device", "fd-chip", "0.3", "ok"] in rows
    assert sum(r[:2] == ["cpu", "device"] for r in rows) == 1


def test_list_of_one_kind(capsys, stranger):
    _, out = run(capsys, "list", "--kind", "attention")
    assert {line.split()[1] for line in out.out.splitlines()[1:]} == {"attention"}


def test_list_as_json_has_a_stable_form(capsys, stranger):
    _, out = run(capsys, "list", "--json")
    data = json.loads(out.out)
    chip = next(p for p in data["plugins"] if p["distribution"] == "fd-chip")
    assert list(chip) == [
        "name", "kind", "distribution", "version", "group", "target", "status", "reason",
    ]  # fmt: skip
    assert data["problems"] == []


def test_list_says_what_is_wrong(capsys, stranger, monkeypatch):
    monkeypatch.setenv("FD_PLUGINS_DISABLED", "fd-chip,fd-absent")
    code, out = run(capsys, "list")
    assert code == 0 and "disabled" in out.out
    assert "problem: FD_PLUGINS_DISABLED names fd-absent" in out.err


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
    demo = Path(__file__).resolve().parents[2] / "models" / "ernie-tiny"
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
    others = tuple(e for e in inventory.entries if e.distribution != "fd-kv-shm")
    monkeypatch.setattr(plugins_why, "discover", lambda: discovery.Inventory(others))
    code, out = run(capsys, "why", "kv_transport")
    assert code == 1 and "none is installed; possible: shm by pip install fd-kv-shm" in out.out
    monkeypatch.setattr(plugins_why, "discover", discovery.discover)
    monkeypatch.setenv("FD_PLUGINS_DISABLED", "fd-kv-shm")
    code, out = run(capsys, "why", "kv_transport")
    assert code == 1 and "named by FD_PLUGINS_DISABLED" in out.out and "pip" not in out.out


@pytest.mark.parametrize("kind", ["scheduler", "kv_transport", "grammar", "model", "kernels"])
def test_why_of_every_other_kind(capsys, stranger, kind):
    code, out = run(capsys, "why", kind)
    assert code in (0, 1) and "candidate" in out.out and kind in out.out


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
    import site

    from fastdeploy_core.cli import plugins_doctor

    (tmp_path / "sneaky.pth").write_text("import os\n")
    monkeypatch.setattr(site, "getsitepackages", lambda: [str(tmp_path)])
    rows = [r for r in plugins_doctor.pth_rows() if r["name"] == "sneaky.pth"]
    assert len(rows) == 1 and "runs code" in rows[0]["hint"] and rows[0]["verdict"] == "WARN"


def test_usage_errors_exit_with_2(capsys):
    for argv in ([], ["list", "--kind", "odd"], ["why"]):
        assert main(["plugins", *argv]) == 2
        assert "usage: fastdeploy plugins" in "".join(capsys.readouterr())


def test_list_imports_neither_plugins_nor_heavy_libraries(stranger):
    (stranger / "chip.py").write_text("raise SystemExit('imported')")
    code = (
        f"import sys; sys.path[:] = {sys.path!r}\n"
        "from fastdeploy_core.cli.main import main\n"
        "main(['plugins', 'list'])\n"
        "heavy = {'torch', 'paddle', 'numpy', 'msgspec', 'pluggy', 'stevedore', 'fastapi', "
        "'chip'}\nsys.exit(str(sorted(heavy & set(sys.modules))) if heavy & set(sys.modules) "
        "else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "fd-chip" in done.stdout
