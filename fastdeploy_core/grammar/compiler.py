"""Compiles client grammars in child processes that are killed when they take too long.

Front ends use it before a request is sent to the engine. So a hostile or hopeless constraint ends
its own request with InvalidRequest and harms no other. The engine never compiles client text.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

import msgspec

from fastdeploy_core.config import StructuredOutputsConfig
from fastdeploy_core.errors import ConfigError, InvalidRequest, QueueFull, Unavailable
from fastdeploy_core.plugins.discovery import PluginEntry
from fastdeploy_core.plugins.known import providers
from fastdeploy_core.types import StructuredOutputsParams

from .child import IDLE_FACTOR, Answer, Setup

logger = logging.getLogger(__name__)

# While one child runs into its time limit, the other one still serves.
NUM_CHILDREN = 2
START_TIMEOUT_S = 60.0  # reading a large tokenizer and importing, on a busy machine
MAX_WAIT_S = 10.0  # for a free child; after that the client is told to retry
MAX_MEMORY_BYTES = 1024**3  # that one compilation may add to its process
MAX_CACHED = 128  # answers, the ones used last
MAX_CACHED_BYTES = 256 * 1024  # of a constraint and its answer
MAX_ANSWER_BYTES = 16 * 1024 * 1024


class _Child:
    """One compiling process; started on first use, and again after it was killed."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Connection | None = None
        self._lock = threading.Lock()

    def compile(self, body: bytes) -> Answer:
        """The answer; TimeoutError or EOFError if the child had to be killed or died."""
        with self._lock:
            process, channel = self._process, self._channel
            if channel is None or process is None or process.poll() is not None:
                process, channel = self._start()
            try:
                return _ask(channel, body, IDLE_FACTOR * self._setup.timeout_s)
            except (TimeoutError, EOFError, OSError):
                self._stop()
                if process.returncode == -signal.SIGPROF:
                    raise TimeoutError from None
                raise

    def close(self) -> None:
        """End the process, even in the middle of a compilation."""
        process = self._process
        if process is not None:
            # a running compile() then reads the end of the stream and releases the lock
            process.kill()
        with self._lock:
            self._stop()

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        if self._channel is not None:
            self._channel.close()

    def _start(self) -> tuple[subprocess.Popen[bytes], Connection]:
        self._stop()
        channel, end = Pipe()
        self._channel = channel
        # -P: no imports from the working directory.
        self._process = process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            [sys.executable, "-P", "-m", "fastdeploy_core.grammar.child", str(end.fileno())],
            pass_fds=(end.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=None if logger.isEnabledFor(logging.DEBUG) else subprocess.DEVNULL,
        )
        end.close()
        try:
            answer = _ask(channel, msgspec.msgpack.encode(self._setup), START_TIMEOUT_S)
        except (TimeoutError, EOFError, OSError) as error:
            self._stop()
            raise Unavailable(
                f"the grammar compiler process did not start ({type(error).__name__}); backend "
                f"{self._setup.backend.name}; run: fastdeploy plugins doctor"
            ) from error
        if answer.error:
            self._stop()
            raise ConfigError(answer.error)
        return process, channel


def _ask(channel: Connection, body: bytes, timeout_s: float) -> Answer:
    channel.send_bytes(body)
    if not channel.poll(timeout_s):
        raise TimeoutError
    return msgspec.msgpack.decode(channel.recv_bytes(MAX_ANSWER_BYTES), type=Answer)


