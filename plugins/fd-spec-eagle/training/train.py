"""Distil a drafter for ernie-tiny from the text that it was trained on.

    python train.py eagle3 --minutes 1                  # with a GPU
    python train.py dflash --minutes 25 --rows 8        # on two processor cores

Every batch is drawn anew from the curriculum of models/ernie-tiny/training. The target computes its
hidden states and its distribution over the next token once; the drafter learns that distribution
where the target itself writes. The checkpoint has the published layout: config.json and
model.safetensors in --out. `acceptance` printed at the end is that of drafts along held-out
answers; what an engine accepts is measured with benchmarks/speculative_acceptance.py.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from abc import ABC, abstractmethod
from collections import Counter
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import DataLoader

from block_drafter import BlockDrafter
from drafter import Drafter, Past

ROOT = Path(__file__).resolve().parents[3]
TARGET = ROOT / "models" / "ernie-tiny"
sys.path.insert(0, str(TARGET / "training"))

import curriculum  # noqa: E402
import data  # noqa: E402
from model import ErnieTiny, ModelConfig, load_checkpoint, rotation  # noqa: E402
from optimizer import Muon  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

# Number n: what block n reads, so that 8 is what the last of eight blocks gives.
AUX_LAYERS = (2, 5, 8)
LATER = 0.8  # a draft weighs so much less than the one before it
MASK_ID = 0  # <unk>, which no text has


# (loss, share that is right) of the first draft, the second ...
Losses = list[tuple[Tensor, Tensor]]
# Hidden states of the target that drafters read, and its logits.
Taught = tuple[list[Tensor], Tensor]


class Lesson(ABC):
    """One method: its drafter, and how that learns."""

    sizes: dict[str, Any]  # config.json
    drafter: torch.nn.Module

    def __init__(self, target: ModelConfig) -> None:
        self.sizes = {
            "model_type": "llama",
            "vocab_size": target.vocab_size,
            "hidden_size": target.hidden_size,
            "head_dim": 64,
            "max_position_embeddings": target.max_position_embeddings,
            "rms_norm_eps": target.rms_norm_eps,
            "rope_theta": target.rope_theta,
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        }

    @abstractmethod
    def losses(self, model: ErnieTiny, batch: data.Inputs, taught: Taught, count: int) -> Losses:
        """Of `count` drafts in a row along a batch."""

    def tables(self) -> dict[str, Tensor]:
        """Tensors of the checkpoint that are not learned."""
        return {}


def frequent(tokenizer: Tokenizer, number: int, samples: int = 6000) -> Tensor:
    """The tokens that answers have most often, [number] in order of id."""
    rng, counts = Random("draft vocabulary"), Counter[int]()
    for document in data.encode(tokenizer, [curriculum.sample(rng) for _ in range(samples)]):
        counts.update(document.tokens[(document.flags & data.TARGET) > 0].tolist())
    total, most = sum(counts.values()), counts.most_common(number)
    print(f"{len(most)} tokens are {100 * sum(n for _, n in most) / total:.2f} % of answers")
    found = sorted(token for token, _ in most)
    spare = (token for token in range(tokenizer.get_vocab_size()) if token not in counts)
    while len(found) < number:
        found.append(next(spare))
    return torch.tensor(sorted(found))


@torch.no_grad()
def teach(model: ErnieTiny, batch: data.Inputs) -> Taught:
    """What the target makes of a batch."""
    cos, sin = rotation(batch.positions, model.config)
    mask = data.dense_mask(batch.documents)
    x, kept = model.embed(batch.tokens), {}
    for number, layer in enumerate(model.layers):
        x, _ = layer(x, cos, sin, mask)
        kept[number + 1] = x.float()
    return [kept[number] for number in AUX_LAYERS], model.head(model.norm(x)).float()


class Eagle3(Lesson):
    """Drafts one after another, from a vocabulary of its own."""

    def __init__(
        self, target: ModelConfig, model: ErnieTiny, tokenizer: Tokenizer, draft_vocab_size: int
    ) -> None:
        super().__init__(target)
        self.sizes |= {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": draft_vocab_size,
            "intermediate_size": 384,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "eagle_aux_hidden_state_layer_ids": list(AUX_LAYERS),
        }
        embedding = model.embed_tokens.weight
        self._ids = frequent(tokenizer, draft_vocab_size).to(embedding.device)
        self.drafter: Drafter = Drafter(self.sizes).to(embedding.device)
        with torch.no_grad():
            self.drafter.lm_head.weight.copy_(embedding[self._ids])
            self.drafter.norm.weight.copy_(model.norm.weight)

    def losses(self, model: ErnieTiny, batch: data.Inputs, taught: Taught, count: int) -> Losses:
        """Pass j, after j drafts, at every position."""
        drafter, ids, (aux, logits) = self.drafter, self._ids, taught
        seen = data.dense_mask(batch.documents)
        wanted, best = logits[..., ids].log_softmax(-1).exp(), logits.argmax(-1)
        embedded = model.embed(batch.tokens).float().roll(-1, dims=1)
        hidden, angles = drafter.fc(torch.cat(aux, dim=-1)), drafter.angles(batch.positions)
        written = (batch.flags & data.TARGET) > 0
        past, found = Past([], []), []
        for number in range(count):
            out, hidden = drafter(embedded, hidden, angles, seen, past)
            # At position p the target says at p + 1 what follows token p + 1. A pass begins inside
            # the document, and its token is one that the target writes.
            counts = written.roll(-2, dims=1) & (
                batch.documents == batch.documents.roll(-2, dims=1)
            )
            counts[:, -2:] = False
            counts &= batch.positions >= number
            right = ids[out.argmax(-1)] == best.roll(-1, dims=1)
            each = -(wanted.roll(-1, dims=1) * out.log_softmax(-1)).sum(-1)
            total = counts.sum().clamp(min=1)
            found.append(((each * counts).sum() / total, (right & counts).sum() / total))
            hidden = hidden.roll(1, dims=1)  # what the next pass reads one position later
        return found

    def tables(self) -> dict[str, Tensor]:
        """Where its vocabulary lies in the target's."""
        ids = self._ids.cpu()
        can = torch.zeros(self.sizes["vocab_size"], dtype=torch.bool).index_fill(0, ids, True)
        return {"d2t": ids - torch.arange(len(ids)), "t2d": can}


