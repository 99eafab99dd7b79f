"""Hidden states are computed of the tokens that are read, from the last block's attention on;
results stay."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tests.paged
from fastdeploy_core.config import GraphConfig, SpeculativeConfig
from fastdeploy_core.contracts.attention import AttentionBatch, Projections
from fastdeploy_core.engine.selection import resolve_plugins
from fastdeploy_core.errors import WorkerError
from fastdeploy_core.models.decoder import DecoderLM
from fastdeploy_core.plugins.kernels import ChosenKernels, build_kernel_table
from fastdeploy_core.reference.attention import ReferenceAttention
from fastdeploy_core.types import SamplingParams
from fastdeploy_core.worker import graph_sizes
from fastdeploy_core.worker.worker import Worker
from fastdeploy_testing.capturing import CapturingDevice, WithPrompts
from tests.checkpoints import VARIANTS, reference
from tests.paged import PagedModel, load_driver
from tests.parity import TOLERANCE, relative_error
from tests.worker_steps import Steps, engine_config, make_worker, sharpen, write_model

SIZES = (8, 24, 48)
FEED_FORWARD = (
    *("linear_add", "linear", "add_rms_norm", "rms_norm", "gated_linear"),
    *("linear_float32", "moe_routing", "moe_experts"),
)


@pytest.mark.parametrize("variant", VARIANTS)
def test_named_tokens_have_the_hidden_states_they_have_among_all(
    checkpoints: Path, variant: str, tensor_library: str
) -> None:
    """And the cache holds every token: what follows is the same."""
    model = PagedModel(checkpoints / variant, tensor_library)
    short, long = (answer["prompt"].tolist() for answer in reference(checkpoints / variant))
    every = np.concatenate(model.step([("a", short), ("b", long)]))
    for read in ([4, 27], [0], [1, 2, 9, 20, 26]):
        names = f"c{read}", f"d{read}"
        (found,) = model.step([(names[0], short), (names[1], long)], read)
        assert relative_error(found, every[read]) < TOLERANCE
    behind = [model.step([(a, [7]), (b, [8])]) for a, b in (("a", "b"), names)]
    assert relative_error(np.concatenate(behind[1]), np.concatenate(behind[0])) < TOLERANCE
    model.close()


class WholeAttention(ReferenceAttention):
    """From a block's normed input to its output projection, for every token."""

    unit = "projections"  # type: ignore[assignment]

    def __init__(self, spec: Any, block_size: int, device: Any, kernels: Any) -> None:
        super().__init__(spec, block_size, device, kernels)
        self._kernels = kernels

    def prepare(self, batch: AttentionBatch) -> Any:
        self._batch = batch
        return super().prepare(batch)

    def prepare_projections(self, given: Projections) -> Projections:
        return given

    def forward_block(self, x: Any, given: Any, cache: Any, metadata: Any, rotary: Any) -> Any:
        kernels, spec, batch = self._kernels, self.spec, self._batch
        heads = kernels["linear"](x, given.qkv, given.qkv_bias).reshape(
            [x.shape[0], -1, spec.head_dim]
        )
        q, k = heads[:, : spec.num_heads], heads[:, spec.num_heads : -spec.num_kv_heads]
        q, k = kernels["rotary_embedding"](q, k, batch.positions, rotary, spec.rotary_interleaved)
        rows = (k, heads[:, -spec.num_kv_heads :])
        kernels["kv_write"](rows, cache, batch.slot_mapping)
        return kernels["linear"](self.forward(q, *rows, cache, metadata), given.output, None)


def test_a_driver_that_projects_does_so_for_all_and_its_results_are_selected(
    checkpoints: Path, tensor_library: str
) -> None:
    """The output's bias stands after that."""

    def drivers(kind: str, name: str) -> Any:
        return WholeAttention if kind == "attention" else load_driver(kind, name)

    model = PagedModel(checkpoints / "llama", tensor_library, drivers=drivers)
    answer = reference(checkpoints / "llama")[1]
    prompt, read = answer["prompt"].tolist(), [2, 21]
    for names, wanted in ((None, answer["logits"]), (read, answer["logits"][read])):
        (found,) = model.step([(str(names), prompt)], names)
        assert relative_error(found, wanted) < TOLERANCE
    model.close()


def noting(calls: list[tuple[str, int]]) -> Any:
    """build_kernel_table whose kernels note the rows that they are given."""

    def note(name: str, kernel: Any) -> Any:
        return lambda x, *rest: (calls.append((name, int(x.shape[0]))), kernel(x, *rest))[1]

    def make(*args: Any, **options: Any) -> ChosenKernels:
        table = build_kernel_table(*args, **options)
        for name in (*FEED_FORWARD, "norm_linear", "select_rows"):
            table.functions[name] = note(name, table.functions[name])
        return table

    return make


