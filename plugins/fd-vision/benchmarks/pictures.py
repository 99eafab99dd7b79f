"""What a picture costs: seconds to the first token, cold and repeated, and decode steps after it.

    python plugins/fd-vision/benchmarks/pictures.py 7b                 # Qwen2.5-VL-7B's shapes
    python plugins/fd-vision/benchmarks/pictures.py 3b --side 512 --batch 1 8
    python plugins/fd-vision/benchmarks/pictures.py tiny --side 224 --batch 1 --output 8

Random weights (bfloat16), one square picture of noise a prompt beside 64 random tokens, greedy, no
tokenizer, all requests at once. Medians of rounds, each with pictures of its own.

cold      LLM.generate for one token of one request: prepare, encode, prompt, sample
repeated  the same request again: the prefix cache has all but the last block of it
same      the same picture behind other text: its vectors are kept, the prompt is computed
decode    (seconds of --output tokens - seconds of one token) / (--output - 1), a step of all rows
batch     requests/s of one token each, every request with a picture of its own
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fastdeploy_core.api.llm import LLM
from fastdeploy_core.types import SamplingParams

VOCAB, IMAGE = 152064, 151655
TEXT: dict[str, dict[str, int]] = {
    "tiny": {
        "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    },
    "3b": {
        "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
        "num_attention_heads": 16, "num_key_value_heads": 2,
    },
    "7b": {
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4,
    },
}  # fmt: skip
VISION: dict[str, dict[str, Any]] = {
    "tiny": {
        "depth": 2, "hidden_size": 64, "num_heads": 4, "intermediate_size": 96,
        "fullatt_block_indexes": [1],
    },
    "3b": {
        "depth": 32, "hidden_size": 1280, "num_heads": 16, "intermediate_size": 3420,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
    "7b": {
        "depth": 32, "hidden_size": 1280, "num_heads": 16, "intermediate_size": 3420,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
}  # fmt: skip


def write_folder(size: str, folder: Path) -> Path:
    """config.json and preprocessor_config.json of that size; no weights."""
    head = TEXT[size]["hidden_size"] // TEXT[size]["num_attention_heads"]
    config = {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl",
        "vocab_size": VOCAB, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "tie_word_embeddings": False, "hidden_act": "silu",
        "torch_dtype": "bfloat16", "bos_token_id": 151643, "eos_token_id": 151645,
        "vision_start_token_id": 151652, "vision_end_token_id": 151653,
        "image_token_id": IMAGE, "video_token_id": 151656, **TEXT[size],
        "rope_scaling": {"type": "mrope", "mrope_section": _sections(head)},
        "vision_config": {
            "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2,
            "window_size": 112, "out_hidden_size": TEXT[size]["hidden_size"],
            "hidden_act": "silu", **VISION[size],
        },
    }  # fmt: skip
    preprocessor = {
        "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2,
        "min_pixels": 3136, "max_pixels": 12845056,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    return folder


def _sections(head: int) -> list[int]:
    """Qwen2.5-VL's [16, 24, 24] of a head of 128, in proportion."""
    first = head // 8
    return [first, (head // 2 - first) // 2, head // 2 - first - (head // 2 - first) // 2]


class Asker:
    """Makes requests and times them."""

    def __init__(self, llm: LLM, side: int) -> None:
        self._llm, self._side = llm, side
        self._random = np.random.default_rng(0)

    def request(self, picture: Image.Image | None = None) -> dict[str, Any]:
        """64 random tokens around a picture of noise, or the given one."""
        words = self._random.integers(1000, 100_000, 64).tolist()
        if picture is None:
            noise = self._random.integers(0, 255, (self._side, self._side, 3), dtype=np.uint8)
            picture = Image.fromarray(noise)
        ids = [*words[:8], 151652, IMAGE, 151653, *words[8:]]
        return {"prompt_token_ids": ids, "multi_modal_data": {"image": picture}}

    def seconds(self, requests: list[dict[str, Any]], max_tokens: int = 1) -> float:
        """That LLM.generate takes for all of them."""
        params = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        began = time.perf_counter()
        self._llm.generate(requests, params, use_tqdm=False)
        return time.perf_counter() - began


def measure(asker: Asker, batches: list[int], output: int, rounds: int) -> dict[str, float]:
    """Medians, by what was measured."""
    found: dict[str, list[float]] = {}
    for number in range(rounds + 1):  # the first warms up
        first = asker.request()
        row = {"cold ms": asker.seconds([first]) * 1e3, "repeated ms": asker.seconds([first]) * 1e3}
        again = asker.request(first["multi_modal_data"]["image"])
        row["same picture ms"] = asker.seconds([again]) * 1e3
        for batch in batches:
            requests = [asker.request() for _ in range(batch)]
            row[f"requests/s of {batch}"] = batch / asker.seconds(requests)
            # From the caches: what is timed is decoding.
            short, long = (asker.seconds(requests, tokens) for tokens in (1, output))
            row[f"decode ms of {batch}"] = (long - short) / (output - 1) * 1e3
        if number:
            for name, value in row.items():
                found.setdefault(name, []).append(value)
    return {name: statistics.median(values) for name, values in found.items()}


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("size", choices=TEXT)
    parser.add_argument("--side", type=int, default=1024, help="pixels")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--output", type=int, default=64, help="tokens")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(
            write_folder(arguments.size, Path(folder)), load_format="dummy", dtype="bfloat16",
            skip_tokenizer_init=True, max_model_len=8192, max_num_seqs=max(arguments.batch),
        )  # fmt: skip
        with llm:
            asker = Asker(llm, arguments.side)
            found = measure(asker, arguments.batch, arguments.output, arguments.rounds)
            (output,) = llm.generate(asker.request(), SamplingParams(max_tokens=1), use_tqdm=False)
    print(f"Qwen2.5-VL {arguments.size}, a picture of {arguments.side} pixels a side:", end=" ")
    print(f"{len(output.prompt_token_ids)} tokens a prompt, medians of {arguments.rounds} rounds")
    for name, value in found.items():
        print(f"{name:>20} {value:10.2f}")


if __name__ == "__main__":
    main()
