"""Forty plugins that do what no plugin should, as wheels.

Each has a device of its own name and score 500, so that a default start would choose it, unless the
fault lies elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tests.plugins.wheels import build_wheel, install

HOOKS = """
from fastdeploy_core.contracts import Accept, Candidate, Decline, hookimpl
{before}
@hookimpl
def fd_device_probe(question):
    {probe}
    return Candidate("{name}", {verdict}, {{"tensor_library": "torch"}})
{more}
"""
DRIVER = """
{before}
from fastdeploy_core.reference.device import CpuDevice
class Device(CpuDevice):
    name = "{name}"
    contract = {contract}
"""
POINTS = """
[fastdeploy.hooks]
{name} = {module}.hooks
[fastdeploy.devices]
{name} = {module}.driver:Device
"""
SEGFAULT = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"


@dataclass(frozen=True)
class Hostile:
    """What is wrong with one plugin; `doctor` says `words` of its distribution."""

    words: str
    before: str = ""  # in its hook module
    probe: str = "pass"
    more: str = ""
    verdict: str = "Accept(500)"
    driver: str = ""  # at the beginning of its driver's module
    contract: str = "(1, 0)"
    points: str = POINTS
    requires: tuple[str, ...] = ("fastdeploy-core>=0.1,<0.2",)
    raw: dict[str, bytes] = field(default_factory=dict)  # files of dist-info, replaced


DECLINES = {"verdict": "Decline('not here')"}
# (name, what is wrong)
HOSTILE = {
    # the hook module
    "raises": Hostile("the runtime is absent", "raise RuntimeError('the runtime is absent')"),
    "lacks": Hostile("No module named 'vendor_sdk'", "import vendor_sdk"),
    "syntax": Hostile("SyntaxError", "def (:"),
    "exits": Hostile("SystemExit: 3", "import sys; sys.exit(3)"),
    "quits": Hostile("exit code 4", "import os; os._exit(4)"),
    "quitsquietly": Hostile("exit code 0", "import os; os._exit(0)"),
    "crashes": Hostile("signal SIGSEGV", SEGFAULT),
    "sleeps": Hostile("did not finish within", "import time; time.sleep(600)"),
    "computes": Hostile("did not finish within", "while True: pass"),
    "recurses": Hostile("RecursionError", "def f(): f()\nf()"),
    "interrupts": Hostile("KeyboardInterrupt", "raise KeyboardInterrupt"),
    "threads": Hostile(
        "leaves threads running",
        "import threading, time; threading.Thread(target=time.sleep, args=(600,)).start()",
    ),
    "patricide": Hostile(
        "ended its parent process", "import os, signal; os.kill(os.getppid(), signal.SIGKILL)"
    ),
    "unhook": Hostile("no such hook", more="@hookimpl\ndef fd_no_such_hook(): pass", **DECLINES),
    "wants": Hostile("it wants now", more="@hookimpl\ndef fd_shutdown(now): pass", **DECLINES),
    # the probe
    "probe-raises": Hostile("chip on fire", probe="raise RuntimeError('chip on fire')"),
    "probe-exits": Hostile("SystemExit: 5", probe="raise SystemExit(5)"),
    "probe-quits": Hostile("exit code 6", probe="import os; os._exit(6)"),
    "probe-crashes": Hostile("signal SIGSEGV", probe=SEGFAULT),
    "probe-sleeps": Hostile("did not finish within", probe="import time; time.sleep(600)"),
    "probe-computes": Hostile("did not finish within", probe="while True: pass"),
    "probe-nonsense": Hostile("not a Candidate", probe="return {'score': 1}"),
    "probe-other": Hostile("which is not its own", probe="return Candidate('cpu', Accept(999))"),
    # the driver, which would win
    "driver-raises": Hostile("no firmware", driver="raise RuntimeError('no firmware')"),
    "driver-lacks": Hostile("No module named 'vendor_sdk'", driver="import vendor_sdk"),
    "driver-quits": Hostile("exit code 7", driver="import os; os._exit(7)"),
    "driver-crashes": Hostile("signal SIGSEGV", driver=SEGFAULT),
    "driver-sleeps": Hostile("did not finish within", driver="import time; time.sleep(600)"),
    "driver-absent": Hostile(
        "AttributeError", points=POINTS.replace("driver:Device", "driver:Devise")
    ),
    "driver-newer": Hostile("written for contract 2.0", contract="(2, 0)"),
    "driver-older": Hostile("written for contract 0.12", contract="(0, 12)"),
    "driver-undeclared": Hostile("declares no contract", contract="'1.0'"),
    # metadata
    "bytes": Hostile("cannot be read", raw={"entry_points.txt": b"[fastdeploy.devices]\n\xff = x"}),
    "nameless": Hostile("cannot be read", raw={"METADATA": b"Metadata-Version: 2.1\n"}),
    "core9": Hostile("requires fastdeploy-core", requires=("fastdeploy-core>=9,<10",)),
    "requirement": Hostile("cannot be read", requires=("fastdeploy-core ><= what",)),
    "group": Hostile("no group", points="[fastdeploy.gadgets]\n{name} = {module}.driver:Device\n"),
    "later": Hostile(
        "made for contract 2", points="[fastdeploy.devices.v2]\n{name} = {module}.driver:Device\n"
    ),
    "usurper": Hostile(
        "the core's own stays in use", points="[fastdeploy.devices]\ncpu = {module}.driver:Device\n"
    ),
    "serve": Hostile(
        "the core's own command", points="[fastdeploy.commands]\nserve = {module}.driver:Device\n"
    ),
}
# Harmless, but they talk: at import, past Python, when asked, and at the end of the process.
BANNER = """
import atexit, os, sys
print("WELCOME")
os.write(1, b"WELCOME\\n")
atexit.register(print, "WELCOME", flush=True)
sys.stdout.write("WELCOME\\n")
"""
TALKATIVE = Hostile("", BANNER, "print('WELCOME')", driver=BANNER, **DECLINES)


def distribution(name: str) -> str:
    """Of the plugin of that name."""
    return f"fd-bad-{name}"


def put(site: Path, folder: Path, name: str, plugin: Hostile) -> None:
    """Install one as a wheel."""
    module, chip = f"bad_{name.replace('-', '_')}", f"bad{name.replace('-', '')}"
    words = {"name": chip, "module": module}
    hooks = HOOKS.format(
        before=plugin.before, probe=plugin.probe, more=plugin.more, verdict=plugin.verdict, **words
    )
    files = {
        f"{module}/__init__.py": "",
        f"{module}/hooks.py": hooks,
        f"{module}/driver.py": DRIVER.format(
            before=plugin.driver, contract=plugin.contract, **words
        ),
    }
    points = plugin.points.format(**words)
    install(site, build_wheel(folder, distribution(name), files, points, requires=plugin.requires))
    for path, content in plugin.raw.items():
        (site / f"fd_bad_{name.replace('-', '_')}-0.1.0.dist-info" / path).write_bytes(content)
