"""Train ernie-tiny from scratch and write its checkpoint.

    python tokenizer.py
    python train.py --minutes 8

Needs one GPU; `--smoke` runs the same steps with a toy size on a processor in two minutes. The
batches are drawn while the model trains, so no text is ever seen twice. The learning rate follows
the clock: constant, then down to nothing over the last part of `--minutes`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.utils.data import DataLoader

import curriculum
import data
from model import ErnieTiny, Mask, ModelConfig, checkpoint_tensors
from optimizer import build
from tokenizer import FOLDER, write_json


@dataclass(frozen=True)
class Plan:
    """How long and how hard to train."""

    minutes: float = 8.0
    rows: int = 16
    length: int = 8192
    workers: int = 14
    matrix_rate: float = 0.02
    other_rate: float = 3e-3
    warmup_steps: int = 50
    decay_share: float = 0.5
    prompt_weight: float = 0.02
    mtp_weight: float = 0.3
    balance_rate: float = 1e-3
    judge_every: float = 2.0
    seed: int = 2026


SMOKE = Plan(minutes=0.6, rows=2, length=768, workers=1, warmup_steps=5, judge_every=0.3)
SMOKE_SIZES = ModelConfig(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    moe_num_experts=4,
    moe_intermediate_size=32,
)


class Losses(nn.Module):
    """The model with its training loss, as one module to compile."""

    def __init__(self, model: ErnieTiny, plan: Plan) -> None:
        super().__init__()
        self.model, self.plan = model, plan

    def forward(
        self, tokens: Tensor, flags: Tensor, documents: Tensor, positions: Tensor, mask: Mask
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The loss to minimise, the loss of the main head on targets, the load of the experts."""
        out = self.model(tokens, positions, mask)
        main, target = self._one(out.logits, tokens, flags, documents, 1)
        draft, _ = self._one(out.mtp_logits, tokens, flags, documents, 2)
        return main + self.plan.mtp_weight * draft, target, out.load

    def _one(
        self, logits: Tensor, tokens: Tensor, flags: Tensor, documents: Tensor, ahead: int
    ) -> tuple[Tensor, Tensor]:
        """The weighted loss of predicting `ahead` tokens on, and the plain one on targets."""
        size = tokens.shape[1] - ahead
        losses = F.cross_entropy(
            logits[:, :size].float().flatten(0, 1), tokens[:, ahead:].flatten(), reduction="none"
        )
        same = (documents[:, ahead:] == documents[:, :size]).flatten()
        real = tokens[:, ahead:].flatten() != data.PAD_ID
        target = ((flags[:, ahead:].flatten() & data.TARGET) > 0) & same
        count = target.sum().clamp(min=1)
        prompt = self.plan.prompt_weight * (same & real & ~target)
        wanted = (losses * target).sum() / count
        return wanted + (losses * prompt).sum() / count, wanted.detach()


class Judge:
    """Counts held-out answers that the model would give exactly, without generating them.

    With greedy decoding an answer comes out exactly when every one of its tokens is the best
    choice after the ones before it, so one pass over prompt and answer decides it.
    """

    def __init__(self, tokenizer: Tokenizer, plan: Plan, count: int) -> None:
        self.names = list(curriculum.MEASURED)
        samples = [
            (name, sample)
            for name in self.names
            for sample in curriculum.held_out(
                name, count // 4 if name in ("find_key_4k", "find_key_8k") else count
            )
        ]
        documents = data.encode(tokenizer, [sample for _, sample in samples], only_last=True)
        self.batches: list[tuple[Tensor, Tensor, list[tuple[str, data.Place]]]] = []
        left = [
            (name, one)
            for (name, _), one in zip(samples, documents, strict=True)
            if len(one.tokens) <= plan.length
        ]
        while left:
            batch, places = data.pack([one for _, one in left], plan.rows, plan.length)
            found = [(name, place) for (name, _), place in zip(left, places, strict=True) if place]
            tokens = torch.from_numpy(batch.tokens.astype("int16"))
            self.batches.append((tokens, torch.from_numpy(batch.flags), found))
            left = [pair for pair, place in zip(left, places, strict=True) if place is None]

    @torch.no_grad()
    def __call__(
        self, forward: Any, device: torch.device, mask_of: data.MaskMaker
    ) -> dict[str, tuple[float, float]]:
        """Exact answers and accepted first drafts of every task, in percent."""
        exact: dict[str, list[bool]] = {name: [] for name in self.names}
        drafts: dict[str, list[int]] = {name: [0, 0] for name in self.names}
        for tokens, flags, found in self.batches:
            batch = data.inputs(tokens.to(device), flags.to(device))
            best, draft = forward(batch.tokens, batch.positions, mask_of(batch.documents))
            target = (batch.flags & data.TARGET) > 0
            right = ((best[:, :-1] == batch.tokens[:, 1:]) | ~target[:, 1:]).cpu()
            taken = ((draft[:, :-2] == best[:, 1:-1]) & target[:, 2:]).cpu()
            wanted = target.cpu()
            for name, (row, start, stop) in found:
                exact[name].append(bool(right[row, start : stop - 1].all()))
                drafts[name][0] += int(taken[row, start : stop - 2].sum())
                drafts[name][1] += int(wanted[row, start + 2 : stop].sum())
        return {
            name: (
                100 * sum(exact[name]) / max(1, len(exact[name])),
                100 * drafts[name][0] / max(1, drafts[name][1]),
            )
            for name in self.names
        }


