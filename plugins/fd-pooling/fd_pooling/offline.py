"""What LLM(model, runner="pooling") can do: embed, encode, classify, score, reward. Names and
results are vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fastdeploy_core.api.inputs import Prompts, normalise_prompts
from fastdeploy_core.engine.input import RequestOptions
from fastdeploy_core.errors import InvalidRequest, error_named

from .prompts import Cut, Prompter
from .requests import pooled_requests
from .settings import PoolingSettings
from .vectors import check_dimensions, cosine, finished

if TYPE_CHECKING:
    from fastdeploy_core.api.llm import LLM


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """How one call's prompts are pooled."""

    dimensions: int | None = None  # the first so many of an embedding
    use_activation: bool | None = None  # norm of embeddings, activation of heads; None: configured
    normalize: bool | None = None  # another name of the same, for embeddings
    truncate_prompt_tokens: int | None = None  # -1: to what the model takes

    @property
    def is_raw(self) -> bool | None:
        """Whether norm and activation are left out; None: as configured."""
        asked = self.use_activation if self.normalize is None else self.normalize
        return None if asked is None else not asked

    @property
    def cut(self) -> Cut | None:
        """How to cut prompts, if they may be cut."""
        most = self.truncate_prompt_tokens
        return None if most is None else Cut(most)


@dataclass(slots=True)
class PoolingOutput:
    """What a prompt was pooled to."""

    data: np.ndarray  # [width] float32; [steps, width] with pooling type STEP


@dataclass(slots=True)
class EmbeddingOutput:
    """An embedding."""

    embedding: list[float]


@dataclass(slots=True)
class ClassificationOutput:
    """Probabilities of the model's labels, in their order."""

    probs: list[float]
    labels: list[str]

    @property
    def label(self) -> str:
        """The likeliest."""
        return self.labels[int(np.argmax(self.probs))]


@dataclass(slots=True)
class ScoringOutput:
    """How well a pair fits."""

    score: float


@dataclass(slots=True)
class PoolingRequestOutput:
    """A prompt and what came of it: one of the records above."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: Any
    num_cached_tokens: int = 0
    finished: bool = True


def embed(
    llm: LLM,
    prompts: Prompts,
    *,
    pooling_params: PoolingParams | None = None,
    use_tqdm: bool = True,
) -> list[PoolingRequestOutput]:
    """Embeddings, in the order of the prompts: `outputs.embedding`."""
    found = _run(llm, _prompts(llm, prompts, pooling_params), pooling_params, use_tqdm, "embed")
    for output in found:
        output.outputs = EmbeddingOutput(output.outputs.data.tolist())
    return found


def encode(
    llm: LLM,
    prompts: Prompts,
    *,
    pooling_params: PoolingParams | None = None,
    use_tqdm: bool = True,
) -> list[PoolingRequestOutput]:
    """What the model's task gives: `outputs.data`."""
    return _run(llm, _prompts(llm, prompts, pooling_params), pooling_params, use_tqdm)


def classify(
    llm: LLM,
    prompts: Prompts,
    *,
    pooling_params: PoolingParams | None = None,
    use_tqdm: bool = True,
) -> list[PoolingRequestOutput]:
    """Probabilities of labels: `outputs.probs` and `outputs.label`."""
    found = _run(llm, _prompts(llm, prompts, pooling_params), pooling_params, use_tqdm, "classify")
    labels = list(_settings(llm).labels)
    for output in found:
        output.outputs = ClassificationOutput(output.outputs.data.tolist(), labels)
    return found


def reward(
    llm: LLM,
    prompts: Prompts,
    *,
    pooling_params: PoolingParams | None = None,
    use_tqdm: bool = True,
) -> list[PoolingRequestOutput]:
    """Rewards: `outputs.data`."""
    prepared = _prompts(llm, prompts, pooling_params)
    return _run(llm, prepared, pooling_params, use_tqdm, "reward")


