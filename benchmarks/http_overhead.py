"""What streaming over HTTP costs per token, on a device that does nothing: server, engine, client.

    python benchmarks/http_overhead.py --model models/ernie-tiny     # 1, 32, 64, 256 streams
    python benchmarks/http_overhead.py --model DIR --streams 256 --step-ms 1.8 --api-server-count 4

Only the tokenizer of the model folder is used; its weights are not read. Each round streams the
same number of tokens to every client at once, from one client process. Processor time is counted
per process (API servers, engine, client), so that figures of a busy machine can be compared;
`offline` is what the engine alone would have generated at this step time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
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

ROOT = Path(__file__).resolve().parents[1]
TICKS = os.sysconf("SC_CLK_TCK")
PROMPT = 32


def parse_arguments() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default=str(ROOT / "models" / "ernie-tiny"))
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 32, 64, 256])
    parser.add_argument("--tokens", type=int, default=256, help="of each answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--step-ms", type=float, default=0.0, help="how long the device takes")
    parser.add_argument("--api-server-count", type=int, default=1)
    parser.add_argument("--clients", type=int, default=1, help="client processes")
    parser.add_argument(
        "serve", nargs="*", help="further arguments of `fastdeploy serve`, after --"
    )
    return parser.parse_args()


def null_model(model: str, folder: Path, step_ms: float) -> None:
    """The model's tokenizer with a configuration for the null device."""
    for file in Path(model).glob("*token*"):
        shutil.copy(file, folder)
    config = json.loads((Path(model) / "config.json").read_text())
    config["null"] = {
        "vocab_size": config["vocab_size"],
        "predictable": False,
        "step_s": step_ms / 1000,
        "num_blocks": 20_000,
    }
    (folder / "config.json").write_text(json.dumps(config))


class Server:
    """`fastdeploy serve` on the null device."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        command = [sys.executable, "-m", "fastdeploy_core.cli.main", "serve", str(folder)]
        command += ["--device", "null", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--max-num-seqs", str(max(options.streams)), "--max-concurrency", "4096"]
        command += ["--max-num-batched-tokens", str(max(2048, max(options.streams) * PROMPT))]
        if options.api_server_count > 1:
            command += ["--api-server-count", str(options.api_server_count)]
        environment = {**os.environ, "FD_LOG_LEVEL": "warning"}
        self.process = subprocess.Popen([*command, *options.serve], env=environment)
        deadline = time.monotonic() + 60
        while not self.answers("/health/ready"):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("the server did not start")
            time.sleep(0.1)

    def answers(self, path: str) -> bool:
        """Whether a GET is answered with 200."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
                return answer.status == 200
        except OSError:
            return False

    def processor_s(self) -> dict[str, float]:
        """Seconds by kind of process."""
        used: dict[str, float] = {"api": 0.0, "engine": 0.0}
        for pid in _family(self.process.pid):
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
            used["engine" if b"fastdeploy-engine" in line else "api"] += _processor_s(pid)
        return used

    def stop(self) -> None:
        """End it."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(30)


def _family(pid: int) -> list[int]:
    found, ring = [pid], {pid}
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    while ring:
        ring = {child for child, parent in parents.items() if parent in ring}
        found += ring
    return found


def _processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def run_clients(server: Server, streams: int, options: argparse.Namespace) -> dict[str, Any]:
    """One round of `fastdeploy bench serve`, in one or several processes."""
    file = Path(tempfile.gettempdir()) / f"fd-http-{os.getpid()}.json"
    command = [sys.executable, "-m", "fastdeploy_core.cli.main", "bench", "serve"]
    command += ["--url", f"http://127.0.0.1:{server.port}", "--num-prompts", str(streams)]
    command += ["--input-len", str(PROMPT), "--output-len", str(options.tokens)]
    command += ["--num-clients", str(options.clients), "--num-warmup", "0"]
    before = server.processor_s()
    spent = os.times().children_user + os.times().children_system
    subprocess.run([*command, "--save-result", str(file)], stdout=subprocess.DEVNULL, check=True)
    client = os.times().children_user + os.times().children_system - spent
    after = server.processor_s()
    (run,) = json.loads(file.read_text())
    file.unlink()
    return {
        "client": client,
        **{name: after[name] - before[name] for name in after},
        "tokens": run["output_tokens"],
        "tokens_per_s": run["output_tokens_per_s"],
        "itl_p99_ms": run["p99_itl_ms"],
    }


def main() -> None:
    """Run and print the table."""
    options = parse_arguments()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        null_model(options.model, folder, options.step_ms)
        server = Server(options, folder)
        try:
            rounds: dict[int, list[dict[str, Any]]] = {}
            for _ in range(options.rounds):
                for streams in options.streams:
                    result = run_clients(server, streams, options)
                    rounds.setdefault(streams, []).append(result)
        finally:
            server.stop()
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}, {time.strftime('%Y-%m-%d')}; {options.rounds} rounds, "
        "answers of "
        f"{options.tokens} tokens, {options.api_server_count} API servers, {options.clients} "
        f"clients, device step {options.step_ms:g} ms; medians\n"
    )
    print(
        f"{'streams':>7} {'tokens/s':>9} {'offline':>9} {'ITL p99, ms':>12}   processor us per "
        "token: API servers, engine, client"
    )
    for streams, results in rounds.items():
        median = {
            key: statistics.median(r[key] / (r["tokens"] if key in _COSTS else 1) for r in results)
            for key in results[0]
        }
        offline = f"{streams / options.step_ms * 1000:9.0f}" if options.step_ms else f"{'-':>9}"
        costs = ", ".join(f"{median[key] * 1e6:.1f}" for key in _COSTS)
        print(
            f"{streams:>7} {median['tokens_per_s']:>9.0f} {offline} {median['itl_p99_ms']:>12.2f}  "
            f" {costs}"
        )


_COSTS = ("api", "engine", "client")

if __name__ == "__main__":
    main()
