"""Models whose layers are of several kinds, in FastDeploy or in vLLM: prompts and decode steps.

    python plugins/fd-cuda/benchmarks/layer_kinds.py gpt-oss-20b
    python plugins/fd-cuda/benchmarks/layer_kinds.py qwen3-next-80b-a3b --layers 12 --save ours
    python plugins/fd-cuda/benchmarks/layer_kinds.py gemma-3-4b --engine vllm  # if it is installed

Shapes are benchmarks/random_model.py's; gpt-oss has its experts in MXFP4, Qwen3-Next is in FP8 with
blocks of 128, GLM-4.5-Air in 4 bits by AWQ, others in bfloat16. Weights are random, so that
routing spreads; prompts are random token ids, all requests at once, greedy, prefix cache off.

prompts  seconds of LLM.generate for one token of each request
decode   (seconds of --output tokens - seconds of one token) / (--output - 1), a step of all rows
kernels  that FastDeploy met for the first time while it served
memory   the most that FastDeploy's tensors took of the GPU, with what torch kept free for them

--wait: once started, print "ready" and wait for a line of standard input, so that engines that
share a GPU are measured in turn. vLLM gets --kv-gb of memory for keys, values and states;
FastDeploy the blocks that the requests take.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))
from random_model import SHAPES

SEED = 1234
MANY_TOKENS = 100_000  # one round of more is enough
KERNELS_SHOWN = 11


def write_config(model: str, num_layers: int | None, folder: Path) -> dict[str, Any]:
    """config.json of that many of the model's layers (None: all), with its number format."""
    config = dict(SHAPES[model])
    if num_layers:
        config["num_hidden_layers"] = num_layers
        if "layer_types" in config:
            config["layer_types"] = config["layer_types"][:num_layers]
    layers = [f"model.layers.{n}" for n in range(config["num_hidden_layers"])]
    if model == "gpt-oss-20b":
        plain = ["model.layers.*.self_attn", "model.layers.*.mlp.router"]
        plain += ["model.embed_tokens", "lm_head"]
        config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": plain}
    if model == "qwen3-next-80b-a3b":
        small = ("linear_attn.in_proj_ba", "mlp.gate", "mlp.shared_expert_gate")
        config["quantization_config"] = {
            "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
            "modules_to_not_convert": [f"{at}.{name}" for at in layers for name in small]
            + ["lm_head"],
        }  # fmt: skip
    if model == "glm-4.5-air":
        # The first layer's width is not a multiple of a group.
        plain = [f"{at}.mlp.gate" for at in layers[1:]] + [f"{layers[0]}.mlp", "lm_head"]
        config["quantization_config"] = {
            "quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True,
            "version": "gemm", "modules_to_not_convert": plain,
        }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return config


