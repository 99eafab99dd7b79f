"""Damaged copies of a GGUF file, each opened as a model: run as a program, in a process of its own.

    python tests/gguf_mutations.py FILE FOLDER SEED COUNT LIBRARY

Prints one JSON line: how many were refused with an error of ours, how many still load, what else
was raised, and by how much memory grew. Address space is limited, so that a number believed too
early fails.
"""

from __future__ import annotations

import json
import os
import resource
import struct
import sys
import traceback
from collections import Counter
from pathlib import Path

import numpy as np

EXTREMES = (0, 1, 2, 31, 255, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 62,
    1 << 63,
            (1 << 64) - 1)  # fmt: skip
KINDS = (*["bits"] * 5, *["bytes", "number"] * 2, "long", "cut", "drop", "repeat", "move")
SPARE_BYTES = 1 << 30


def mutate(data: bytes, header: int, rng: np.random.Generator) -> bytes:
    """One or two changes, most of them in the header."""
    for _ in range(int(rng.integers(1, 3))):
        end = header if rng.random() < 0.85 else len(data)
        at = int(rng.integers(0, max(1, min(end, len(data)))))
        kind = rng.choice(KINDS)
        length = int(rng.integers(1, 64))
        if kind == "bits":
            data = data[:at] + bytes([data[at] ^ (1 << int(rng.integers(8)))]) + data[at + 1 :]
        elif kind == "bytes":
            data = data[:at] + rng.bytes(min(length, 8)) + data[at + min(length, 8) :]
        elif kind == "number":
            data = data[:at] + struct.pack("<I", int(rng.choice(EXTREMES[:9]))) + data[at + 4 :]
        elif kind == "long":
            value = EXTREMES[int(rng.integers(len(EXTREMES)))]
            data = data[:at] + struct.pack("<Q", value) + data[at + 8 :]
        elif kind == "cut" and rng.random() < 0.3:
            data = data[: max(at, 1)]
        elif kind == "drop":
            data = data[:at] + data[at + length :]
        elif kind == "repeat":
            data = data[:at] + data[at : at + length] + data[at:]
        elif kind == "move":
            other = int(rng.integers(0, max(1, len(data) - length)))
            data = data[:at] + data[other : other + length] + data[at + length :]
        if not data:
            return b"G"
    return data


def open_as_model(path: Path, library: str) -> None:
    """Everything a server does with the file up to its first step."""
    from fastdeploy_core.config.model import read_model_config
    from fastdeploy_core.plugins.checkpoints import find_model
    from fastdeploy_core.tokenizer import Tokenizer
    from tests.paged import PagedModel, with_quantizer

    drivers = with_quantizer("gguf")
    model = PagedModel(path, library, dtype="float32", drivers=drivers, max_model_len=64)
    config = read_model_config(path, {}, find_model)
    tokenizer = Tokenizer.load(config.tokenizer_path)
    ids = tokenizer.encode("Hello, 你好 <s> 12")
    tokenizer.decode(ids)
    known = [token for token in ids if token < model.loaded.shapes.vocab_size][:8] or [0]
    model.step([("a", known)])


def main() -> None:
    from fd_gguf.reader import GGUFFile

    from fastdeploy_core.errors import FastDeployError

    source, folder, seed, count, library = sys.argv[1:]
    os.environ["FD_CACHE_DIR"] = str(Path(folder) / "cache")
    data, header = Path(source).read_bytes(), len(GGUFFile(Path(source)).header())
    open_as_model(Path(source), library)  # whatever is imported or allocated once
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + SPARE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    outcomes, wrong = Counter[str](), []
    path = Path(folder) / "mutated.gguf"
    for number in range(int(count)):
        path.unlink(missing_ok=True)  # the last one may still be mapped
        path.write_bytes(mutate(data, header, np.random.default_rng([int(seed), number])))
        try:
            open_as_model(path, library)
            outcomes["loads"] += 1
        except FastDeployError as error:
            outcomes["refused"] += 1
            if not str(error):
                wrong.append(f"{number}: an error without words")
        except KeyboardInterrupt:
            raise
        except BaseException:
            wrong.append(f"{number}: {traceback.format_exc()[-1500:]}")
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(json.dumps({**outcomes, "wrong": wrong, "grown_bytes": grown * 1024}))


if __name__ == "__main__":
    main()
