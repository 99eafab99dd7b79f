"""Finding a tensor library without importing it, and loading it without noise."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fastdeploy_core import tensor
from fastdeploy_core.errors import ConfigError


def run(program: str, *flags: str) -> str:
    done = subprocess.run(
        [sys.executable, *flags, "-c", program], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_importing_the_room_imports_no_library():
    program = (
        "import sys, fastdeploy_core.tensor as t, fastdeploy_core.reference.hooks, "
        "fastdeploy_core.reference.kernels, fastdeploy_core.contracts.attention; t.available(); "
        "print([m for m in ('torch', 'paddle') if m in sys.modules])"
    )
    assert run(program).strip() == "[]"


@pytest.mark.parametrize("name", tensor.available())
def test_loading_one_library_is_silent_and_leaves_the_other_alone(name):
    program = (
        "import sys; from fastdeploy_core import tensor\n"
        f"xp = tensor.load({name!r}); assert tensor.load({name!r}) is xp\n"
        f"assert xp.name == {name!r} and tensor.namespace(xp.zeros([2])) is xp\n"
        "assert sum(m in sys.modules for m in ('torch', 'paddle')) == 1\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("name", "threads"), [(name, asked) for name in tensor.available() for asked in (None, "3")]
)
def test_loading_a_library_leaves_logging_signals_and_threads_alone(name, threads, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if threads is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    program = (
        "import logging, os, signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('ended by the program'), sys.exit(3)))\n"
        f"from fastdeploy_core import tensor; tensor.load({name!r}).zeros([2])\n"
        "print(logging.root.handlers, logging.root.level)\n"
        "print(os.environ.get('OMP_NUM_THREADS'), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGTERM); import time; time.sleep(5)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 3
    if threads is None:  # PaddlePaddle itself warns of several
        assert done.stderr == ""
    assert done.stdout.splitlines() == ["[] 30", str(threads), "ended by the program"]


def test_unknown_library_is_refused_with_the_possible_ones():
    with pytest.raises(ConfigError, match=r"'jax'.*torch, paddle"):
        tensor.load("jax")


def test_missing_library_says_what_to_install(monkeypatch):
    monkeypatch.setattr(tensor, "_loaded", {})
    monkeypatch.setattr(tensor.importlib.util, "find_spec", lambda name: None)
    assert tensor.available() == []
    with pytest.raises(ConfigError, match=r'pip install "fastdeploy-core\[paddle\]"'):
        tensor.load("paddle")


def test_namespace_refuses_what_is_no_tensor():
    with pytest.raises(TypeError, match="list is not a tensor"):
        tensor.namespace([1.0])
