"""Distil an EAGLE-3 drafter for ernie-tiny from the text that it was trained on.

    python train.py --minutes 1                  # with a GPU
    python train.py --minutes 25 --rows 8        # on two processor cores

Every batch is drawn anew from the curriculum of models/ernie-tiny/training. The target computes its
hidden states and its distribution over the next token once; the drafter's passes learn that
distribution where the target itself writes. The checkpoint has the published layout: config.json
and model.safetensors in --out. `acceptance` printed at the end is that of drafts along held-out
answers; what an engine accepts is measured with benchmarks/speculative_acceptance.py.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import DataLoader

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
LATER = 0.8  # a pass weighs so much less than the one before it


def config(target: ModelConfig, draft_vocab_size: int) -> dict[str, Any]:
    """config.json of the drafter."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": target.vocab_size,
        "draft_vocab_size": draft_vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": 384,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "max_position_embeddings": target.max_position_embeddings,
        "rms_norm_eps": target.rms_norm_eps,
        "rope_theta": target.rope_theta,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "eagle_aux_hidden_state_layer_ids": list(AUX_LAYERS),
        "torch_dtype": "bfloat16",
    }


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
def teach(model: ErnieTiny, batch: data.Inputs, mask: Tensor) -> tuple[list[Tensor], Tensor]:
    """Hidden states of the target that the drafter reads, and its logits."""
    cos, sin = rotation(batch.positions, model.config)
    x, kept = model.embed(batch.tokens), {}
    for number, layer in enumerate(model.layers):
        x, _ = layer(x, cos, sin, mask)
        kept[number + 1] = x.float()
    return [kept[number] for number in AUX_LAYERS], model.head(model.norm(x)).float()


def losses(
    drafter: Drafter, model: ErnieTiny, batch: data.Inputs, ids: Tensor, passes: int
) -> list[tuple[Tensor, Tensor]]:
    """(loss, share of right drafts) of each pass. ids: the draft vocabulary."""
    seen = data.dense_mask(batch.documents)
    aux, logits = teach(model, batch, seen)
    wanted, best = logits[..., ids].log_softmax(-1).exp(), logits.argmax(-1)
    embedded = model.embed(batch.tokens).float().roll(-1, dims=1)
    hidden, angles = drafter.fc(torch.cat(aux, dim=-1)), drafter.angles(batch.positions)
    written = (batch.flags & data.TARGET) > 0
    past, found = Past([], []), []
    for number in range(passes):
        out, hidden = drafter(embedded, hidden, angles, seen, past)
        # At position p the target says at p + 1 what follows token p + 1. A pass begins inside the
        # document, and its token is one that the target writes.
        counts = written.roll(-2, dims=1) & (batch.documents == batch.documents.roll(-2, dims=1))
        counts[:, -2:] = False
        counts &= batch.positions >= number
        right = ids[out.argmax(-1)] == best.roll(-1, dims=1)
        each = -(wanted.roll(-1, dims=1) * out.log_softmax(-1)).sum(-1)
        total = counts.sum().clamp(min=1)
        found.append(((each * counts).sum() / total, (right & counts).sum() / total))
        hidden = hidden.roll(1, dims=1)  # what the next pass reads one position later
    return found


def train(options: argparse.Namespace, model: ErnieTiny, sizes: dict[str, Any], ids: Tensor) -> Any:
    """A trained drafter."""
    drafter = Drafter(sizes).to(ids.device)
    with torch.no_grad():
        drafter.lm_head.weight.copy_(model.embed_tokens.weight[ids])
        drafter.norm.weight.copy_(model.norm.weight)
    named = dict(drafter.named_parameters())
    plain = [p for name, p in named.items() if p.ndim < 2 or name.startswith("lm_head")]
    matrices = [p for name, p in named.items() if p.ndim == 2 and not name.startswith("lm_head")]
    muon = Muon(matrices, decay=0.02, compiled=False)
    adam = torch.optim.AdamW(plain, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    enough = get_context("fork").Event()
    batches = data.Batches(TARGET / "tokenizer.json", options.rows, options.length, 7, enough)
    loader = DataLoader(batches, batch_size=None, num_workers=options.workers)
    began, last = time.monotonic(), 0.0
    for step, (tokens, flags) in enumerate(loader):
        done = (time.monotonic() - began) / (60 * options.minutes)
        if done >= 1:
            break
        batch = data.inputs(tokens.to(ids.device), flags.to(ids.device))
        found = losses(drafter, model, batch, ids, options.passes)
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
    return drafter


@torch.no_grad()
def held_out(drafter: Drafter, model: ErnieTiny, tokenizer: Tokenizer, ids: Tensor) -> None:
    """Print how often each pass is right along answers that training never saw."""
    for task in curriculum.JUDGED:
        documents = data.encode(tokenizer, curriculum.held_out(task, 40, 2026), only_last=True)
        packed, _ = data.pack(documents, 48, 512)
        tokens, flags = (torch.from_numpy(part.astype("int64")).to(ids.device) for part in packed)
        found = losses(drafter, model, data.inputs(tokens, flags), ids, 5)
        print(f"{task:12} acceptance", *(f"{100 * float(share):5.1f}" for _, share in found))


def save(folder: Path, drafter: Drafter, sizes: dict[str, Any], ids: Tensor) -> None:
    """Write the checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {n: p.detach().bfloat16().contiguous().cpu() for n, p in drafter.named_parameters()}
    ids = ids.cpu()
    tensors["d2t"] = ids - torch.arange(len(ids))
    tensors["t2d"] = torch.zeros(sizes["vocab_size"], dtype=torch.bool).index_fill(0, ids, True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(sizes, indent=2) + "\n", encoding="utf-8")
    print(f"{folder}: {(folder / 'model.safetensors').stat().st_size:,} bytes")


def main() -> None:
    """Train, judge, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=25)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--passes", type=int, default=4, help="drafts in a row that are trained")
    parser.add_argument("--draft-vocab-size", type=int, default=1024)
    parser.add_argument("--workers", type=int, default=1, help="processes that draw text")
    parser.add_argument("--out", type=Path, default=ROOT / "models" / "ernie-tiny-eagle3")
    options = parser.parse_args()
    torch.manual_seed(7)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    stated = json.loads((TARGET / "config.json").read_text(encoding="utf-8"))
    target = ModelConfig(**{name: stated[name] for name in ModelConfig.__dataclass_fields__})
    model = ErnieTiny(target, torch.float32).to(device).requires_grad_(False)
    load_checkpoint(model, load_file(TARGET / "model.safetensors", device=str(device)))
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    ids = frequent(tokenizer, options.draft_vocab_size).to(device)
    sizes = config(target, options.draft_vocab_size)
    drafter = train(options, model, sizes, ids)
    save(options.out, drafter, sizes, ids)
    held_out(drafter, model, tokenizer, ids)


if __name__ == "__main__":
    main()
