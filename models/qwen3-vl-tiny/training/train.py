"""Train qwen3-vl-tiny from scratch and write its checkpoint.

    python tokenizer.py
    python train.py --seconds 285
    python train.py --start FOLDER --rate 0.3 --seconds 100    # go on from a checkpoint

Needs one GPU, which also draws the pictures, and processor cores for the workers, which make the
conversations while the model trains: none is seen twice. The learning rate follows the clock. On a
processor, `--pictures 16 --workers 1` shows that the loss falls.
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
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

import chat
import data
import scenes
from model import CELL, Model, Sizes, checkpoint_tensors, load_checkpoint
from painter import Painter
from tokenizer import FOLDER, PAD, SPECIAL, TURN_END, write_json

sys.path.append(str(FOLDER.parent / "ernie-tiny" / "training"))
from optimizer import Muon

SIZE = (6 * CELL, 6 * CELL)
PROMPT_WEIGHT = 0.02
DECAY_SHARE, WARMUP_STEPS = 0.6, 100
MATRIX_RATE, OTHER_RATE = 0.02, 3e-3


class Pass:
    """Forward and backward passes over pictures of one size. On a GPU they are a captured graph: a
    model so small computes faster than a processor can queue its kernels."""

    def __init__(self, model: Model, inputs: tuple[Tensor, ...], *, captures: bool) -> None:
        """inputs: as those of all calls, but for what is in them."""
        self._model, self._inputs = model, [tensor.clone() for tensor in inputs]
        self._weights = list(model.parameters())
        self.answers = torch.zeros(())  # the part of the loss that is of answers
        self._graph: torch.cuda.CUDAGraph | None = None
        self._gradients: list[Tensor | None] = []
        if captures:
            self._capture()

    def _capture(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._forget()
                self._compute()
            gradient = self._gradient()
        torch.cuda.current_stream().wait_stream(stream)
        wanted = self.answers.item()
        self._forget()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._compute()
        self._gradients = [weight.grad for weight in self._weights]
        graph.replay()
        alike = F.cosine_similarity(self._gradient(), gradient, 0).item()
        if not (abs(self.answers.item() - wanted) < 0.02 * wanted and alike > 0.98):
            raise RuntimeError(f"a captured pass differs: {self.answers.item()} {wanted} {alike}")
        self._graph = graph

    def _forget(self) -> None:
        for weight in self._weights:
            weight.grad = None

    def _gradient(self) -> Tensor:
        """All gradients in one vector."""
        return torch.cat([w.grad.flatten() for w in self._weights if w.grad is not None])

    def _compute(self) -> None:
        tokens, positions, targets, where, pictures = self._inputs
        kind = tokens.device.type
        with torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda", cache_enabled=False):
            logits = self._model(tokens, positions, pictures, where)
        wanted = tokens[:, 1:].flatten()
        losses = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), wanted, reduction="none")
        target = targets[:, 1:].flatten()
        count = target.sum()
        rest = (wanted >= len(SPECIAL)) & ~target
        answers = (losses * target).sum() / count
        (answers + PROMPT_WEIGHT * (losses * rest).sum() / count).backward()
        nn.utils.clip_grad_norm_(self._weights, 1.0)
        self.answers = answers.detach()

    def __call__(self, *inputs: Tensor) -> None:
        """Leave the gradients of these inputs."""
        for own, given in zip(self._inputs, inputs, strict=True):
            own.copy_(given)
        self._forget()
        if self._graph is None:
            self._compute()
            return
        self._graph.replay()
        for weight, gradient in zip(self._weights, self._gradients, strict=True):
            weight.grad = gradient


class Judge:
    """Counts held-out answers that the model would give exactly, without generating them: each
    token has to be the best one after the ones before it. Its scores are for the eye; those of the
    card are `evaluate.py`'s."""

    def __init__(self, tokenizer: Tokenizer, count: int, device: torch.device) -> None:
        rng = Random(7)
        self.batches: list[tuple[str, data.Batch, Tensor]] = []
        for task in (*scenes.TASKS, "new pairs"):
            asked = [chat.single(rng, task) for _ in range(count)]
            arrays, shown = data.make(tokenizer, iter(asked), (6, 6), count)
            painted = np.stack([np.asarray(scenes.paint(rng, scene, SIZE)) for scene in shown])
            batch = data.on_device(arrays, SIZE, device)
            self.batches.append((task, batch, torch.from_numpy(painted).to(device)))

    @torch.no_grad()
    def __call__(self, model: Model) -> dict[str, float]:
        """Percent of exact answers by task."""
        scores = {}
        for task, batch, pictures in self.batches:
            best = model(batch.tokens, batch.positions, pictures, batch.where).argmax(-1)
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
    if options.start is not None:
        load_checkpoint(model, load_file(options.start / "model.safetensors"))
    muon, adam = optimizers(model, is_fast=is_fast)
    judge = Judge(Tokenizer.from_file(str(file)), options.judged, device)
    painter = Painter(device)
    passes: dict[tuple[int, int], Pass] = {}
    step, num_pictures, judged = 0, 0, 0.0
    while (done := (time.monotonic() - begin) / options.seconds) < 1:
        batch = batches.get(device)
        assert batch.drawn is not None
        pictures = painter(batch.drawn, batch.size)
        inputs = (batch.tokens, batch.positions, batch.targets, batch.where, pictures)
        if batch.size not in passes:
            # The usual size; others are rare.
            captures = is_fast and not options.eager and batch.size == SIZE
            passes[batch.size] = Pass(model, inputs, captures=captures)
        run = passes[batch.size]
        run(*inputs)
        share = min(1.0, (step + 1) / WARMUP_STEPS, (1 - done) / DECAY_SHARE) * options.rate
        muon.step(share * MATRIX_RATE)
        adam.param_groups[0]["lr"] = share * OTHER_RATE
        adam.step()
        adam.zero_grad()
        num_pictures += len(pictures)
        if step % options.say_every == 0:
            print(
                f"step {step} answers {run.answers.item():.4f} share {share:.3f} {num_pictures} "
                f"pictures {time.monotonic() - begin:.0f} s",
                flush=True,
            )
        step += 1
        if done - judged > 0.2:
            judged = done
            export(model, options.output)
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
    parser.add_argument("--seconds", type=float, default=285)
    parser.add_argument("--start", type=Path, help="folder of a checkpoint to go on from")
    parser.add_argument("--rate", type=float, default=1.0, help="times the usual learning rates")
    parser.add_argument("--pictures", type=int, default=256, help="of a step")
    parser.add_argument("--eager", action="store_true", help="without captured graphs")
    parser.add_argument("--workers", type=int, default=7)
    parser.add_argument("--judged", type=int, default=100, help="held-out questions of a task")
    parser.add_argument("--say-every", type=int, default=200)
    parser.add_argument("--output", type=Path, default=FOLDER)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
