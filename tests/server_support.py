"""What the server tests share: a tiny byte-level tokenizer, a scripted engine, a live server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from fastdeploy_core.config.server import ServerConfig
from fastdeploy_core.engine.input import RequestLimits
from fastdeploy_core.engine.stream import OutputStream
from fastdeploy_core.errors import FastDeployError, Unavailable
from fastdeploy_core.serving.app import create_app
from fastdeploy_core.serving.http import event_loop
from fastdeploy_core.serving.http.listening import bind_socket
from fastdeploy_core.serving.server import ApiServer
from fastdeploy_core.tokenizer import Tokenizer
from fastdeploy_core.types import FinishReason, Request, RequestOutputDelta, SequenceDelta
from fastdeploy_core.types.engine import EngineHealth, EngineInfo, EngineStats
from fastdeploy_core.types.step import TokenLogprobs
from fastdeploy_testing.fakes import null_hf_config

EOS = "<eos>"
T = TypeVar("T")
SPECIALS = (EOS, "<|user|>", "<|assistant|>")
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}[call {{ c.function.name }}]{% endfor %}{% endfor %}"
    "{% if tools %}(tools: {% for t in tools %}{{ t.function.name }} {% endfor %}){% endif %}"
    "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking %}<think>\n{% endif %}"
    "{% endif %}"
)


def write_tokenizer(folder: Path) -> Path:
    """A byte-level tokenizer without merges: one token per byte, ids of bytes in code-point
    order."""
    vocab = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIALS))
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": EOS, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


SLOW_FILE = "slow"
# A starved server answers late: clients without a limit of their own wait longer than httpx's 5 s.
vars(httpx.get.__kwdefaults__["timeout"]).update(httpx.Timeout(60.0).as_dict())


@contextmanager
def slowly(model: Path) -> Iterator[None]:
    """Engines of this null model take steps so slow that a request outlives what a test does
    meanwhile, also where the test gets no processor for seconds."""
    (model / SLOW_FILE).touch()
    try:
        yield
    finally:
        (model / SLOW_FILE).unlink()


def write_null_model(folder: Path, **options: Any) -> Path:
    """A model folder for device null (or faulty): shapes of a tiny model, and no weights."""
    write_tokenizer(folder)
    faults = options.pop("faults", [])
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 259,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "eos_token_id": 256,
        **null_hf_config(faults=faults, **{"vocab_size": 259, "slow_file": SLOW_FILE, **options}),
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


Script = Callable[[str, int], str]  # prompt text and choice index to the text of the answer


class ScriptedEngine:
    """The engine interface, answering each prompt with the text a script gives for it."""

    def __init__(self, tokenizer: Tokenizer, script: Script, **info: Any) -> None:
        self.tokenizer = tokenizer
        self.script = script
        facts = {"max_model_len": 512, "max_request_tokens": 512, **info}
        self.info = EngineInfo(
            num_blocks=64,
            block_size=16,
            vocab_size=len(tokenizer),
            max_num_seqs=8,
            max_num_batched_tokens=512,
            served_names=["tiny"],
            **facts,
        )
        self.requests: list[Request] = []
        self.running = 0
        self.aborted = 0
        self.num_generated = 0
        self.ended_branches: list[str] = []
        self.pause_s = 0.0
        self.gate: threading.Event | None = None  # answers wait for it after their first token
        self.refuse: FastDeployError | None = None
        self.fail: FastDeployError | None = None  # raised after two tokens
        self.step_tokens = 1
        self.well = True
        self.draining = False

    def check_admission(self, num_tokens: int = 0) -> None:
        if self.refuse is not None:
            raise self.refuse

    async def generate(
        self, request: Request, chunk_tokens: int = 1
    ) -> AsyncIterator[RequestOutputDelta]:
        self.requests.append(request)
        self.running += 1
        stream, done = OutputStream(request, chunk_tokens), False
        try:
            try:
                async for made in self._deltas(request):
                    stream.put(made)
                    if stream.is_due():
                        delta = await stream.get()
                        done = delta.finished
                        yield delta
            except FastDeployError as error:
                stream.fail(error)
                while True:
                    yield await stream.get()
        finally:
            self.running -= 1
            self.aborted += not done

    async def _deltas(self, request: Request) -> AsyncIterator[RequestOutputDelta]:
        prompt = self.tokenizer.decode(request.prompt_token_ids)
        params = request.sampling
        left = {}
        for index in range(params.n):
            ids = self.tokenizer.encode(self.script(prompt, index), False)
            left[index] = [*ids, self.tokenizer.token_to_id(EOS)]
        position = 0
        made = dict.fromkeys(left, 0)
        while left:
            parts = []
            for index in list(left):
                ids, left[index] = left[index][: self.step_tokens], left[index][self.step_tokens :]
                ids = ids[: (params.max_tokens or 512) - made[index]]
                made[index] += len(ids)
                self.num_generated += len(ids)
                reason = None
                if not left[index]:
                    reason = FinishReason.STOP
                elif made[index] >= (params.max_tokens or 512):
                    reason = FinishReason.LENGTH
                logprobs = None
                if params.logprobs is not None:
                    logprobs = [self._logprobs(t, params.logprobs) for t in ids]
                parts.append(SequenceDelta(index=index, token_ids=ids, logprobs=logprobs))
                if reason is not None:
                    parts[-1].finish_reason = reason
                    del left[index]
            first = position == 0
            prompt_logprobs = None
            if first and params.prompt_logprobs is not None:
                rest = [self._logprobs(t, params.prompt_logprobs) for t in request.prompt_token_ids]
                prompt_logprobs = [None, *rest[1:]]
            yield RequestOutputDelta(
                request_id=request.request_id,
                position=position,
                sequences=parts,
                prompt_logprobs=prompt_logprobs,
                num_cached_tokens=2 if first else None,
                queue_s=0.001 if first else None,
                finished=not left,
            )
            position += 1
            if self.fail is not None and position == 2:
                raise self.fail
            while self.gate is not None and not self.gate.is_set():
                await asyncio.sleep(0.005)
            await asyncio.sleep(self.pause_s)

    def _logprobs(self, token: int, count: int) -> TokenLogprobs:
        others = [(token + 1 + i) % 256 for i in range(count - 1)] if count else []
        ids = [token, *others]
        values = [float("-inf") if i == 2 else -0.5 - i for i in range(len(ids))]
        return TokenLogprobs(ids, values, 1)

    def end_branches(self, branch_ids: Sequence[str]) -> None:
        self.ended_branches += branch_ids

    def health(self) -> EngineHealth:
        return EngineHealth(
            alive=self.well,
            ready=self.well and not self.draining,
            draining=self.draining,
            reason="" if self.well else "no step for 31 s at /usr/lib/python3/engine.py",
        )

    async def stats(self) -> EngineStats:
        return EngineStats(
            num_running=self.running,
            num_blocks_total=64,
            num_blocks_free=60,
            prompt_tokens_total=sum(len(r.prompt_token_ids) for r in self.requests),
            generation_tokens_total=self.num_generated,
        )

    def take_no_more(self) -> None:
        pass

    async def drain(self, grace_s: float) -> None:
        self.draining = True
        self.fail = Unavailable("the server is shutting down")
        if self.gate is not None:
            self.gate.set()

    async def close(self) -> None:
        self.well = False


def limits_of(engine: Any, tokenizer: Tokenizer, **changes: Any) -> RequestLimits:
    """Request limits that fit an engine."""
    values = {
        "max_model_len": engine.info.max_model_len,
        "vocab_size": engine.info.vocab_size,
        "eos_token_ids": tuple(tokenizer.eos_token_ids),
    }
    return RequestLimits(**{**values, **changes})


class LiveServer:
    """A server on a free port, run by a thread of this process."""

    def __init__(self, app: Any, config: ServerConfig) -> None:
        self.app = app
        self.state = app.state.server
        self.socket = bind_socket(config)
        self.port = self.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.server = ApiServer(app, config)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        wait_for(lambda: self.server.started, "the server to start")

    def _run(self) -> None:
        event_loop.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self.server.serve(sockets=[self.socket])

    def signal(self) -> None:
        """What a SIGTERM does."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self.server.stop)

    def run(self, coroutine: Any) -> Any:
        """Run something on the server's loop."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    def join(self, timeout_s: float = 60.0) -> bool:
        """Whether the server has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def close(self) -> None:
        """End it now."""
        with contextlib.suppress(RuntimeError):  # it has ended
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self.server.leave)
        assert self.join(), "the server did not end"
        self.socket.close()


