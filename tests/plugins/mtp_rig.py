"""A tiny random target with multi-token-prediction modules, and a bench to drive `mtp`, or another
drafter with layers of its own, on by hand.

The bench plays worker and engine: it keeps block tables, feeds chosen tokens and says which of them
were right, so that tests decide about chunks, refused drafts and shared blocks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from fastdeploy_core.config import CacheConfig, EngineConfig
from fastdeploy_core.config.model import read_model_config
from fastdeploy_core.contracts.attention import AttentionBatch
from fastdeploy_core.contracts.device import DeviceOptions
from fastdeploy_core.contracts.speculative import DraftBatch, DrafterContext
from fastdeploy_core.layers import DriverFactories, ForwardContext, ModelBuilder, ModelRanks
from fastdeploy_core.loading.draft_weights import load_draft_weights
from fastdeploy_core.models.shapes import model_class
from fastdeploy_core.plugins.kernels import build_kernel_table
from fastdeploy_core.reference.attention import ReferenceAttention
from fastdeploy_core.reference.device import CpuDevice
from fastdeploy_core.reference.moe import ReferenceMoE

VOCAB, HIDDEN, BLOCK = 67, 32, 4
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
    "rope_theta": 10000.0,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "ernie": {
        **COMMON,
        "architectures": ["Ernie4_5_MoeForCausalLM"],
        "model_type": "ernie4_5_moe",
        "num_key_value_heads": 2,
        "moe_intermediate_size": 16,
        "moe_k": 2,
        "moe_num_experts": 4,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
        "tie_word_embeddings": True,
        "use_bias": False,
    },
    "deepseek": {
        **COMMON,
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "moe_intermediate_size": 16,
        "n_shared_experts": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
        "q_lora_rank": 24,
        "kv_lora_rank": 20,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 12,
        "v_head_dim": 16,
    },
}


def config_of(family: str, num_modules: int = 1) -> dict[str, Any]:
    return {**CONFIGS[family], "num_nextn_predict_layers": num_modules}


def save_checkpoint(
    folder: Path,
    family: str,
    *,
    num_modules: int = 1,
    own_head: bool = False,
    without: Sequence[str] = (),
    seed: int = 0,
) -> dict[str, np.ndarray]:
    """Write config.json and random weights under the released names; returns the weights.

    Modules of DeepSeek carry copies of the embedding and the head, or with `own_head` others.
    """
    config = config_of(family, num_modules)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    shapes = _shapes(config)
    weights = {name: _values(name, shape, seed) for name, shape in shapes.items()}
    for name in shapes if not own_head else ():
        if name.endswith(("embed_tokens.weight", "shared_head.head.weight")):
            weights[name] = _values(name, shapes[name], seed + 1)
    if not own_head and family == "deepseek":
        for name in shapes:
            if name.endswith(".embed_tokens.weight"):
                weights[name] = weights["model.embed_tokens.weight"]
            elif name.endswith("shared_head.head.weight"):
                weights[name] = weights["lm_head.weight"]
    kept = {n: w for n, w in weights.items() if not any(text in n for text in without)}
    save_file(kept, folder / "model.safetensors")
    return weights


def _values(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    generator = np.random.default_rng([seed, *name.encode()])
    noise = generator.standard_normal(shape).astype(np.float32)
    is_norm = name.endswith(("norm.weight", "norm.0.weight", "norm.1.weight", "norm.2.weight"))
    return 1 + 0.2 * noise if is_norm else 0.15 * noise


def _shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor the target and its modules ask for; copies of embedding and head included."""
    from fd_spec_mtp.layout import modules

    xp_device = CpuDevice(DeviceOptions(num_threads=1))
    build = _builder(xp_device, config)
    model = model_class(config)(config, build)
    shapes = {name: p.shape for name, p in build.weights.placements.items()}
    for names in modules(config, config["num_nextn_predict_layers"]):
        draft = build.extension(None)
        draft.norm(names.embedding_norm, HIDDEN, 1e-5)
        draft.norm(names.hidden_norm, HIDDEN, 1e-5)
        draft.linear(names.projection, 2 * HIDDEN, HIDDEN)
        model.block(draft, names.block, config["num_hidden_layers"])
        if names.norm:
            draft.norm(names.norm, HIDDEN, 1e-5)
        shapes |= {name: p.shape for name, p in draft.weights.placements.items()}
        for copy in (names.embedding, names.head):
            if copy:
                shapes[f"{copy}.weight"] = (VOCAB, HIDDEN)
    return shapes