def start(options: argparse.Namespace, folder: Path) -> tuple[Any, Any, str]:
    """An engine, its class of sampling parameters, and its name."""
    common = {
        "skip_tokenizer_init": True, "load_format": "dummy", "dtype": "bfloat16", "seed": 0,
        "max_model_len": options.long + options.output + 64, "enable_prefix_caching": False,
        "max_num_seqs": max(options.batch), "max_num_batched_tokens": options.tokens,
    }  # fmt: skip
    if options.engine == "vllm":
        import vllm

        graphs = {"cudagraph_capture_sizes": sorted({*options.batch, 1})}
        # Its first choice for gated delta nets on Hopper; it does not look whether it is there.
        has_flashinfer = find_spec("flashinfer") is not None
        delta = {} if has_flashinfer else {"gdn_prefill_backend": "triton"}
        # Kept to its own bytes, it does not measure what others take of the GPU.
        peer = vllm.LLM(
            str(folder), kv_cache_memory_bytes=int(options.kv_gb * 1e9), disable_log_stats=True,
            gpu_memory_utilization=0.05, compilation_config=graphs, additional_config=delta,
            **common,
        )  # fmt: skip
        peer.collective_rpc(fill_with_noise, args=(SEED,))
        return peer, vllm.SamplingParams, f"vLLM {vllm.__version__}"
    from fastdeploy_core.api.llm import LLM
    from fastdeploy_core.types import SamplingParams

    if options.device == "cuda":
        from engine import noise_on_the_device

        noise_on_the_device(SEED)
    size = 64
    rows = max(options.batch) * -(-(options.prompt + options.output + size) // size)
    num_blocks = max(rows, -(-common["max_model_len"] // size)) + 1
    llm = LLM(
        folder, device=options.device, tensor_library="torch", block_size=size,
        num_gpu_blocks_override=num_blocks, **common,
    )  # fmt: skip
    return llm, SamplingParams, f"FastDeploy {version('fastdeploy-core')}"


def fill_with_noise(worker: Any, seed: int) -> None:
    """In vLLM's worker, whose own dummy weights make every hidden state the same: N(0, 0.02), and
    random bits of packed numbers."""
    import torch

    generator = torch.Generator(device="cuda").manual_seed(seed)
    with torch.no_grad():
        for name, weight in worker.get_model().named_parameters():
            if weight.is_floating_point() and weight.element_size() >= 2:
                if "scale" in name:
                    weight.fill_(0.01)
                elif "bias" in name or "norm" in name:
                    weight.fill_(float("norm" in name and "bias" not in name))
                else:
                    weight.normal_(0, 0.02, generator=generator)
                continue
            raw = torch.empty(0, dtype=torch.uint8, device=weight.device)
            raw.set_(weight.untyped_storage())  # it may be laid out in any way
            if "scale" in name:
                raw.fill_(118)  # of MXFP4: a power of two
            else:
                raw.random_(0, 256, generator=generator)
                if weight.is_floating_point():
                    raw &= 0xBF  # of FP8: below 2, and a number


class Asker:
    """Makes requests and times them."""

    def __init__(self, llm: Any, params: Any, vocabulary: int) -> None:
        self._llm, self._params, self._vocabulary = llm, params, vocabulary
        self._random = np.random.default_rng(0)

    def seconds(self, count: int, length: int, num_tokens: int) -> float:
        """That `count` new prompts with `num_tokens` of answer each take."""
        sizes = (count, length)
        prompts = self._random.integers(10, self._vocabulary - 10, sizes).tolist()
        params = self._params(
            temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        began = time.perf_counter()
        outputs = self._llm.generate(asked, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        lengths = {len(output.outputs[0].token_ids) for output in outputs}
        assert lengths == {num_tokens}, f"answers of {lengths} tokens"
        return seconds


def measure(asker: Asker, options: argparse.Namespace) -> dict[str, float]:
    """Medians in ms, by what was measured; printed as they are found."""
    found: dict[str, float] = {}

    def say(what: str, values: list[float]) -> None:
        found[what] = statistics.median(values) * 1e3
        print(f"  {what:>26} {found[what]:10.3f} ms", flush=True)

    asker.seconds(1, options.long, 4)  # here and below: compile what has to be
    long = [asker.seconds(1, options.long, 1) for _ in range(options.rounds)]
    say(f"1 prompt of {options.long}", long)
    for batch in options.batch:
        # The whole round: steps with prompts and ever more decodes have kernels of their own.
        asker.seconds(batch, options.prompt, options.output)
        rounds = range(options.rounds if batch * options.prompt < MANY_TOKENS else 1)
        first = [asker.seconds(batch, options.prompt, 1) for _ in rounds]
        whole = [asker.seconds(batch, options.prompt, options.output) for _ in rounds]
        say(f"{batch} prompts of {options.prompt}", first)
        least = statistics.median(first)
        say(f"decode of {batch}", [(t - least) / (options.output - 1) for t in whole])
    return found


def profile(asker: Asker, options: argparse.Namespace, peer: Any) -> None:
    """Which kernels take how long: decode steps with little context, a step of prompts, and the
    long prompt. `peer`: vLLM, whose worker profiles itself."""
    cases = [(f"decode of {batch}", (batch, 64, 40), 40) for batch in options.profile]
    prompts = max(1, options.tokens // options.prompt)
    cases.append((f"{prompts} prompts of {options.prompt}", (prompts, options.prompt, 1), 1))
    cases.append(("the long prompt", (1, options.long, 1), 1))
    for what, order, num_steps in cases:
        asker.seconds(*order)  # compiles what has to be
        if peer is None:
            place = SimpleNamespace()
            begin_profile(place)
            asker.seconds(*order)
            text = end_profile(place, num_steps)
        else:
            peer.collective_rpc(begin_profile)
            asker.seconds(*order)
            (text,) = peer.collective_rpc(end_profile, args=(num_steps,))
        lines = text.splitlines()[:KERNELS_SHOWN]
        print(f"  {what}, a step: " + "\n  ".join(lines), flush=True)


def begin_profile(place: Any) -> None:
    """In the process that queues kernels; `place` keeps the profile."""
    from engine import Profile

    place.kernels_profile = Profile()
    place.kernels_profile.start()


def end_profile(place: Any, num_steps: int) -> str:
    """What engine.summary says of so many steps."""
    from engine import summary

    place.kernels_profile.stop()
    return summary(place.kernels_profile.recorded, num_steps, 0.0)


def watch_compilers() -> list[str]:
    """Names of kernels, Triton's and native ones, that are met for the first time from now on."""
    from triton import knobs

    from fd_cuda.kernels import native

    met: list[str] = []
    load = native._load

    def note(**told: Any) -> None:
        met.append(told["src"].name)

    def loading(kernel: native.Function) -> None:
        met.append(kernel.name)
        load(kernel)

    knobs.compilation.listener = note
    native._load = loading
    return met


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", choices=sorted(SHAPES))
    parser.add_argument("--engine", choices=("fastdeploy", "vllm"), default="fastdeploy")
    parser.add_argument("--device", default="cuda", help="of FastDeploy")
    parser.add_argument("--layers", type=int, help="the first so many of the model's layers")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--prompt", type=int, default=1024, help="tokens")
    parser.add_argument("--long", type=int, default=16384, help="tokens of the one long prompt")
    parser.add_argument("--output", type=int, default=64, help="tokens of an answer, 2 or more")
    parser.add_argument("--tokens", type=int, default=16384, help="most tokens of a step")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--kv-gb", type=float, default=16.0, help="of vLLM, for its cache")
    parser.add_argument("--save", type=Path, help="a file for the numbers")
    parser.add_argument("--beside", type=Path, help="such a file of another engine: print ratios")
    parser.add_argument(
        "--profile", type=int, nargs="+", metavar="BATCH",
        help="the kernels of decode steps of so many, of a step of prompts, and of the long prompt",
    )  # fmt: skip
    parser.add_argument("--wait", action="store_true", help="for a line of standard input")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        config = write_config(options.model, options.layers, Path(name))
        began = time.perf_counter()
        llm, params, engine = start(options, Path(name))
        took = time.perf_counter() - began
        if options.wait:
            print("ready", flush=True)
            sys.stdin.readline()
        print(
            f"{engine}, {options.model}, {config['num_hidden_layers']} layers, started in "
            f"{took:.0f} s, medians of {options.rounds} rounds (of one with many tokens)",
            flush=True,
        )
        asker, is_ours = Asker(llm, params, config["vocab_size"]), options.engine == "fastdeploy"
        met = watch_compilers() if is_ours and options.device == "cuda" else None
        found = measure(asker, options)
        if met is not None:
            import torch

            print(f"  kernels first met after start-up: {len(met)} {' '.join(sorted(set(met)))}")
            print(f"  memory: {torch.cuda.max_memory_reserved() / 1e9:.1f} GB")
        if options.profile:
            profile(asker, options, None if is_ours else llm)
        if is_ours:
            llm.close()
    if options.beside and options.beside.exists():
        other = json.loads(options.beside.read_text())
        ratios = {what: other[what] / value for what, value in found.items() if what in other}
        shown = "; ".join(f"{what} {ratio:.2f}" for what, ratio in ratios.items())
        print(f"  the other's time over this one's: {shown}")
    if options.save:
        options.save.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
