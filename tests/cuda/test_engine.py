"""Whole engines on a GPU: the tokens of the reference device, of eager steps, and of any batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastdeploy_testing.generate import sampled_tokens
from tests.checkpoints import NUM_GREEDY, build, reference

pytestmark = pytest.mark.device("cuda")

DEMO = Path(__file__).resolve().parents[2] / "models" / "ernie-tiny"
MAX_TOKENS = 48
GREEDY: dict[str, Any] = {}
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "top_k": 40}
PENALISED = {"temperature": 0.7, "repetition_penalty": 1.1, "presence_penalty": 0.4}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Lengths around a block, a common prefix, and more rows than the smallest captured graphs
    have."""
    if not list(DEMO.glob("*.safetensors")):
        pytest.skip("this tree holds no demo weights (models/ernie-tiny/*.safetensors)")
    rng = np.random.default_rng(5)
    found = [rng.integers(3, 400, n).tolist() for n in (1, 7, 63, 64, 65, 200, 9, 30, 2, 128, 17)]
    return [*found, [*found[5][:130], 9, 4]]


def tokens(prompts: list[list[int]], *samplings: dict[str, Any], **settings: Any) -> list[Any]:
    """What a fresh engine says, for each of the samplings: all prompts together, then one by
    one."""
    values = {"max_model_len": 512, "max_num_seqs": 16, "num_gpu_blocks_override": 256, **settings}
    return sampled_tokens(DEMO, prompts, list(samplings), max_tokens=MAX_TOKENS, **values)["runs"]


def on_gpu(prompts: list[list[int]], *samplings: dict[str, Any], **settings: Any) -> list[Any]:
    values = {"device": "cuda", "tensor_library": "torch", **settings}
    return tokens(prompts, *samplings, **values)


