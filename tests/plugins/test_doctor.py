"""`plugins doctor` and `plugins check` of plugins with one mistake each, as wheels."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.plugins.wheels import REPOSITORY, build_wheel, environment, install
from tests.plugins.wheels import fastdeploy as command_line

DEVICE = """
from fastdeploy_core.reference.device import CpuDevice
class Device(CpuDevice):
    name = "odd"
"""
HOOKS = """
from fastdeploy_core.contracts import Accept, Candidate, hookimpl
@hookimpl
def fd_device_probe(question):
    return Candidate("odd", Accept(0, "always"))
"""
PROBE = """
import os, signal, time
from fastdeploy_core.contracts import hookimpl
@hookimpl
def fd_device_probe(question):
    {0}
"""
KERNELS = """
from fastdeploy_core.reference.ops.body import rms_norm as right
TABLE = {{{0}}}
def rms_norm(x, weight, eps):
    return right(x, weight, {1})
"""
POINTS = """
[fastdeploy.devices]
odd = odd.device:Device
[fastdeploy.kernels]
odd = odd.kernels:TABLE
[fastdeploy.hooks]
odd = odd.hooks
"""


def add(
    site: Path,
    *,
    device: str = DEVICE,
    hooks: str = HOOKS,
    cells: str = "",
    eps: str = "eps",
    package: str = "",
) -> Path:
    """Install a distribution fd-odd with one device; returns the site."""
    files = {
        "odd/__init__.py": package,
        "odd/device.py": device,
        "odd/hooks.py": hooks,
        "odd/kernels.py": KERNELS.format(cells, eps),
    }
    install(site, build_wheel(site.parent, "fd-odd", files, POINTS))
    return site


@pytest.fixture
def site(tmp_path: Path) -> Path:
    return tmp_path / "site"


def fastdeploy(site: Path, *words: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """The command line with this plugin alone, and the kit."""
    chosen = {"FD_PLUGINS": "fd-odd,fastdeploy-testing", **settings}
    return command_line(site, *words, timeout_s=300, **chosen)


def doctor(site: Path, **settings: str) -> tuple[int, list[dict[str, str]]]:
    """Exit code and the rows of fd-odd that did not pass."""
    done = fastdeploy(site, "plugins", "doctor", "--json", **settings)
    rows = json.loads(done.stdout)["checks"]
    return done.returncode, [
        r for r in rows if r["origin"] == "fd-odd 0.1.0" and r["verdict"] != "PASS"
    ]


def test_a_healthy_plugin_passes(site: Path) -> None:
    add(site, cells='"rms_norm": "odd.kernels:rms_norm"')
    assert doctor(site)[1] == []


@pytest.mark.parametrize(
    ("probe", "words"),
    [
        ("raise RuntimeError('no bus')", "RuntimeError: no bus"),
        ("os._exit(3)", "ended the process with exit code 3"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "was killed by signal SIGSEGV"),
        ("time.sleep(600)", "did not finish within 2 s"),
        ("return 'odd'", "returned 'odd', not a Candidate"),
    ],
    ids=["raises", "exits", "crashes", "hangs", "answers nonsense"],
)
def test_a_probe_that_a_start_leaves_out_fails(site: Path, probe: str, words: str) -> None:
    add(site, hooks=PROBE.format(probe))
    code, rows = doctor(site)
    assert code == 1
    assert [r["verdict"] for r in rows] == ["FAIL"] and words in rows[0]["hint"], rows


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        ('"rms_norm": "odd.kernells:rms_norm"', "No module named 'odd.kernells'"),
        ('"rms_norm": "odd.kernels:rmsnorm"', "no attribute 'rmsnorm'"),
        ('"rms_nrom": "odd.kernels:rms_norm"', "did you mean rms_norm?"),
        ('"linear_ad": "odd.kernels:rms_norm"', "did you mean linear_add?"),
    ],
    ids=["module", "function", "operation", "operation of no format"],
)
def test_a_misspelt_cell_fails(site: Path, cells: str, words: str) -> None:
    add(site, cells=cells)
    code, rows = doctor(site)
    assert code == 1
    assert any(r["verdict"] == "FAIL" and words in r["hint"] for r in rows), rows


def test_misspelt_cells_fail_the_kit(site: Path) -> None:
    add(site, cells='"rms_norm": "odd.kernells:rms_norm", "linear_ad": "odd.kernels:rms_norm"')
    done = fastdeploy(site, "plugins", "check", "odd", "-k", "every_cell")
    assert done.returncode == 1
    for words in ("No module named 'odd.kernells'", "did you mean linear_add?"):
        assert words in done.stdout, done.stdout


def test_a_module_that_does_not_exist_is_seen_without_the_hardware(site: Path) -> None:
    decline = HOOKS.replace('Accept(0, "always")', 'Decline("no bus")').replace("Accept", "Decline")
    add(site, hooks=decline, cells='"rms_norm": "odd.kernells:rms_norm"')
    code, rows = doctor(site)
    assert code == 1
    assert [r["hint"] for r in rows] == ["rms_norm: there is no module odd.kernells"]


def test_a_plugins_own_operation_is_shown_and_allowed(site: Path) -> None:
    add(site, cells='"gather_pages": "odd.kernels:rms_norm", "linear_tet9": "odd.kernels:rms_norm"')
    _, rows = doctor(site)
    assert [r["verdict"] for r in rows] == ["WARN"]
    assert rows[0]["hint"].startswith("gather_pages: ")


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bf16"])
def test_a_dtype_that_no_model_has_fails(site: Path, dtype: str) -> None:
    device = DEVICE.replace("CpuDevice\nclass", "CpuDevice\nimport dataclasses\nclass")
    device += (
        "    def __init__(self, options):\n"
        "        super().__init__(options)\n"
        f"        self.limits = dataclasses.replace(self.limits, dtypes=('float32', {dtype!r}))\n"
    )
    add(site, device=device)
    code, rows = doctor(site)
    assert code == 1
    assert any(f"DeviceLimits.dtypes has {dtype!r}" in r["hint"] for r in rows), rows
    check = ("plugins", "check", "odd", "-k", "limits_agree or memory_is")
    done = fastdeploy(site, *check)
    assert done.returncode == 1
    assert "2 cases cannot be set up" in done.stdout and repr(dtype) in done.stdout, done.stdout


def test_what_a_plugin_prints_does_not_spoil_json(site: Path) -> None:
    add(site, package="print('odd 1.0, (c) odd')")
    assert doctor(site, FD_PLUGIN_PREFLIGHT="0")[1] == []
    done = fastdeploy(site, "plugins", "why", "device", "--json", FD_PLUGIN_PREFLIGHT="0")
    assert json.loads(done.stdout)["decisions"], done.stdout
    assert "(c) odd" in done.stderr


def test_a_fixed_eps_fails_in_few_lines(site: Path) -> None:
    add(site, cells='"rms_norm": "odd.kernels:rms_norm"', eps="1e-6")
    code, rows = doctor(site)
    assert code == 1 and any("rms_norm: differs" in r["hint"] for r in rows), rows
    check = ("plugins", "check", "odd", "--kind", "kernels", "-k", "norm")
    done = fastdeploy(site, *check)
    assert done.returncode == 1
    assert "test_rms_norm: " in done.stdout and "-v -k test_rms_norm" in done.stdout, done.stdout
    assert len(done.stdout.splitlines()) < 30, done.stdout


def test_without_a_tensor_library_doctor_fails_and_check_says_so() -> None:
    """In a Python that sees neither library."""
    hidden = (
        "import importlib.util as u, sys\n"
        "find = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name in ('torch', 'paddle') else find(name, *a)\n"
        "from fastdeploy_core.cli.main import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-P", "-c", hidden, "plugins", *words],
            env=environment(REPOSITORY, FD_PLUGINS="fastdeploy-testing"),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    done = run("doctor", "--json")
    rows = [r for r in json.loads(done.stdout)["checks"] if r["kind"] == "tensor library"]
    assert done.returncode == 1
    assert [r["verdict"] for r in rows] == ["FAIL"] and "[torch]" in rows[0]["hint"]
    done = run("check", "cpu")
    assert done.returncode == 1 and not done.stdout
    assert 'pip install "fastdeploy-core[torch]"' in done.stderr, done.stderr


def test_doctor_skips_what_nothing_installed_examines(site: Path) -> None:
    """In a Python that finds no such command."""
    hidden = (
        "import sys\n"
        "from fastdeploy_core.plugins.discovery import Inventory\n"
        "named = Inventory.named\n"
        "hidden = ('command', 'plugins.examine')\n"
        "Inventory.named = lambda self, *of: [] if of == hidden else named(self, *of)\n"
        "from fastdeploy_core.cli.main import main\n"
        "sys.exit(main(['plugins', 'doctor', '--json']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", hidden],
        env=environment(add(site), FD_PLUGINS="fd-odd"),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    rows = [r for r in json.loads(done.stdout)["checks"] if r["verdict"] == "SKIP"]
    hints = [r["hint"] for r in rows if r["origin"] == "fd-odd 0.1.0"]
    assert hints == ["its operations are not examined; run: pip install fastdeploy-testing"], (
        done.stdout
    )


def test_doctor_examines_whichever_plugins_take_part(site: Path) -> None:
    """FD_PLUGINS says what serves, not what looks into it."""
    add(site, cells='"rms_norm": "odd.kernels:rms_norm"', eps="1e-6")
    code, rows = doctor(site, FD_PLUGINS="fd-odd")
    assert code == 1 and any("rms_norm: differs" in r["hint"] for r in rows), rows
