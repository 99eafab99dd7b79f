"""`fastdeploy plugins new`, every kind: the wheel builds, and its own tests pass as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from fastdeploy_core.contracts.base import KINDS
from fastdeploy_testing.new import TEMPLATES, create
from tests.plugins.test_template import build
from tests.plugins.wheels import environment, fastdeploy, install

# tests/plugins/test_template.py does these with an environment of their own.
ELSEWHERE = {"device", "drafter", "launcher", "model", "quantizer", "tool_parser"}
HERE = sorted(TEMPLATES.keys() - ELSEWHERE)
NAMES = {"kernels": "fd-ops-cpu"}  # the last part names the device


def test_there_is_one_for_every_kind() -> None:
    kinds = {template.kind for template in TEMPLATES.values()}
    assert kinds == KINDS.keys() - {"part"}, "part is the core's own"


@pytest.mark.parametrize(
    "kind",
    # That of a KV transport takes a minute; its bytes are moved by fd-kv-shm, which has the same
    # tests.
    [pytest.param(k, marks=[pytest.mark.slow] if k == "kv_transport" else []) for k in HERE],
)
def test_its_own_tests_pass(kind: str, tmp_path: Path, tensor_library: str) -> None:
    name = NAMES.get(kind, f"fd-my-own{kind.replace('_', '')}")
    project, site = create(name, tmp_path, kind), tmp_path / "site"
    install(site, build(project, tmp_path))
    driver = name.rpartition("-")[2]
    listed = fastdeploy(site, "plugins", "list", "--kind", TEMPLATES[kind].kind).stdout
    assert re.search(rf"{driver} .*{name} .*ok", listed), listed
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider",
         "-p", "no:asyncio", "--fd-tensor", tensor_library],
        cwd=project, env=environment(site), capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) >= 2, done.stdout[-2000:]