class GrammarCompiler:
    """Compiles constraints; thread-safe. `backend` goes into Request.grammar_backend, the result of
    compile() into Request.grammar."""

    def __init__(self, setup: Setup | None, config: StructuredOutputsConfig) -> None:
        self.backend = "" if setup is None else setup.backend.name
        self._config = config
        self._cache: OrderedDict[bytes, Answer] = OrderedDict()  # refusals, too
        self._lock = threading.Lock()
        # Last in, first out: the child that ran last has warm caches.
        self._idle: queue.LifoQueue[_Child] = queue.LifoQueue()
        self._children = [_Child(setup) for _ in range(NUM_CHILDREN)] if setup else []
        for child in self._children:
            self._idle.put(child)
        self._threads = ThreadPoolExecutor(NUM_CHILDREN + 2, "grammar-compiler")
        self._closed, self._broken = False, ""  # why the backend cannot be used at all

    @classmethod
    def start(
        cls,
        tokenizer_path: str | Path,
        backend: PluginEntry | None,
        *,
        vocab_size: int = 0,
        eos_token_ids: Sequence[int] = (),
        config: StructuredOutputsConfig | None = None,
    ) -> GrammarCompiler:
        """`tokenizer_path` is a model folder or its tokenizer.json, `backend` the grammar driver
        that was resolved; None: every constraint is refused. No process is started before the first
        constraint arrives."""
        config = config or StructuredOutputsConfig()
        if backend is None:
            return cls(None, config)
        path = Path(tokenizer_path)
        path = path / "tokenizer.json" if path.is_dir() else path
        setup = Setup(
            backend=backend,
            tokenizer_json=str(path.resolve()),
            vocab_size=vocab_size,
            eos_token_ids=[int(t) for t in eos_token_ids],
            options={
                "disable_any_whitespace": config.disable_any_whitespace,
                "max_source_bytes": config.max_source_bytes,
                "max_depth": config.max_depth,
            },
            timeout_s=config.compile_timeout_s,
            memory_bytes=MAX_MEMORY_BYTES,
        )
        return cls(setup, config)

    def compile(self, params: StructuredOutputsParams) -> bytes:
        """The compiled constraint, or InvalidRequest; ConfigError where the backend cannot be
        loaded. Waits for a free child and at most the time limit."""
        if not self.backend:
            raise InvalidRequest(self._why_none(), param="structured_outputs")
        try:
            body = msgspec.msgpack.encode(params)
        except (RecursionError, TypeError, ValueError, OverflowError):
            raise InvalidRequest(
                f"structured_outputs.{params.kind} cannot be used: it is not valid JSON, or nests "
                f"more than {self._config.max_depth} levels deep",
                param=f"structured_outputs.{params.kind}",
            ) from None
        with self._lock:
            answer = self._cache.pop(body, None)
        answer = answer or self._ask(body)
        if len(body) + len(answer.compiled) <= MAX_CACHED_BYTES:
            with self._lock:
                self._cache[body] = answer
                if len(self._cache) > MAX_CACHED:
                    self._cache.popitem(last=False)
        if answer.error:
            raise InvalidRequest(answer.error, param=answer.param)
        return answer.compiled

    async def compile_async(self, params: StructuredOutputsParams) -> bytes:
        """compile() on a thread of this compiler."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self.compile, params)

    def close(self) -> None:
        """Kill the children; later calls fail."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for child in self._children:
            child.close()

    def _why_none(self) -> str:
        if self._config.backend == "off":
            return (
                "structured outputs are turned off on this server "
                "(--guided-decoding-backend off); remove structured_outputs from the request"
            )
        known = " or ".join(f"pip install {of}" for of in sorted({*providers("grammar").values()}))
        return (
            "structured outputs need a grammar backend, and none is installed on this server; "
            f"install one: {known}"
        )

    def _ask(self, body: bytes) -> Answer:
        if self._closed:
            raise InvalidRequest("the grammar compiler is closed", param="structured_outputs")
        if self._broken:
            raise ConfigError(self._broken)
        try:
            child = self._idle.get(timeout=MAX_WAIT_S)
        except queue.Empty:
            raise QueueFull("the grammar compiler is busy; try again", retry_after_s=2.0) from None
        try:
            return child.compile(body)
        except TimeoutError:
            why = f"it takes longer than {self._config.compile_timeout_s:g} s to compile"
        except (EOFError, OSError):
            why = "it needs more memory or stack to compile than is possible"
        except ConfigError as error:
            self._broken = str(error)
            raise
        finally:
            self._idle.put(child)
        logger.warning("grammar compilation refused and its process ended: %s", why)
        return Answer(
            error=f"structured_outputs cannot be used: {why}; simplify the schema or grammar",
            param="structured_outputs",
        )