def _builder(
    device: Any,
    config: Mapping[str, Any],
    attention: Any = ReferenceAttention,
    ranks: ModelRanks | None = None,
) -> ModelBuilder:
    kernels = build_kernel_table("cpu")
    return ModelBuilder(
        device,
        kernels,
        "float32",
        max_positions=config["max_position_embeddings"],
        drivers=DriverFactories(
            lambda spec: attention(spec, BLOCK, device, kernels),
            lambda spec: ReferenceMoE(spec, device, kernels),
        ),
        ranks=ranks or ModelRanks(),
    )


@dataclass
class Sequence_:
    """What the bench knows of one sequence."""

    tokens: list[int]  # all that will ever be known
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    hidden: list[np.ndarray] = field(default_factory=list)  # the target's, by position


@dataclass
class Feed:
    """One row of a step: `count` right tokens, then wrong ones that stand for refused drafts."""

    name: str
    count: int
    wrong: list[int] = field(default_factory=list)
    draws: bool = True  # False: a prefill chunk before the last


class Bench:
    """Target and drafter of one rank over one pool of blocks."""

    def __init__(
        self,
        folder: Path,
        library: str,
        num_drafts: int,
        options: Mapping[str, Any] | None = None,
        *,
        rank: int = 0,
        tp_size: int = 1,
        address: str = "",
        num_blocks: int = 64,
        drivers: tuple[Any, Any] = (CpuDevice, ReferenceAttention),
        quantizer: Any = None,
        method: str = "mtp",
    ) -> None:
        from fastdeploy_core.loading.loader import Checkpoint, open_files

        self.device = drivers[0](DeviceOptions(tensor_library=library, num_threads=1))
        self.xp, self.num_drafts, options = self.device.xp, num_drafts, dict(options or {})
        self.communicator = None
        if tp_size > 1:
            self.communicator = self.device.communicator(rank, tp_size, address)
        config = EngineConfig(model=read_model_config(folder), cache=CacheConfig(block_size=BLOCK))
        hf_config = config.model.hf_config
        ranks = ModelRanks(rank, tp_size, self.communicator)
        self.build = _builder(self.device, hf_config, drivers[1], ranks)
        self.model = model_class(hf_config)(hf_config, self.build)
        with self.xp.no_grad():
            with Checkpoint(open_files(folder, self.build.device), rank) as tensors:
                assert not self.model.load_weights(tensors)
            own = quantizer and quantizer({"is_quantized": False}, self.device, self.build.kernels)
            draft = self.build.extension(own)
            (entry,) = entry_points(group="fastdeploy.speculative", name=method)
            self.drafter = entry.load()(
                DrafterContext(
                    num_speculative_tokens=num_drafts,
                    options=options,
                    vocab_size=VOCAB,
                    max_num_seqs=8,
                    device=self.device,
                    kernels=self.build.kernels,
                    hf_config=hf_config,
                    model=self.model,
                    builder=draft,
                    load_weights=partial(
                        load_draft_weights, draft, self.model, config, options.get("model", "")
                    ),
                )
            )
        self.caches = [
            tuple(
                self.xp.full(s, float("nan"), dtype=self.xp.float32)
                for s in self.build.attention_drivers[spec].cache_shapes(num_blocks)
            )
            for spec in self.build.kv_layers
        ]
        self._free = list(np.random.default_rng(3).permutation(num_blocks))
        self.sequences: dict[str, Sequence_] = {}
        self.drawn_logits: list[np.ndarray] = []  # of the last step, one per draft

    def add(self, name: str, tokens: Sequence[int], shared: str = "", num_shared: int = 0) -> None:
        """A sequence; its first blocks may be another's."""
        new = self.sequences[name] = Sequence_(list(tokens))
        if num_shared:
            new.blocks = self.sequences[shared].blocks[: num_shared // BLOCK]
            new.num_computed = num_shared
            new.hidden = self.sequences[shared].hidden[:num_shared]

    def step(self, rows: Sequence[Feed], max_drafts: int | None = None) -> np.ndarray:
        """Feed tokens; returns [B, max_drafts] drafts, sampled greedily."""
        ids, follow, last = [], [], []
        for feed in rows:
            known = self.sequences[feed.name].tokens
            start = self.sequences[feed.name].num_computed
            end = start + feed.count
            ids += [*known[start:end], *feed.wrong]
            last.append(len(ids) - 1 - len(feed.wrong))
            follow += [*known[start + 1 : end + 1], *(VOCAB - 1 - t for t in feed.wrong)]
        batch = self._batch(
            [f.name for f in rows], [f.count + len(f.wrong) for f in rows], 1 + self.num_drafts
        )
        self.drawn_logits = []
        with self.xp.no_grad():
            context = self._context(batch)
            hidden = self.model.forward(self._tensor(ids), batch.positions, context)
            proposal = self.drafter.propose(
                DraftBatch(
                    seq_ids=np.arange(len(rows)),
                    slots=np.arange(len(rows)),
                    draws=np.array([f.draws for f in rows]),
                    max_drafts=self.num_drafts if max_drafts is None else max_drafts,
                    attention=batch,
                    context=context,
                    input_ids=self._tensor(ids),
                    next_token_ids=self._tensor(follow),
                    hidden_states=hidden,
                    last=self._tensor(last),
                    draw=self._draw,
                    decode=partial(self._decode, [f.name for f in rows]),
                    ends=batch.positions[self._tensor(last)],
                )
            )
        states = np.array(self.device.to_host(hidden), np.float64)
        for row, feed in enumerate(rows):
            sequence, first = self.sequences[feed.name], int(batch.cu_seqlens_q[row])
            sequence.hidden += list(states[first : first + feed.count])
            sequence.num_computed += feed.count
        return np.array(self.device.to_host(proposal))

    def _draw(self, logits: Any, number: int) -> Any:
        assert number == len(self.drawn_logits)
        self.drawn_logits.append(np.array(self.device.to_host(logits)))
        return self.xp.argmax(logits, -1)

    def _decode(self, names: Sequence[str], positions: Any) -> tuple[AttentionBatch, Any]:
        where = self.device.to_host(positions).tolist()
        batch = self._batch(names, [1] * len(names), 0, where)
        return batch, self._context(batch)

    def _context(self, batch: AttentionBatch) -> ForwardContext:
        metadata = {s: d.prepare(batch) for s, d in self.build.attention_drivers.items()}
        return ForwardContext(batch, metadata, self.caches)

    def _tensor(self, values: Sequence[int]) -> Any:
        return self.device.to_device(np.array(values, np.int64))

    def _batch(
        self,
        names: Sequence[str],
        counts: Sequence[int],
        lookahead: int,
        starts: Sequence[int] | None = None,
    ) -> AttentionBatch:
        positions, slots, lengths = [], [], []
        for row, (name, count) in enumerate(zip(names, counts, strict=True)):
            sequence = self.sequences[name]
            start = sequence.num_computed if starts is None else starts[row]
            while starts is None and len(sequence.blocks) * BLOCK < start + count + lookahead:
                sequence.blocks.append(int(self._free.pop()))
            lengths.append(start + count)
            for position in range(start, start + count):
                positions.append(position)
                slots.append(sequence.blocks[position // BLOCK] * BLOCK + position % BLOCK)
        tables = np.zeros((len(names), max(-(-n // BLOCK) for n in lengths)), np.int32)
        for row, name in enumerate(names):
            blocks = self.sequences[name].blocks[: tables.shape[1]]
            tables[row, : len(blocks)] = blocks
        cu_seqlens = np.cumsum([0, *counts])
        put = self.device.to_device
        return AttentionBatch.upload(put, cu_seqlens, lengths, tables, slots, positions)
