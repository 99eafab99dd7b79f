"""The family PoolingLM: another family's model, whose prompts are pooled to one vector each.

Which family, which hidden states and which head after them: PoolingSettings, in config.json as the
engine reads it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fastdeploy_core.errors import ConfigError
from fastdeploy_core.models.shapes import model_class

from .encoders import BertLM, RobertaLM, rows_of
from .settings import PoolingSettings, SentenceFiles, read_settings, stem

if TYPE_CHECKING:
    from fastdeploy_core.contracts.model import ModelShapes, StoredTensor
    from fastdeploy_core.layers import ForwardContext, ModelBuilder
    from fastdeploy_core.tensor import Tensor

logger = logging.getLogger(__name__)

# Decode steps have no place here, so there is nothing to capture. A prompt's own chunk, or a cached
# beginning of it, is enough for its last token's hidden state alone.
ENGINE_ARGUMENTS: dict[str, Any] = {"enforce_eager": True}
WHOLE_PROMPTS = {"enable_chunked_prefill": False, "enable_prefix_caching": False}


class PoolingLM:
    """See contracts.small.PoolingLM."""

    features = frozenset({"pooling"})

    @staticmethod
    def adapt(
        folder: Path, tokenizer: Path, config: Mapping[str, Any], asked: Mapping[str, Any]
    ) -> dict[str, Any]:
        """config.json for this family."""
        settings = read_settings(folder, tokenizer, config, asked)
        arguments = {**ENGINE_ARGUMENTS}
        if settings.needs_whole_prompts:
            arguments |= WHOLE_PROMPTS
        sentence = SentenceFiles(folder)
        longest = settings.max_position_embeddings
        if settings.is_encoder:
            longest -= family_of(settings).first_position(config)
        lengths = [length for length in (longest, sentence.max_tokens) if length]
        changed = {
            "architectures": [PoolingLM.__name__],
            **({"max_position_embeddings": min(lengths)} if lengths else {}),
            "pooling": {**settings.as_config(), "prompts": sentence.prompts},
            "engine_arguments": arguments,
        }
        logger.info(
            "prompts are pooled: %s, %s of %s%s",
            settings.task,
            settings.pooling_type,
            settings.architecture,
            ", without chunks and prefix cache" if settings.needs_whole_prompts else "",
        )
        return {**config, **changed}

    @staticmethod
    def methods() -> Mapping[str, Callable[..., Any]]:
        """embed, encode, classify, score and reward."""
        from .offline import METHODS

        return METHODS

    @staticmethod
    def shapes(config: Mapping[str, Any], tp_size: int, dtype: str) -> ModelShapes:
        """Those of the model whose hidden states are pooled."""
        settings = _settings(config)
        shapes: ModelShapes = family_of(settings).shapes(_inner(config, settings), tp_size, dtype)
        return replace(shapes, architecture=PoolingLM.__name__)

    def __init__(self, config: Mapping[str, Any], build: ModelBuilder) -> None:
        self._settings = settings = _settings(config)
        self._xp, self._build = build.xp, build
        # A head of its own is only built where it is used.
        tied = {} if settings.head == "tokens" else {"tie_word_embeddings": True}
        self._model = family_of(settings)({**_inner(config, settings), **tied}, build)
        self._head = make_head(settings, build, self._model, config)

    def forward(self, input_ids: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        """One row for each token of context.rows, or for each prompt of the step: its pooled hidden
        states."""
        kind, rows = self._settings.pooling_type, context.rows
        if kind in ("LAST", "STEP"):
            last: Tensor = self._model.forward(input_ids, positions, context)
            return last
        hidden = self._model.forward(input_ids, positions, replace(context, rows=None))
        return self._pooled(hidden, rows, context)

    def _pooled(self, hidden: Tensor, read: Tensor | None, context: ForwardContext) -> Tensor:
        """hidden: [num_tokens, hidden] of whole prompts."""
        xp, batch, found = self._xp, context.batch, []
        rows = rows_of(batch)
        counts = (batch.slot_mapping >= 0).float().unsqueeze(1) if batch.is_padded else None
        for first, end in rows:
            own = hidden[first:end]
            if self._settings.pooling_type == "CLS":
                found.append(own[0])
            elif counts is None:
                found.append(own.float().mean(0))
            else:  # without padding
                count = counts[first:end]
                found.append((own.float() * count).sum(0) / xp.clamp(count.sum(), 1.0))
        vectors = xp.stack(found)
        if self._settings.head != "none":  # whose weights are of the model's dtype
            vectors = vectors.to(hidden.dtype)
        if read is None:
            return vectors
        of_token = np.repeat(np.arange(len(rows)), [end - first for first, end in rows])
        sequence = xp.index_select(self._build.device.to_device(of_token), 0, read)
        return xp.index_select(vectors, 0, sequence)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[num_rows, hidden] to [num_rows, settings.width] float32: before activation, cut and
        norm, which front ends do."""
        return self._head(hidden)

    def load_weights(self, tensors: Iterable[tuple[str, StoredTensor]]) -> list[str]:
        """Names with and without the prefix of the model inside: both are written."""
        unknown: list[str] = self._model.load_weights(self._named(tensors))
        return unknown

    def _named(
        self, tensors: Iterable[tuple[str, StoredTensor]]
    ) -> Iterator[tuple[str, StoredTensor]]:
        prefix = "" if self._settings.is_encoder else "model."
        for name, tensor in tensors:
            own = name
            for outer in ("bert.", "roberta."):
                own = own.removeprefix(outer)
            is_known = self._build.weights.parts_of(self._build.weights.canonical(own))
            if not is_known and prefix and not own.startswith(prefix):
                own = prefix + own if not own.startswith("lm_head.") else own
            yield own, tensor