class DFlash(Lesson):
    """Drafts a block at once, from `anchors` places of each row."""

    def __init__(
        self, target: ModelConfig, model: ErnieTiny, block_size: int, anchors: int
    ) -> None:
        super().__init__(target)
        self._size, self._anchors = block_size, anchors
        self.sizes |= {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "block_size": block_size,
            "num_target_layers": target.num_hidden_layers,
            "dflash_config": {
                "mask_token_id": MASK_ID,
                "target_layer_ids": [number - 1 for number in AUX_LAYERS],
            },
        }
        self.drafter = BlockDrafter(self.sizes).to(model.embed_tokens.weight.device)
        with torch.no_grad():
            self.drafter.norm.weight.copy_(model.norm.weight)

    def losses(self, model: ErnieTiny, batch: data.Inputs, taught: Taught, count: int) -> Losses:
        """Of blocks after random tokens whose next one the target writes."""
        size, length, documents = self._size, batch.tokens.shape[1], batch.documents
        aux, logits = taught
        written = (batch.flags & data.TARGET) > 0
        # Token p can be a block's first if p + 1 is written and p - 1 is of the same document.
        can = written.roll(-1, dims=1) & (batch.positions > 0)
        can[:, -size:] = False
        number = min(self._anchors, int(can.sum(1).max()))
        chances, anchors = (torch.rand(can.shape, device=can.device) * can).topk(number, dim=1)
        where = anchors[..., None] + torch.arange(size, device=can.device)  # [rows, anchors, size]
        flat = where.flatten(1)
        ids = torch.full_like(where, MASK_ID)
        ids[..., 0] = batch.tokens.gather(1, anchors)
        index = torch.arange(length, device=can.device)
        before = (index < anchors[..., None]) & (
            documents[:, None] == documents.gather(1, anchors)[..., None]
        )
        before = before.repeat_interleave(size, dim=1)
        own = torch.arange(flat.shape[1], device=can.device) // size
        seen = torch.cat((before, (own[:, None] == own).expand(len(flat), -1, -1)), dim=-1)
        positions = (
            batch.positions.gather(1, anchors)[..., None] + where - anchors[..., None]
        ).flatten(1)
        embedded, states = model.embed(ids.flatten(1)).float(), torch.cat(aux, dim=-1)
        x = self.drafter(embedded, states, (positions, batch.positions), seen[:, None])
        out = (x @ model.embed_tokens.weight.T).float().unflatten(1, (number, size))
        rows = torch.arange(len(flat), device=can.device)[:, None, None]
        told = logits[rows, where - 1]  # the target's, of the token that stands there
        counts = written[rows, where] & (documents[rows, where] == documents[rows, where - 1])
        counts = (counts & (chances > 0)[..., None])[..., 1:].long().cumprod(-1)
        each = -(told.softmax(-1) * out.log_softmax(-1)).sum(-1)[..., 1:]
        right = (out.argmax(-1) == told.argmax(-1))[..., 1:]
        totals = counts.sum((0, 1)).clamp(min=1)
        losses, shares = ((part * counts).sum((0, 1)) / totals for part in (each, right))
        return list(zip(losses[:count], shares[:count], strict=True))


