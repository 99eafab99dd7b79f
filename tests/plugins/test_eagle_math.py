"""fd-spec-eagle's drafts, of both methods, against plain implementations on targets of
transformers, through chunks, refusals and sharing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from fastdeploy_core.errors import WeightError
from fastdeploy_testing.capturing import CapturingDevice, RecordableAttention
from tests.plugins import dflash_oracle, eagle_oracle
from tests.plugins.mtp_captured_graph import replayed
from tests.plugins.mtp_rig import BLOCK, VOCAB, Bench, Feed

pytest.importorskip("fd_spec_eagle", reason="needs: pip install -e plugins/fd-spec-eagle")
RANK = Path(__file__).with_name("mtp_rank.py")
CASES = [
    ("Llama", "safeai", "eagle3"),
    ("Qwen3", "speculators", "eagle3"),
    ("Ernie4_5", "specforge", "eagle3"),
    ("Ernie4_5_Moe", "safeai", "eagle3"),
    ("Qwen3", "z-lab", "dflash"),
    ("Ernie4_5_Moe", "speculators", "dflash"),
]
BOTH = pytest.mark.parametrize(("layout", "method"), [("safeai", "eagle3"), ("z-lab", "dflash")])


def random_tokens(count: int, seed: int = 5) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, count).tolist()


class Pair:
    """A target and a draft on disk, what drafts they should give, and our bench over them."""

    def __init__(self, folder: Path, family: str, layout: str, method: str = "eagle3") -> None:
        self.folder, self.options = folder / "target", {"model": str(folder / "draft")}
        self.method, target = method, eagle_oracle.save_target(self.folder, family)
        module: Any = dflash_oracle if method == "dflash" else eagle_oracle
        weights = module.save_draft(folder / "draft", layout)
        own = {"after": layout == "speculators"} if method == "eagle3" else {}
        self.oracle = module.Oracle(target, weights, module.SIZES, module.READS[layout], **own)

    def bench(self, library: str, num_drafts: int, **settings: Any) -> Bench:
        return Bench(self.folder, library, num_drafts, self.options, method=self.method, **settings)

    def check(self, bench: Bench, names: list[str], proposal: np.ndarray) -> None:
        """The last step's logits and drafts of the named rows are the plain implementation's."""
        for row, name in enumerate(names):
            if not name:
                continue
            sequence = bench.sequences[name]
            tokens = sequence.tokens[: sequence.num_computed + 1]
            logits, drafts = self.oracle.drafts(tokens, bench.num_drafts)
            ours, exact = np.array([drawn[row] for drawn in bench.drawn_logits]), logits.numpy()
            can = np.isfinite(exact)
            assert (np.isfinite(ours) == can).all(), "only these tokens can be drafted"
            assert np.abs(ours[can] - exact[can]).max() < 2e-4 * np.abs(exact[can]).max(), name
            assert proposal[row].tolist() == drafts, name


@pytest.mark.parametrize(("family", "layout", "method"), CASES)
@pytest.mark.parametrize("num_drafts", [1, 4])
def test_drafts_are_the_plain_ones(
    family: str, layout: str, method: str, num_drafts: int, tensor_library: str, tmp_path: Path
) -> None:
    """Uneven prompts in one batch, then decodes: alone, with right and with refused drafts."""
    pair = Pair(tmp_path, family, layout, method)
    bench = pair.bench(tensor_library, num_drafts)
    bench.add("a", random_tokens(19, 1))
    bench.add("b", random_tokens(23, 2))
    pair.check(bench, ["a", "b"], bench.step([Feed("a", 3), Feed("b", 11)]))
    pair.check(bench, ["b", "a"], bench.step([Feed("b", 1), Feed("a", 2, wrong=[7, 8])]))
    pair.check(bench, ["a", "b"], bench.step([Feed("a", 1, wrong=[9]), Feed("b", 3)]))
    pair.check(bench, ["a"], bench.step([Feed("a", 1)]))


@BOTH
def test_chunks_fill_the_cache_like_one_prompt(
    layout: str, method: str, tensor_library: str, tmp_path: Path
) -> None:
    pair = Pair(tmp_path, "Llama", layout, method)
    bench = pair.bench(tensor_library, 3)
    bench.add("a", random_tokens(31))
    bench.add("other", random_tokens(9, 4))
    bench.step([Feed("a", 10)], max_drafts=0)
    assert bench.drawn_logits == []
    mixed = bench.step([Feed("a", 1, draws=False), Feed("other", 8)])
    pair.check(bench, ["", "other"], mixed)
    none = bench.step([Feed("a", 14, draws=False)])
    assert bench.drawn_logits == [] and none.tolist() == [[-1, -1, -1]]
    pair.check(bench, ["a"], bench.step([Feed("a", 5)]))


@BOTH
@pytest.mark.parametrize("shared", [BLOCK, 3 * BLOCK])
def test_shared_blocks_serve_who_agrees_on_the_next_token(
    shared: int, layout: str, method: str, tensor_library: str, tmp_path: Path
) -> None:
    """The entry of a block's last token was made with the token after the block, by EAGLE-3."""
    pair = Pair(tmp_path, "Llama", layout, method)
    bench = pair.bench(tensor_library, 2)
    tokens = random_tokens(30)
    bench.add("first", tokens)
    bench.step([Feed("first", 20)])
    bench.add("same", [*tokens[: shared + 1], *random_tokens(10, 9)], "first", shared)
    pair.check(bench, ["same"], bench.step([Feed("same", 6)]))


