"""How long `fastdeploy --help`, `plugins list` and `plugins why device` take beside many plugins.

    python benchmarks/plugin_commands.py [--plugins 15] [--repeats 7]
    python benchmarks/plugin_commands.py --serve models/ernie-tiny [--repeats 3]

Each plugin is a distribution of its own with a hook module, a device whose hardware is not here,
and a kernel table; nothing else that this Python has installed takes part. Prints the median, the
least, and the processor's seconds of all processes together, which a busy machine lengthens least.
With --serve: seconds until `serve MODEL` has given its first token, alone and beside the forty
hostile wheels of tests/plugins/hostile.py, in turn.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from start_up import Start

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = (("--help",), ("plugins", "list"), ("plugins", "why", "device"))
HOOKS = """
from fastdeploy_core.contracts import Candidate, Decline, hookimpl
from fastdeploy_core.contracts.device import DeviceQuestion

@hookimpl
def fd_device_probe(question: DeviceQuestion) -> Candidate:
    return Candidate("{name}", Decline("no chip is here"), {{"tensor_library": "torch"}})
"""
DRIVER = """
from fastdeploy_core.reference.device import CpuDevice
class Device(CpuDevice):
    name = "{name}"
    contract = (1, 0)
"""
POINTS = """
[fastdeploy.hooks]
{name} = {name}.hooks
[fastdeploy.devices]
{name} = {name}.driver:Device
[fastdeploy.kernels]
{name} = {name}.kernels:TABLE
"""


def install(site: Path, name: str) -> None:
    """Files and metadata, as a wheel would bring them."""
    files = {
        "__init__.py": "",
        "hooks.py": HOOKS,
        "driver.py": DRIVER,
        "kernels.py": "TABLE = {{}}",
    }
    (site / name).mkdir()
    for file, text in files.items():
        (site / name / file).write_text(text.format(name=name))
    info = site / f"fd_{name}-0.1.0.dist-info"
    info.mkdir()
    (info / "entry_points.txt").write_text(POINTS.format(name=name))
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: fd-{name}\nVersion: 0.1.0\n"
        "Requires-Dist: fastdeploy-core>=0.1,<0.2\n"
    )


def processor_s() -> float:
    """Seconds that all ended children have had."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure_starts(options: argparse.Namespace, folder: Path) -> None:
    """Print seconds until the first token, without and with the hostile wheels."""
    sys.path.insert(0, str(ROOT))
    from tests.plugins.hostile import HOSTILE, put

    sites = {"alone": folder / "alone", f"beside {len(HOSTILE)} hostile": folder / "hostile"}
    for site in sites.values():
        site.mkdir()
    for name, plugin in HOSTILE.items():
        (folder / name).mkdir()
        put(folder / "hostile", folder / name, name, plugin)
    seconds: dict[str, list[float]] = {name: [] for name in sites}
    options.model, options.serve = options.serve, ["--device", "cpu", "--num-threads", "1"]
    for _ in range(options.repeats):
        for name, site in sites.items():
            os.environ["PYTHONPATH"] = os.pathsep.join((str(site), str(ROOT)))
            server = Start(options)
            try:
                server.wait_ready()
                seconds[name].append(server.first_token())
            finally:
                server.stop()
    medians = [statistics.median(taken) for taken in seconds.values()]
    for name, taken in seconds.items():
        print(f"{name:<24}{statistics.median(taken):>6.2f} s{min(taken):>6.2f} s")
    print(f"{medians[1] - medians[0]:.2f} s more beside them (median of {options.repeats} each)")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plugins", type=int, default=15)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--serve", metavar="MODEL", help="measure starts of this model instead")
    parser.add_argument("--tensor-library", default="torch")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.serve:
            measure_starts(arguments, Path(folder))
            return
        names = [f"chip{number}" for number in range(arguments.plugins)]
        for name in names:
            install(Path(folder), name)
        path = os.pathsep.join([folder, *(p for p in sys.path[1:] if p)])
        others = ",".join(["fd-tools", *(f"fd-{name}" for name in names)])
        environment = {**os.environ, "PYTHONPATH": path, "FD_PLUGINS": others}
        print(
            f"{arguments.plugins} plugins, {arguments.repeats} times each, {os.cpu_count()} cores"
        )
        print(f"{'command':<24}{'median':>8}{'least':>8}{'processor':>11}")
        for words in COMMANDS:
            command = [sys.executable, "-P", "-m", "fastdeploy_core.cli.main", *words]
            times, used = [], []
            for _ in range(arguments.repeats):
                began, before = time.perf_counter(), processor_s()
                subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
                times.append(time.perf_counter() - began)
                used.append(processor_s() - before)
            row = (statistics.median(times), min(times), min(used))
            print(f"{' '.join(words):<24}{row[0]:>6.2f} s{row[1]:>6.2f} s{row[2]:>9.2f} s")


if __name__ == "__main__":
    main()
