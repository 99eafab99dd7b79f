"""`eagle3` and `dflash` in a whole engine: no token changes, and every draft of the demo model's
checkpoints is the plain implementation's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
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
MODELS = ["demo_eagle3", "demo_dflash", "eagle3", "dflash"]
BOTH = pytest.mark.parametrize("method", ["eagle3", "dflash"])


def asked_for(method: str, count: int, folder: Path) -> dict[str, Any]:
    section = {"method": method, "num_speculative_tokens": count, "model": str(folder)}
    return {**section, "adaptive_length": False}


def trained(method: str) -> Path:
    """The checkpoint for the demo model."""
    return DEMO.with_name(f"ernie-tiny-{method}")


@pytest.fixture(scope="module", autouse=True)
def demo() -> None:
    if not list(DEMO.glob("*.safetensors")):
        pytest.skip("this tree holds no demo weights (models/ernie-tiny/*.safetensors)")


@pytest.fixture(scope="module")
def benches(tmp_path_factory: pytest.TempPathFactory, tensor_library: str) -> Any:
    """(with drafts, without), by name of method: of the demo model, or of a random target."""
    folder = tmp_path_factory.mktemp("eagle")
    eagle_oracle.save_target(folder / "target", "Qwen3")
    eagle_oracle.save_draft(folder / "eagle3", "speculators")
    dflash_oracle.save_draft(folder / "dflash", "speculators")

    @cache
    def make(name: str) -> tuple[Bench, Bench]:
        model, _, captured = name.partition("-")
        method = model.removeprefix("demo_")
        target, draft = folder / "target", folder / method
        if model != method:
            target, draft = DEMO, trained(method)
        yes = GraphConfig(sizes=(1, 2, 4, 8)) if captured else None
        no = GraphConfig(enabled=False) if captured else None
        asked = asked_for(method, 3, draft)
        return Bench(target, tensor_library, yes, **asked), Bench(target, tensor_library, no)

    return make


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("captured", ["", "-captured"])
@pytest.mark.parametrize("model", MODELS)
def test_no_token_changes(benches: Any, model: str, captured: str, seed: int) -> None:
    """Random settings: chunks, prefix cache, preemption, host tier, n > 1, seeds, penalties."""
    name = model + captured
    run_mix(benches, name, seed)
    worker = benches(name)[0].worker
    assert worker._runner._drafting.guard.num_failures == 0, "no drafts were lost to an error"
    if captured:
        assert sum(work.num_replays for work in worker.device.recorded) > 20


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", [*MODELS, "demo_eagle3-captured", "dflash-captured"])
def test_no_token_changes_over_many_mixes(benches: Any, name: str) -> None:
    for seed in range(100, 160):
        run_mix(benches, name, seed)


@BOTH
def test_captured_steps_accept_what_others_accept(benches: Any, method: str) -> None:
    """The graph of a decode step reads what the target's blocks returned in that very step. It
    always makes all drafts, so an answer's last step may accept another number."""
    texts = [text[-100:] for task in ("recall", "copying") for text in prompts(task, 2)]
    arrivals = [(0, make_request(f"r{n}", t, max_tokens=40)) for n, t in enumerate(texts)]
    settings = Settings(num_blocks=160, max_num_batched_tokens=MAX_TOKENS)
    found = []
    for name in (f"demo_{method}", f"demo_{method}-captured"):
        core, _ = benches(name)[0].run(settings, arrivals)
        found.append(core.stats().accepted_draft_tokens_total)
    assert found[0] > 40 and abs(found[0] - found[1]) <= len(arrivals)


@pytest.fixture
def speculating(tensor_library: str) -> Iterator[Any]:
    """Makes LLMs of the demo model and closes them."""
    made: list[LLM] = []

    def make(count: int, method: str = "eagle3", **settings: Any) -> LLM:
        asked = asked_for(method, count, trained(method)) if count else None
        common = {**COMMON, "speculative_config": asked}
        made.append(LLM(DEMO, tensor_library=tensor_library, **common, **settings))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


@BOTH
def test_every_draft_is_the_plain_one(speculating: Any, method: str) -> None:
    """Of an answer by the demo model, by the checkpoint that was trained for it."""
    from transformers import AutoModelForCausalLM

    folder = trained(method)
    sizes = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    weights = {
        name: w.double() if w.is_floating_point() else w
        for name, w in load_file(folder / "model.safetensors").items()
    }
    target = AutoModelForCausalLM.from_pretrained(DEMO, dtype="float32").eval()
    if method == "eagle3":
        reads = sizes["eagle_aux_hidden_state_layer_ids"]
        oracle = eagle_oracle.Oracle(target, weights, sizes, reads)
    else:
        own = sizes["dflash_config"]
        reads = [number + 1 for number in own["target_layer_ids"]]
        oracle = dflash_oracle.Oracle(target, weights, sizes, reads, own["mask_token_id"])
    llm = speculating(3, method)
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


@BOTH
def test_first_drafts_of_the_demo_model_are_right(speculating: Any, method: str) -> None:
    expected, *_ = answers(speculating(0), {"facts": 2, "sorting": 2, "recall": 2})
    llm = speculating(3, method)
    tokens, *_ = answers(llm, {"facts": 2, "sorting": 2, "recall": 2})
    assert tokens == expected
    metrics = llm.get_metrics()
    first = metrics["accepted_drafts_at_total"][0] / metrics["drafts_total"]
    assert first >= 0.8, f"{first:.3f}"


@BOTH
def test_a_prefix_hit_drafts_as_well_as_a_computed_prompt(speculating: Any, method: str) -> None:
    """The second time prompts come out of the cache, and the same drafts are made and accepted."""
    llm = speculating(3, method, block_size=16)
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
