"""Many clients that ask about pictures at once: does the server stay responsive, is every picture
encoded once, does memory come back?

    OMP_NUM_THREADS=1 python plugins/fd-vision/benchmarks/clients.py
    python plugins/fd-vision/benchmarks/clients.py --clients 64 --questions 3 --waves 3

A real server with the demo model, models/qwen3-vl-tiny. In each wave every client streams answers
to its questions one after the other. Each wave has pictures of its own, and four clients ask about
each. Meanwhile a prober asks /health, and a client without pictures asks a question.

first     seconds to the first token: of one client alone, then of all at once
health    the longest that /health took
encoded   pictures that went through the tower, and how many there were
memory    proportional set size of all of the server's processes, after each wave
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "models" / "qwen3-vl-tiny" / "training")]

import chat as questions  # noqa: E402 - of the folder above
from scenes import draw_content, paint  # noqa: E402

from tests import server_process  # noqa: E402
from tests.server_process import ServerProcess, serving  # noqa: E402

MODEL = ROOT / "models" / "qwen3-vl-tiny"
ASKED_BY = 4  # clients that ask about the same picture
# Runs at the start of each of the server's processes: the engine's says what it encodes.
COUNTER = """
import os, sys
if "fd_vision.child" not in sys.orig_argv:
    from fastdeploy_core.models.media import SequenceMedia
    encode = SequenceMedia._encode
    def counted(self, items):
        if items:
            with open(os.environ["ENCODED"], "a") as file:
                file.write("".join(item.digest.hex() + chr(10) for item in items))
        return encode(self, items)
    SequenceMedia._encode = counted
"""


def body_of(question: str, picture: bytes | None) -> bytes:
    """Of a streamed request."""
    content: list[dict[str, Any]] = [{"type": "text", "text": question}]
    if picture is not None:
        url = f"data:image/png;base64,{base64.b64encode(picture).decode()}"
        content.insert(0, {"type": "image_url", "image_url": {"url": url}})
    message = {"role": "user", "content": content}
    return json.dumps(
        {"model": MODEL.name, "messages": [message], "max_tokens": 40, "temperature": 0,
         "stream": True}
    ).encode()  # fmt: skip


def first_token_s(url: str, body: bytes) -> float:
    """Seconds until the first token came; the whole answer is read."""
    asked = urllib.request.Request(
        f"{url}/v1/chat/completions", body, {"Content-Type": "application/json"}
    )
    began, found = time.perf_counter(), 0.0
    with urllib.request.urlopen(asked, timeout=300) as answer:
        for line in answer:
            if not found and b'"content":"' in line.replace(b" ", b"") and b'""' not in line:
                found = time.perf_counter() - began
    return found


def pictures_of(random: Random, count: int) -> list[tuple[bytes, list[str]]]:
    """PNG files of the model's kind, and questions about each."""
    made = []
    while len(made) < count:
        scene = draw_content(random, "shapes")
        turns = [questions.ask(random, scene, task) for task in ("count", "where", "shape")]
        if all(turns):
            file = io.BytesIO()
            paint(random, scene, (320, 320)).save(file, "PNG")
            made.append((file.getvalue(), [turn.question for turn in turns if turn]))
    return made


def memory_mib(server: ServerProcess) -> float:
    """Of the process and all that it started."""
    total, waiting = 0, [server.process.pid]
    while waiting:
        pid = waiting.pop()
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
            for listed in Path(f"/proc/{pid}/task").glob("*/children"):
                waiting += map(int, listed.read_text().split())
        except OSError:
            continue
    return total / 1024


class Prober:
    """Asks /health every tenth of a second, and a question without a picture every second."""

    def __init__(self, url: str) -> None:
        self._url, self._enough = url, threading.Event()
        self.health_s, self.text_s = [0.0], [0.0]
        self._threads = [threading.Thread(target=f) for f in (self._health, self._text)]

    def __enter__(self) -> Prober:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._enough.set()
        for thread in self._threads:
            thread.join()

    def _health(self) -> None:
        while not self._enough.wait(0.1):
            began = time.perf_counter()
            with urllib.request.urlopen(f"{self._url}/health", timeout=300) as answer:
                answer.read()
            self.health_s.append(time.perf_counter() - began)

    def _text(self) -> None:
        while not self._enough.wait(1.0):
            self.text_s.append(first_token_s(self._url, body_of("What color is it?", None)))


def wave(url: str, clients: int, count: int, random: Random) -> list[float]:
    """Seconds to the first token of each request of all clients."""
    made = pictures_of(random, -(-clients * count // ASKED_BY))
    asked: list[bytes] = [
        body_of(texts[n % len(texts)], file) for file, texts in made for n in range(ASKED_BY)
    ]
    random.shuffle(asked)

    def client(number: int) -> list[float]:
        return [first_token_s(url, body) for body in asked[number::clients]]

    with ThreadPoolExecutor(clients) as threads:
        return [seconds for own in threads.map(client, range(clients)) for seconds in own]


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--questions", type=int, default=3, help="of a client in a wave")
    parser.add_argument("--waves", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, encoded = Path(name), Path(name) / "encoded"
        (folder / "sitecustomize.py").write_text(COUNTER)
        encoded.touch()
        own = {"PYTHONPATH": f"{folder}:{ROOT}", "ENCODED": str(encoded)}
        server_process.START_S = 300  # other work may keep the processors busy
        with serving(MODEL, "--max-model-len", "1024", extra=own) as server:
            url, random = server.url, Random(1)
            first_token_s(url, body_of("What color is it?", None))
            alone = [
                first_token_s(url, body_of(texts[0], file))
                for file, texts in pictures_of(random, 20)
            ]
            print(f"first, one client: {statistics.median(alone) * 1e3:.0f} ms (median of 20)")
            print(f"memory: {memory_mib(server):.0f} MiB", flush=True)
            for number in range(options.waves):
                before, began = len(encoded.read_text().split()), time.perf_counter()
                with Prober(url) as prober:
                    found = sorted(wave(url, options.clients, options.questions, random))
                took = time.perf_counter() - began
                digests = encoded.read_text().split()[before:]
                print(
                    f"wave {number + 1}: {len(found)} requests in {took:.1f} s; first token "
                    f"{statistics.median(found):.2f} s median, {found[-1]:.2f} s longest; /health "
                    f"{max(prober.health_s) * 1e3:.0f} ms longest of {len(prober.health_s) - 1}; "
                    f"text alone {max(prober.text_s):.2f} s longest; encoded {len(digests)} times "
                    f"{len(set(digests))} pictures; memory {memory_mib(server):.0f} MiB",
                    flush=True,
                )


if __name__ == "__main__":
    main()
