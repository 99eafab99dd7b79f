"""Drafts after pictures and videos change no token, and are made at the positions and from the
vectors that the target has."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from test_mixes import ALONE, SMALL, ask, engine, mixes, num_replays, params_of
from tiny import FAMILIES, VOCAB, Oracle, picture, prompt_of, runner_of

from fastdeploy_core.types import SamplingParams

pytest.importorskip("fd_speculative", reason="needs: pip install -e plugins/fd-speculative")
pytest.importorskip("fd_spec_mtp", reason="needs: pip install -e plugins/fd-spec-mtp")
FIXED = {"adaptive_length": False}  # as many drafts however long steps take
METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 3, **FIXED},
    "suffix": {"method": "suffix", "num_speculative_tokens": 4, **FIXED},
    "mtp": {"method": "mtp", "num_speculative_tokens": 2, **FIXED},
    "mtp, then n-grams": {
        "method": "mtp", "num_speculative_tokens": 4, "mtp_strategy": "with_ngram", **FIXED,
    },
}  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "captured": {"captures": "prompts", "max_num_seqs": 4},
    "cut inside pictures": {"max_num_batched_tokens": 23, "max_num_seqs": 4},
    "captured, preempted": {
        **SMALL, "captures": "decodes", "max_num_seqs": 8, "max_num_batched_tokens": 37,
    },
}  # fmt: skip
RUNS = [
    *(("ngram", "qwen2_5_vl"), ("mtp", "ernie4_5_vl"), ("draft_model", "qwen2_5_vl")),
    *(pytest.param(m, n, marks=pytest.mark.slow) for m in ("ngram", "suffix") for n in FAMILIES),
    pytest.param("mtp, then n-grams", "ernie4_5_vl", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def with_module(checkpoint: Callable[[str], Path], tmp_path_factory: Any) -> Path:
    """An ERNIE with a multi-token-prediction module of random weights."""
    folder = tmp_path_factory.mktemp("mtp") / "ernie"
    folder.mkdir()
    for path in checkpoint("ernie4_5_vl").iterdir():
        if path.name != "model.safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["num_nextn_predict_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(checkpoint("ernie4_5_vl") / "model.safetensors")
    random = torch.Generator().manual_seed(3)

    def made(shape: Sequence[int]) -> torch.Tensor:
        values = torch.randn(tuple(shape), generator=random)
        return 1 + 0.1 * values if len(shape) == 1 else values * (0.7 / shape[-1] ** 0.5)

    layer = "model.layers.0."
    own = {n.removeprefix(layer): made(x.shape) for n, x in tensors.items() if layer in n}
    modules = {f"model.mtp_block.0.{name}": tensor for name, tensor in own.items()}
    for name, shape in (("emb_norm", [64]), ("hidden_norm", [64]), ("linear_proj", [64, 128])):
        modules[f"model.mtp_{name}.0.weight"] = made(shape)
    save_file(tensors | modules, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def text_model(checkpoint: Callable[[str], Path], tmp_path_factory: Any) -> Path:
    """One that knows nothing of pictures, with Qwen2.5-VL's vocabulary."""
    folder: Path = tmp_path_factory.mktemp("text") / "qwen2"
    torch.manual_seed(4)
    config = hf.Qwen2Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=4096,
    )  # fmt: skip
    hf.Qwen2ForCausalLM(config).float().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((checkpoint("qwen2_5_vl") / name).read_bytes())
    return folder


@pytest.mark.parametrize(("method", "name"), RUNS)
def test_tokens_are_those_without_drafts(
    checkpoint: Callable[[str], Path],
    with_module: Path,
    text_model: Path,
    fd_tensor: str,
    method: str,
    name: str,
) -> None:
    settings = METHODS.get(method) or {
        "method": "draft_model", "model": str(text_model), "num_speculative_tokens": 2, **FIXED,
    }  # fmt: skip
    folder = with_module if name == "ernie4_5_vl" else checkpoint(name)
    asked, params = mixes(name, 9), params_of(9)
    device = {"tensor_library": fd_tensor, "device": "cpu"}
    with engine(folder, **device, **ALONE) as llm:
        wanted = [ask(llm, [a], p)[0] for a, p in zip(asked, params, strict=True)]
    fed = accepted = 0
    for setting, more in SETTINGS.items():
        with engine(folder, speculative_config=settings, **device, **more) as llm:
            for _ in range(2):  # the second time from the caches
                assert ask(llm, asked, params) == wanted, setting
            metrics = llm.get_metrics()
            fed += metrics["draft_tokens_total"]
            accepted += metrics["accepted_draft_tokens_total"]
            assert not more.get("captures") or num_replays(llm) > 20
    # What modules and models of random weights draft is seldom right.
    assert fed > 40 and (accepted > 10 or method in ("mtp", "draft_model"))


