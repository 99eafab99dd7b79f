"""What a picture costs: seconds to the first token, cold and repeated, and decode steps after it.

    python plugins/fd-vision/benchmarks/pictures.py 7b                 # Qwen2.5-VL-7B's shapes
    python plugins/fd-vision/benchmarks/pictures.py 3b --side 512 --batch 1 8
    python plugins/fd-vision/benchmarks/pictures.py ernie-28b          # ERNIE-4.5-VL-28B-A3B's
    python plugins/fd-vision/benchmarks/pictures.py tiny --side 224 --batch 1 --output 8
    python plugins/fd-vision/benchmarks/pictures.py 7b --engine vllm   # where vLLM is installed
    python plugins/fd-vision/benchmarks/pictures.py ernie-28b --layers 10 --kv-gb 3  # a part of it

Random weights (bfloat16), one square picture of noise a prompt beside 64 random tokens, greedy, all
requests at once. Medians of rounds (an even number: the mean of the middle two; the least and the
most are printed beside it), each with pictures of its own. --wait: once started, print
"ready" and wait for a line of standard input, so that two engines can be measured in turn.

cold      LLM.generate for one token of one request: prepare, encode, prompt, sample
repeated  the same request again: the prefix cache has all but the last block of it
same      the same picture after other text: its vectors are kept, the prompt is computed
decode    (seconds of --output tokens - seconds of one token) / (--output - 1), a step of all rows
batch     requests/s of one token each, every request with a picture of its own

--side 0: text alone, of as many tokens; with --plain by the decoder's own family, without a tower.
--plain-steps: steps with pictures run operation by operation.
--profile: instead, where the time goes on a GPU: preparing a picture, the tower of some pictures in
one call, and, by kernel, one request, all of a batch, and decode steps of it.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fastdeploy_core.api.llm import LLM
from fastdeploy_core.models.media import SequenceMedia
from fastdeploy_core.types import SamplingParams

VOCAB, IMAGE = 152064, 151655
TEXT_LENGTH = 1435  # of a prompt of text alone: that of one with a picture of 1,024 x 1,024
QWEN_WORDS = {
    "<|im_end|>": 151645, "<|endoftext|>": 151643, "<|vision_start|>": 151652,
    "<|vision_end|>": 151653, "<|image_pad|>": IMAGE, "<|video_pad|>": 151656,
}  # fmt: skip
BLOCK = 64  # tokens, of the cache
MOST_PIXELS = 1_605_632  # that a picture is shown with; engines keep memory for it
CLIP = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
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


def write_folder(
    size: str, folder: Path, *, is_plain: bool = False, layers: int = 0
) -> tuple[int, int, int]:
    """config.json and preprocessor_config.json of that size; no weights. A picture's tokens.
    is_plain: the decoder's own family. layers: of the decoder, if not all."""
    write = _ernie if size.startswith("ernie") else _qwen
    config, preprocessor, tokens = write(size)
    config["num_hidden_layers"] = layers or config["num_hidden_layers"]
    if is_plain:
        config |= {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
        del config["vision_config"], config["rope_scaling"]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    return tokens


def _qwen(size: str) -> tuple[dict[str, Any], dict[str, Any], tuple[int, int, int]]:
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
            "patch_size": 14, "spatial_patch_size": 14, "spatial_merge_size": 2,
            "temporal_patch_size": 2, "window_size": 112, "tokens_per_second": 2,
            "out_hidden_size": TEXT[size]["hidden_size"], "hidden_act": "silu", **VISION[size],
        },
    }  # fmt: skip
    preprocessor = {
        "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor",
        "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2,
        "min_pixels": 3136, "max_pixels": MOST_PIXELS, **CLIP,
    }  # fmt: skip
    return config, preprocessor, (151652, IMAGE, 151653)


