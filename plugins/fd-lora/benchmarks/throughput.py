"""Throughput with adapters in the batch, beside none: LLM.generate, all requests at once, greedy.

    python plugins/fd-lora/benchmarks/throughput.py --device cuda --shape ernie-0.3b qwen3-0.6b

Weights of model and adapters are random. Each line is one kind of batch: `plain` in an engine
without --enable-lora; no adapter, then rows with --adapters in turn, in an engine with it. Rounds
go in turn.

whole    output tokens over the seconds of all requests, prompts included
prompts  the seconds of one token of each request
step     (seconds of --output tokens - those of one) / (--output - 1)
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from fastdeploy import LLM, LoRARequest, SamplingParams

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))
from random_model import SHAPES

BLOCK = 64  # tokens of a KV block


def write_adapter(folder: Path, config: dict[str, Any], rank: int, seed: int) -> Path:
    """An adapter of every linear layer, or of attention where layers have experts, as PEFT writes
    it. A block of noise is repeated."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    dim = config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    sizes = {
        "self_attn.q_proj": (hidden, q), "self_attn.k_proj": (hidden, kv),
        "self_attn.v_proj": (hidden, kv), "self_attn.o_proj": (q, hidden),
    }  # fmt: skip
    if "moe_intermediate_size" not in config:
        sizes |= dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (hidden, inner))
        sizes["mlp.down_proj"] = (inner, hidden)
    noise = np.random.default_rng(seed).standard_normal(1 << 20, dtype=np.float32)
    noise, tensors = (noise * np.float32(0.02)).astype(np.float16), {}
    for number in range(config["num_hidden_layers"]):
        for name, (inputs, outputs) in sizes.items():
            prefix = f"base_model.model.model.layers.{number}.{name}"
            for half, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                tensors[f"{prefix}.lora_{half}.weight"] = np.resize(noise, shape)
                noise = np.roll(noise, 4321)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of all requests: for one token of each, and for all of their tokens."""

    prompts: float
    whole: float


class Engine:
    """One engine over the shape's random weights."""

    def __init__(self, folder: Path, options: argparse.Namespace, **more: Any) -> None:
        self._options = options
        length = options.prompt + options.output + 64
        blocks = options.batch * -(-length // BLOCK) + 1  # leaves room for the second engine
        self._llm = LLM(
            folder, skip_tokenizer_init=True, load_format="dummy", device=options.device,
            tensor_library="torch", seed=0, max_model_len=length, max_num_seqs=options.batch,
            max_num_batched_tokens=min(16384, length * options.batch), enable_prefix_caching=False,
            block_size=BLOCK, num_gpu_blocks_override=blocks, **more,
        )  # fmt: skip

    def times(self, adapters: list[LoRARequest | None], vocab: int) -> Times:
        """Of new prompts whose rows have these adapters in turn."""
        options, draw = self._options, np.random.default_rng(1)
        prompts = draw.integers(10, vocab - 10, (options.batch, options.prompt)).tolist()
        each = [adapters[row % len(adapters)] for row in range(options.batch)]
        taken = []
        for count in (1, options.output):
            params = SamplingParams(
                max_tokens=count, ignore_eos=True, detokenize=False, temperature=0
            )
            began = time.perf_counter()
            self._llm.generate(prompts, params, use_tqdm=False, lora_request=each)
            taken.append(time.perf_counter() - began)
        return Times(*taken)

    def close(self) -> None:
        self._llm.close()


def measure(shape: str, options: argparse.Namespace) -> None:
    config = SHAPES[shape]
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / shape
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        names = [f"adapter{number}" for number in range(options.adapters)]
        paths = [
            write_adapter(Path(root) / name, config, options.rank, seed)
            for seed, name in enumerate(names)
        ]
        some = [LoRARequest(name, 1, str(p)) for name, p in zip(names, paths, strict=True)]
        batches: dict[bool, dict[str, list[LoRARequest | None]]] = {
            False: {"plain": [None]},
            True: {"no adapter": [None], f"{len(some)} adapters": [*some]},
        }
        found: dict[str, list[Times]] = {}
        for has_adapters, cases in batches.items():
            lora = {"enable_lora": True, "max_loras": len(some), "max_lora_rank": options.rank}
            engine = Engine(folder, options, **(lora if has_adapters else {}))
            for adapters in cases.values():
                engine.times(adapters, config["vocab_size"])  # loads, compiles
            for _ in range(options.rounds):
                for name, adapters in cases.items():
                    found.setdefault(name, []).append(engine.times(adapters, config["vocab_size"]))
            engine.close()
    plain = _medians(found["plain"], options.output)
    tokens = options.batch * options.output
    print(f"{shape}, batch {options.batch}, {options.prompt} + {options.output} tokens, rank "
          f"{options.rank}; of plain in brackets")  # fmt: skip
    for name, times in found.items():
        whole, prompts, step = own = _medians(times, options.output)
        of = [before / now for before, now in zip(plain, own, strict=True)]
        print(
            f"  {name}: {tokens / whole:,.0f} tokens/s ({of[0]:.3f}), prompts {prompts * 1e3:.1f} "
            f"ms ({of[1]:.3f}), step {step * 1e3:.3f} ms ({of[2]:.3f})",
            flush=True,
        )


def _medians(times: list[Times], output: int) -> tuple[float, float, float]:
    """Seconds of whole answers, of prompts and of a decode step."""
    steps = [(t.whole - t.prompts) / (output - 1) for t in times]
    median = statistics.median
    return median(t.whole for t in times), median(t.prompts for t in times), median(steps)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shape", nargs="+", default=["ernie-0.3b"], choices=SHAPES)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    for shape in options.shape:
        measure(shape, options)


if __name__ == "__main__":
    main()
