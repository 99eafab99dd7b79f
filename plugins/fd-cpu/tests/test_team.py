"""Threads that are away: no step waits for them, and no result depends on which threads took
part."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import F32, address
from fd_cpu import _native
from test_products import FORMATS, packed, product


def sizes(rng, num_rows):
    """One matrix of few panels, one of so many that the last two are taken in turns; both of many
    rows are divided by rows."""
    for outputs, inputs in ((40, 128), (1060, 256)):
        weight = rng.standard_normal((outputs, inputs)).astype(np.float32) * 0.05
        yield weight, rng.standard_normal((num_rows, inputs)).astype(np.float32)


@pytest.mark.parametrize(("kind", "group", "limit"), FORMATS)
@pytest.mark.parametrize("num_rows", [1, 9, 40, 260])
def test_a_product_is_the_same_without_those_who_are_away(runtime, kind, group, limit, num_rows):
    del limit  # none: to the last bit
    if runtime.num_threads == 1:
        pytest.skip("one thread is never away")
    for weight, x in sizes(np.random.default_rng(num_rows), num_rows):
        matrix, _ = packed(kind, group, weight)
        runtime.stay_away(False)
        together = product(runtime, matrix, x, weight.shape[0])
        runtime.stay_away(True)
        assert np.array_equal(product(runtime, matrix, x, weight.shape[0]), together)
    runtime.stay_away(False)


def chain(runtime, num_rows, steps):
    """A plan of products, each of the one before, and where the last one's result will be."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal((num_rows, 256)).astype(np.float32)
    results, kept = [x], []
    plan = _native.Plan()
    runtime.begin(plan)
    for _ in range(steps):
        weight = rng.standard_normal((256, 256)).astype(np.float32) / 16
        matrix, _ = packed(0, 0, weight)
        kept.append(matrix)
        results.append(np.zeros((num_rows, 256), np.float32))
        runtime.linear(
            *(matrix, address(results[-2]), F32, num_rows, 256, 0, 1e-5, 0, 0),
            *(address(results[-1]), F32, 256),
        )
    runtime.end()
    return plan, results[-1], (kept, results)


@pytest.mark.skipif(not shutil.which("g++"), reason="compiles with g++")
@pytest.mark.parametrize(
    ("flags", "num_rounds"), [(["-O2"], 1000), (["-O1", "-g", "-fsanitize=thread"], 100)]
)
def test_teams_whose_threads_come_and_go(tmp_path, flags, num_rounds):
    """Up to five threads. A thread that waits for good does not end; ThreadSanitizer says what it
    finds."""
    here, program = Path(__file__).parent, tmp_path / "team_threads"
    source = here.parent / "src"
    command = ["g++", "-std=c++17", *flags, "-iquote", source]
    command += [here / "team_threads.cpp", source / "team.cpp", "-pthread", "-o", program]
    env = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}  # another sanitizer's
    built = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if "tsan" in built.stderr:
        pytest.skip("g++ has no ThreadSanitizer here")
    assert built.returncode == 0, built.stderr
    command = [program, str(num_rounds)]
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("num_threads", [2, 3])
@pytest.mark.parametrize("num_rows", [1, 24])
def test_threads_come_and_go_in_the_middle_of_a_plan(num_threads, num_rows):
    runtime = _native.Runtime(num_threads, [], "")
    plan, result, _alive = chain(runtime, num_rows, 40)
    runtime.replay([plan], 1)
    wanted = result.copy()
    is_over = threading.Event()

    def disturb():
        rng = np.random.default_rng(0)
        while not is_over.is_set():
            runtime.stay_away(bool(rng.integers(2)))
            time.sleep(rng.uniform(0, 3e-4))

    other = threading.Thread(target=disturb)
    other.start()
    try:
        for _ in range(100):
            result[:] = 0
            runtime.replay([plan], 2)
            assert np.array_equal(result, wanted)
    finally:
        is_over.set()
        other.join()
