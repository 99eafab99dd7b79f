"""How evenly text streams while other clients send pictures.

    OMP_NUM_THREADS=1 python plugins/fd-vision/benchmarks/text_beside_pictures.py
    python plugins/fd-vision/benchmarks/text_beside_pictures.py --shapes 7b --side 1024

A real server, by default with the demo model, models/qwen3-vl-tiny; with --shapes one of those of
pictures.py, with random weights. Clients stream answers to prompts of random tokens, one after the
other, for --seconds: alone, then beside senders of pictures, then beside senders of text prompts
of as many tokens. Senders run in processes of their own; each sends as fast as it is answered, and
asks for one token. Every picture and prompt is a new one. Arguments after -- go to the server.

between   ms between two tokens of an answer: p50, p99, longest; of all clients together
first     ms to the first token of an answer, median
sent      what the senders got answered, per second
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import multiprocessing
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pictures
from PIL import Image

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from tests import server_process  # noqa: E402 - of the folder above
from tests.server_process import serving  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.sharedctypes import Synchronized
    from multiprocessing.synchronize import Event

DEMO = ROOT / "models" / "qwen3-vl-tiny"
TEMPLATE = """{% for message in messages %}{% for part in message.content %}\
{{ '<|vision_start|><|image_pad|><|vision_end|>' if part.type == 'image' else part.text }}\
{% endfor %}{% endfor %}"""
JsonObject = dict[str, Any]


class Load(NamedTuple):
    """What clients and senders ask for."""

    url: str
    model: str
    vocabulary: int  # ids of prompts stay below it
    input_len: int  # tokens of a client's prompt
    output_len: int
    side: int  # pixels of a picture

    def text(self, random: np.random.Generator, length: int, max_tokens: int) -> JsonObject:
        """A streamed completion of random tokens."""
        ids = random.integers(100, self.vocabulary, length).tolist()
        return {"model": self.model, "prompt": ids, "max_tokens": max_tokens, "stream": True}

    def picture(self, random: np.random.Generator) -> JsonObject:
        """A question about a new picture: large spots of colour, as JPEG."""
        spots = random.integers(0, 255, (16, 16, 3), dtype=np.uint8)
        file = io.BytesIO()
        Image.fromarray(spots).resize((self.side, self.side)).save(file, "JPEG")
        url = f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "w"}]
        return {
            "model": self.model, "max_tokens": 1,
            "messages": [{"role": "user", "content": parts}],
        }  # fmt: skip


def ask(url: str, body: JsonObject) -> Iterator[float]:
    """When each event of the answer came; one without `stream`. What the server refuses raises."""
    data = json.dumps({"temperature": 0, "ignore_eos": True, **body}).encode()
    asked = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(asked, timeout=300) as answer:
            for line in answer:
                if b"error" in line[:20]:
                    raise RuntimeError(line.decode())
                if line.startswith((b"data: {", b"{")):
                    yield time.perf_counter()
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"{error}: {error.read().decode()}") from error


def length_of(load: Load) -> int:
    """Tokens of a prompt with a picture."""
    body = load.picture(np.random.default_rng(0))
    asked = urllib.request.Request(
        f"{load.url}/v1/chat/completions", json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )  # fmt: skip
    with urllib.request.urlopen(asked, timeout=300) as answer:
        return int(json.load(answer)["usage"]["prompt_tokens"])


def send(load: Load, length: int, seed: int, enough: Event, count: Synchronized[int]) -> None:
    """Ask until it is enough: about pictures, or with `length` for so many tokens of text."""
    random = np.random.default_rng(seed)
    while not enough.is_set():
        if length:
            list(ask(f"{load.url}/v1/completions", load.text(random, length, 1)))
        else:
            list(ask(f"{load.url}/v1/chat/completions", load.picture(random)))
        with count.get_lock():
            count.value += 1


@contextmanager
def senders(load: Load, count: int, length: int) -> Iterator[Synchronized[int]]:
    """So many processes that send. Yields how much was answered."""
    context = multiprocessing.get_context("spawn")
    enough, answered = context.Event(), context.Value("i", 0)
    started = [
        context.Process(target=send, args=(load, length, time.time_ns() + n, enough, answered))
        for n in range(count)
    ]
    for process in started:
        process.start()
    while count and answered.value < count:  # each has started, and the server is warm
        time.sleep(0.05)
        if any(process.exitcode for process in started):
            raise RuntimeError("a sender failed, see above")
    try:
        yield answered
    finally:
        enough.set()
        for process in started:
            process.join()


def stream(load: Load, clients: int, seconds: float, seed: int) -> tuple[list[float], list[float]]:
    """Seconds to first tokens, and between tokens, of all clients."""
    first, between = list[float](), list[float]()
    until = time.perf_counter() + seconds

    def client(number: int) -> None:
        random = np.random.default_rng([seed, number])
        while (began := time.perf_counter()) < until:
            body = load.text(random, load.input_len, load.output_len)
            times = list(ask(f"{load.url}/v1/completions", body))
            first.append(times[0] - began)
            between.extend(np.diff(times[: load.output_len]))

    threads = [threading.Thread(target=client, args=(n,)) for n in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return first, between


def write_shapes(size: str, folder: Path) -> int:
    """A folder that a server can serve, without weights. The size of its vocabulary."""
    pictures.write_folder(size, folder)
    pictures.write_tokenizer(folder, pictures.QWEN_WORDS, 151665, "Qwen2_5_VLProcessor")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return 100_000


def measure(load: Load, options: argparse.Namespace) -> None:
    """Print one line for each kind of load."""
    length = length_of(load)
    stream(load, options.clients, 1.0, 0)  # warms up
    print(
        f"{options.clients} clients, {options.senders} senders, {length} tokens a picture's prompt"
    )
    kinds = {"alone": (0, 0), "pictures": (options.senders, 0), "text": (options.senders, length)}
    for seed, (kind, (count, tokens)) in enumerate(kinds.items(), 1):
        with senders(load, count, tokens) as answered:
            before, began = answered.value, time.perf_counter()
            first, between = stream(load, options.clients, options.seconds, seed)
            rate = (answered.value - before) / (time.perf_counter() - began)
        p50, p99, most = (np.percentile(between, p) * 1e3 for p in (50, 99, 100))
        print(
            f"{kind:>9}: between p50 {p50:.2f} p99 {p99:.2f} longest {most:.1f} ms of "
            f"{len(between)}; first {np.median(first) * 1e3:.1f} ms; sent {rate:.2f} /s",
            flush=True,
        )


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", choices=tuple(pictures.TEXT), help="instead of the demo model")
    parser.add_argument("--side", type=int, default=320, help="pixels")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--senders", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each kind of load")
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("server", nargs="*", help="after --: arguments of fastdeploy serve")
    options = parser.parse_args()
    server_process.START_S = 300  # kernels may have to be compiled and measured
    with tempfile.TemporaryDirectory() as name:
        folder, vocabulary, more = DEMO, 500, list[str]()
        if options.shapes:
            folder, more = Path(name), ["--load-format", "dummy", "--max-model-len", "4096"]
            vocabulary = write_shapes(options.shapes, folder)
        with serving(folder, *more, *options.server) as server:
            load = Load(
                server.url, folder.name, vocabulary, options.input_len, options.output_len,
                options.side,
            )  # fmt: skip
            measure(load, options)


if __name__ == "__main__":
    main()
