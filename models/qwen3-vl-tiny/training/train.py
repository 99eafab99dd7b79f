"""Train qwen3-vl-tiny from scratch and write its checkpoint.

    python tokenizer.py
    python train.py --minutes 3.7

Needs one GPU and as many processor cores as there are workers, which draw the pictures while the
model trains: none is seen twice. The learning rate follows the clock. On a processor, `--pictures
16 --workers 1` shows that the loss falls.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from pathlib import Path
from random import Random

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

import chat
import data
import scenes
from model import CELL, Model, Sizes, checkpoint_tensors
from tokenizer import FOLDER, PAD, SPECIAL, TURN_END, write_json

sys.path.append(str(FOLDER.parent / "ernie-tiny" / "training"))
from optimizer import Muon

PROMPT_WEIGHT = 0.02
DECAY_SHARE, WARMUP_STEPS = 0.6, 100
MATRIX_RATE, OTHER_RATE = 0.02, 3e-3


def loss_of(logits: Tensor, batch: data.Batch) -> tuple[Tensor, Tensor]:
    """The loss to minimise, and the part of it that is of answers."""
    wanted = batch.tokens[:, 1:].flatten()
    losses = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), wanted, reduction="none")
    target = batch.targets[:, 1:].flatten()
    count = target.sum()
    rest = (wanted >= len(SPECIAL)) & ~target
    answers = (losses * target).sum() / count
    return answers + PROMPT_WEIGHT * (losses * rest).sum() / count, answers.detach()


class Judge:
    """Counts held-out answers that the model would give exactly, without generating them: each
    token has to be the best one behind the ones before it. Its scores are for the eye; those of the
    card are `evaluate.py`'s."""

    def __init__(self, tokenizer: Tokenizer, count: int, device: torch.device) -> None:
        rng = Random(7)
        self.batches: list[tuple[str, data.Batch]] = []
        for task in (*scenes.TASKS, "new pairs"):
            asked = [chat.single(rng, task) for _ in range(count)]
            memory = np.zeros((count, 6 * CELL, 6 * CELL, 3), np.uint8)
            arrays = data.make(tokenizer, rng, iter(asked), (6, 6), memory)
            moved = {k: torch.from_numpy(v).to(device) for k, v in arrays.items()}
            pictures = torch.from_numpy(memory).to(device)
            self.batches.append((task, data.Batch(pictures=pictures, **moved)))

    @torch.no_grad()
    def __call__(self, model: Model) -> dict[str, float]:
        """Percent of exact answers by task."""
        scores = {}
        for task, batch in self.batches:
            best = model(batch.tokens, batch.positions, batch.pictures, batch.where).argmax(-1)
            right = (best[:, :-1] == batch.tokens[:, 1:]) | ~batch.targets[:, 1:]
            scores[task] = 100 * right.all(1).float().mean().item()
        return scores


def optimizers(model: Model, *, is_fast: bool) -> tuple[Muon, torch.optim.AdamW]:
    """Muon for the matrices, AdamW for the rest."""
    groups: dict[bool, list[nn.Parameter]] = defaultdict(list)
    for name, weight in model.named_parameters():
        groups[weight.ndim == 2 and "embed" not in name].append(weight)
    adam = torch.optim.AdamW(
        groups[False], lr=OTHER_RATE, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0, fused=is_fast
    )
    return Muon(groups[True], decay=0.05, compiled=False), adam


def export(model: Model, folder: Path) -> None:
    """Write the weights and the files beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(checkpoint_tensors(model), folder / "model.safetensors", metadata={"format": "pt"})
    named = ("vision_start", "vision_end", "image", "video")
    ids = {f"{name}_token_id": 3 + n for n, name in enumerate(named)}
    ids |= {"eos_token_id": TURN_END, "pad_token_id": PAD}
    write_json(folder / "config.json", model.sizes.to_json(ids))
    write_json(
        folder / "generation_config.json",
        {"eos_token_id": TURN_END, "pad_token_id": PAD, "do_sample": False},
    )
    seen = {
        "patch_size": 16, "merge_size": 2, "temporal_patch_size": 2,
        "size": {"shortest_edge": 28672, "longest_edge": 36864},
        "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
        "do_resize": True, "do_rescale": True, "do_normalize": True, "resample": 3,
        "rescale_factor": 1 / 255, "do_convert_rgb": True,
    }  # fmt: skip
    write_json(
        folder / "preprocessor_config.json",
        {**seen, "image_processor_type": "Qwen2VLImageProcessorFast"},
    )
    write_json(
        folder / "video_preprocessor_config.json",
        {
            **seen, "video_processor_type": "Qwen3VLVideoProcessor", "fps": 2, "min_frames": 2,
            "max_frames": 16, "do_sample_frames": True,
            "size": {"shortest_edge": 28672, "longest_edge": 36864 * 8},
        },
    )  # fmt: skip


def train(options: argparse.Namespace) -> None:
    """Run the whole training."""
    begin = time.monotonic()
    file = FOLDER / "tokenizer.json"
    batches = data.Batches(file, options.pictures, options.workers, seed=2026)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    is_fast = device.type == "cuda"
    torch.manual_seed(2026)
    torch.set_float32_matmul_precision("high")
    model = Model(Sizes()).to(device)
    print(f"{sum(p.numel() for p in model.parameters())} parameters on {device}", flush=True)
    muon, adam = optimizers(model, is_fast=is_fast)
    judge = Judge(Tokenizer.from_file(str(file)), options.judged, device)
    batches.start(device)
    step, num_pictures, judged = 0, 0, 0.0
    while (done := (time.monotonic() - begin) / (60 * options.minutes)) < 1:
        batch = batches.get()
        with torch.autocast(device.type, torch.bfloat16, enabled=is_fast):
            logits = model(batch.tokens, batch.positions, batch.pictures, batch.where)
            loss, answers = loss_of(logits, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        share = min(1.0, (step + 1) / WARMUP_STEPS, (1 - done) / DECAY_SHARE)
        muon.step(share * MATRIX_RATE)
        adam.param_groups[0]["lr"] = share * OTHER_RATE
        adam.step()
        adam.zero_grad()
        num_pictures += len(batch.pictures)
        if step % options.say_every == 0:
            print(
                f"step {step} answers {answers.item():.4f} share {share:.3f} {num_pictures} "
                f"pictures {time.monotonic() - begin:.0f} s",
                flush=True,
            )
        step += 1
        if done - judged > 0.2:
            judged = done
            report(judge(model))
    batches.close()
    # What is scored is what is shipped: weights of 16 bits.
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.bfloat16())
    export(model, options.output)
    print(f"{step} steps, {num_pictures} pictures, {time.monotonic() - begin:.0f} s", flush=True)
    report(judge(model))


def report(scores: dict[str, float]) -> None:
    """Print percentages."""
    print("  ".join(f"{task} {score:.1f}" for task, score in scores.items()), flush=True)


def main() -> None:
    """Read the options and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=3.7)
    parser.add_argument("--pictures", type=int, default=256, help="of a step")
    parser.add_argument("--workers", type=int, default=15)
    parser.add_argument("--judged", type=int, default=200, help="held-out questions of a task")
    parser.add_argument("--say-every", type=int, default=200)
    parser.add_argument("--output", type=Path, default=FOLDER)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
