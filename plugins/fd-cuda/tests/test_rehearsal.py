"""Kernels are compiled side by side before any runs; nothing is launched, and what they would write
is zero."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

from fd_cuda.kernels import native, rehearsal


def test_what_is_met_is_compiled_by_other_threads(tmp_path: Path) -> None:
    script = Path(__file__).with_name("rehearse.py")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        "TRITON_CACHE_DIR": str(tmp_path / "triton"),
        "XDG_CACHE_HOME": str(tmp_path / "xdg"),
    }
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, script, "90"],
        capture_output=True, text=True, env=environment, check=False, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["inside"] >= 2 and found["threads"] >= 2
    assert found["outside"] == 0 and found["is_zero"]


def test_a_native_launch_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel is not even loaded; the first launch that counts loads it."""
    ahead: list[str] = []
    loaded: list[native.Function] = []
    monkeypatch.setattr(native, "_functions", {})
    monkeypatch.setattr(native.torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(native, "compile_ahead", lambda name, defines: ahead.append(name))
    monkeypatch.setattr(native, "_load", loaded.append)
    monkeypatch.setattr(rehearsal._state, "is_on", True, raising=False)
    kernel = native.function("gemv", {"K": 64})
    native.launch(kernel, (1, 1, 1), 32, [])
    assert ahead == ["gemv"] and not loaded
    monkeypatch.setattr(rehearsal._state, "is_on", False)
    assert native.function("gemv", {"K": 64}) is kernel
    assert loaded == [kernel]
    native.load_met()  # at the end, what nothing has launched
    assert loaded == [kernel] * 2
    kernel.handle = ctypes.c_void_p(1)
    native.load_met()
    assert len(loaded) == 2


def test_an_older_triton_compiles_what_it_meets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(triton, "AsyncCompileMode")
    with rehearsal.compile_only():
        assert not rehearsal.is_on()
