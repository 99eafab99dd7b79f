"""fd-spec-mtp's drafts against the papers' formulas in numpy, through chunks, refusals and
sharing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from fastdeploy_core.errors import WeightError
from fastdeploy_testing.capturing import CapturingDevice, RecordableAttention
from tests.cpu.test_layers_quantizer import Int8
from tests.plugins import mtp_oracle as oracle
from tests.plugins.mtp_captured_graph import replayed
from tests.plugins.mtp_rig import (
    BLOCK,
    VOCAB,
    Bench,
    Feed,
    config_of,
    save_checkpoint,
)

pytest.importorskip("fd_spec_mtp", reason="needs: pip install -e plugins/fd-spec-mtp")
RANK = Path(__file__).with_name("mtp_rank.py")
FAMILIES = ("ernie", "deepseek")


def random_tokens(count: int, seed: int = 5) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, count).tolist()


class Expected:
    """What the formulas say about a checkpoint."""

    def __init__(self, folder: Path, family: str, **settings: object) -> None:
        self.config = config_of(family, int(settings.get("num_modules", 1)))
        self.family = family
        weights = save_checkpoint(folder, family, **settings)
        self.weights = {name: w.astype(np.float64) for name, w in weights.items()}

    def drafts(self, bench: Bench, name: str, num_drafts: int) -> tuple[np.ndarray, list[int]]:
        """Logits [num_drafts, vocabulary] and greedy drafts after the sequence's last computed
        token, recomputed from its beginning."""
        sequence = bench.sequences[name]
        end, modules = sequence.num_computed, self.config["num_nextn_predict_layers"]
        tokens, hidden = list(sequence.tokens[: end + 1]), np.array(sequence.hidden[:end])
        drafts, rows = [], []
        for number in range(num_drafts):
            module = min(number, modules - 1)
            follow = np.array((tokens + drafts)[module + 1 : module + 1 + hidden.shape[0]])
            logits, new = oracle.run(self.family, self.config, self.weights, module, follow, hidden)
            rows.append(logits[-1])
            drafts.append(int(logits[-1].argmax()))
            # After the last module that one again, one position further.
            hidden = new if number + 1 < modules else np.concatenate((hidden, new[-1:]))
        return np.array(rows), drafts


def check(bench: Bench, expected: Expected, names: list[str], proposal: np.ndarray) -> None:
    """The last step's logits and drafts of the named rows are the formulas'."""
    for row, name in enumerate(names):
        if not name:
            continue
        logits, drafts = expected.drafts(bench, name, bench.num_drafts)
        ours = np.array([drawn[row] for drawn in bench.drawn_logits])
        assert np.abs(ours - logits).max() < 2e-4 * np.abs(logits).max(), name
        assert proposal[row].tolist() == drafts, name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_drafts", [1, 4])
def test_drafts_are_the_papers(
    family: str, num_drafts: int, tensor_library: str, tmp_path: Path
) -> None:
    """Uneven prompts in one batch, then decodes: alone, with right and with refused drafts."""
    expected = Expected(tmp_path / "m", family)
    bench = Bench(tmp_path / "m", tensor_library, num_drafts)
    bench.add("a", random_tokens(19, 1))
    bench.add("b", random_tokens(23, 2))
    check(bench, expected, ["a", "b"], bench.step([Feed("a", 3), Feed("b", 11)]))
    check(bench, expected, ["b", "a"], bench.step([Feed("b", 1), Feed("a", 2, wrong=[7, 8])]))
    check(bench, expected, ["a", "b"], bench.step([Feed("a", 1, wrong=[9]), Feed("b", 3)]))
    check(bench, expected, ["a"], bench.step([Feed("a", 1)]))


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_fill_the_cache_like_one_prompt(
    family: str, tensor_library: str, tmp_path: Path
) -> None:
    expected = Expected(tmp_path / "m", family)
    bench = Bench(tmp_path / "m", tensor_library, 3)
    bench.add("a", random_tokens(31))
    bench.add("other", random_tokens(9, 4))
    bench.step([Feed("a", 10)], max_drafts=0)
    assert bench.drawn_logits == []
    mixed = bench.step([Feed("a", 1, draws=False), Feed("other", 8)])
    check(bench, expected, ["", "other"], mixed)
    none = bench.step([Feed("a", 14, draws=False)])
    assert bench.drawn_logits == [] and none.tolist() == [[-1, -1, -1]]
    check(bench, expected, ["a"], bench.step([Feed("a", 5)]))


@pytest.mark.parametrize("shared", [BLOCK, 3 * BLOCK])
def test_shared_blocks_serve_who_agrees_on_the_next_token(
    shared: int, tensor_library: str, tmp_path: Path
) -> None:
    """The entry of a block's last token was made with the token after the block."""
    expected = Expected(tmp_path / "m", "ernie")
    bench = Bench(tmp_path / "m", tensor_library, 2)
    tokens = random_tokens(30)
    bench.add("first", tokens)
    bench.step([Feed("first", 20)])
    bench.add("same", [*tokens[: shared + 1], *random_tokens(10, 9)], "first", shared)
    check(bench, expected, ["same"], bench.step([Feed("same", 6)]))
    other = (tokens[shared] + 1) % VOCAB
    bench.add("parted", [*tokens[:shared], other, *random_tokens(10, 9)], "first", shared)
    bench.step([Feed("parted", 6)])
    logits, _ = expected.drafts(bench, "parted", 1)
    assert np.abs(bench.drawn_logits[0][0] - logits[0]).max() > 1e-3, "then no rule were needed"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_drafts", [1, 2, 3, 5])