@pytest.mark.parametrize("variant", ["llama", "qwen3", "ernie-moe", "qwen3-moe", "deepseek"])
def test_the_last_block_is_given_these_rows_alone_behind_its_attention(
    checkpoints: Path, variant: str, tensor_library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, int]] = []
    monkeypatch.setattr(tests.paged, "build_kernel_table", noting(calls))
    model = PagedModel(checkpoints / variant, tensor_library)
    prompt = reference(checkpoints / variant)[1]["prompt"].tolist()
    calls.clear()
    model.step([("a", prompt)], [3, 22])
    names = [name for name, _ in calls]
    assert names.count("select_rows") == 2, "the attention's result and what it is added to"
    behind = len(names) - names[::-1].index("select_rows")
    before, after = calls[:behind], calls[behind:]
    assert {rows for _, rows in before} == {len(prompt)}
    assert {rows for _, rows in after} == {2}
    assert len(after) >= 4, "output projection, feed-forward, final norm"
    calls.clear()
    model.step([("b", prompt)])
    assert {rows for _, rows in calls} == {len(prompt)} and "select_rows" not in dict(calls)
    model.close()


# -- in the worker --------------------------------------------------------------------------------


def make_steps(folder: Path, library: str, *, is_captured: bool, **model: Any) -> Steps:
    config = engine_config(folder, library, max_num_seqs=6, model=model)
    worker = make_worker(dataclasses.replace(config, graphs=GraphConfig(enabled=is_captured)))
    if is_captured:
        worker.resolved = WithPrompts(worker.resolved)  # type: ignore[assignment]
    worker.load()
    if not model:
        sharpen(worker)
    return Steps(worker, num_blocks=256, num_host_blocks=64)


