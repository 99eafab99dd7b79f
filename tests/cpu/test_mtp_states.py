"""Qwen3-Next's own module for drafts: it drafts what transformers' layers do with its weights, and
refused drafts leave the states of the model as they were."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from fd_spec_mtp.drafter import MTPDrafter
from safetensors.numpy import load_file, save_file

from tests.checkpoints import VOCAB, build
from tests.cpu.engine_mixes import Settings
from tests.cpu.speculative_mixes import SpeculativeBench, answers_alone, check, make_free_requests
from tests.null_engine import make_request

SLOW = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a module under the names of Qwen's releases."""
    made = build(tmp_path_factory.mktemp("mtp"), ["qwen3-next"]) / "qwen3-next"
    config = json.loads((made / "config.json").read_text("utf-8"))
    tensors, rng = load_file(made / "model.safetensors"), np.random.default_rng(3)
    last = "model.layers.3."  # of four, that with full attention
    own = {
        name.replace(last, "mtp.layers.0."): tensor
        for name, tensor in tensors.items()
        if name.startswith(last)
    }
    hidden = config["hidden_size"]
    own |= {f"mtp.{name}.weight": np.empty(hidden) for name in ("norm", "pre_fc_norm_hidden")}
    own |= {"mtp.pre_fc_norm_embedding.weight": np.empty(hidden)}
    own |= {"mtp.fc.weight": np.empty((hidden, 2 * hidden))}
    noise = {name: rng.normal(0, 0.2, x.shape).astype(np.float32) for name, x in own.items()}
    save_file(tensors | noise, made / "model.safetensors", {"format": "pt"})
    return made


def drafts_by_transformers(folder: Path, tokens: list[int]) -> list[int]:
    """What the module drafts after tokens[: n + 2], for each n."""
    import torch
    import transformers
    from transformers.models.qwen3_next import modeling_qwen3_next as modeling

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype="float32", attn_implementation="eager"
    ).eval()
    config, hidden = model.config, model.config.hidden_size
    own = {
        name.removeprefix("mtp."): torch.from_numpy(tensor)
        for name, tensor in load_file(folder / "model.safetensors").items()
        if name.startswith("mtp.")
    }
    layer = modeling.Qwen3NextDecoderLayer(config, 3).eval()
    mapped = {name.removeprefix("layers.0."): x for name, x in own.items() if "layers." in name}
    # transformers joins experts in memory.
    experts = [f"mlp.experts.{n}" for n in range(config.num_experts)]
    parts = {
        part: torch.stack([mapped.pop(f"{e}.{part}_proj.weight") for e in experts])
        for part in ("gate", "up", "down")
    }
    mapped["mlp.experts.gate_up_proj"] = torch.cat((parts["gate"], parts["up"]), 1)
    mapped["mlp.experts.down_proj"] = parts["down"]
    layer.load_state_dict(mapped)

    def norm(name: str, x: Any) -> Any:
        made = modeling.Qwen3NextRMSNorm(hidden, eps=config.rms_norm_eps)
        made.load_state_dict({"weight": own[f"{name}.weight"]})
        return made(x)

    ids = torch.tensor([tokens])
    with torch.no_grad():
        states = model.model(ids).last_hidden_state[:, :-1]
        embedded = model.model.embed_tokens(ids[:, 1:])
        both = (norm("pre_fc_norm_embedding", embedded), norm("pre_fc_norm_hidden", states))
        x = torch.cat(both, -1) @ own["fc.weight"].T
        count = x.shape[1]
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        turned = model.model.rotary_emb(x, torch.arange(count)[None])
        y = layer(x, position_embeddings=turned, attention_mask=mask)
        y = y[0] if isinstance(y, tuple) else y
        return model.lm_head(norm("norm", y))[0].argmax(-1).tolist()


def test_first_drafts_are_those_of_transformers_layers(
    folder: Path, tensor_library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a prompt in chunks, and after steps whose drafts were refused."""
    bench = SpeculativeBench(
        folder, tensor_library, "mtp", processors=(), sharp=False, load_format="auto"
    )
    propose, made = MTPDrafter.propose, {}

    def recorded(self: Any, batch: Any) -> Any:
        found = propose(self, batch)
        if int(found[0, 0]) >= 0:  # it drafts after the prompt's last chunk alone
            made[int(batch.ends[0])] = int(found[0, 0])
        return found

    monkeypatch.setattr(MTPDrafter, "propose", recorded)
    prompt = [3 + (7 * n) % (VOCAB - 3) for n in range(20)]
    settings = Settings(chunked_prefill=True, max_num_batched_tokens=9)
    request = make_request("one", prompt, max_tokens=24, ignore_eos=True)
    _, collector = bench.run(settings, [(0, request)])
    tokens = prompt + collector.answers("one")[0]
    expected = drafts_by_transformers(folder, tokens)
    checked = {end: draft for end, draft in made.items() if end < len(expected)}
    assert len(checked) > 15 and checked == {end: expected[end] for end in checked}


@pytest.mark.parametrize("num_mixes", (3, pytest.param(70, marks=SLOW)))
@pytest.mark.parametrize("captures", [False, True])
def test_no_token_changes(
    folder: Path, tensor_library: str, captures: bool, num_mixes: int
) -> None:
    plain = SpeculativeBench(folder, tensor_library, processors=())
    requests = make_free_requests(Random(5), 16, plain.vocab_size)
    truth = answers_alone(plain, requests)
    bench = SpeculativeBench(folder, tensor_library, "mtp", captures=captures, processors=())
    seen: Counter[str] = Counter()
    for seed in range(num_mixes):
        random = Random(seed)
        chosen = random.sample(requests, random.randrange(4, 9))
        arrivals = [(random.randrange(10), r) for r in chosen]
        core, collector = bench.run_varied(Settings.random(random), arrivals, random)
        check(collector, chosen, truth)
        core.scheduler.kv.check()
        stats = core.stats()
        seen["refused"] += stats.draft_tokens_total - stats.accepted_draft_tokens_total
        seen["replays"] += bench.num_replays if captures else 0
        assert not stats.draft_failures_total
    assert seen["refused"] > 10 * num_mixes and bool(seen["replays"]) == captures