def test_several_modules_draft_in_turn(
    family: str, num_drafts: int, tensor_library: str, tmp_path: Path
) -> None:
    """Module m makes the m-th draft; the last goes on. Accepted drafts leave every cache exact."""
    expected = Expected(tmp_path / "m", family, num_modules=3)
    expected.config["num_nextn_predict_layers"] = min(3, num_drafts)
    bench = Bench(tmp_path / "m", tensor_library, num_drafts)
    assert len(bench.drafter._modules) == min(3, num_drafts)
    bench.add("a", random_tokens(12))
    sequence = bench.sequences["a"]
    proposal = bench.step([Feed("a", 11)])
    check(bench, expected, ["a"], proposal)
    for _ in range(2):  # the target samples what was drafted, and one token more
        sequence.tokens = sequence.tokens[: sequence.num_computed + 1]
        sequence.tokens += [*proposal[0].tolist(), 5]
        proposal = bench.step([Feed("a", 1 + num_drafts)])
        check(bench, expected, ["a"], proposal)


@pytest.mark.parametrize("own_head", [False, True])
def test_embedding_and_head_are_shared_unless_they_differ(
    own_head: bool, tensor_library: str, tmp_path: Path
) -> None:
    expected = Expected(tmp_path / "m", "deepseek", own_head=own_head)
    bench = Bench(tmp_path / "m", tensor_library, 2)
    module = bench.drafter._modules[0]
    assert (module._embedding.weight is bench.model.embedding.weight) is not own_head
    assert (module._head.weight is bench.model.lm_head.weight) is not own_head
    bench.add("a", random_tokens(9))
    check(bench, expected, ["a"], bench.step([Feed("a", 8)]))


def test_draft_in_a_number_format_of_its_own(tensor_library: str, tmp_path: Path) -> None:
    """Only the module's block is asked about; with 8 bits its logits stay near."""
    expected = Expected(tmp_path / "m", "ernie")
    bench = Bench(tmp_path / "m", tensor_library, 1, quantizer=Int8)
    asked = {layer.name for layer in Int8.last.asked}
    parts = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    assert asked == {f"model.mtp_block.0.{part}" for part in parts}
    bench.add("a", random_tokens(14))
    bench.step([Feed("a", 13)])
    exact, _ = expected.drafts(bench, "a", 1)
    error = np.abs(bench.drawn_logits[0][0] - exact[0]).max() / np.abs(exact).max()
    assert 1e-4 < error < 0.05


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_draft_what_one_drafts(family: str, tensor_library: str, tmp_path: Path) -> None:
    expected = Expected(tmp_path / "m", family, own_head=family == "deepseek")
    bench = Bench(tmp_path / "m", tensor_library, 3)
    bench.add("a", random_tokens(14))
    (tmp_path / "group").mkdir(mode=0o700)
    command = [sys.executable, RANK, tmp_path / "m", tensor_library, tmp_path / "group"]
    ranks = [
        subprocess.Popen(
            [*map(str, command), str(rank), json.dumps(random_tokens(14))],
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
    check(bench, expected, ["a"], proposal)
    assert first["drafts"] == proposal.tolist()
    one = np.array(bench.drawn_logits)
    assert np.abs(np.array(first["logits"]) - one).max() < 1e-4 * np.abs(one).max()


@pytest.mark.parametrize(
    ("family", "without", "named"),
    [
        ("ernie", ("mtp_emb_norm",), "model.mtp_emb_norm.0.weight"),
        ("deepseek", ("layers.2.mlp.experts.5.",), "model.layers.2.mlp.experts.5.down_proj.weight"),
        ("deepseek", ("layers.2.",), "lacks 42 weights that the speculative method needs"),
    ],
)
def test_missing_weights_are_named(
    family: str, without: tuple[str, ...], named: str, tensor_library: str, tmp_path: Path
) -> None:
    save_checkpoint(tmp_path / "m", family, without=without)
    with pytest.raises(WeightError, match=re.escape(named)) as caught:
        Bench(tmp_path / "m", tensor_library, 1)
    assert "'model' in --speculative-config" in str(caught.value)


def test_weights_of_another_shape_of_module_are_named(tensor_library: str, tmp_path: Path) -> None:
    weights = save_checkpoint(tmp_path / "m", "ernie")
    weights["model.mtp_block.0.mlp.experts.0.gate_proj.weight"] = np.zeros((4, 4), np.float32)
    save_file(weights, tmp_path / "m" / "model.safetensors")
    with pytest.raises(WeightError, match=r"does not know: model\.mtp_block\.0\.mlp\.experts\.0"):
        Bench(tmp_path / "m", tensor_library, 1)


def test_weights_from_a_folder_of_their_own(tensor_library: str, tmp_path: Path) -> None:
    """A target without modules and a checkpoint that holds them."""
    save_checkpoint(tmp_path / "target", "deepseek", without=("layers.2.",))
    expected = Expected(tmp_path / "draft", "deepseek")
    bench = Bench(tmp_path / "target", tensor_library, 2, {"model": str(tmp_path / "draft")})
    bench.add("a", random_tokens(9))
    check(bench, expected, ["a"], bench.step([Feed("a", 8)]))


def test_a_round_of_drafts_can_be_captured(tensor_library: str, tmp_path: Path) -> None:
    """Of a decode step nothing but shapes is read on the host: the captured graph serves other
    rows."""
    expected = Expected(tmp_path / "m", "ernie")
    drivers = (CapturingDevice, RecordableAttention)
    bench = Bench(tmp_path / "m", tensor_library, 4, drivers=drivers)
    for name in "abcd":
        bench.add(name, random_tokens(12, ord(name)))
    bench.step([Feed("a", 3), Feed("b", 9), Feed("c", 5), Feed("d", 2)])
    proposal = replayed(bench, "ab", "dc")
    for row, name in enumerate("dc"):
        assert proposal[row].tolist() == expected.drafts(bench, name, 4)[1]
