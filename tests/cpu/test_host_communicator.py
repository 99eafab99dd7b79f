"""Collectives: values, equal bits on all ranks, and peers that die, hang or disagree."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from fastdeploy_core import tensor
from fastdeploy_core.devices import host_communicator as module
from fastdeploy_core.devices.host_communicator import SharedMemoryCommunicator
from fastdeploy_core.errors import ConfigError, WorkerError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def xp(tensor_library):
    return tensor.load(tensor_library)


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "group"
    path.mkdir(mode=0o700)
    return path


def together(*calls):
    """Run one call per rank at the same time; their results, or the errors they raised."""
    results = [None] * len(calls)

    def run(i):
        try:
            results[i] = calls[i]()
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    return results


def join(xp, folder, size, **options):
    groups = together(
        *(
            lambda rank=rank: SharedMemoryCommunicator(xp, rank, size, folder, **options)
            for rank in range(size)
        )
    )
    assert all(isinstance(g, SharedMemoryCommunicator) for g in groups), groups
    return groups


def on_all(groups, inputs, method, *arguments):
    """The same collective on every rank; their results."""
    pairs = zip(groups, inputs, strict=True)
    return together(*(partial(getattr(group, method), x, *arguments) for group, x in pairs))


def leave(groups):
    for group in groups:
        group.close()


@pytest.mark.parametrize("size", [2, 3])
def test_results(xp, folder, size):
    groups = join(xp, folder, size)
    data = [
        np.random.default_rng(r).standard_normal((2, 3)).astype(np.float32) for r in range(size)
    ]
    inputs = [xp.tensor(d) for d in data]
    total = data[0].copy()
    for more in data[1:]:
        total += more
    for result in on_all(groups, inputs, "all_reduce"):
        assert np.array_equal(xp.to_numpy(result), total)
    for dim in (-1, 0, 1):
        for result in on_all(groups, inputs, "all_gather", dim):
            assert np.array_equal(xp.to_numpy(result), np.concatenate(data, dim))
    for source in range(size):
        for result in on_all(groups, inputs, "broadcast", source):
            assert np.array_equal(xp.to_numpy(result), data[source])
    assert together(*(g.barrier for g in groups)) == [None] * size
    for x, d in zip(inputs, data, strict=True):
        assert np.array_equal(xp.to_numpy(x), d)
    leave(groups)


@pytest.mark.parametrize("dtype", ["int64", "int32", "bfloat16", "bool"])
def test_other_dtypes_travel(xp, folder, dtype):
    groups = join(xp, folder, 2)
    inputs = [
        xp.tensor([[1, 0, 1]]).to(xp.dtype(dtype)),
        xp.tensor([[0, 0, 1]]).to(xp.dtype(dtype)),
    ]
    gathered = on_all(groups, inputs, "all_gather", 0)
    sent = on_all(groups, inputs, "broadcast", 1)
    for result in gathered:
        assert xp.dtype_name(result) == dtype
        assert result.to(xp.int64).tolist() == [[1, 0, 1], [0, 0, 1]]
    assert [x.to(xp.int64).tolist() for x in sent] == [[[0, 0, 1]]] * 2
    if dtype != "bool":
        sums = on_all(groups, inputs, "all_reduce")
        for result in sums:
            assert xp.dtype_name(result) == dtype
            assert result.to(xp.int64).tolist() == [[1, 0, 2]]
    leave(groups)


def test_tensors_larger_than_a_slot_and_empty_ones(xp, folder, monkeypatch):
    monkeypatch.setattr(module, "SLOT_BYTES", 4096)
    groups = join(xp, folder, 2)
    for shape in ((5000,), (3, 1024), (1024,), (1025,), (0, 4)):
        data = [np.random.default_rng(r).standard_normal(shape).astype(np.float32) for r in (0, 1)]
        inputs = [xp.tensor(d) for d in data]
        sums = on_all(groups, inputs, "all_reduce")
        rows = on_all(groups, inputs, "all_gather", 0)
        for total, row in zip(sums, rows, strict=True):
            assert np.array_equal(xp.to_numpy(total), data[0] + data[1])
            assert np.array_equal(xp.to_numpy(row), np.concatenate(data))
    leave(groups)


def test_views_are_reduced_by_their_values(xp, folder):
    groups = join(xp, folder, 2)
    x = xp.arange(12).reshape([3, 4]).float()
    for result in together(*(lambda g=g: g.all_reduce(x[:, 1:3]) for g in groups)):
        assert result.tolist() == [[2.0, 4.0], [10.0, 12.0], [18.0, 20.0]]
    leave(groups)


def test_a_group_of_one_needs_nothing(xp):
    group = SharedMemoryCommunicator(xp, 0, 1, Path("/nonexistent"))
    x = xp.ones([2])
    assert group.all_reduce(x) is x and group.all_gather(x) is x and group.broadcast(x) is x
    group.barrier()
    group.close()


def test_ranks_that_disagree_both_learn_it(xp, folder):
    first, second = join(xp, folder, 2)
    x = xp.ones([2])
    errors = together(lambda: first.all_reduce(x), lambda: second.broadcast(x, 1))
    assert all(isinstance(e, WorkerError) and "disagree" in str(e) for e in errors)
    assert "all_reduce" in str(errors[0]) and "broadcast of 8 bytes from rank 1" in str(errors[0])
    with pytest.raises(WorkerError, match="disagree"):
        first.barrier()
    leave((first, second))


def test_different_shapes_are_noticed(xp, folder):
    groups = join(xp, folder, 2)
    errors = together(
        lambda: groups[0].all_reduce(xp.ones([2])), lambda: groups[1].all_reduce(xp.ones([3]))
    )
    assert all(isinstance(e, WorkerError) and "bytes" in str(e) for e in errors)
    leave(groups)


def test_a_closed_communicator_says_so(xp, folder):
    first, second = join(xp, folder, 2)
    first.close()
    with pytest.raises(WorkerError, match="closed"):
        first.barrier()
    with pytest.raises(WorkerError, match="rank 0 left the group"):
        second.all_reduce(xp.ones([2]))
    second.close()
    second.close()


def test_a_rank_that_never_comes(xp, folder):
    with pytest.raises(WorkerError, match=r"ranks \[1\] did not join"):
        SharedMemoryCommunicator(xp, 0, 2, folder, connect_timeout_s=0.2)
    other = folder.parent / "other"
    other.mkdir(mode=0o700)
    with pytest.raises(WorkerError, match="rank 0 did not open"):
        SharedMemoryCommunicator(xp, 1, 2, other, connect_timeout_s=0.2)


def test_groups_of_different_size_do_not_mix(xp, folder):
    results = together(
        lambda: SharedMemoryCommunicator(xp, 0, 2, folder, connect_timeout_s=60),
        lambda: SharedMemoryCommunicator(xp, 1, 3, folder, connect_timeout_s=4),
    )
    assert isinstance(results[0], WorkerError) and "rank 1 of 3" in str(results[0])
    assert isinstance(results[1], WorkerError)


def test_the_folder_must_be_private(xp, folder, tmp_path):
    folder.chmod(0o750)
    with pytest.raises(ConfigError, match="0700"):
        SharedMemoryCommunicator(xp, 0, 2, folder)
    with pytest.raises(ConfigError, match="No such file"):
        SharedMemoryCommunicator(xp, 0, 2, tmp_path / "absent")
    with pytest.raises(ConfigError, match="outside a group of 2"):
        SharedMemoryCommunicator(xp, 2, 2, folder)


def test_a_path_too_long_for_a_socket(xp, tmp_path):
    folder = tmp_path / ("x" * 120)
    folder.mkdir(mode=0o700)
    with pytest.raises(ConfigError, match="TMPDIR"):
        SharedMemoryCommunicator(xp, 0, 2, folder)


# -- real processes --------------------------------------------------------------------------------


def start(library, rank, folder, rounds, end):
    program = str(ROOT / "tests" / "collective_rank.py")
    arguments = (library, str(rank), "2", str(folder), str(rounds), end)
    return subprocess.Popen(
        [sys.executable, program, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )


def test_two_processes_get_the_same_bits(tensor_library, folder):
    with (
        start(tensor_library, 0, folder, 40, "close") as first,
        start(tensor_library, 1, folder, 40, "close") as second,
    ):
        outputs = [p.communicate(timeout=300)[0].strip() for p in (first, second)]
    assert len(outputs[0]) == 64 and outputs[0] == outputs[1]
    assert (first.returncode, second.returncode) == (0, 0)


@pytest.mark.parametrize("end", ["die", "kill"])
def test_a_dead_peer_is_noticed_at_once(xp, tensor_library, folder, end):
    with start(tensor_library, 1, folder, 0, "die" if end == "die" else "hang") as peer:
        group = SharedMemoryCommunicator(xp, 0, 2, folder)
        group.barrier()
        assert peer.stdout.readline()
        if end == "kill":
            peer.kill()
        started = time.monotonic()
        with pytest.raises(WorkerError, match="rank 1 left the group"):
            for _ in range(2):  # the first may still be sent before the peer is gone
                group.all_reduce(xp.ones([4]))
        assert time.monotonic() - started < 20  # not the time limit of a hanging peer
        group.close()


def test_a_peer_killed_while_it_is_waited_for(xp, tensor_library, folder):
    with start(tensor_library, 1, folder, 0, "hang") as peer:
        group = SharedMemoryCommunicator(xp, 0, 2, folder)
        group.barrier()
        threading.Timer(0.5, peer.kill).start()
        with pytest.raises(WorkerError, match="rank 1 left the group"):
            group.all_reduce(xp.ones([4]))
        group.close()


def test_a_hanging_peer_is_given_up(xp, tensor_library, folder):
    with start(tensor_library, 1, folder, 0, "hang") as peer:
        group = SharedMemoryCommunicator(xp, 0, 2, folder)
        group.barrier()
        group._timeout_s = 0.5
        with pytest.raises(WorkerError, match=r"did not reach collective 1 within 0\.5 s"):
            group.all_reduce(xp.ones([4]))
        peer.kill()
        group.close()