def score(
    llm: LLM,
    queries: str | Sequence[str],
    documents: str | Sequence[str],
    /,
    *,
    instruction: str | None = None,
    pooling_params: PoolingParams | None = None,
    use_tqdm: bool = True,
) -> list[PoolingRequestOutput]:
    """How well each document fits the query, or its query: `outputs.score`."""
    one = [queries] if isinstance(queries, str) else list(queries)
    two = [documents] if isinstance(documents, str) else list(documents)
    if not two or len(one) not in (1, len(two)):
        raise InvalidRequest(
            f"{len(one)} queries and {len(two)} documents are no pairs; give one query, or one for "
            "each document",
            param="queries",
        )
    each = one * len(two) if len(one) == 1 else one
    params, settings = pooling_params or PoolingParams(), _settings(llm)
    prompter = Prompter(settings, llm._tokenizer, llm._limits)
    if settings.task == "embed":
        texts = [prompter.text(text, True, params.cut) for text in [*one, *two]]
        found = _run(llm, texts, params, use_tqdm)
        left, right = found[: len(one)], found[len(one) :]
        left = left * len(two) if len(left) == 1 else left
        for a, b in zip(left, right, strict=True):
            b.outputs = ScoringOutput(cosine(a.outputs.data, b.outputs.data))
        return right
    if settings.width != 1:
        raise InvalidRequest(
            f"this model has {settings.width} labels, so a pair has no single score; use classify()"
        )
    pairs = [prompter.pair(a, b, instruction, params.cut) for a, b in zip(each, two, strict=True)]
    found = _run(llm, pairs, params, use_tqdm, "classify")
    for output in found:
        output.outputs = ScoringOutput(float(output.outputs.data[0]))
    return found


METHODS: Final[dict[str, Callable[..., Any]]] = {
    "embed": embed,
    "encode": encode,
    "classify": classify,
    "reward": reward,
    "score": score,
}


def _settings(llm: LLM) -> PoolingSettings:
    return PoolingSettings.of(llm.config.model.hf_config["pooling"])


def _prompts(llm: LLM, prompts: Prompts, params: PoolingParams | None) -> list[list[int]]:
    prompter = Prompter(_settings(llm), llm._tokenizer, llm._limits)
    cut = None if params is None else params.cut
    found = []
    for prompt in normalise_prompts(prompts):
        if prompt.media:
            raise InvalidRequest("pictures are not pooled", param="prompts")
        if prompt.token_ids is not None:
            found.append(prompter.ids(prompt.token_ids, cut))
        else:
            found.append(prompter.text(prompt.text or "", True, cut))
    return found


def _run(
    llm: LLM,
    prompts: Sequence[list[int]],
    params: PoolingParams | None,
    use_tqdm: bool,
    task: str = "",
) -> list[PoolingRequestOutput]:
    from fastdeploy_core.api.llm import Batch

    settings, params = _settings(llm), params or PoolingParams()
    if task not in ("", settings.task):
        raise InvalidRequest(
            f"{task}() is not possible: this model is for the task {settings.task}; another one is "
            f"LLM(model, runner='pooling', convert='{task}')"
        )
    if params.dimensions is not None and settings.task == "embed":
        check_dimensions(settings, params.dimensions)
    prompter = Prompter(settings, llm._tokenizer, llm._limits)
    requests = pooled_requests(prompts, settings, prompter, llm._limits, RequestOptions(), "prompt")
    flat = [request for own in requests for request in own]
    batch = Batch(iter(flat), [None] * len(flat))
    outputs = iter(llm._collect(batch, use_tqdm, None))
    found = []
    for own in requests:
        parts = [next(outputs) for _ in own]
        for part in parts:
            if part.error is not None:
                raise error_named(part.error_type, part.error)
        vectors = [
            finished(
                settings,
                part.outputs[0].pooled or b"",
                dimensions=params.dimensions,
                is_raw=params.is_raw,
            )
            for part in parts
        ]
        data = np.stack(vectors) if settings.pooling_type == "STEP" else vectors[0]
        last = parts[-1]
        cached = last.num_cached_tokens or 0
        output = PoolingOutput(data)
        ids = last.prompt_token_ids
        found.append(PoolingRequestOutput(last.request_id, ids, output, cached))
    return found
