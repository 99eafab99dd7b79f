"""What a build says of a compiler that is too old."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

PLUGIN = Path(__file__).parents[1]


@pytest.mark.skipif(
    not (shutil.which("cmake") and shutil.which("g++")), reason="needs cmake and g++ in PATH"
)
def test_an_old_compiler_is_named_with_what_to_do_instead(tmp_path):
    """g++ under a version of its own making, as CMake finds versions out."""
    old = tmp_path / "g++-old"
    version = "-U__GNUC__ -D__GNUC__=10 -U__GNUC_MINOR__ -D__GNUC_MINOR__=2"
    old.write_text(f'#!/bin/sh\nexec g++ {version} "$@"\n')
    old.chmod(0o755)
    command = ["cmake", "-S", str(PLUGIN), "-B", str(tmp_path / "build")]
    done = subprocess.run(
        [*command, f"-DCMAKE_CXX_COMPILER={old}"], capture_output=True, text=True, check=False
    )
    said = " ".join(done.stderr.split())
    assert done.returncode != 0
    for part in (f"GNU 10.2.0 ({old})", "needs GCC 11 or Clang", "CXX=g++-11", "wheel"):
        assert part in said