def test_greedy_tokens_equal_the_reference_devices_in_float32(prompts: list[list[int]]) -> None:
    (expected,) = tokens(prompts, GREEDY, device="cpu", tensor_library="torch", dtype="float32")
    (found,) = on_gpu(prompts, GREEDY, dtype="float32")
    assert found["together"] == expected["together"]
    assert found["alone"] == expected["together"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_captured_steps_give_the_tokens_of_eager_steps(
    prompts: list[list[int]], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit by bit where rows do not depend on the batch, which captured graphs pad to larger
    ones."""
    monkeypatch.setenv("FD_BATCH_INVARIANT", "1")
    samplings = (GREEDY, SAMPLED, PENALISED)
    captured = on_gpu(prompts, *samplings, dtype=dtype)
    eager = on_gpu(prompts, *samplings, dtype=dtype, enforce_eager=True)
    for sampling, found, expected in zip(samplings, captured, eager, strict=True):
        assert found["together"] == expected["together"], sampling
        assert found["alone"] == found["together"], sampling


@pytest.mark.parametrize(
    "family", ["gpt-oss", "gemma3", "llama4", "deepseek-v32", "qwen3-next", "nemotron-h", "lfm2"]
)
def test_each_kind_of_layer_gives_the_tokens_of_transformers(tmp_path: Path, family: str) -> None:
    """In float32, with captured decodes, prompts in chunks, and the prefix cache."""
    answers = reference(build(tmp_path, [family]) / family)
    (run,) = sampled_tokens(
        tmp_path / family,
        [answer["prompt"].tolist() for answer in answers],
        [GREEDY],
        max_tokens=NUM_GREEDY,
        device="cuda",
        tensor_library="torch",
        dtype="float32",
        block_size=16,
        max_num_batched_tokens=17,
        max_num_seqs=4,
        num_gpu_blocks_override=256,
    )["runs"]
    expected = [answer["greedy"].tolist() for answer in answers]
    assert run["together"] == expected and run["alone"] == expected


@pytest.mark.parametrize(
    "family", ["gpt-oss", "gemma3", "llama4", "qwen3-next", "nemotron-h", "lfm2"]
)
def test_each_kind_of_layer_comes_back_from_host_memory(tmp_path: Path, family: str) -> None:
    """Prompts with common beginnings, again and again on few blocks: the tokens of an engine
    without a cache."""
    from fastdeploy import LLM, SamplingParams

    folder, rng = build(tmp_path, [family]) / family, np.random.default_rng(7)
    shared = [rng.integers(3, 90, 70).tolist() for _ in range(5)]
    prompts = [[*rng.choice(shared), *rng.integers(3, 90, n + 1)] for n in range(20)]
    asked = [{"prompt_token_ids": [int(token) for token in prompt]} for prompt in prompts]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    found = []
    for options in ({"enable_prefix_caching": False}, {"swap_space": 0.02}):
        with LLM(
            folder, device="cuda", tensor_library="torch", dtype="float32", max_model_len=112,
            max_num_seqs=2, max_num_batched_tokens=48, num_gpu_blocks_override=14, block_size=16,
            skip_tokenizer_init=True, **options,
        ) as llm:  # fmt: skip
            rounds = [llm.generate(asked, params, use_tqdm=False) for _ in range(2)]
            found += [[out.outputs[0].token_ids for out in outputs] for outputs in rounds]
            metrics = llm.get_metrics()
    print(family, {name: metrics[name] for name in metrics if "host" in name})
    assert metrics["host_hit_tokens_total"] > 500
    assert found[1:] == [found[0]] * 3


@pytest.mark.parametrize(
    "family", ["gpt-oss", "gemma3", "llama4", "qwen3-next", "nemotron-h", "lfm2"]
)
def test_each_kind_of_layer_comes_back_from_a_store(tmp_path: Path, family: str) -> None:
    """What one engine left on disk: the next one resumes with it, and says the same."""
    from fastdeploy import LLM, SamplingParams

    folder, rng = build(tmp_path, [family]) / family, np.random.default_rng(8)
    asked = [{"prompt_token_ids": rng.integers(3, 90, 70 + n).tolist()} for n in range(4)]
    params, found = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True), []
    for _ in range(2):
        with LLM(
            folder, device="cuda", tensor_library="torch", dtype="float32", max_model_len=112,
            max_num_seqs=2, max_num_batched_tokens=48, num_gpu_blocks_override=64, block_size=16,
            skip_tokenizer_init=True, swap_space=0.02, kv_store="disk",
            kv_store_config={"path": str(tmp_path / "store")},
        ) as llm:  # fmt: skip
            outputs = llm.generate(asked, params, use_tqdm=False)
            found.append([out.outputs[0].token_ids for out in outputs])
            metrics = llm.get_metrics()
    print(family, {name: metrics[name] for name in metrics if "store" in name})
    assert metrics["host_hit_tokens_total"] == 4 * 64 and not metrics["kv_store_failures_total"]
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("family", "quantization"),
    [
        *((family, None) for family in ("gpt-oss", "gemma3", "qwen3-next", "nemotron-h")),
        ("qwen3-next", "block_wise_fp8"),
    ],
)
def test_serving_meets_no_kernel_that_start_up_has_not_met(
    tmp_path: Path, family: str, quantization: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of many lengths, alone and together, beside decodes and in chunks of few tokens."""
    from fd_cuda.kernels import native
    from triton import knobs

    from fastdeploy import LLM, SamplingParams

    folder, rng, met = build(tmp_path, [family]) / family, np.random.default_rng(9), list[str]()
    load = native._load

    def note(**told: Any) -> None:
        met.append(told["src"].name)

    def loading(kernel: Any) -> None:
        met.append(f"{kernel.name} {kernel.defines}")
        load(kernel)

    with LLM(
        folder, device="cuda", tensor_library="torch", dtype="bfloat16", max_model_len=256,
        max_num_seqs=40, max_num_batched_tokens=1024, num_gpu_blocks_override=256, block_size=16,
        skip_tokenizer_init=True, quantization=quantization,
    ) as llm:  # fmt: skip
        monkeypatch.setattr(knobs.compilation, "listener", note)
        monkeypatch.setattr(native, "_load", loading)
        batches = [[n] for n in (1, 2, 3, 5, 6, 9, 16, 17, 63, 100, 129, 240)]
        batches += [[240] * 9, [17] * 16, list(range(1, 36)), [201, 1, 3, 60, 7], [64] * 33]
        for sampling in (GREEDY, SAMPLED):
            params = SamplingParams(max_tokens=5, ignore_eos=True, **{"temperature": 0, **sampling})
            for lengths in batches:
                prompts = [{"prompt_token_ids": rng.integers(3, 90, n).tolist()} for n in lengths]
                llm.generate(prompts, params, use_tqdm=False)
    assert " ".join(sorted(set(met))) == ""


@pytest.mark.parametrize("settings", [{}, {"dtype": "float32"}, {"kv_cache_dtype": "fp8"}], ids=str)
def test_a_scored_text_has_the_bits_of_its_generation(
    prompts: list[list[int]], settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode steps, captured and in any batch, and a prompt in one go or in pieces: each token's
    log-probability is the same number."""
    from fastdeploy import LLM, SamplingParams

    monkeypatch.setenv("FD_BATCH_INVARIANT", "1")
    with LLM(
        DEMO, device="cuda", tensor_library="torch", max_model_len=512, max_num_seqs=16,
        num_gpu_blocks_override=256, skip_tokenizer_init=True, max_num_batched_tokens=256,
        **{"dtype": "bfloat16", **settings},
    ) as llm:  # fmt: skip
        wanted = SamplingParams(temperature=0.8, seed=3, max_tokens=MAX_TOKENS, logprobs=0)
        answers = [out.outputs[0] for out in llm.generate(prompts, wanted, use_tqdm=False)]
        texts = [[*p, *a.token_ids] for p, a in zip(prompts, answers, strict=True)]
        scoring = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        scored = llm.generate(texts, scoring, use_tqdm=False)
    pairs = [
        (said[token].logprob, found[token].logprob)
        for prompt, answer, out in zip(prompts, answers, scored, strict=True)
        for token, said, found in zip(
            answer.token_ids, answer.logprobs, out.prompt_logprobs[len(prompt) :], strict=True
        )
    ]
    same = sum(a == b for a, b in pairs)
    print(f"{same} of {len(pairs)} log-probabilities have the same bits, {settings}")
    assert len(pairs) > 300
    assert same == len(pairs), max(abs(a - b) for a, b in pairs)
