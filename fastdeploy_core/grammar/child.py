"""The process that compiles grammars: requests come and answers go through a connection.

Each message is MessagePack. The first one in is the set-up; the first one out says whether it
worked. Only compiler.py starts this process, and may kill it.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from fastdeploy_core.errors import InvalidRequest
from fastdeploy_core.plugins.discovery import PluginEntry
from fastdeploy_core.plugins.drivers import load
from fastdeploy_core.types import StructuredOutputsParams

# A compilation that sleeps, or gets no processor, ends after this many times its time limit.
IDLE_FACTOR = 10


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


def limit_memory(extra_bytes: int) -> None:
    """Let the address space grow by at most this much; no core dumps."""
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


def main(handle: int) -> int:
    """Serve until the connection of this handle ends."""
    channel = Connection(handle)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and closes its end
    setup = msgspec.msgpack.decode(channel.recv_bytes(), type=Setup)
    try:
        driver = load(setup.backend, preflight=False)  # this process is one that may fail
        backend = driver(setup.tokenizer_json, setup.vocab_size, setup.eos_token_ids)
    except Exception as error:  # of a plugin
        text = f"grammar backend {setup.backend.name} cannot be built: {type(error).__name__}"
        channel.send_bytes(msgspec.msgpack.encode(Answer(error=f"{text}: {error}")))
        return 1
    limit_memory(setup.memory_bytes)
    channel.send_bytes(msgspec.msgpack.encode(Answer()))
    with contextlib.suppress(EOFError):
        while body := channel.recv_bytes():
            # A parent that is gone cannot kill this process; then the alarm does.
            signal.alarm(math.ceil(IDLE_FACTOR * setup.timeout_s) + 2)
            # Processor time, so that the machine's load does not decide what is refused.
            signal.setitimer(signal.ITIMER_PROF, setup.timeout_s)
            answer = compile_one(backend, setup, body)
            signal.setitimer(signal.ITIMER_PROF, 0)
            channel.send_bytes(msgspec.msgpack.encode(answer))
            signal.alarm(0)
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
