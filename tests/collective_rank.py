"""A rank of a group as a program: collective_rank.py LIBRARY RANK SIZE FOLDER ROUNDS END.

Joins, reduces ROUNDS times, prints a digest of all results, then leaves ("close"), dies without a
word ("die") or stops taking part ("hang").
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path

import numpy as np

from fastdeploy_core import tensor
from fastdeploy_core.devices.host_communicator import SharedMemoryCommunicator


def main(library: str, rank: int, size: int, folder: str, rounds: int, end: str) -> None:
    xp = tensor.load(library)
    group = SharedMemoryCommunicator(xp, rank, size, Path(folder))
    rng = np.random.default_rng(rank)
    digest = hashlib.sha256()
    for turn in range(rounds):
        x = xp.tensor(rng.standard_normal((turn % 7 + 1, 33)).astype(np.float32))
        digest.update(xp.to_numpy(group.all_reduce(x)).tobytes())
        digest.update(xp.to_numpy(group.all_gather(x)).tobytes())
        digest.update(xp.to_numpy(group.broadcast(x, turn % size)).tobytes())
    group.barrier()
    sys.stdout.write(digest.hexdigest() + "\n")
    sys.stdout.flush()
    if end == "die":
        os._exit(7)
    if end == "hang":
        time.sleep(100)
    group.close()


if __name__ == "__main__":
    name, rank, size, folder, rounds, end = sys.argv[1:]
    main(name, int(rank), int(size), folder, int(rounds), end)
