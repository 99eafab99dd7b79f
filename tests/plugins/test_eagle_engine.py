"""`eagle3` and `dflash` in a whole engine: no token changes, and every draft of the demo model's
EAGLE-3 block is the plain implementation's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from safetensors.torch import load_file

from fastdeploy import LLM
from fastdeploy_core.config import GraphConfig
from tests.cpu.engine_mixes import Settings
from tests.null_engine import make_request
from tests.plugins import dflash_oracle, eagle_oracle
from tests.plugins.drafting_mixes import COMMON, DEMO, MAX_TOKENS, Bench, answers, prompts, run_mix

pytest.importorskip("fd_spec_eagle", reason="needs: pip install -e plugins/fd-spec-eagle")
DRAFT = DEMO.with_name("ernie-tiny-eagle3")
EAGLE3 = {"method": "eagle3", "adaptive_length": False}


@pytest.fixture(scope="module", autouse=True)
def demo() -> None:
    if not list(DEMO.glob("*.safetensors")):
        pytest.skip("this tree holds no demo weights (models/ernie-tiny/*.safetensors)")


@pytest.fixture(scope="module")
def benches(tmp_path_factory: pytest.TempPathFactory, tensor_library: str) -> Any:
    """(with drafts, without), by name of model or, with a random target, of method."""
    folder = tmp_path_factory.mktemp("eagle")
    eagle_oracle.save_target(folder / "target", "Qwen3")
    eagle_oracle.save_draft(folder / "eagle3", "speculators")
    dflash_oracle.save_draft(folder / "dflash", "speculators")

    @cache
    def make(name: str) -> tuple[Bench, Bench]:
        model, _, recorded = name.partition("-")
        target, draft = (DEMO, DRAFT) if model == "demo" else (folder / "target", folder / model)
        yes = GraphConfig(sizes=(1, 2, 4, 8)) if recorded else None
        no = GraphConfig(enabled=False) if recorded else None
        asked = {**EAGLE3, "num_speculative_tokens": 3, "model": str(draft)}
        if model == "dflash":
            asked["method"] = model
        return Bench(target, tensor_library, yes, **asked), Bench(target, tensor_library, no)

    return make


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "name", ["demo", "eagle3", "dflash", "eagle3-recorded", "dflash-recorded", "demo-recorded"]
)
def test_no_token_changes(benches: Any, name: str, seed: int) -> None:
    """Random settings: chunks, prefix cache, preemption, host tier, n > 1, seeds, penalties."""
    run_mix(benches, name, seed)
    worker = benches(name)[0].worker
    assert worker._runner._drafting.guard.num_failures == 0, "no drafts were lost to an error"
    if name.endswith("-recorded"):
        assert sum(work.num_replays for work in worker.device.recorded) > 20


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", ["demo", "eagle3", "dflash", "dflash-recorded", "demo-recorded"])
def test_no_token_changes_over_many_mixes(benches: Any, name: str) -> None:
    for seed in range(100, 160):
        run_mix(benches, name, seed)


def test_recorded_steps_accept_what_others_accept(benches: Any) -> None:
    """The graph of a decode step reads what the target's blocks returned in that very step. It
    always makes all drafts, so an answer's last step may accept another number."""
    texts = [text[-100:] for task in ("recall", "copying") for text in prompts(task, 2)]
    arrivals = [(0, make_request(f"r{n}", t, max_tokens=40)) for n, t in enumerate(texts)]
    settings = Settings(num_blocks=160, max_num_batched_tokens=MAX_TOKENS)
    found = []
    for name in ("demo", "demo-recorded"):
        core, _ = benches(name)[0].run(settings, arrivals)
        found.append(core.stats().accepted_draft_tokens_total)
    assert found[0] > 60 and abs(found[0] - found[1]) <= len(arrivals)


@pytest.fixture
def speculating(tensor_library: str) -> Iterator[Any]:
    """Makes LLMs of the demo model and closes them."""
    made: list[LLM] = []

    def make(count: int, **settings: Any) -> LLM:
        asked = {**EAGLE3, "num_speculative_tokens": count, "model": str(DRAFT)}
        common = {**COMMON, "speculative_config": asked if count else None}
        made.append(LLM(DEMO, tensor_library=tensor_library, **common, **settings))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


def test_every_draft_is_the_plain_one(speculating: Any) -> None:
    """Of an answer by the demo model, by the checkpoint that was trained for it."""
    from transformers import AutoModelForCausalLM

    sizes = json.loads((DRAFT / "config.json").read_text(encoding="utf-8"))
    weights = {
        name: w.double() if w.is_floating_point() else w
        for name, w in load_file(DRAFT / "model.safetensors").items()
    }
    reads = sizes["eagle_aux_hidden_state_layer_ids"]
    target = AutoModelForCausalLM.from_pretrained(DEMO, dtype="float32").eval()
    oracle = eagle_oracle.Oracle(target, weights, sizes, reads)
    llm = speculating(3)
    drafter = llm._engine._core._executor._worker._runner._drafting._drafter
    propose, seen = drafter.propose, list[tuple[int, list[int]]]()

    def watched(batch: Any) -> Any:
        drafts = propose(batch)
        if batch.max_drafts and batch.draws.all():
            seen.append((int(batch.ends[0]) + 2, drafts[0].tolist()))
        return drafts

    drafter.propose = watched
    (answer,), drafted, accepted = answers(llm, {"extraction": 1})
    tokens = [*prompts("extraction", 1)[0], *answer]
    checked = [(known, drafts) for known, drafts in seen if known <= len(tokens)]
    assert len(checked) > 3 and accepted > 0.5 * drafted
    for known, drafts in checked:
        assert drafts == oracle.drafts(tokens[:known], 3)[1][: len(drafts)], known


def test_first_drafts_of_the_demo_model_are_right(speculating: Any) -> None:
    expected, *_ = answers(speculating(0), {"facts": 2, "sorting": 2, "copying": 2})
    llm = speculating(3)
    tokens, *_ = answers(llm, {"facts": 2, "sorting": 2, "copying": 2})
    assert tokens == expected
    metrics = llm.get_metrics()
    first = metrics["accepted_drafts_at_total"][0] / metrics["drafts_total"]
    assert first >= 0.8, f"{first:.3f}"


def test_a_prefix_hit_drafts_as_well_as_a_computed_prompt(speculating: Any) -> None:
    """The second time prompts come out of the cache, and the same drafts are made and accepted."""
    llm = speculating(3, block_size=16)
    cold = answers(llm, {"recall": 1, "extraction": 1})
    before = llm.get_metrics()["prefix_hit_tokens_total"]
    warm = answers(llm, {"recall": 1, "extraction": 1})
    assert llm.get_metrics()["prefix_hit_tokens_total"] > before
    assert warm == cold


def test_two_ranks_answer_the_same(speculating: Any) -> None:
    expected, *_ = answers(speculating(0), {"facts": 2, "sorting": 2})
    llm = speculating(2, tensor_parallel_size=2)
    tokens, drafted, accepted = answers(llm, {"facts": 2, "sorting": 2})
    assert tokens == expected and accepted > 0.4 * drafted