def train(options: argparse.Namespace, lesson: Lesson, model: ErnieTiny, count: int) -> None:
    """Train the lesson's drafter."""
    named = dict(lesson.drafter.named_parameters())
    plain = [p for name, p in named.items() if p.ndim < 2 or name.startswith("lm_head")]
    matrices = [p for name, p in named.items() if p.ndim == 2 and not name.startswith("lm_head")]
    muon = Muon(matrices, decay=0.02, compiled=False)
    adam = torch.optim.AdamW(plain, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    enough, device = get_context("fork").Event(), plain[0].device
    batches = data.Batches(TARGET / "tokenizer.json", options.rows, options.length, 7, enough)
    loader = DataLoader(batches, batch_size=None, num_workers=options.workers)
    began, last = time.monotonic(), 0.0
    for step, (tokens, flags) in enumerate(loader):
        done = (time.monotonic() - began) / (60 * options.minutes)
        if done >= 1:
            break
        batch = data.inputs(tokens.to(device), flags.to(device))
        taught = teach(model, batch)
        for _ in range(options.updates):
            found = lesson.losses(model, batch, taught, count)
            sum(LATER**n * loss for n, (loss, _) in enumerate(found)).backward()
            share = min(1.0, (step + 1) / 20, 2 * (1 - done))  # warm up; fall over the second half
            muon.step(share * 0.01)
            adam.param_groups[0]["lr"] = share * 2e-3
            adam.step()
            adam.zero_grad()
        if time.monotonic() - last > 10:
            last = time.monotonic()
            right = " ".join(f"{100 * float(share):5.1f}" for _, share in found)
            print(f"{step:6} {100 * done:5.1f} %  right {right}", flush=True)
    enough.set()
    print(f"{step} steps of {options.rows} x {options.length} tokens")


@torch.no_grad()
def held_out(lesson: Lesson, model: ErnieTiny, tokenizer: Tokenizer, count: int) -> None:
    """Print how often each draft is right along answers that training never saw."""
    for task in curriculum.JUDGED:
        documents = data.encode(tokenizer, curriculum.held_out(task, 40, 2026), only_last=True)
        packed, _ = data.pack(documents, 48, 512)
        device = model.embed_tokens.weight.device
        tokens, flags = (torch.from_numpy(part.astype("int64")).to(device) for part in packed)
        batch = data.inputs(tokens, flags)
        found = lesson.losses(model, batch, teach(model, batch), count)
        print(f"{task:12} acceptance", *(f"{100 * float(share):5.1f}" for _, share in found))


def save(folder: Path, lesson: Lesson) -> None:
    """Write the checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    named = lesson.drafter.named_parameters()
    tensors = {name: p.detach().bfloat16().contiguous().cpu() for name, p in named}
    file = folder / "model.safetensors"
    save_file({**tensors, **lesson.tables()}, file, metadata={"format": "pt"})
    config = json.dumps(lesson.sizes, indent=2) + "\n"
    (folder / "config.json").write_text(config, encoding="utf-8")
    print(f"{folder}: {file.stat().st_size:,} bytes")


def main() -> None:
    """Train, judge, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("method", choices=["eagle3", "dflash"])
    parser.add_argument("--minutes", type=float, default=25)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--passes", type=int, default=4, help="of eagle3: drafts that are trained")
    parser.add_argument("--draft-vocab-size", type=int, default=1024, help="of eagle3")
    parser.add_argument("--block-size", type=int, default=8, help="of dflash")
    parser.add_argument("--anchors", type=int, default=32, help="of dflash: blocks of each row")
    parser.add_argument("--updates", type=int, default=1, help="of the drafter with each batch")
    parser.add_argument("--workers", type=int, default=1, help="processes that draw text")
    parser.add_argument("--out", type=Path, help="default: models/ernie-tiny-METHOD")
    options = parser.parse_args()
    torch.manual_seed(7)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    stated = json.loads((TARGET / "config.json").read_text(encoding="utf-8"))
    target = ModelConfig(**{name: stated[name] for name in ModelConfig.__dataclass_fields__})
    dtype = (
        torch.float32 if device.type == "cuda" else torch.bfloat16
    )  # several times as fast there
    model = ErnieTiny(target, dtype).to(device).requires_grad_(False)
    load_checkpoint(model, load_file(TARGET / "model.safetensors", device=str(device)))
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    lesson: Lesson
    if options.method == "eagle3":
        lesson = Eagle3(target, model, tokenizer, options.draft_vocab_size)
        count, judged = options.passes, 5
    else:
        lesson = DFlash(target, model, options.block_size, options.anchors)
        count = judged = options.block_size - 1
    train(options, lesson, model, count)
    save(options.out or ROOT / "models" / f"ernie-tiny-{options.method}", lesson)
    held_out(lesson, model, tokenizer, judged)


if __name__ == "__main__":
    main()
