"""`mtp` in a whole engine: nothing it drafts changes a token, whatever else is switched on."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest

from fastdeploy import LLM
from fastdeploy_core.config import GraphConfig
from fastdeploy_core.errors import ConfigError, FastDeployError
from fastdeploy_core.layers.linear import Linear
from tests.plugins.drafting_mixes import COMMON, DEMO, Bench, answers, run_mix
from tests.plugins.mtp_rig import save_checkpoint

pytest.importorskip("fd_spec_mtp", reason="needs: pip install -e plugins/fd-spec-mtp")


@pytest.fixture(scope="module", autouse=True)
def demo() -> None:
    if not list(DEMO.glob("*.safetensors")):
        pytest.skip("this tree holds no demo weights (models/ernie-tiny/*.safetensors)")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mtp")
    for name, family, count in (("deepseek", "deepseek", 1), ("ernie", "ernie", 2)):
        save_checkpoint(folder / name, family, num_modules=count)
    return folder


@pytest.fixture(scope="module")
def benches(checkpoints: Path, tensor_library: str) -> Any:
    """(with drafts, without), by name of model."""

    @cache
    def make(name: str) -> tuple[Bench, Bench]:
        model, _, captured = name.partition("-")
        folder = DEMO if model == "demo" else checkpoints / model
        method = {"method": "mtp", "num_speculative_tokens": 3, "adaptive_length": False}
        yes = GraphConfig(sizes=(1, 2, 4, 8)) if captured else None
        no = GraphConfig(enabled=False) if captured else None
        drafting = Bench(folder, tensor_library, yes, **method)
        return drafting, Bench(folder, tensor_library, no)

    return make


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", ["demo", "deepseek", "ernie"])
def test_no_token_changes(benches: Any, name: str, seed: int) -> None:
    """Random settings: chunks, prefix cache, preemption, host tier, n > 1, seeds, penalties."""
    run_mix(benches, name, seed)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", ["ernie-captured"])
def test_no_token_changes_over_captured_steps(benches: Any, name: str, seed: int) -> None:
    run_mix(benches, name, seed)
    device = benches(name)[0].worker.device
    assert sum(work.num_replays for work in device.recorded) > 20


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", ["demo", "deepseek", "ernie", "demo-captured"])
def test_no_token_changes_over_many_mixes(benches: Any, name: str) -> None:
    for seed in range(100, 160):
        run_mix(benches, name, seed)


@pytest.fixture
def speculating(tensor_library: str) -> Iterator[Any]:
    """Makes LLMs of the demo model and closes them."""
    made: list[LLM] = []

    def make(speculative: dict[str, Any] | None, **settings: Any) -> LLM:
        llm = LLM(
            DEMO,
            tensor_library=tensor_library,
            **COMMON,
            speculative_config=speculative,
            **settings,
        )
        made.append(llm)
        return llm

    yield make
    for llm in made:
        llm.close()


JUDGED = dict.fromkeys(("arithmetic", "copying", "sorting", "extraction", "recall", "facts"), 2)


@pytest.fixture(scope="module")
def judged(tensor_library: str) -> list[list[int]]:
    """Answers without speculation."""
    with LLM(DEMO, tensor_library=tensor_library, **COMMON) as llm:
        return answers(llm, JUDGED)[0]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_first_drafts_of_the_demo_model_are_right(
    count: int, speculating: Any, judged: list[list[int]]
) -> None:
    llm = speculating({"method": "mtp", "num_speculative_tokens": count, "adaptive_length": False})
    tokens, drafted, accepted = answers(llm, JUDGED)
    assert tokens == judged
    metrics = llm.get_metrics()
    first = metrics["accepted_drafts_at_total"][0] / metrics["drafts_total"]
    assert first >= 0.9, f"{first:.3f}"
    assert accepted <= drafted


def test_a_prefix_hit_drafts_as_well_as_a_computed_prompt(speculating: Any) -> None:
    """The second time prompts come out of the cache, and the same drafts are made and accepted."""
    llm = speculating(
        {"method": "mtp", "num_speculative_tokens": 3, "adaptive_length": False}, block_size=16
    )
    cold = answers(llm, {"recall": 1, "extraction": 1})
    before = llm.get_metrics()["prefix_hit_tokens_total"]
    warm = answers(llm, {"recall": 1, "extraction": 1})
    assert llm.get_metrics()["prefix_hit_tokens_total"] > before
    assert warm == cold


def test_ngrams_go_on_behind_the_module(speculating: Any) -> None:
    expected, *_ = answers(speculating(None), {"copying": 2})
    one = {"method": "mtp", "num_speculative_tokens": 1, "adaptive_length": False}
    hybrid = {**one, "num_speculative_tokens": 5, "mtp_strategy": "with_ngram"}
    alone = answers(speculating(one), {"copying": 2})
    both = answers(speculating(hybrid), {"copying": 2})
    assert alone[0] == both[0] == expected
    assert both[2] > 1.5 * alone[2], "n-grams found more of what is copied"


def linears(part: Any) -> list[Linear]:
    """Every linear layer below an object."""
    found, seen, left = [], set[int](), [part]
    while left:
        item = left.pop()
        if id(item) in seen or isinstance(item, type | ModuleType | FunctionType):
            continue
        seen.add(id(item))
        if isinstance(item, Linear):
            found.append(item)
        elif type(item).__module__.startswith(("fastdeploy_core.layers", "fastdeploy_core.models")):
            left += gc.get_referents(item)
    return found


@pytest.mark.parametrize("method", ["mtp", "draft_model"])
def test_the_draft_has_a_number_format_of_its_own(method: str, speculating: Any) -> None:
    """The target stays as it is: the answers are its own, and most drafts are still right."""
    asked = {"method": method, "num_speculative_tokens": 1, "adaptive_length": False}
    if method == "draft_model":
        asked["model"] = str(DEMO)
    expected, *_ = answers(speculating(None), {"facts": 2, "sorting": 2})
    llm = speculating({**asked, "quantization": "wint8"})
    tokens, drafted, accepted = answers(llm, {"facts": 2, "sorting": 2})
    assert tokens == expected and accepted > 0.8 * drafted > 0
    runner = llm._engine._core._executor._worker._runner
    drafter = runner._drafting._drafter
    draft = drafter._modules[0]._block if method == "mtp" else drafter._model.layers[0]
    for part, is_quantized in ((draft, True), (runner._model.layers[0], False)):
        layers = linears(part)
        assert len(layers) > 2
        assert all((layer.weight is None) == is_quantized for layer in layers)


def test_two_ranks_answer_the_same(speculating: Any) -> None:
    expected, *_ = answers(speculating(None), {"facts": 2, "sorting": 2})
    llm = speculating(
        {"method": "mtp", "num_speculative_tokens": 2, "adaptive_length": False},
        tensor_parallel_size=2,
    )
    tokens, drafted, accepted = answers(llm, {"facts": 2, "sorting": 2})
    assert tokens == expected and accepted > 0.4 * drafted


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"num_speculative_tokens": 0}, "between 1 and"),
        ({"num_speculative_tokens": 2, "max_steps": 1}, "unknown key 'max_steps'"),
        ({"num_speculative_tokens": 2, "model": "/nowhere"}, "is no folder"),
        ({"num_speculative_tokens": 2, "mtp_strategy": "eagle"}, "possible: default, with_ngram"),
    ],
)
def test_bad_configuration_says_what_would_work(
    asked: dict[str, Any], message: str, speculating: Any
) -> None:
    with pytest.raises((ConfigError, FastDeployError), match=message):
        speculating({"method": "mtp", **asked})


def test_a_target_without_modules_is_refused(checkpoints: Path, tensor_library: str) -> None:
    folder = checkpoints / "none"
    save_checkpoint(folder, "deepseek", without=("layers.2.",))
    with pytest.raises(FastDeployError, match=r"has no weights model\.layers\.2\.\*"):
        LLM(
            folder,
            device="cpu",
            skip_tokenizer_init=True,
            tensor_library=tensor_library,
            speculative_config={"method": "mtp"},
        )