class Module:
    """The module of `with_module` by transformers' layers, over a whole sequence."""

    def __init__(self, folder: Path, oracle: Oracle) -> None:
        tensors = load_file(folder / "model.safetensors")
        part = lambda name: tensors[f"model.mtp_{name}.0.weight"]  # noqa: E731
        self.norms, self.projection = (part("emb_norm"), part("hidden_norm")), part("linear_proj")
        self._oracle, text = oracle, oracle.model.model.language_model
        self._text, self._block = text, copy.deepcopy(text.layers[0])
        own = "model.mtp_block.0."
        found = {n.removeprefix(own): x for n, x in tensors.items() if n.startswith(own)}
        self._block.load_state_dict(found)

    @torch.no_grad()
    def hidden(
        self, embedded: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """[n, 64] of the tokens after, of the target, [3, n]: after the final norm, [n, 64]."""
        both = (embedded, hidden)
        joined = [
            torch.nn.functional.rms_norm(x, (64,), w, 1e-5)
            for x, w in zip(both, self.norms, strict=True)
        ]
        x = (torch.cat(joined, -1) @ self.projection.T)[None]
        turned = self._text.rotary_emb(x, positions[:, None])
        made = self._block(x, position_embeddings=turned, attention_mask=None)
        return self._text.norm(made[0] if isinstance(made, tuple) else made)[0]


@torch.no_grad()
def expected(folder: Path, oracle: Oracle, ids: list[int], end: int, image: Any) -> list[int]:
    """Two drafts after token `end` of a sequence with one picture, of which the next is known."""
    module, model = Module(folder, oracle), oracle.model
    made = oracle.pixels([image])
    rows, columns = (int(n) // 2 for n in made["image_grid_thw"][0, 1:])
    first, count = ids.index(oracle.image), rows * columns
    behind = torch.arange(len(ids) - first - count) + first + max(rows, columns)
    inside = torch.stack(
        (torch.zeros(count), torch.arange(count) // columns, torch.arange(count) % columns)
    )
    positions = torch.cat(
        (torch.arange(first).expand(3, -1), inside.long() + first, behind.expand(3, -1)), 1
    )
    tokens = torch.tensor([ids])
    kinds = (tokens == oracle.image).int()
    known = slice(0, end + 1)
    hidden = model.model(
        input_ids=tokens[:, known], position_ids=positions[:, None, known],
        attention_mask=torch.ones(1, end + 1, dtype=torch.long), mm_token_type_ids=kinds[:, known],
        moe_mm_token_type_ids=torch.isin(tokens, torch.tensor(oracle.ids)).int()[:, known], **made,
    ).last_hidden_state[0]  # fmt: skip
    embedded = model.get_input_embeddings()(tokens[0])
    embedded[first : first + count] = torch.tensor(oracle.features([image]))
    one = module.hidden(embedded[1 : end + 2], hidden, positions[:, known])
    drafts = [int((one[-1] @ model.lm_head.weight.T).argmax())]
    # The module once more, a place further, after what it has said.
    drafted = model.get_input_embeddings()(torch.tensor(drafts))
    two = module.hidden(
        torch.cat((embedded[1 : end + 2], drafted)),
        torch.cat((hidden, one[-1:])),
        positions[:, : end + 2],
    )
    return [*drafts, int((two[-1] @ model.lm_head.weight.T).argmax())]


@pytest.mark.parametrize("captures", [False, True])
def test_drafts_are_made_of_vectors_at_their_positions(
    with_module: Path, fd_tensor: str, captures: bool
) -> None:
    """As transformers' layers make them: after the prompt, and in later steps."""
    oracle, image = Oracle(with_module, "ernie4_5_vl"), picture(230, 170, 5)
    seen: dict[int, list[int]] = {}
    with engine(
        with_module, tensor_library=fd_tensor, device="cpu", captures="decodes" if captures else "",
        speculative_config=METHODS["mtp"], async_scheduling=False,
    ) as llm:  # fmt: skip
        runner = runner_of(llm)
        drafter = runner._drafting._drafter
        propose = drafter.propose

        def watched(batch: Any) -> Any:
            made = propose(batch)
            own, ends = (np.array(runner._xp.to_numpy(x)) for x in (made, batch.ends))
            if own.shape[1]:
                seen[int(ends[0])] = own[0].tolist()
            return made

        drafter.propose = watched
        given = {
            # The last block has room for drafts.
            "prompt": prompt_of(1, "What is here", place=FAMILIES["ernie4_5_vl"].place),
            "multi_modal_data": {"image": [image]},
        }
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        (output,) = llm.generate(given, params, use_tqdm=False)
        assert not captures or num_replays(llm) > 4
    ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    known = [end for end in seen if len(output.prompt_token_ids) - 1 <= end < len(ids) - 1]
    assert len(known) > 4
    for end in known:
        assert seen[end] == expected(with_module, oracle, ids, end, image), end