def replays(steps: Steps) -> int:
    """Of captured prompts: they are the last ones made."""
    device = steps.worker.device
    assert isinstance(device, CapturingDevice)
    return sum(work.num_replays for work in device.recorded[-len(SIZES) :])


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Tokens fed and hidden states returned by each forward pass."""
    found: list[tuple[int, int]] = []
    forward = DecoderLM.forward

    def noting(self: Any, ids: Any, positions: Any, context: Any) -> Any:
        hidden = forward(self, ids, positions, context)
        found.append((int(ids.shape[0]), int(hidden.shape[0])))
        return hidden

    monkeypatch.setattr(DecoderLM, "forward", noting)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def pair(
    folder: Path, tensor_library: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Steps, Steps]]:
    """Without captured graphs, and with."""
    monkeypatch.setattr(graph_sizes, "prompt_ladder", lambda most: SIZES)
    both = [make_steps(folder, tensor_library, is_captured=is_one) for is_one in (False, True)]
    yield both[0], both[1]
    for steps in both:
        steps.worker.close()


CAPTURED = ("llama", "qwen3", "qwen3-moe", "ernie-moe")


@pytest.mark.parametrize(
    ("variant", "is_captured"),
    [*((name, False) for name in (*CAPTURED, "deepseek")), *((name, True) for name in CAPTURED)],
)
def test_prompts_in_chunks_beside_decodes_give_the_tokens_of_transformers(
    checkpoints: Path,
    variant: str,
    is_captured: bool,
    tensor_library: str,
    monkeypatch: pytest.MonkeyPatch,
    read: list[tuple[int, int]],
) -> None:
    monkeypatch.setattr(graph_sizes, "prompt_ladder", lambda most: SIZES)
    model = {"load_format": "auto"}
    steps = make_steps(checkpoints / variant, tensor_library, is_captured=is_captured, **model)
    answers = reference(checkpoints / variant)
    read.clear()
    prompts = [answer["prompt"].tolist() for answer in answers]
    for seq_id, prompt in enumerate(prompts):
        steps.add(seq_id, prompt)
    for count in (3, 6, None, None, None):
        steps.step([steps.row(seq_id, count) for seq_id in (0, 1)])
    if is_captured:
        assert replays(steps) == 3
    else:
        assert read[:3] == [(6, 1), (2 + 6, 1), (1 + 14, 2)], "the first chunks sample nothing"
    for seq_id, answer in enumerate(answers):
        tokens = steps.tokens[seq_id][len(prompts[seq_id]) :]
        assert len(tokens) >= 3 and tokens == answer["greedy"][: len(tokens)].tolist()
    steps.worker.close()


def test_a_captured_graph_is_padded_to_the_rows_there_can_be(
    pair: tuple[Steps, Steps], read: list[tuple[int, int]]
) -> None:
    steps = pair[1]
    steps.add(1, [*range(3, 23)])
    steps.add(2, [*range(30, 33)])
    read.clear()
    steps.step([steps.row(1), steps.row(2)])
    assert read == [(24, 6)], "the closure is called again"


def test_chunks_that_sample_nothing_are_as_good_captured(pair: tuple[Steps, Steps]) -> None:
    """Rows of a step before leave no trace in them either."""
    found = []
    for steps in pair:
        steps.add(1, [7, 5, 9])
        steps.add(2, [*range(3, 63)])
        outputs = [steps.step([steps.row(1), steps.row(2, 20)])]
        outputs += [steps.step([steps.row(2, 10)]) for _ in range(3)]
        assert [row.token_ids for step in outputs[1:] for row in step] == [[], [], []]
        steps.step([steps.row(1), steps.row(2)])
        steps.step([steps.row(1), steps.row(2)])
        found.append([steps.finish(1), steps.finish(2)])
    assert found[0] == found[1] and len(found[0][1]) == 62
    assert replays(pair[1]) == 5


def logprobs(row: Any) -> list[Any]:
    return [(x.token_ids, x.rank, np.round(x.logprobs, 3).tolist()) for x in row.prompt_logprobs]


def test_prompt_logprobs_beside_another_prompt_read_every_token(
    pair: tuple[Steps, Steps], read: list[tuple[int, int]]
) -> None:
    """Such a step is not captured; what follows it is, chunks of other prompts beside the row that
    wanted them."""
    wishes, found = SamplingParams(temperature=0, prompt_logprobs=2), []
    for steps in pair:
        steps.add(1, [5, 9, 33, 120, 77], wishes)
        steps.add(2, [*range(3, 23)])
        read.clear()
        first, second = steps.step([steps.row(1), steps.row(2, 12)])
        assert read == [(17, 17)] and second.prompt_logprobs is None
        begun = 0 if steps is pair[0] else replays(steps)
        steps.step([steps.row(1), steps.row(2)])
        if steps is pair[1]:
            assert (begun, replays(steps)) == (0, 1)
        found.append((logprobs(first), steps.finish(1), steps.finish(2)))
    assert found[0] == found[1]
    assert len(found[0][0]) == 4


@pytest.mark.parametrize("is_captured", [False, True])
def test_a_drafter_with_layers_of_its_own_gets_every_token_of_steps_it_follows(
    folder: Path,
    tensor_library: str,
    is_captured: bool,
    monkeypatch: pytest.MonkeyPatch,
    read: list[tuple[int, int]],
) -> None:
    monkeypatch.setattr(graph_sizes, "prompt_ladder", lambda most: SIZES)
    options = {"model": str(folder)}
    config = dataclasses.replace(
        engine_config(folder, tensor_library, max_num_seqs=6),
        speculative=SpeculativeConfig("draft_model", 2, adaptive_length=False, options=options),
        graphs=GraphConfig(enabled=is_captured),
    )
    resolved: Any = resolve_plugins(config)
    worker = Worker(config, WithPrompts(resolved) if is_captured else resolved)
    worker.load()
    steps = Steps(worker)
    steps.add(1, [5, 9, 33, 120, 77, 2, 8])
    steps.add(2, [*range(3, 13)])
    read.clear()
    message = steps.message([steps.row(1), steps.row(2)])
    message.max_drafts = 2
    output = worker.launch(message).wait()
    assert read[:2] == [(24, 24) if is_captured else (17, 17)] * 2, "the target, then its double"
    assert output.draft_failures == 0 and output.token_ids.size == 2
    steps.add(3, [*range(3, 12)])
    read.clear()
    steps.step([steps.row(3)])
    assert read == [(24, 24) if is_captured else (9, 1)], "nobody drafts after this one"
    worker.close()


def test_a_model_that_returns_all_hidden_states_is_named(
    pair: tuple[Steps, Steps], folder: Path, tensor_library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = DecoderLM.forward

    def deaf(self: Any, ids: Any, positions: Any, context: Any) -> Any:
        return forward(self, ids, positions, dataclasses.replace(context, rows=None))

    monkeypatch.setattr(DecoderLM, "forward", deaf)
    steps = pair[0]
    steps.add(1, [5, 9, 33])
    with pytest.raises(WorkerError, match=r"LlamaForCausalLM\.forward returned 3 .* names 1 of 3"):
        steps.step([steps.row(1)])
    with pytest.raises(WorkerError, match=r"cannot be captured: .* returned 48 .* names 6 of 48"):
        make_steps(folder, tensor_library, is_captured=True)
