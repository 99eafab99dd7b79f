"""Our server and vLLM's beside each other on one machine: what clients see of both, in turns.

    python benchmarks/beside_vllm.py MODEL --streams 1 32 256 -- --max-model-len 2048

Starts both servers of MODEL (a folder, with config.json and a tokenizer at least) with random
weights, N(0, 0.02) on both sides, and waits until both are ready. Then each number of streams is
measured in a closed loop: so many clients send `--per-stream` requests each, one after the other;
ours, then vLLM's, `--rounds` times. Prompts are random ids, answers have a fixed length, prefix
caches are off; both answer all streams once before. The last columns are processors that a server's
processes take together, and what the busiest client process takes of one: near 1 the client is what
is measured. Arguments after -- go to both servers. vLLM is taken from this Python's packages, or
from `--vllm-path`. With `--wait`, several of these can start beside each other: ours starts after a
line on standard input, and after a second one, when "ready" was printed, it measures. A side that
does not start, ends, or takes longer than `--measured-within` is left out from then on, with a line
that says so; the other's figures come all the same.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from start_up import processor_s

HERE = Path(__file__).resolve().parent
OURS, VLLM = "FastDeploy", "vLLM"
READY = {OURS: "/health/ready", VLLM: "/health"}
COLUMNS = {
    "output_tokens_per_s": "tokens/s",
    "p50_ttft_ms": "TTFT p50",
    "p90_ttft_ms": "p90",
    "p99_ttft_ms": "p99",
    "p50_itl_ms": "ITL p50",
    "p90_itl_ms": "p90",
    "p99_itl_ms": "p99",
    "processors": "server",
    "client_busy": "client",
}


class Noise:
    """A worker extension of vLLM, whose own dummy weights make every hidden state the same."""

    def fill_with_noise(self) -> None:
        """Matrices N(0, 0.02), norms 1, biases 0."""
        import torch

        generator = torch.Generator(device="cuda").manual_seed(0)
        with torch.no_grad():
            for name, weight in self.get_model().named_parameters():  # type: ignore[attr-defined]
                if "bias" in name or "norm" in name:
                    weight.fill_(float("norm" in name and "bias" not in name))
                elif weight.is_floating_point():
                    weight.normal_(0, 0.02, generator=generator)


def parse_arguments() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", type=Path, help="folder")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument(
        "--per-stream", type=int, nargs="+", default=[4], help="requests; one, or one by --streams"
    )
    parser.add_argument("--input-len", type=int, default=256)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--clients", type=int, default=4, help="client processes at most")
    parser.add_argument("--kv-gb", type=float, default=12.0, help="KV cache of each server")
    parser.add_argument("--vllm-path", default="", help="folder that holds the package vllm")
    parser.add_argument("--vllm-options", default="", help="further ones of its server")
    parser.add_argument("--ready-within", type=float, default=600.0, help="seconds")
    parser.add_argument("--measured-within", type=float, default=300.0, help="seconds, each time")
    parser.add_argument("--logs", type=Path, help="folder for what both servers print")
    parser.add_argument("--wait", action="store_true")
    words = [*sys.argv[1:], "--"]
    end = words.index("--")
    options = parser.parse_args(words[:end])
    if len(options.per_stream) not in (1, len(options.streams)):
        parser.error("--per-stream: one number, or as many as --streams")
    options.serve = words[end + 1 : -1]
    return options


def commands(options: argparse.Namespace, ports: dict[str, int]) -> dict[str, list[str]]:
    """How each server is started."""
    cli = [sys.executable, "-m"]
    common = [
        "serve", str(options.model), "--host", "127.0.0.1", "--load-format", "dummy",
        "--no-enable-prefix-caching", "--max-num-seqs", str(max(options.streams)),
        "--kv-cache-memory-bytes", str(int(options.kv_gb * 1e9)), *options.serve,
    ]  # fmt: skip
    # Kept to its own bytes, it does not measure what others take of the GPU.
    vllm = [
        "--gpu-memory-utilization", "0.05", "--dtype", "bfloat16", "--worker-extension-cls",
        f"{Path(__file__).stem}.{Noise.__name__}", "--disable-uvicorn-access-log",
        *options.vllm_options.split(),
    ]  # fmt: skip
    return {
        OURS: [*cli, "fastdeploy_core.cli.main", *common, "--port", str(ports[OURS])],
        VLLM: [*cli, "vllm.entrypoints.cli.main", *common, "--port", str(ports[VLLM]), *vllm],
    }


class Server:
    """A server's process and what it printed."""

    def __init__(
        self, name: str, port: int, command: list[str], options: argparse.Namespace
    ) -> None:
        self.name, self.url = name, f"http://127.0.0.1:{port}"
        self._limit = options.ready_within
        self.error = ""
        environment = dict(os.environ)
        if name == VLLM:
            path = [options.vllm_path, str(HERE), environment.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
            environment["VLLM_SERVER_DEV_MODE"] = "1"  # for /collective_rpc
        folder = options.logs or Path(tempfile.mkdtemp())
        folder.mkdir(parents=True, exist_ok=True)
        self._log = folder / f"{name}.log"
        self._began = time.perf_counter()
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, start_new_session=True
            )

    def wait(self) -> None:
        """Until it answers, or `error` says why it does not."""
        while not self._answers():
            if self._process.poll() is not None:
                said = [x for x in self._log.read_text().splitlines() if "Error" in x]
                self.error = f"exit status {self._process.returncode}: {''.join(said[-1:])}"
                break
            if time.perf_counter() - self._began > self._limit:
                self.error = f"not ready after {self._limit:g} s"
                break
            time.sleep(0.1)
        took = time.perf_counter() - self._began
        if self.name == VLLM and not self.error:
            body = json.dumps({"method": "fill_with_noise"}).encode()
            ask = urllib.request.Request(
                f"{self.url}/collective_rpc", body, {"Content-Type": "application/json"}
            )
            try:
                urllib.request.urlopen(ask, timeout=120).close()
            except OSError as error:
                self.error = f"weights were not filled: {error}"
        print(f"{self.name}: {self.error or f'ready after {took:.0f} s'}; {self._log}", flush=True)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + READY[self.name], timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def processor_s(self) -> float:
        """Of all its processes so far."""
        return processor_s(self._process.pid)

    def signal(self, kind: signal.Signals) -> None:
        """To all of its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, kind)

    def ended(self, within: float) -> None:
        """Wait, but not longer than so many seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(within)