def _ernie(size: str) -> tuple[dict[str, Any], dict[str, Any], tuple[int, int, int]]:
    config = {
        "architectures": ["Ernie4_5_VLMoeForConditionalGeneration"],
        "model_type": "ernie4_5_moe_vl", "vocab_size": 103424, "hidden_size": 2560,
        "intermediate_size": 12288, "num_hidden_layers": 28, "num_attention_heads": 20,
        "num_key_value_heads": 4, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
        "rope_theta": 500000, "freq_allocation": 20, "rope_scaling": {"type": "default"},
        "use_bias": False, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "moe_num_experts": [64, 64], "moe_intermediate_size": [1536, 512], "moe_k": 6,
        "moe_num_shared_experts": 2, "moe_layer_start_index": [1, 1],
        "moe_layer_end_index": [29, 28], "moe_layer_interval": 1, "eos_token_id": 2,
        "im_patch_id": 100295, "image_start_token_id": 101304, "image_end_token_id": 101305,
        "video_start_token_id": 101306, "video_end_token_id": 101307,
        "vision_config": {
            "depth": 32, "hidden_size": 1280, "num_heads": 16, "mlp_ratio": 4, "patch_size": 14,
            "spatial_merge_size": 2, "temporal_merge_size": 2, "hidden_act": "quick_gelu",
        },
    }  # fmt: skip
    preprocessor = {
        "patch_size": 14, "merge_size": 2, "temporal_conv_size": 2, "min_pixels": 3136,
        "max_pixels": MOST_PIXELS, "draw_on_frames": False, **CLIP,
    }  # fmt: skip
    return config, preprocessor, (101304, 100295, 101305)


