r"""What every number format costs the demo model: exact answers, perplexity, bytes.

    python plugins/fd-calibrate/benchmarks/quality.py [--count 200] [--only wint4 ...] \
        [--seeds 3] [--device cuda]

Questions are held out of training by construction (models/ernie-tiny). An answer counts if greedy
decoding produces it character by character. One pass over the whole text tells: that is the case
exactly if every token of the answer is the model's first choice after the tokens before it.
Perplexity is over all tokens of held-out texts of all tasks, questions included. Calibration text
is taken from the training half.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[3]
MODEL = ROOT / "models" / "ernie-tiny"
sys.path.insert(0, str(MODEL / "training"))

import chat  # noqa: E402
import curriculum  # noqa: E402
from fd_calibrate.prefill import BLOCK_SIZE, grouped, prefill  # noqa: E402
from fd_calibrate.run import QuantizeOptions, quantize  # noqa: E402

from fastdeploy_core.config import CacheConfig, DeviceConfig, EngineConfig  # noqa: E402
from fastdeploy_core.config.model import read_model_config  # noqa: E402
from fastdeploy_core.contracts.attention import cache_dtypes  # noqa: E402
from fastdeploy_core.contracts.device import DeviceOptions  # noqa: E402
from fastdeploy_core.engine.selection import resolve_plugins  # noqa: E402
from fastdeploy_core.loading.loader import load_model  # noqa: E402
from fastdeploy_core.plugins.kernels import build_kernel_table  # noqa: E402
from fastdeploy_core.tensor import DTYPE_BYTES  # noqa: E402
from fastdeploy_core.tokenizer import Tokenizer  # noqa: E402

MAX_LENGTH = 2048
TOKENS_AT_ONCE = 2048
W4A8 = {"quantization": "mix_quant", "dense_quant_type": "wint8", "moe_quant_type": "w4a8"}
STATIC = {"activation_scheme": "static"}
WINT4 = {"quantization": "wint4", "group_size": 0}
CCQ = {"quantization": "wint2", "moe_quant_type": "ccq2"}


@dataclass(frozen=True)
class Row:
    """One line of the table: how the model is loaded, or quantized first."""

    name: str
    method: Any = None  # value of --quantization, or of --method of `fastdeploy quantize`
    cache: str = "auto"
    calibrated: bool = False
    static_cache: str = ""
    seeds: bool = False  # measured with several rotations


ROWS = (
    Row("bf16"),
    Row("wint8", "wint8"),
    Row("w8a8", "w8a8"),
    Row("block_wise_fp8", "block_wise_fp8"),
    Row("wfp8afp8", "wfp8afp8"),
    Row("wint4, per output", WINT4),
    Row("wint4, groups of 32", {**WINT4, "group_size": 32}),
    Row("wint4, groups of 64", {**WINT4, "group_size": 64}),
    Row("wint4, groups of 64, calibrated", {**WINT4, "group_size": 64}, calibrated=True),
    Row("wint4 (experts), wint8", "wint4"),
    Row("w4a8 (experts), wint8", W4A8),
    Row("KV int8", cache="int8"),
    Row("KV float8_e4m3fn", cache="float8_e4m3fn"),
    Row("KV int4_zp", cache="int4_zp"),
    Row("W4A8C8, static", {**W4A8, **STATIC}, calibrated=True, static_cache="int8"),
    Row("2 bits: CCQ (experts), wint8", CCQ),
    Row("2 bits: tet2 (experts)", {"quantization": "tet2"}, seeds=True),
    Row(
        "2 bits: tet2 (experts), calibrated", {"quantization": "tet2"}, calibrated=True, seeds=True
    ),
    Row("2 bits: wint2 (tet2 experts, wint8), calibrated", "wint2", calibrated=True),
    Row("3 bits: tet3 (experts)", {"quantization": "tet3"}),
    Row("4 bits: tet4 (experts)", {"quantization": "tet4"}),
)


@dataclass
class Judged:
    """The results of one configuration."""

    exact: float
    tasks: dict[str, float]
    perplexity: float
    answer_nats: float
    weight_bytes: int
    cache_bytes: float
    seconds: float


def questions(count: int) -> dict[str, list[tuple[list[int], list[int]]]]:
    """(prompt, answer) tokens of held-out samples by task."""
    tokenizer, found = Tokenizer.load(MODEL), {}
    for task in curriculum.MEASURED:
        if task.startswith("find_key_"):
            continue  # its samples have thousands of tokens each
        many = count if task in curriculum.JUDGED else -(-count // 10)
        found[task] = [
            (
                tokenizer.encode(chat.prompt_text(sample), False),
                tokenizer.encode(chat.expected_text(sample), False),
            )
            for sample in curriculum.held_out(task, many)
        ]
    return found


class Loaded:
    """A model on one device that scores whole texts."""

    def __init__(self, folder: Path, method: str, cache: str, where: DeviceConfig) -> None:
        model = read_model_config(folder, {"quantization": method, "max_model_len": MAX_LENGTH})
        config = EngineConfig(
            model=model,
            cache=CacheConfig(block_size=BLOCK_SIZE, kv_dtype=cache),
            device=where,
        )
        resolved = resolve_plugins(config)
        self.device = resolved.load("device")(DeviceOptions(tensor_library=where.tensor_library))
        kernels = build_kernel_table(self.device.name, resolved=resolved)
        self.loaded = load_model(config, self.device, kernels, 0, 1, None, resolved.load)

    def score(self, samples: list[list[int]]) -> list[tuple[np.ndarray, np.ndarray]]:
        """For each sample, for each token but the first: its log-probability, and whether it is the
        likeliest."""
        xp, loaded, found = self.device.xp, self.loaded, []
        for group in grouped(samples, TOKENS_AT_ONCE):
            with xp.no_grad():
                ids, positions, context = prefill(
                    self.device, loaded.attention, loaded.builder.kv_layers, group
                )
                hidden = loaded.model.forward(ids, positions, context)
                values = xp.log_softmax(loaded.model.compute_logits(hidden), -1)
                values = np.array(self.device.to_host(values))
            start = 0
            for sample in group:
                rows = values[start : start + len(sample) - 1]
                target = np.array(sample[1:])
                logprobs = rows[np.arange(len(target)), target]
                found.append((logprobs, rows.argmax(axis=1) == target))
                start += len(sample)
        return found

    def cache_bytes(self) -> float:
        """Bytes that one token takes in the KV cache, over all layers."""
        total = 0
        for spec in self.loaded.builder.kv_layers:
            shapes = self.loaded.attention[spec].cache_shapes(1)
            for shape, dtype in zip(shapes, cache_dtypes(spec, len(shapes)), strict=True):
                total += math.prod(shape) * DTYPE_BYTES[dtype]
        return total / BLOCK_SIZE


def judge(model: Loaded, asked: dict[str, list[tuple[list[int], list[int]]]]) -> dict[str, Any]:
    """Percent exact by task, and perplexity over all tokens of all texts."""
    tasks, total, tokens, answers, answered = {}, 0.0, 0, 0.0, 0
    for task, pairs in asked.items():
        scores = model.score([prompt + answer for prompt, answer in pairs])
        exact = 0
        for (prompt, _), (logprobs, first) in zip(pairs, scores, strict=True):
            own = slice(len(prompt) - 1, None)
            exact += bool(first[own].all())
            total, tokens = total - float(logprobs.sum()), tokens + len(logprobs)
            answers, answered = answers - float(logprobs[own].sum()), answered + len(logprobs[own])
        tasks[task] = 100 * exact / len(pairs)
    judged = [tasks[name] for name in curriculum.JUDGED]
    return {
        "exact": sum(judged) / len(judged),
        "tasks": tasks,
        "perplexity": math.exp(total / tokens),
        "answer_nats": answers / answered,
    }


def measure(
    row: Row, asked: Any, text: Path, where: DeviceConfig, seed: int, max_tokens: int
) -> Judged:
    """Load or quantize, then judge."""
    began = time.perf_counter()
    method = row.method or ""
    if isinstance(method, dict):
        method = json.dumps({**method, **({"seed": seed} if row.seeds else {})})
    with tempfile.TemporaryDirectory(prefix="quality-") as scratch:
        folder = MODEL
        if row.calibrated:
            folder = Path(scratch) / "model"
            options = QuantizeOptions(
                MODEL, method, folder, text, row.static_cache,
                max_tokens=max_tokens, device=where.device, tensor_library=where.tensor_library,
                show_progress=False,
            )  # fmt: skip
            quantize(options)
            method = ""
        model = Loaded(folder, method, row.cache, where)
    return Judged(
        **judge(model, asked),
        weight_bytes=model.loaded.weight_bytes,
        cache_bytes=model.cache_bytes(),
        seconds=time.perf_counter() - began,
    )


def calibration_text(folder: Path) -> Path:
    """Training documents, in the form in which the model was trained on them."""
    rng, path = Random(7), folder / "calibration.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for _ in range(2000):
            text = "".join(piece.text for piece in chat.pieces(curriculum.sample(rng)))
            file.write(json.dumps({"text": text}) + "\n")
    return path


def lines(options: argparse.Namespace) -> Iterator[tuple[str, Judged]]:
    """One result for every row, or for every seed of rows with several."""
    asked = questions(options.count)
    where = DeviceConfig(device=options.device, tensor_library=options.tensor_library)
    with tempfile.TemporaryDirectory(prefix="quality-") as scratch:
        text = calibration_text(Path(scratch))
        for row in ROWS:
            if options.only and not any(word in row.name for word in options.only):
                continue
            for seed in range(options.seeds if row.seeds else 1):
                name = f"{row.name}, rotation {seed}" if row.seeds else row.name
                result = measure(row, asked, text, where, seed, options.calibration_tokens)
                yield name, result


def main() -> None:
    """Print conditions and a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=200, help="questions of a judged task")
    parser.add_argument("--only", nargs="*", default=[], help="rows whose name has one of these")
    parser.add_argument("--seeds", type=int, default=3, help="rotations of the 2-bit code")
    parser.add_argument("--calibration-tokens", type=int, default=32768)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tensor-library", default="torch")
    options = parser.parse_args()
    print(
        f"{options.count} questions of each of {', '.join(curriculum.JUDGED)}; perplexity over "
        "held-out "
        f"texts of all tasks; device {options.device}, {options.tensor_library}; weights in bytes "
        "as held (embeddings and norms in float32)\n",
        flush=True,
    )
    print("| format | exact, % | " + " | ".join(curriculum.JUDGED), end="")
    print(" | perplexity | nats per answer token | weights, MB | KV bytes per token | s |")
    print("|---|" + "---|" * (len(curriculum.JUDGED) + 6), flush=True)
    for name, result in lines(options):
        tasks = " | ".join(f"{result.tasks[task]:.1f}" for task in curriculum.JUDGED)
        print(
            f"| {name} | {result.exact:.2f} | {tasks} | {result.perplexity:.4f} | "
            f"{result.answer_nats:.5f} | {result.weight_bytes / 1e6:.2f} | "
            f"{result.cache_bytes:.0f} | "
            f"{result.seconds:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
