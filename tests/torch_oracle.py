"""Answers of transformers' own modules, from a process with torch: the suite may run on paddle.

usage: torch_oracle.py, then lines "QUESTION INPUT.npz OUTPUT.npz"; each is answered with "done".
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

Arrays = dict[str, np.ndarray]


def ask(question: str, folder: Path, **arrays: np.ndarray) -> Arrays:
    """The question's answer to these arrays; skips where transformers is not installed."""
    if not all(importlib.util.find_spec(name) for name in ("torch", "transformers")):
        pytest.skip("needs torch and transformers to compare with")
    source, target = folder / f"{question}-in.npz", folder / f"{question}-out.npz"
    np.savez(source, **arrays)
    process, errors = _process()
    process.stdin.write(f"{question}\t{source}\t{target}\n")
    process.stdin.flush()
    answer = process.stdout.readline().strip()
    if answer != "done":
        _process.cache_clear()
        process.kill()
        process.wait()
        errors.seek(0)
        raise RuntimeError(f"{question} failed:\n{errors.read()[-3000:]}")
    with np.load(target) as result:
        return dict(result)


@functools.cache
def _process() -> tuple[subprocess.Popen[str], object]:
    """One process for the whole run: importing transformers takes seconds."""
    errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed when the run ends
    process = subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )

    def stop() -> None:
        process.stdin.close()
        process.wait()
        process.stdout.close()
        errors.close()

    atexit.register(stop)
    return process, errors


def ernie_router(a: Arrays) -> Arrays:
    import torch
    from transformers.models.ernie4_5_moe import Ernie4_5_MoeConfig
    from transformers.models.ernie4_5_moe import modeling_ernie4_5_moe as ernie

    experts, hidden = a["weight"].shape
    config = Ernie4_5_MoeConfig(hidden_size=hidden, moe_num_experts=experts, moe_k=int(a["top_k"]))
    router = ernie.Ernie4_5_MoeTopKRouter(config)
    router.weight.data = torch.from_numpy(a["weight"])
    router.moe_statics.e_score_correction_bias.data = torch.from_numpy(a["bias"])[None]
    logits, weights, ids = router(torch.from_numpy(a["x"]))
    return {"logits": logits.numpy(), "weights": weights.numpy(), "ids": ids.numpy()}


def qwen_router(a: Arrays) -> Arrays:
    import torch
    from transformers.models.qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen

    experts, hidden = a["weight"].shape
    config = Qwen3MoeConfig(
        hidden_size=hidden,
        num_experts=experts,
        num_experts_per_tok=int(a["top_k"]),
        norm_topk_prob=bool(a["renormalize"]),
    )
    router = qwen.Qwen3MoeTopKRouter(config)
    router.weight.data = torch.from_numpy(a["weight"])
    logits, weights, ids = router(torch.from_numpy(a["x"]))
    return {"logits": logits.numpy(), "weights": weights.numpy(), "ids": ids.numpy()}


def deepseek_router(a: Arrays) -> Arrays:
    import torch
    from transformers.models.deepseek_v3 import DeepseekV3Config
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek

    experts, hidden = a["weight"].shape
    config = DeepseekV3Config(
        hidden_size=hidden,
        n_routed_experts=experts,
        num_experts_per_tok=int(a["top_k"]),
        n_group=int(a["groups"]),
        topk_group=int(a["top_k_groups"]),
        routed_scaling_factor=float(a["scaling"]),
        norm_topk_prob=True,
    )
    router = deepseek.DeepseekV3TopkRouter(config)
    router.weight.data = torch.from_numpy(a["weight"])
    router.e_score_correction_bias.data = torch.from_numpy(a["bias"])
    logits, weights, ids = router(torch.from_numpy(a["x"]))
    return {"logits": logits.numpy(), "weights": weights.numpy(), "ids": ids.numpy()}


def experts(a: Arrays) -> Arrays:
    import torch
    from transformers.models.qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen

    count, hidden, intermediate = a["down"].shape
    config = Qwen3MoeConfig(
        hidden_size=hidden, moe_intermediate_size=intermediate, num_experts=count
    )
    config._experts_implementation = "eager"
    module = qwen.Qwen3MoeExperts(config)
    module.gate_up_proj.data = torch.from_numpy(a["gate_up"])
    module.down_proj.data = torch.from_numpy(a["down"])
    y = module(*(torch.from_numpy(a[name]) for name in ("x", "ids", "weights")))
    return {"y": y.numpy()}


def rotary(a: Arrays) -> Arrays:
    """Llama's pairs and ERNIE's; their functions want [batch, heads, tokens, dim]."""
    import torch
    from transformers.models.ernie4_5 import modeling_ernie4_5 as ernie
    from transformers.models.llama import modeling_llama as llama

    q, k = (torch.from_numpy(a[name]).transpose(0, 1)[None] for name in ("q", "k"))
    cos, sin = (torch.from_numpy(np.tile(a[name], (1, 2)))[None] for name in ("cos", "sin"))
    answer = {}
    for name, module in (("llama", llama), ("ernie", ernie)):
        turned = module.apply_rotary_pos_emb(q, k, cos, sin)
        for part, value in zip("qk", turned, strict=True):
            answer[f"{name}_{part}"] = value[0].transpose(0, 1).numpy()
    return answer


def warpers(a: Arrays) -> Arrays:
    """min_p, then top_k, then top_p, as the contract orders them."""
    import torch
    from transformers.generation import logits_process as warp

    rows = []
    for row, top_k, top_p, min_p in zip(
        a["logits"], a["top_k"], a["top_p"], a["min_p"], strict=True
    ):
        x = torch.from_numpy(row)[None]
        if min_p > 0:
            x = warp.MinPLogitsWarper(float(min_p))(None, x)
        if top_k:
            x = warp.TopKLogitsWarper(int(top_k))(None, x)
        if top_p < 1:
            x = warp.TopPLogitsWarper(float(top_p))(None, x)
        rows.append(x[0].numpy())
    return {"logits": np.stack(rows)}


QUESTIONS: dict[str, Callable[[Arrays], Arrays]] = {
    f.__name__: f for f in (ernie_router, qwen_router, deepseek_router, experts, rotary, warpers)
}


def main() -> None:
    import torch

    with torch.inference_mode():
        for line in sys.stdin:
            question, source, target = line.rstrip("\n").split("\t")
            with np.load(source) as inputs:
                np.savez(target, **QUESTIONS[question](dict(inputs)))
            sys.stdout.write("done\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
