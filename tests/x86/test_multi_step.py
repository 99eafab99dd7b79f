"""Several decode steps in one go on fd-cpu's device: the tokens of steps one by one, in fewer of
them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastdeploy import LLM, SamplingParams
from fastdeploy_core.scheduler import decode_count
from fastdeploy_core.worker import model_runner, prompt_graphs

pytest.importorskip("fd_cpu._native", reason="fd-cpu is not installed")
capture = pytest.importorskip("fd_cpu.capture")
DEMO = Path(__file__).parents[2] / "models" / "ernie-tiny"
PROMPTS = ["12 + 30 =", "Sort: d a c b", "The capital of", "Count to ten: 1 2", "Reverse: abcdef"]


@pytest.fixture(scope="module", autouse=True)
def patience() -> Iterator[None]:
    """A slow machine changes nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_count, "most_at", lambda *step: 1e6)
        yield


def make(library: str, **options: Any) -> LLM:
    settings = {"max_num_seqs": 4, "num_threads": 2, "max_model_len": 256, "dtype": "float32"}
    settings |= {"num_gpu_blocks_override": 64, "block_size": 16}
    settings |= {"device": "x86", "tensor_library": library}
    return LLM(str(DEMO), **(settings | options))


@pytest.fixture(scope="module")
def engines(tensor_library: str) -> Iterator[tuple[LLM, LLM]]:
    """As it is, and one step at a time."""
    several = make(tensor_library)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_runner, "max_decodes", lambda config, limits: 1)
        single = make(tensor_library)
    yield several, single
    several.close()
    single.close()


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the captured graphs of prompts that are replayed from now on."""
    sizes: list[int] = []
    run = prompt_graphs.CapturedPrompt.run
    monkeypatch.setattr(
        prompt_graphs.CapturedPrompt,
        "run",
        lambda self, *step: (sizes.append(self.size), run(self, *step))[1],
    )
    return sizes


def test_captured_prompts_answer_as_prompts_operation_by_operation(
    tensor_library: str, engines: tuple[LLM, LLM], replayed: list[int]
) -> None:
    """One captured graph takes them all: alone, several in a step, in chunks, beside decodes."""
    prompts = ["12 + 30 =", "Count: " + "1 2 3 " * 30, "Sort: d a c b", "Reverse: " + "abc " * 17]
    params = SamplingParams(temperature=0.0, max_tokens=20)
    eager = make(tensor_library, enforce_eager=True)
    found = []
    for llm in (engines[0], eager):
        several = llm.generate(prompts * 3, params, use_tqdm=False)
        alone = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in prompts]
        found.append([x.outputs[0].token_ids for x in (*several, *alone)])
    eager.close()
    assert found[0] == found[1]
    assert len(replayed) > 4 and len(set(replayed)) == 1


def test_captured_prompts_are_plans_for_sampled_tokens_and_answer_as_the_reference(
    tensor_library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the sampled tokens stand, and however many there are; a chunk may have none."""
    run, seen = prompt_graphs.CapturedPrompt.run, list[tuple[int, int]]()

    def note(self: Any, batch: Any, *step: Any) -> Any:
        target = run(self, batch, *step)
        assert isinstance(self._forward, capture.NativeGraph)
        assert self.hidden.shape[0] == 4, "rows that there can be"
        seen.append((batch.num_tokens, int(target.hidden.shape[0])))
        return target

    monkeypatch.setattr(prompt_graphs.CapturedPrompt, "run", note)
    options: dict[str, Any] = {"max_num_batched_tokens": 24, "enable_chunked_prefill": True}
    prompts = ["12 + 30 =", "Count: " + "1 2 3 " * 12, "Sort: d a c b", "Reverse: " + "abc " * 7]
    params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=1)
    found = []
    for device in ("x86", "cpu"):
        with make(tensor_library, device=device, **options) as llm:
            outputs = [x.outputs[0] for x in llm.generate(prompts, params, use_tqdm=False)]
        found.append(outputs)
    for ours, theirs in zip(*found, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.cumulative_logprob == pytest.approx(theirs.cumulative_logprob, abs=1e-3)
    assert {rows for _, rows in seen} >= {1, 2, 3}
    assert any(tokens == 24 and rows == 1 for tokens, rows in seen)


@pytest.mark.parametrize("method", ["mtp", "draft_model"])
def test_prompts_are_captured_beside_a_drafter_whose_own_part_is_not(
    tensor_library: str, engines: tuple[LLM, LLM], replayed: list[int], method: str
) -> None:
    """Its cache is filled operation by operation, and some of its drafts are right."""
    config = {"method": method, "num_speculative_tokens": 1, "adaptive_length": False}
    config |= {"model": str(DEMO)} if method == "draft_model" else {}
    params = SamplingParams(temperature=0.0, max_tokens=20)
    answers = []
    for is_eager in (False, True):
        replayed.clear()
        llm = make(tensor_library, speculative_config=config, enforce_eager=is_eager)
        answers.append(llm.generate(PROMPTS, params, use_tqdm=False))
        llm.close()
        assert bool(replayed) != is_eager
    answers.append(engines[0].generate(PROMPTS, params, use_tqdm=False))
    captured, eager, plain = ([x.outputs[0].token_ids for x in found] for found in answers)
    assert captured == eager == plain
    assert sum(x.metrics.speculate_metrics.accepted_tokens for x in answers[0])


CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "max_tokens": 40},
    "to the limit": {"temperature": 0.0, "max_tokens": 60, "ignore_eos": True},
    "random": {"temperature": 1.0, "seed": 5, "max_tokens": 40},
    "filtered": {"temperature": 0.9, "top_k": 20, "top_p": 0.8, "seed": 5, "max_tokens": 33},
    "stop string": {"temperature": 0.0, "max_tokens": 40, "stop": ["a", "3", "e"]},
    "stop token": {"temperature": 0.8, "seed": 1, "max_tokens": 40, "stop_token_ids": [*range(300,
        400)]},
    "penalties": {"temperature": 0.8, "seed": 1, "max_tokens": 20, "repetition_penalty": 1.3},
}  # fmt: skip


