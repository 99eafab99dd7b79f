"""The process that compiles grammars: reads requests from stdin and writes answers to stdout.

Frames are a 4-byte big-endian length and MessagePack. The first frame in is the set-up; the first
frame out says whether it worked. Only compiler.py starts this process, and may kill it.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import signal
import struct
import sys
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from fastdeploy_core.errors import FastDeployError, InvalidRequest
from fastdeploy_core.plugins.discovery import PluginEntry
from fastdeploy_core.plugins.drivers import load
from fastdeploy_core.types import StructuredOutputsParams

HEADER = struct.Struct(">I")


class Setup(msgspec.Struct, kw_only=True):
    """The first message; sent once by the parent."""

    backend: PluginEntry
    tokenizer_json: str
    vocab_size: int
    eos_token_ids: list[int]
    options: dict[str, Any]
    timeout_s: float
    memory_bytes: int


class Answer(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The answer to the set-up or to one compilation; `error` is empty when it worked."""

    compiled: bytes = b""
    error: str = ""
    param: str = ""


def read_frame(stream: BinaryIO) -> bytes:
    """Read one frame; empty at the end of the stream."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return b""
    return stream.read(HEADER.unpack(header)[0])


def write_frame(stream: BinaryIO, body: bytes) -> None:
    """Write one frame."""
    stream.write(HEADER.pack(len(body)) + body)
    stream.flush()


def limit_memory(extra_bytes: int) -> None:
    """Let the address space grow by at most this much; no core dumps."""
    try:
        import resource
    except ImportError:  # not a POSIX system: only the time limit applies
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    statm = Path("/proc/self/statm")
    if statm.exists():
        pages = int(statm.read_text(encoding="ascii").split()[0])
        limit = pages * os.sysconf("SC_PAGE_SIZE") + extra_bytes
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def compile_one(backend: Any, setup: Setup, body: bytes) -> Answer:
    """Compile one constraint; every failure becomes an answer, except the end of the process."""
    try:
        params = msgspec.msgpack.decode(body, type=StructuredOutputsParams)
        return Answer(compiled=backend.compile(params, setup.options))
    except InvalidRequest as error:
        return Answer(error=str(error), param=error.param or "structured_outputs")
    except MemoryError:
        return Answer(error="it needs too much memory to compile", param="structured_outputs")
    except Exception as error:  # an error of a plugin or library: the client sees its class only
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return Answer(
            error=f"the grammar library refused it ({type(error).__name__})",
            param="structured_outputs",
        )


def main() -> int:
    """Serve until stdin ends."""
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = io.StringIO()  # a library that prints must not write into the frames
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and closes stdin
    setup = msgspec.msgpack.decode(read_frame(requests), type=Setup)
    try:
        driver = load(setup.backend, preflight=False)  # this process is one that may fail
        backend = driver(setup.tokenizer_json, setup.vocab_size, setup.eos_token_ids)
    except (FastDeployError, OSError, ValueError) as error:
        write_frame(answers, msgspec.msgpack.encode(Answer(error=str(error))))
        return 1
    limit_memory(setup.memory_bytes)
    write_frame(answers, msgspec.msgpack.encode(Answer()))
    while body := read_frame(requests):
        # A parent that is gone cannot kill this process; then the alarm does.
        signal.alarm(math.ceil(setup.timeout_s) + 2)
        answer = compile_one(backend, setup, body)
        signal.alarm(0)
        write_frame(answers, msgspec.msgpack.encode(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
