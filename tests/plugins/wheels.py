"""Wheels written by hand, as a stranger would publish them, and folders to install them into."""

from __future__ import annotations

import base64
import hashlib
import os
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def build_wheel(
    folder: Path,
    name: str,
    files: Mapping[str, str],
    entry_points: str,
    *,
    version: str = "0.1.0",
    summary: str = "",
    requires: Sequence[str] = ("fastdeploy-core>=0.1,<0.2",),
) -> Path:
    """A pure-Python wheel; returns its path."""
    stem = f"{name.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    metadata = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    metadata += [f"Summary: {summary}"] if summary else []
    metadata += [f"Requires-Dist: {r}" for r in requires]
    contents = {path: textwrap.dedent(text) for path, text in files.items()}
    contents[f"{info}/METADATA"] = "\n".join(metadata) + "\n"
    contents[f"{info}/WHEEL"] = (
        "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    contents[f"{info}/entry_points.txt"] = textwrap.dedent(entry_points)
    record = "".join(
        f"{path},{_digest(text)},{len(text.encode())}\n" for path, text in contents.items()
    )
    contents[f"{info}/RECORD"] = record + f"{info}/RECORD,,\n"
    wheel = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in contents.items():
            archive.writestr(path, text)
    return wheel


def install(site: Path, *wheels: Path) -> None:
    """Unpack wheels into a folder that goes on the path; what pip does with pure Python."""
    site.mkdir(exist_ok=True)
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)


def environment(site: Path, **more: str) -> dict[str, str]:
    """For child processes: that folder before this checkout, none of the caller's settings."""
    kept = {n: v for n, v in os.environ.items() if not n.startswith("FD_")}
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join((str(site), str(REPOSITORY))),
        "OMP_NUM_THREADS": "1",
        "FD_PLUGIN_HOOK_TIMEOUT_S": "3",
        "FD_PLUGIN_DRIVER_TIMEOUT_S": "3",
        **more,
    }


def fastdeploy(
    site: Path, *arguments: str, timeout_s: float = 60, **more: str
) -> subprocess.CompletedProcess[str]:
    """The command line in an environment where the folder's plugins are installed."""
    return python(site, "-m", "fastdeploy_core.cli.main", *arguments, timeout_s=timeout_s, **more)


def python(
    site: Path, *arguments: str, timeout_s: float = 60, **more: str
) -> subprocess.CompletedProcess[str]:
    """Python in that environment."""
    return subprocess.run(
        [sys.executable, "-P", *arguments],
        env=environment(site, **more),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def _digest(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return "sha256=" + base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
