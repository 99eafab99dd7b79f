"""The kit fails every faulty driver that can be generated from a Protocol (driver_mutants.py)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from fastdeploy_testing.conformance.driver_mutants import KINDS_WITH_MUTANTS, mutants_of
from fastdeploy_testing.conformance.mutants import FEWEST
from fastdeploy_testing.new import TEMPLATES, create

# Ten seconds each and more: a scheduler's tests wait for leases.
SLOW = set(KINDS_WITH_MUTANTS) - {"tool_parser"}


def install(project: Path, site: Path) -> None:
    """Put its package and metadata there: what a wheel would bring."""
    (site / "src").parent.mkdir()
    for package in (project / "src").iterdir():
        (site / package.name).symlink_to(package)
    settings = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    info = site / f"{settings['name'].replace('-', '_')}-0.1.0.dist-info"
    info.mkdir()
    requires = "".join(f"Requires-Dist: {each}\n" for each in settings["dependencies"])
    head = f"Metadata-Version: 2.1\nName: {settings['name']}\nVersion: 0.1.0\n"
    (info / "METADATA").write_text(head + requires)
    points = settings["entry-points"].items()
    (info / "entry_points.txt").write_text(
        "".join(f"[{g}]\n" + "".join(f"{k} = {v}\n" for k, v in own.items()) for g, own in points)
    )


def hunt(folder: Path, kind: str, library: str, *words: str) -> tuple[int, str]:
    """Exit code, and what was printed, of the template's own tests on mutants."""
    template = next(name for name, t in TEMPLATES.items() if t.kind == kind)
    project, site = create("fd-my-own", folder, template), folder / "site"
    install(project, site)
    path = os.pathsep.join([str(site), *(p for p in sys.path if p)])
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider",
         "-p", "no:asyncio", "-p", "fastdeploy_testing.conformance.driver_mutants",
         "--fd-tensor", library, *words],
        cwd=project, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr[-2000:]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=[pytest.mark.slow] if k in SLOW else []) for k in KINDS_WITH_MUTANTS],
)
def test_no_mutant_lives(kind: str, tmp_path: Path, tensor_library: str) -> None:
    code, printed = hunt(tmp_path, kind, tensor_library)
    assert code == 0, printed[-5000:]
    score = re.search(r"(\d+) of (\d+) mutants of kind (\w+) killed", printed)
    assert score is not None and score[3] == kind
    assert score[1] == score[2] and int(score[1]) >= FEWEST, printed[-3000:]


@pytest.mark.slow
def test_a_kit_that_looks_away_is_found_out(tmp_path: Path, tensor_library: str) -> None:
    code, printed = hunt(tmp_path, "kv_store", tensor_library, "-k", "find_counts")
    assert code == 1
    assert re.search(r"get .* is left out", printed), printed[-3000:]


@pytest.mark.parametrize("kind", KINDS_WITH_MUTANTS)
def test_mutants_come_from_the_protocol(kind: str) -> None:
    names = [mutant.name for mutant in mutants_of(kind)]
    assert len(names) == len(set(names)) >= FEWEST
