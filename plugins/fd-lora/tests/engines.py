"""Engines over tiny models in float32, and requests to them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from peft_adapters import NUM_GREEDY, PROMPT_LENGTHS
from safetensors.numpy import save_file

from fastdeploy_core.api.llm import LLM
from fastdeploy_core.types import LoRARequest, RequestOutput, SamplingParams

ROOM = {
    "dtype": "float32", "max_model_len": 128, "num_gpu_blocks_override": 96, "block_size": 8,
    "skip_tokenizer_init": True, "enable_lora": True,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_GREEDY, ignore_eos=True)
SCORED = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=-1)
RAW = {"max_logprobs": -1, "logprobs_mode": "raw_logits"}
TOLERANCE = 1e-4  # of the largest logit


def answer(folder: Path, name: str, number: int = 1) -> tuple[list[int], np.ndarray, list[int]]:
    """A prompt, PEFT's logits and its greedy tokens."""
    with np.load(folder / f"{name}.npz") as data:
        found = [data[f"{key}{number}"] for key in ("prompt", "logits", "greedy")]
    return found[0].tolist(), found[1], found[2].tolist()


def engine(base: Path, fd_tensor: str, **settings: Any) -> LLM:
    return LLM(base, **{**ROOM, "tensor_library": fd_tensor, **settings})


def lora(folder: Path, name: str | None) -> LoRARequest | None:
    return None if name is None else LoRARequest(name, 1, str(folder / name))


def ask(
    llm: LLM,
    prompts: Sequence[list[int]],
    adapters: Sequence[LoRARequest | None],
    params: SamplingParams | list[SamplingParams],
) -> list[RequestOutput]:
    found = llm.generate(prompts, params, use_tqdm=False, lora_request=list(adapters))
    assert isinstance(found, list)
    return found


def tokens_of(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def logits_of(output: RequestOutput, vocab: int) -> np.ndarray:
    """[positions but the first, vocab]: what each prompt token was predicted with, by an engine
    with logprobs_mode="raw_logits"."""
    found = []
    for position in (output.prompt_logprobs or [])[1:]:
        assert position is not None
        found.append([position[token].logprob for token in range(vocab)])
    return np.array(found)


def write_adapter(
    folder: Path,
    name: str,
    sizes: Mapping[str, tuple[int, ...]],
    *,
    rank: int = 4,
    seed: int = 0,
    parameters: Sequence[str] = (),
) -> Path:
    """An adapter with random weights, as PEFT stores it; sizes: inputs and outputs by module, and
    of all experts of a block, whose `parameters` are wrapped into each other, their number."""
    draw, tensors = np.random.default_rng(seed), {}
    for module, (inputs, outputs, *experts) in sizes.items():
        rows = rank * math.prod(experts)
        for half, shape in (("A", (rows, inputs)), ("B", (outputs, rows))):
            noise = draw.standard_normal(shape, dtype=np.float32) * np.float32(0.2)
            tensors[f"base_model.model.{module}.lora_{half}.weight"] = noise
    (folder / name).mkdir(exist_ok=True)
    save_file(tensors, folder / name / "adapter_model.safetensors")
    settings: dict[str, Any] = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank}
    settings["target_parameters"] = list(parameters)
    (folder / name / "adapter_config.json").write_text(json.dumps(settings))
    return folder / name


def check_logits(llm: LLM, folder: Path, name: str) -> tuple[list[list[int]], list[list[int]]]:
    """That an adapter's logits are PEFT's. Returns the prompts, and PEFT's greedy tokens."""
    answers = [answer(folder, name, number) for number in range(len(PROMPT_LENGTHS))]
    prompts = [prompt for prompt, _, _ in answers]
    outputs = ask(llm, prompts, [lora(folder, name)] * len(prompts), SCORED)
    for output, (_, logits, _) in zip(outputs, answers, strict=True):
        theirs = logits[:-1]
        ours = logits_of(output, theirs.shape[1])
        assert np.abs(ours - theirs).max() < TOLERANCE * np.abs(theirs).max()
    return prompts, [greedy for _, _, greedy in answers]


def check_quantized(
    base: Path, folder: Path, name: str, fd_tensor: str, quantization: str, **settings: Any
) -> None:
    """What an adapter changes of the logits is what PEFT says, but for what rounding the base
    changes of them."""
    prompt, theirs, _ = answer(folder, name)
    with engine(base, fd_tensor, quantization=quantization, **settings, **RAW) as llm:
        adapted, plain = ask(llm, [prompt] * 2, [lora(folder, name), None], SCORED)
    with engine(base, fd_tensor, **settings, **RAW) as llm:
        (exact,) = ask(llm, [prompt], [None], SCORED)
    vocab = theirs.shape[1]
    rounding = np.abs(logits_of(plain, vocab) - logits_of(exact, vocab)).max()
    error = np.abs(logits_of(adapted, vocab) - theirs[:-1]).max()
    effect = np.abs(theirs[:-1] - logits_of(exact, vocab)).max()
    assert error < 3 * rounding
    assert rounding < effect / 2