def _settings(config: Mapping[str, Any]) -> PoolingSettings:
    if not isinstance(config.get("pooling"), Mapping):
        raise ConfigError(
            "PoolingLM is no architecture of a checkpoint; pass --runner pooling instead"
        )
    return PoolingSettings.of(config["pooling"])


def _inner(config: Mapping[str, Any], settings: PoolingSettings) -> dict[str, Any]:
    """config.json of the model inside."""
    changed: dict[str, Any] = {
        "architectures": [settings.architecture],
        "max_position_embeddings": settings.max_position_embeddings or None,
    }
    if settings.head == "bert":
        changed["pair_separator"] = settings.token_ids[0]
    return {**config, **changed}


def family_of(settings: PoolingSettings) -> Any:
    """The class of the model inside."""
    name = stem(settings.architecture)[0]
    if settings.is_encoder:
        return BertLM if name == "Bert" else RobertaLM
    return model_class({"architectures": [settings.architecture]})


def make_head(
    settings: PoolingSettings, build: ModelBuilder, model: Any, config: Mapping[str, Any]
) -> Any:
    """[num_rows, hidden] to [num_rows, settings.width] float32."""
    xp, hidden, width = build.xp, int(config["hidden_size"]), settings.width
    if settings.head == "none":
        return lambda x: x.float()
    if settings.head == "tokens":
        no, yes = settings.token_ids

        def difference(x: Tensor) -> Tensor:
            """softmax over both is the sigmoid of this."""
            logits = model.compute_logits(x)
            return logits[:, yes : yes + 1] - logits[:, no : no + 1]

        return difference
    if settings.head == "score":
        score = build.linear("score", hidden, width, quantize=False)
        build.weights.ignore("lm_head.")
        return lambda x: score(x).float()
    if settings.head == "mlp":
        inner = build.linear("score.0", hidden, hidden, bias=True, quantize=False)
        outer = build.linear("score.2", hidden, width, bias=True, quantize=False)
        return lambda x: outer(xp.maximum(inner(x), xp.zeros_like(x))).float()
    names = ("pooler.dense", "classifier")
    if settings.head == "roberta":
        names = ("classifier.dense", "classifier.out_proj")
    dense = build.linear(names[0], hidden, hidden, bias=True, quantize=False)
    labels = build.linear(names[1], hidden, width, bias=True, quantize=False)
    return lambda x: labels(xp.tanh(dense(x))).float()