@BOTH
def test_a_round_of_drafts_can_be_captured(
    layout: str, method: str, tensor_library: str, tmp_path: Path
) -> None:
    """Of a decode step nothing but shapes is read on the host: the captured graph serves other
    rows, over what the target's blocks returned of those."""
    pair = Pair(tmp_path, "Llama", layout, method)
    bench = pair.bench(tensor_library, 4, drivers=(CapturingDevice, RecordableAttention))
    for name in "abcd":
        bench.add(name, random_tokens(12, ord(name)))
    bench.step([Feed("a", 3), Feed("b", 9), Feed("c", 5), Feed("d", 2)])
    proposal = replayed(bench, "ab", "dc")
    for row, name in enumerate("dc"):
        sequence = bench.sequences[name]
        tokens = sequence.tokens[: sequence.num_computed + 1]
        assert proposal[row].tolist() == pair.oracle.drafts(tokens, 4)[1]


@pytest.mark.parametrize("method", ["eagle3", "dflash"])
def test_two_ranks_draft_what_one_drafts(method: str, tensor_library: str, tmp_path: Path) -> None:
    """With a vocabulary that two ranks divide unevenly."""
    pair = Pair(tmp_path, "Qwen3", "speculators", method)
    bench = pair.bench(tensor_library, 3)
    bench.add("a", random_tokens(14))
    (tmp_path / "group").mkdir(mode=0o700)
    command = [sys.executable, RANK, pair.folder, tensor_library, tmp_path / "group"]
    more = [json.dumps(random_tokens(14)), method, json.dumps(pair.options)]
    ranks = [
        subprocess.Popen(
            [*map(str, command), str(rank), *more],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(RANK.parents[2])},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        answers = [rank.communicate(timeout=300) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert not any(rank.returncode for rank in ranks), answers[0][1][-3000:]
    first, second = (json.loads(out.splitlines()[-1]) for out, _ in answers)
    assert first == second  # not one bit may differ between ranks
    proposal = bench.step([Feed("a", 13)])
    pair.check(bench, ["a"], proposal)
    assert first["drafts"] == proposal.tolist()


@pytest.mark.parametrize(
    ("layout", "method", "lacking", "more", "message"),
    [
        ("safeai", "eagle3", "midlayer.hidden_norm", "", r"lacks 1 .*: layers\.0\.hidden_norm"),
        ("safeai", "eagle3", "", "fc_norm.weight", r"does not know: fc_norm\.weight"),
        ("z-lab", "dflash", "layers.1.mlp.up_proj", "", r"lacks 1 .*: layers\.1\.mlp\.up_proj"),
        ("z-lab", "dflash", "", "mask_embedding", r"does not know: mask_embedding"),
    ],
)
def test_tensors_that_lack_or_are_unknown_are_named(
    layout: str, method: str, lacking: str, more: str, message: str, tensor_library: str,
    tmp_path: Path,
) -> None:  # fmt: skip
    pair = Pair(tmp_path, "Llama", layout, method)
    path = tmp_path / "draft" / "model.safetensors"
    kept = {n: w for n, w in load_file(path).items() if n.removesuffix(".weight") != lacking}
    save_file({**kept, **({more: torch.ones(4)} if more else {})}, path)
    with pytest.raises(WeightError, match=message):
        pair.bench(tensor_library, 1)


@pytest.mark.parametrize(
    ("layout", "method", "part"),
    [("specforge", "eagle3", "_block"), ("z-lab", "dflash", "_layers")],
)
def test_embedding_and_head_of_the_target_are_shared(
    layout: str, method: str, part: str, tensor_library: str, tmp_path: Path
) -> None:
    bench = Pair(tmp_path, "Ernie4_5", layout, method).bench(tensor_library, 1)
    vocabulary = getattr(bench.drafter, part).vocabulary
    assert vocabulary.embedding.weight is bench.model.embedding.weight
    assert vocabulary._head.weight is bench.model.lm_head.weight
