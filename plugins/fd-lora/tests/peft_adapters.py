"""Adapters with random weights as PEFT saves them, and what PEFT on transformers computes.

Run as a program in a child process (`build` does that), because transformers needs torch and the
suite may run on paddle."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[3]
NUM_GREEDY = 24
PROMPT_LENGTHS = (5, 23)
EVERY = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
PATTERNS = {
    "rank_pattern": {r"layers\.1\..*q_proj": 2, "down_proj": 5},
    "alpha_pattern": {"down_proj": 3},
}
# By the base model's name in tests/checkpoints.py: each adapter's LoraConfig.
ADAPTERS: dict[str, dict[str, dict[str, Any]]] = {
    "llama": {
        "some": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
        "all": {"r": 8, "lora_alpha": 6, "target_modules": "all-linear", "use_rslora": True},
        "mixed": {"r": 3, "lora_alpha": 5, "target_modules": EVERY, **PATTERNS},
        "regex": {"r": 6, "lora_alpha": 6, "target_modules": r".*\.[02]\..*(up|o)_proj"},
    },
    "qwen3": {"all": {"r": 8, "lora_alpha": 16, "target_modules": EVERY}},
    "ernie": {"all": {"r": 7, "lora_alpha": 9, "target_modules": "all-linear"}},
    "qwen3-moe": {
        "attention": {"r": 4, "lora_alpha": 9, "target_modules": EVERY[:4]},
        "experts": {"r": 4, "lora_alpha": 9, "target_modules": [], "target_parameters": EXPERTS},
        "down": {
            "r": 3,
            "lora_alpha": 6,
            "target_modules": EVERY[:2],
            "target_parameters": EXPERTS[1:],
            "use_rslora": True,
        },
        "first": {
            "r": 5,
            "lora_alpha": 8,
            "target_modules": [],
            "target_parameters": [f"layers.0.{name}" for name in EXPERTS],
        },
    },
    "ernie-moe": {
        "all": {
            "r": 4,
            "lora_alpha": 6,
            "target_modules": EVERY,
            "target_parameters": EXPERTS,
        },
    },
    "deepseek": {
        "attention": {"r": 4, "lora_alpha": 8, "target_modules": ["kv_a_proj_with_mqa", "o_proj"]},
        "experts": {"r": 4, "lora_alpha": 8, "target_modules": [], "target_parameters": EXPERTS},
    },
    "olmo2": {"all": {"r": 8, "lora_alpha": 8, "target_modules": "all-linear"}},
    "phi3": {"all": {"r": 8, "lora_alpha": 8, "target_modules": "all-linear"}},
    "gemma3": {"all": {"r": 8, "lora_alpha": 8, "target_modules": "all-linear"}},
    "hunyuan-moe": {"attention": {"r": 4, "lora_alpha": 9, "target_modules": EVERY[:4]}},
    "llama4": {"attention": {"r": 4, "lora_alpha": 9, "target_modules": EVERY[:4]}},
    "lfm2-moe": {"mixers": {"r": 4, "lora_alpha": 8, "target_modules": ["in_proj", "out_proj"]}},
    "nemotron-h": {"mixers": {"r": 4, "lora_alpha": 8, "target_modules": ["in_proj", "q_proj"]}},
    "qwen3-next": {"mixers": {"r": 4, "lora_alpha": 8, "target_modules": ["o_proj", "out_proj"]}},
}


def build(folder: Path, base: str, more: dict[str, dict[str, Any]] | None = None) -> Path:
    """The base model at folder/BASE, its adapters at folder/NAME, answers at folder/NAME.npz. more:
    other adapters than those above."""
    sys.path.insert(0, str(ROOT))
    from tests.checkpoints import build as build_bases

    build_bases(folder, [base])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    command = [sys.executable, __file__, str(folder), base, json.dumps(more)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(f"peft failed:\n{done.stderr[-4000:]}")
    return folder


def _make(folder: Path, base: str, adapters: dict[str, dict[str, Any]]) -> None:
    import peft
    import torch
    import transformers

    for number, (name, settings) in enumerate(adapters.items()):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder / base, dtype=torch.float32, attn_implementation="eager"
        )
        torch.manual_seed(number)
        config = peft.LoraConfig(**settings, init_lora_weights=False, task_type="CAUSAL_LM")
        adapted = peft.get_peft_model(model, config).eval()
        with torch.no_grad():  # large enough that no token is right by chance
            for key, tensor in adapted.named_parameters():
                if "lora_" in key:
                    tensor.copy_(torch.randn_like(tensor) * 0.2)
        adapted.save_pretrained(folder / name)
        np.savez(folder / f"{name}.npz", **_answers(adapted))


def _answers(model: Any) -> dict[str, np.ndarray]:
    """Random prompts, logits of all their positions, and what greedy decoding adds."""
    import torch

    draw, found = np.random.default_rng(5), {}
    for number, length in enumerate(PROMPT_LENGTHS):
        tokens = draw.integers(3, model.config.vocab_size, length).tolist()
        found[f"prompt{number}"] = np.array(tokens)
        with torch.no_grad():
            for _ in range(NUM_GREEDY):
                logits = model(torch.tensor([tokens])).logits[0]
                found.setdefault(f"logits{number}", logits.numpy())
                tokens.append(int(logits[-1].argmax()))
        found[f"greedy{number}"] = np.array(tokens[length:])
    return found


if __name__ == "__main__":
    given = json.loads(sys.argv[3])
    _make(Path(sys.argv[1]), sys.argv[2], given or ADAPTERS[sys.argv[2]])