def server_config(**changes: Any) -> ServerConfig:
    """A configuration for tests: any free port of this machine."""
    values = {"host": "127.0.0.1", "port": 0, "served_names": ("tiny",), "log_stats": False}
    return ServerConfig(**{**values, **changes})


@contextmanager
def live(engine: Any, tokenizer: Tokenizer, **changes: Any) -> Iterator[LiveServer]:
    """A live server around an engine, ended afterwards."""
    compiler = changes.pop("compiler", None)
    plugins = changes.pop("plugins", ())
    config = server_config(**changes)
    limits = limits_of(engine, tokenizer)
    app = create_app(engine, tokenizer, config, limits=limits, compiler=compiler, plugins=plugins)
    server = LiveServer(app, config)
    try:
        yield server
    finally:
        if not server.join(0):
            server.close()


def wait_for(condition: Callable[[], T], what: str, timeout_s: float = 60.0) -> T:
    """Poll until a condition is true; its value then. Fails with a message when it never is."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        time.sleep(0.005)
    return found


def lines(answer: httpx.Response) -> Iterator[str]:
    """The lines of a stream. Response.iter_lines also ends them at U+0085 and its like, which JSON
    leaves in texts as they are."""
    rest = b""
    for data in answer.iter_bytes():
        *whole, rest = (rest + data).split(b"\n")
        yield from (line.decode() for line in whole)


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The chunks of a streamed answer; it must end with [DONE]."""
    found = [line for line in lines(response) if line]
    assert all(line.startswith("data: ") for line in found), found
    assert found[-1] == "data: [DONE]"
    return [msgspec.json.decode(line[6:]) for line in found[:-1]]


def raw_request(port: int, head: bytes, body: bytes = b"") -> tuple[int, bytes]:
    """Status and body of one hand-written HTTP request; status 0 when there was no answer."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        data = b""
        try:
            connection.sendall(head + b"\r\n\r\n" + body)
            while chunk := connection.recv(65536):
                data += chunk
        except ConnectionError:
            pass  # refused while still sending
    if not data:
        return 0, b""
    top, _, rest = data.partition(b"\r\n\r\n")
    return int(top.split(b" ")[1]), rest