def _sections(head: int) -> list[int]:
    """Qwen2.5-VL's [16, 24, 24] of a head of 128, in proportion."""
    first = head // 8
    return [first, (head // 2 - first) // 2, head // 2 - first - (head // 2 - first) // 2]


def write_tokenizer(folder: Path, special: dict[str, int], count: int, processor: str) -> None:
    """What a peer asks for: a word for each token."""
    from tokenizers import AddedToken, Tokenizer, models

    words = {number: word for word, number in special.items()}
    vocabulary = {words.get(n, f"w{n}"): n for n in range(count)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": next(iter(special)),
        "pad_token": next(iter(special)), "processor_class": processor,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def start(arguments: argparse.Namespace, folder: Path) -> tuple[Any, Any, str]:
    """An engine, its class of sampling parameters, and its name."""
    common = {
        "load_format": "dummy", "dtype": "bfloat16", "max_model_len": 8192,
        "max_num_seqs": max(arguments.batch), "gpu_memory_utilization": arguments.memory,
    }  # fmt: skip
    if arguments.tokens:
        common["max_num_batched_tokens"] = arguments.tokens
    own = dict[str, Any]()
    if arguments.kv_gb:
        cache = int(arguments.kv_gb * 1e9)
        config = json.loads((folder / "config.json").read_text())
        head = config["hidden_size"] // config["num_attention_heads"]
        a_token = 4 * config["num_hidden_layers"] * config["num_key_value_heads"] * head
        own = {"num_gpu_blocks_override": cache // (BLOCK * a_token), "block_size": BLOCK}
        if arguments.engine == "vllm":
            own = {"kv_cache_memory_bytes": cache}
    if arguments.engine == "vllm":
        if arguments.size.startswith("ernie"):
            import ernie_in_vllm  # registers what transformers lacks

            write_tokenizer(folder, ernie_in_vllm.WORDS, 103424, "ErnieProcessor")
        else:
            write_tokenizer(folder, QWEN_WORDS, 151665, "Qwen2_5_VLProcessor")
        import vllm

        graphs = {"cudagraph_capture_sizes": sorted({*arguments.batch, 1})}
        limits = {"image": 1, "video": 0}
        peer = vllm.LLM(
            str(folder), limit_mm_per_prompt=limits, compilation_config=graphs, **common, **own
        )
        return peer, vllm.SamplingParams, f"vLLM {vllm.__version__}"
    llm = LLM(folder, skip_tokenizer_init=True, **common, **own)
    return llm, SamplingParams, f"FastDeploy {version('fastdeploy-core')}"


class Asker:
    """Makes requests and times them."""

    def __init__(self, llm: Any, params: Any, tokens: tuple[int, int, int], side: int) -> None:
        self.llm, self._params, self._tokens, self._side = llm, params, tokens, side
        self._random = np.random.default_rng(0)

    def request(self, picture: Image.Image | None = None) -> dict[str, Any]:
        """64 random tokens around a picture of noise, or the given one; TEXT_LENGTH without."""
        if not self._side:
            return {"prompt_token_ids": self._random.integers(1000, 100_000, TEXT_LENGTH).tolist()}
        words = self._random.integers(1000, 100_000, 64).tolist()
        if picture is None:
            noise = self._random.integers(0, 255, (self._side, self._side, 3), dtype=np.uint8)
            picture = Image.fromarray(noise)
        ids = [*words[:8], *self._tokens, *words[8:]]
        return {"prompt_token_ids": ids, "multi_modal_data": {"image": picture}}

    def seconds(self, requests: list[dict[str, Any]], max_tokens: int = 1) -> float:
        """That LLM.generate takes for all of them."""
        began = time.perf_counter()
        self.generate(requests, max_tokens)
        return time.perf_counter() - began

    def generate(self, requests: list[dict[str, Any]], max_tokens: int = 1) -> list[Any]:
        """What the engine answers."""
        params = self._params(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        answers: list[Any] = self.llm.generate(requests, params, use_tqdm=False)
        return answers


def profile(asker: Asker, counts: Sequence[int], batch: int, rows: int = 14) -> None:
    """Print host and device milliseconds of the tower, and the kernels that take the longest."""
    import torch
    from torch.profiler import ProfilerActivity

    from fastdeploy_core.contracts.model import MediaPart

    llm = asker.llm
    model = llm._engine._core._executor._worker._runner._model

    seconds: list[float] = []

    def items(count: int) -> list[Any]:
        found = []
        for _ in range(count):
            asked = asker.request()
            part = MediaPart("image", asked["multi_modal_data"]["image"], "")
            began = time.perf_counter()
            _, extras = llm._media.prepare(asked["prompt_token_ids"], [part], "")
            seconds.append(time.perf_counter() - began)
            found += extras.media
        return found

    def kernels(what: str, run: Callable[[], object]) -> None:
        with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as seen:
            began = time.perf_counter()
            run()
            torch.cuda.synchronize()
            wall = (time.perf_counter() - began) * 1e3
        found = sorted(seen.key_averages(), key=lambda e: -e.self_device_time_total)
        busy = sum(e.self_device_time_total for e in found) / 1e3
        print(f"{what}: {wall:.1f} ms, kernels {busy:.1f} ms")
        calls = sorted((e for e in found if "cuda" in e.key), key=lambda e: -e.self_cpu_time_total)
        for event in calls[:5]:
            own = event.self_cpu_time_total / 1e3
            print(f"  {own:8.2f} ms {event.count:6} x {event.key:.60} on the host")
        for event in found[:rows]:
            own = event.self_device_time_total / 1e3
            print(f"  {own:8.2f} ms {event.count:6} x {event.key:.90}")

    with torch.no_grad():
        for count in counts:
            shown = items(count)
            for _ in range(3):
                torch.cuda.synchronize()
                began = time.perf_counter()
                model.encode(shown)
                queued = time.perf_counter()
                torch.cuda.synchronize()
            ms = [(end - began) * 1e3 for end in (queued, time.perf_counter())]
            print(f"tower of {count}: queued in {ms[0]:.1f} ms, done in {ms[1]:.1f} ms")
        kernels(f"tower of {counts[-1]}", lambda: model.encode(shown))
    print(f"a picture prepared in {statistics.median(seconds) * 1e3:.1f} ms")
    for _ in range(2):
        one = [asker.request()]
        kernels("one request", lambda asked=one: asker.generate(asked))
    asker.generate([asker.request() for _ in range(batch)])  # starts all decoding processes
    asked = [asker.request() for _ in range(batch)]
    kernels(f"batch of {batch}", lambda: asker.generate(asked))
    kernels("the same again and 16 decode steps", lambda: asker.generate(asked, 17))
    asked = [asker.request() for _ in range(batch)]
    seen = cProfile.Profile()
    seen.runcall(asker.generate, asked)
    pstats.Stats(seen).sort_stats("tottime").print_stats(rows)


def measure(asker: Asker, batches: list[int], output: int, rounds: int) -> dict[str, list[float]]:
    """The value of each round, by what was measured."""
    found: dict[str, list[float]] = {}
    for number in range(rounds + 1):  # the first warms up
        first = asker.request()
        row = {"cold ms": asker.seconds([first]) * 1e3, "repeated ms": asker.seconds([first]) * 1e3}
        if "multi_modal_data" in first:
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
    return found


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("size", choices=(*TEXT, "ernie-28b"))
    parser.add_argument("--side", type=int, default=1024, help="pixels")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--output", type=int, default=64, help="tokens")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engine", choices=("fastdeploy", "vllm"), default="fastdeploy")
    parser.add_argument("--memory", type=float, default=0.9, help="share of the device's memory")
    parser.add_argument(
        "--kv-gb", type=float, default=0.0, help="keys and values, where several engines share it"
    )
    parser.add_argument("--tokens", type=int, default=0, help="of a step; 0: the engine's default")
    parser.add_argument("--save", type=Path, help="a file for the numbers")
    parser.add_argument("--beside", type=Path, help="such a file of another engine: print ratios")
    parser.add_argument("--layers", type=int, default=0, help="of the decoder, for less memory")
    parser.add_argument("--plain", action="store_true", help="text by a model without a tower")
    parser.add_argument("--plain-steps", action="store_true", help="no captured graphs of pictures")
    parser.add_argument("--profile", action="store_true", help="where the time goes")
    parser.add_argument("--wait", action="store_true", help="for a line of standard input")
    arguments = parser.parse_args()
    if arguments.plain and (arguments.side or arguments.size not in TEXT):
        parser.error("--plain is for --side 0 and Qwen's shapes")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokens = write_folder(
            arguments.size, folder, is_plain=arguments.plain, layers=arguments.layers
        )
        if arguments.plain_steps:
            SequenceMedia.captured = lambda *_: None  # type: ignore[method-assign]
        llm, params, engine = start(arguments, folder)
        if arguments.engine == "vllm" and arguments.size.startswith("ernie"):
            tokens = tokens[0], 100290, tokens[2]  # ernie_in_vllm.PLACE
        asker = Asker(llm, params, tokens, arguments.side)
        if arguments.wait:
            print("ready", flush=True)
            sys.stdin.readline()
        if arguments.profile:
            profile(asker, (1, 2, 4), max(arguments.batch))
            llm.close()
            return
        rounds = measure(asker, arguments.batch, arguments.output, arguments.rounds)
        found = {name: statistics.median(values) for name, values in rounds.items()}
        (answer,) = asker.generate([asker.request()])
        num_tokens = len(answer.prompt_token_ids)
        if isinstance(llm, LLM):
            llm.close()
    shown = f"a picture of {arguments.side} pixels a side" if arguments.side else "text alone"
    print(f"{engine}, {arguments.size}, {shown}{', no tower' * arguments.plain}:", end=" ")
    print(f"{num_tokens} tokens a prompt, medians of {arguments.rounds} rounds")
    beside = json.loads(arguments.beside.read_text()) if arguments.beside else {}
    for what, value in found.items():
        # Above 1: faster than the other engine.
        other = beside.get(what, value)
        ratio = value / other if "/s" in what else other / value
        least, most = min(rounds[what]), max(rounds[what])
        print(f"{what:>20} {value:10.2f}  ({least:.2f} to {most:.2f})", end="")
        print(f"{ratio:8.2f}x" if beside else "", flush=True)
    if arguments.save:
        arguments.save.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
