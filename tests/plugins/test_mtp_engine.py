"""`mtp` in a whole engine: nothing it drafts changes a token, whatever else is switched on."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from types import FunctionType, ModuleType
from typing import Any

import pytest

from fastdeploy import LLM, SamplingParams
from fastdeploy_core.config import GraphConfig
from fastdeploy_core.config.arguments import build_engine_config
from fastdeploy_core.errors import ConfigError, FastDeployError
from fastdeploy_core.layers.linear import Linear
from fastdeploy_core.models.shapes import read_shapes
from fastdeploy_core.plugins.resolve import resolve
from fastdeploy_core.types import Request
from fastdeploy_testing.capturing import OnCapturingDevice
from tests.cpu import engine_mixes
from tests.cpu.engine_mixes import Settings, SharedExecutor, make_requests
from tests.plugins.mtp_rig import save_checkpoint

pytest.importorskip("fd_spec_mtp", reason="needs: pip install -e plugins/fd-spec-mtp")
DEMO = Path(__file__).resolve().parents[2] / "models" / "ernie-tiny"
TINY_VOCAB, MAX_TOKENS = 67, 160
COMMON = {
    "device": "cpu",  # the reference, whatever else is installed
    "dtype": "float32",
    "max_model_len": 512,
    "num_gpu_blocks_override": 64,
    "num_threads": 1,  # threads cost more than they give on matrices this small
}


class Bench(engine_mixes.Bench):
    """One loaded model and drafter for engines with many settings. `graphs`: decode steps and
    rounds of drafts are captured, on a processor that re-runs what was captured."""

    def __init__(
        self, folder: Path, library: str, graphs: GraphConfig | None = None, **speculative: Any
    ) -> None:
        config = build_engine_config(
            {
                "model": str(folder),
                "device": "cpu",
                "tensor_library": library,
                "dtype": "float32",
                "max_model_len": MAX_TOKENS,
                "block_size": 4,
                "max_num_seqs": engine_mixes.MAX_NUM_SEQS,
                "max_num_batched_tokens": MAX_TOKENS,
                "num_gpu_blocks_override": 160,
                "speculative_config": speculative or None,
            }
        )
        self.config = replace(config, device=replace(config.device, num_threads=1))
        shapes = read_shapes(config.model.hf_config, 1)
        moe = [shapes.moe] if shapes.moe is not None else []
        self._resolved = resolve(self.config, layers=shapes.layers, moe=moe)
        if graphs is not None:
            self.config = replace(self.config, graphs=graphs)
            self._resolved = OnCapturingDevice(self._resolved)
        self._executor = SharedExecutor(self.config, self._resolved)
        self.block_bytes = self._executor._info.bytes_per_block
        self._num_seq_ids = 0


@pytest.fixture(scope="module", autouse=True)
def demo() -> None:
    if not list(DEMO.glob("*.safetensors")):
        pytest.skip("this tree holds no demo weights (models/ernie-tiny/*.safetensors)")


@cache
def prompts(task: str, count: int) -> list[list[int]]:
    """Held-out questions of the demo model's own curriculum, as token ids."""
    from tokenizers import Tokenizer

    folder = str(DEMO / "training")
    sys.path.insert(0, folder)
    try:
        import chat
        import curriculum
    finally:
        sys.path.remove(folder)
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    texts = [chat.prompt_text(sample) for sample in curriculum.held_out(task, count, 2026)]
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


def mixed(random: Random, count: int, demo: bool) -> list[Request]:
    """Requests of random kinds over the demo's tasks, or over random tokens."""
    requests = make_requests(random, count)
    for request in requests:
        if demo:
            task = random.choice(["arithmetic", "copying", "sorting", "facts", "recall"])
            text = random.choice(prompts(task, 6))
            request.prompt_token_ids = text[-100:] if random.random() < 0.8 else text[:90]
            request.eos_token_ids = [2, 4]
        else:
            request.prompt_token_ids = [t % TINY_VOCAB for t in request.prompt_token_ids]
    return requests


def stretched(random: Random, settings: Settings) -> Settings:
    """For longer texts than the mixes' own: pools that hold two or three of them, or all."""
    num_tokens = settings.max_num_batched_tokens if settings.chunked_prefill else MAX_TOKENS
    return replace(
        settings, num_blocks=random.choice([60, 90, 160]), max_num_batched_tokens=num_tokens
    )


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
        model, _, recorded = name.partition("-")
        folder = DEMO if model == "demo" else checkpoints / model
        method = {"method": "mtp", "num_speculative_tokens": 3, "adaptive_length": False}
        yes = GraphConfig(sizes=(1, 2, 4, 8)) if recorded else None
        no = GraphConfig(enabled=False) if recorded else None
        drafting = Bench(folder, tensor_library, yes, **method)
        return drafting, Bench(folder, tensor_library, no)

    return make


def run_mix(benches: Any, name: str, seed: int) -> None:
    random = Random(seed)
    drafting, plain = benches(name)
    requests = mixed(random, 8, name == "demo")
    arrivals = [(random.randrange(12), request) for request in requests]
    settings = stretched(random, Settings.random(random))
    one_by_one = Settings(num_blocks=160, max_num_batched_tokens=MAX_TOKENS)
    _, expected = plain.run(one_by_one, arrivals)
    core, answers = drafting.run(settings, arrivals)
    assert answers.tokens == expected.tokens, (name, seed, settings)
    assert answers.reasons == expected.reasons and not answers.errors
    assert core.stats().draft_tokens_total > 0


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["demo", "deepseek", "ernie"])
def test_no_token_changes(benches: Any, name: str, seed: int) -> None:
    """Random settings: chunks, prefix cache, preemption, host tier, n > 1, seeds, penalties."""
    run_mix(benches, name, seed)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["ernie-recorded"])
def test_no_token_changes_over_recorded_steps(benches: Any, name: str, seed: int) -> None:
    run_mix(benches, name, seed)
    device = benches(name)[0].worker.device
    assert sum(work.num_replays for work in device.recorded) > 20


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", ["demo", "deepseek", "ernie", "demo-recorded"])
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


def answers(llm: LLM, tasks: dict[str, int]) -> tuple[list[list[int]], int, int]:
    """Greedy answers to held-out questions; drafts fed and accepted meanwhile."""
    before = llm.get_metrics()
    texts = [{"prompt_token_ids": p} for task, n in tasks.items() for p in prompts(task, n)]
    outputs = llm.generate(texts, SamplingParams(temperature=0, max_tokens=48), use_tqdm=False)
    after = llm.get_metrics()
    drafted, accepted = (
        after[key] - before[key] for key in ("draft_tokens_total", "accepted_draft_tokens_total")
    )
    return [list(o.outputs[0].token_ids) for o in outputs], drafted, accepted


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