def answers(llm: LLM, case: dict[str, Any]) -> list[Any]:
    found = llm.generate(PROMPTS, SamplingParams(**case), use_tqdm=False)
    return [(x.outputs[0].token_ids, x.outputs[0].text, x.outputs[0].finish_reason) for x in found]


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"seed": 1}, {"seed": 1, "top_p": 0.9}])
def test_steps_and_their_draws_are_native_plans(
    engines: tuple[LLM, LLM], params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = engines[0]
    case = {"max_tokens": 9, "ignore_eos": True, **params}
    replayed: list[int] = []
    replay = capture.Capturer.replay_times

    def note(self: Any, graphs: Any, times: int) -> None:
        assert all(isinstance(graph, capture.NativeGraph) for graph in graphs)
        replayed.append(times)
        replay(self, graphs, times)

    monkeypatch.setattr(capture.Capturer, "replay_times", note)
    answers(llm, case)
    assert replayed


@pytest.mark.parametrize("name", CASES)
def test_the_same_answers_in_fewer_steps(engines: tuple[LLM, LLM], name: str) -> None:
    several, single = engines
    before = [llm.get_metrics()["steps_total"] for llm in engines]
    assert answers(several, CASES[name]) == answers(single, CASES[name])
    mine, theirs = (
        llm.get_metrics()["steps_total"] - was for llm, was in zip(engines, before, strict=True)
    )
    assert mine == theirs if name == "penalties" else mine < theirs


def test_a_pool_that_is_too_small_changes_no_token(
    engines: tuple[LLM, LLM], tensor_library: str
) -> None:
    case = {"temperature": 0.0, "max_tokens": 50, "ignore_eos": True}
    with make(tensor_library, num_gpu_blocks_override=9) as small:
        assert answers(small, case) == answers(engines[1], case)
        assert small.get_metrics()["preemptions_total"] > 0