def measure(
    server: Server, streams: int, per_stream: int, output_len: int, options: argparse.Namespace
) -> dict[str, Any] | None:
    """What clients saw. None if the server does not answer; its `error` says why then."""
    vocabulary = json.loads((options.model / "config.json").read_text())["vocab_size"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        asked = {
            "url": server.url, "max-concurrency": streams, "num-warmup": 1,
            "num-prompts": streams * per_stream, "input-len": options.input_len,
            "output-len": output_len, "vocab-size": vocabulary,
            "num-clients": min(streams, options.clients), "save-result": file,
        }  # fmt: skip
        words = [word for k, v in asked.items() for word in (f"--{k}", str(v))]
        command = [sys.executable, "-m", "fastdeploy_core.cli.main", "bench", "serve", *words]
        spent_s = server.processor_s()
        try:
            # In a session of its own, so that a client that hangs is ended with its processes.
            client = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
            )
            said = client.communicate(timeout=options.measured_within)[1]
            (result,) = json.loads(file.read_text())
        except subprocess.TimeoutExpired:
            os.killpg(client.pid, signal.SIGKILL)
            server.error = f"not measured within {options.measured_within:g} s"
        except OSError:
            server.error = " ".join(said.decode().splitlines()[-1:]) or "the client failed"
        else:
            if result["completed"]:
                spent_s = server.processor_s() - spent_s
                return {**result, "processors": spent_s / result["duration_s"]}
            server.error = "it answered none of the requests"
    print(f"{server.name}, {streams} streams: {server.error}", flush=True)
    return None


def main() -> None:
    """Start, measure, print."""
    options = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # servers are ended then, too
    with contextlib.ExitStack() as stack:
        sockets = {name: stack.enter_context(socket.socket()) for name in (OURS, VLLM)}
        for probe in sockets.values():
            probe.bind(("127.0.0.1", 0))
        ports = {name: probe.getsockname()[1] for name, probe in sockets.items()}
    started = commands(options, ports)
    settings = (f"{k}={v}" for k, v in os.environ.items() if k.startswith(("FD_", "VLLM_")))
    print("environment:", *sorted(settings))
    servers: list[Server] = []
    try:
        for name in (VLLM, OURS):
            if name == OURS and options.wait:
                sys.stdin.readline()
            print(" ".join(started[name]).replace(sys.executable, "python"), flush=True)
            servers.insert(0, Server(name, ports[name], started[name], options))
        for server in servers:
            server.wait()
        if options.wait:
            print("ready", flush=True)
            sys.stdin.readline()
        print(
            f"{options.model.name}: {options.input_len} tokens in, {options.output_len} out, "
            f"{' '.join(map(str, options.per_stream))} requests of each stream, medians of "
            f"{options.rounds}, {len(os.sched_getaffinity(0))} cores, "
            f"{time.strftime('%Y-%m-%d')}; ms"
        )
        print(
            f"{'streams':>7} {'':10}" + "".join(f"{x:>10}" for x in COLUMNS.values()) + "  failed"
        )
        for server in servers:
            if not server.error:
                measure(server, max(options.streams), 1, 4, options)
        for number, streams in enumerate(options.streams):
            compare(servers, streams, options.per_stream[number % len(options.per_stream)], options)
    finally:
        for kind, within in ((signal.SIGTERM, 4.0), (signal.SIGKILL, 1.0)):
            for server in servers:
                server.signal(kind)
            for server in servers:
                server.ended(within)


def compare(
    servers: list[Server], streams: int, per_stream: int, options: argparse.Namespace
) -> None:
    """One number of streams: a row for each server, and how they relate."""
    seen: dict[str, list[dict[str, Any]]] = {server.name: [] for server in servers}
    rows: dict[str, dict[str, float]] = {}
    for left in reversed(range(options.rounds)):
        for server in servers:
            result = None
            if not server.error:
                result = measure(server, streams, per_stream, options.output_len, options)
            results = seen[server.name]
            results += [result] if result else []
            if left or not results:
                continue
            row = {key: statistics.median(r[key] for r in results) for key in COLUMNS}
            rows[server.name] = row
            failed = sum(r["failed"] for r in results)
            cells = "".join(f"{value:>10.4g}" for value in row.values())
            print(f"{streams:>7} {server.name:10}{cells}{failed:>8}", flush=True)
    if len(rows) == 2:
        ratios = (rows[OURS][key] / max(1e-9, rows[VLLM][key]) for key in COLUMNS)
        print(f"{'':7} {'ours / its':10}" + "".join(f"{x:>10.3g}" for x in ratios), flush=True)


if __name__ == "__main__":
    main()