def rates(plan: Plan, step: int, done: float) -> float:
    """The share of the full learning rate at a step, with `done` of the time used."""
    warm = min(1.0, (step + 1) / plan.warmup_steps)
    return warm * min(1.0, max(0.0, (1.0 - done) / plan.decay_share))


def export(model: ErnieTiny, folder: Path) -> None:
    """Write config.json, generation_config.json and the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(checkpoint_tensors(model), folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", model.config.to_json())
    write_json(
        folder / "generation_config.json",
        {
            "bos_token_id": 1,
            "eos_token_id": [4, 2],
            "pad_token_id": 5,
            "do_sample": False,
        },
    )


def train(plan: Plan, sizes: ModelConfig, options: argparse.Namespace) -> None:
    """Run the whole training."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    fast = device.type == "cuda"
    torch.manual_seed(plan.seed)
    torch.set_float32_matmul_precision("high")
    model = ErnieTiny(sizes, torch.bfloat16 if fast else torch.float32).to(device)
    print(f"{sum(p.numel() for p in model.parameters())} parameters on {device}", flush=True)
    muon, adam = build(model, compiled=fast)
    if options.resume and options.resume.exists():
        model.load_state_dict(torch.load(options.resume, map_location=device))
    losses: Any = Losses(model, plan)

    def best(tokens: Tensor, positions: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
        out = model(tokens, positions, mask)
        return out.logits.argmax(-1), out.mtp_logits.argmax(-1)

    predict: Any = best
    if fast:
        losses, predict = torch.compile(losses, dynamic=False), torch.compile(best, dynamic=False)
    mask_of: data.MaskMaker = data.block_mask if fast else data.dense_mask
    tokenizer_file = FOLDER / "tokenizer.json"
    judge = Judge(Tokenizer.from_file(str(tokenizer_file)), plan, options.judged)
    spawn = multiprocessing.get_context("spawn")
    enough = spawn.Event()
    drawn = data.Batches(tokenizer_file, plan.rows, plan.length, plan.seed + options.epoch, enough)
    loader = iter(
        DataLoader(
            drawn,
            batch_size=None,
            num_workers=plan.workers,
            pin_memory=fast,
            prefetch_factor=4,
            multiprocessing_context=spawn,
        )
    )
    biases = [
        layer.mlp.correction_bias for layer in model.layers if hasattr(layer.mlp, "correction_bias")
    ]
    begin, judged, paused = time.monotonic(), 0.0, 0.0
    counted = 0
    for step, (tokens, flags) in enumerate(loader):
        if step == 3:
            begin = time.monotonic()
        done = (time.monotonic() - begin - paused) / (60 * plan.minutes) if step >= 3 else 0.0
        if done >= 1:
            break
        batch = data.inputs(
            tokens.to(device, non_blocking=True), flags.to(device, non_blocking=True)
        )
        loss, target, load = losses(*batch, mask_of(batch.documents))
        loss.backward()
        nn.utils.clip_grad_norm_(adam.param_groups[0]["params"], 1.0)
        share = rates(plan, step, done)
        muon.step(share * plan.matrix_rate)
        adam.param_groups[0]["lr"] = share * plan.other_rate
        adam.step()
        adam.zero_grad()
        for bias, used in zip(biases, load, strict=True):
            bias.add_(share * plan.balance_rate * (used.mean() - used).sign())
        counted += tokens.numel()
        if step % 100 == 0 or step < 5:
            spent = time.monotonic() - begin
            print(
                f"step {step} loss {loss.item():.4f} target {target.item():.4f} "
                f"load {load.min().item():.3f}-{load.max().item():.3f} share {share:.3f} "
                f"{counted / 1e6:.1f}M tokens {spent:.0f}s",
                flush=True,
            )
        if done * plan.minutes - judged >= plan.judge_every:
            start = time.monotonic()
            judged = done * plan.minutes
            report(judge(predict, device, mask_of), options.output, step, counted)
            paused += time.monotonic() - start
    enough.set()
    for _ in loader:
        pass
    results = judge(predict, device, mask_of)
    report(results, options.output, step, counted)
    export(model, options.output)
    if options.state:
        torch.save(model.state_dict(), options.state)


def report(results: dict[str, tuple[float, float]], folder: Path, step: int, tokens: int) -> None:
    """Print the percentages and keep them in a file."""
    line = "  ".join(f"{name} {exact:.0f}/{draft:.0f}" for name, (exact, draft) in results.items())
    print(f"[{step}] {line}", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "training_log.jsonl").open("a", encoding="utf-8") as log:
        log.write(json.dumps({"step": step, "tokens": tokens, "results": results}) + "\n")


def main() -> None:
    """Read the options and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--matrix-rate", type=float)
    parser.add_argument("--judged", type=int, default=200, help="held-out samples of a task")
    parser.add_argument("--output", type=Path, help="the model folder, for a smoke run ./smoke")
    parser.add_argument("--state", type=Path, help="where to keep float32 weights to go on from")
    parser.add_argument("--resume", type=Path, help="float32 weights to go on from")
    parser.add_argument("--epoch", type=int, default=0, help="another number draws other samples")
    parser.add_argument("--smoke", action="store_true", help="a toy size for a processor")
    options = parser.parse_args()
    options.output = options.output or (Path("smoke") if options.smoke else FOLDER)
    chosen = {name: getattr(options, name) for name in ("minutes", "rows", "matrix_rate")}
    plan = replace(
        SMOKE if options.smoke else Plan(), **{k: v for k, v in chosen.items() if v is not None}
    )
    if options.smoke and options.judged == 200:
        options.judged = 8
    train(plan, SMOKE_SIZES if options.smoke else ModelConfig(), options)


if __name__ == "__main__":
    main()
