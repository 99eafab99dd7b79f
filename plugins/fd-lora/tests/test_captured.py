"""Adapters in captured steps, on a GPU: answers are those of an engine without captured steps,
whatever adapters came and went. Kernels differ in rounding with the number of rows, so two tokens
that are nearly as probable may change places, and from there answers differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import write_adapter

from fastdeploy_core.api.llm import LLM
from fastdeploy_core.types import CompletionOutput, LoRARequest, SamplingParams

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 1024,
    "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "tie_word_embeddings": True, "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip
SIZES = {
    "self_attn.q_proj": (512, 512), "self_attn.v_proj": (512, 256),
    "self_attn.o_proj": (512, 512), "mlp.gate_proj": (512, 1024), "mlp.down_proj": (1024, 512),
}  # fmt: skip
MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 16,
    "num_experts_per_tok": 4, "moe_intermediate_size": 256, "norm_topk_prob": True,
    "mlp_only_layers": [], "decoder_sparse_step": 1,
}  # fmt: skip
EXPERTS = {"mlp.experts.base_layer": (512, 512, 16), "mlp.experts": (256, 512, 16)}
LENGTH = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True, logprobs=2)
ROUNDING = 0.1  # of a log probability


def adapter(folder: Path, number: int, *, has_experts: bool) -> LoRARequest:
    """Large enough that its tokens are others than the base's."""
    sizes = {
        f"model.layers.{layer}.{name}": size
        for layer in range(CONFIG["num_hidden_layers"])
        for name, size in (EXPERTS if has_experts else SIZES).items()
    }
    parameters = ["experts.down_proj", "experts.gate_up_proj"] if has_experts else []
    path = write_adapter(folder, f"a{number}", sizes, rank=8, seed=number, parameters=parameters)
    return LoRARequest(path.name, 1, str(path))


@pytest.mark.parametrize(
    ("has_experts", "quantization"), [(False, None), (True, None), (True, "wint8")]
)
def test_captured_steps_follow_adapters_that_come_and_go(
    tmp_path: Path, has_experts: bool, quantization: str | None
) -> None:
    # Experts in float32: rounding that differs with the rows of a step may choose other experts.
    config = {**CONFIG, **MOE, "torch_dtype": "float32"} if has_experts else CONFIG
    (tmp_path / "config.json").write_text(json.dumps(config))
    draws = (adapter(tmp_path, number, has_experts=has_experts) for number in range(4))
    adapters = [None, *draws]
    draw = np.random.default_rng(0)
    prompts = [draw.integers(3, 1000, size).tolist() for size in draw.integers(4, 60, 16)]
    settings: dict[str, Any] = {
        "device": "cuda", "tensor_library": "torch", "load_format": "dummy",
        "skip_tokenizer_init": True, "max_model_len": 256, "max_num_seqs": 16,
        "enable_lora": True, "max_loras": 2, "max_cpu_loras": 3, "max_lora_rank": 8,
        "num_gpu_blocks_override": 200, "block_size": 16, "lora_experts": has_experts,
        "quantization": quantization,
    }  # fmt: skip
    rounds = [(0, 1), (1, 2), (3, 4, 0), (2, 0, 1), (4,), (0,)]  # at most two adapters at a time
    found: list[list[list[CompletionOutput]]] = []
    for eager in (False, True):
        with LLM(tmp_path, **settings, enforce_eager=eager) as llm:
            answers = []
            for chosen in rounds:
                each = [adapters[chosen[row % len(chosen)]] for row in range(len(prompts))]
                out = llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=each)
                assert isinstance(out, list)
                answers.append([request.outputs[0] for request in out])
            found.append(answers)
    captured, uncaptured = found
    alike = sum(
        compare(ours, theirs)
        for answers, others in zip(captured, uncaptured, strict=True)
        for ours, theirs in zip(answers, others, strict=True)
    )
    assert alike > 0.7 * len(rounds) * len(prompts) * LENGTH
    base = captured[-1]
    for ours, theirs in zip(captured[0][::2], base[::2], strict=True):
        compare(ours, theirs)
    assert [answer.token_ids for answer in captured[4]] != [answer.token_ids for answer in base]


def compare(ours: CompletionOutput, theirs: CompletionOutput) -> int:
    """How many tokens are alike before one that is not. There both are as probable."""
    assert ours.logprobs is not None
    assert theirs.logprobs is not None
    for place, token in enumerate(ours.token_ids):
        own, other = ours.logprobs[place], theirs.logprobs[place]
        assert token in other
        assert abs(own[token].logprob - other[token].logprob) < ROUNDING
        chosen = theirs.token_ids[place]
        if token != chosen:
            assert other[chosen].logprob - other[token].logprob < ROUNDING
            return place
    return LENGTH
