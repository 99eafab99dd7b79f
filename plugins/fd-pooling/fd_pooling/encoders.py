"""BERT-like encoders (arXiv 1810.04805, 1907.11692): every token sees all tokens of its prompt.

Absolute positions, LayerNorm after each sum, GELU. A prompt is computed in one step and nothing of
it is kept: the one layer that `shapes` states only makes the engine count the prompt's tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from fastdeploy_core.contracts.attention import AttentionSpec
from fastdeploy_core.contracts.model import ModelShapes
from fastdeploy_core.errors import UnsupportedModel
from fastdeploy_core.layers import Placement
from fastdeploy_core.models.reading import ConfigReader

if TYPE_CHECKING:
    from fastdeploy_core.contracts.attention import AttentionBatch
    from fastdeploy_core.contracts.model import StoredTensor
    from fastdeploy_core.layers import ForwardContext, ModelBuilder
    from fastdeploy_core.tensor import Tensor


# Added to the score of a key that is padding; float16 holds it, and rows of padding stay finite.
HIDDEN: Final = -30000.0


class BertLM:
    """BertModel. With `pair_separator` in the configuration, tokens after the first of those are
    of type 1, as in a pair of texts; else all are of type 0."""

    features = frozenset[str]()

    @staticmethod
    def first_position(config: Mapping[str, Any]) -> int:
        """Row of the position table that the first token takes."""
        return 0

    @classmethod
    def shapes(cls, config: Mapping[str, Any], tp_size: int, dtype: str) -> ModelShapes:
        """Shapes of one rank."""
        read = ConfigReader(config, tp_size)
        read.require_activation("gelu")
        if config.get("position_embedding_type", "absolute") != "absolute":
            raise UnsupportedModel(
                f"position_embedding_type {config['position_embedding_type']!r} of config.json is "
                "not served; possible: absolute"
            )
        read.divided("intermediate_size", read.size("intermediate_size"))
        return ModelShapes(
            architecture=read.architecture,
            num_layers=read.size("num_hidden_layers"),
            vocab_size=read.size("vocab_size"),
            hidden_size=read.size("hidden_size"),
            max_position_embeddings=read.size("max_position_embeddings"),
            layers=(cls._spec(read, dtype),),
        )

    @staticmethod
    def _spec(read: ConfigReader, dtype: str) -> AttentionSpec:
        return read.gqa(dtype)

    def __init__(self, config: Mapping[str, Any], build: ModelBuilder) -> None:
        read = ConfigReader(config, build.tp_size)
        spec = build.cache_spec(self._spec(read, build.dtype))
        build.attention(spec)
        build.add_kv_layer(spec)
        hidden, eps = read.size("hidden_size"), read.number("layer_norm_eps", default=1e-12)
        self._xp, self._first = build.xp, self.first_position(config)
        self._dtype = build.dtype
        self.weights = build.weights
        for text in ("position_ids", "token_type_ids", "pooler.", "cls.", "lm_head."):
            build.weights.ignore(text)  # a head that is served announces its own weights
        self.words = build.embedding("embeddings.word_embeddings", read.size("vocab_size"), hidden)
        places, types = (
            read.size("max_position_embeddings"),
            read.size("type_vocab_size", default=2),
        )
        self.places = Table(build, "embeddings.position_embeddings", places, hidden)
        self.types = Table(build, "embeddings.token_type_embeddings", types, hidden)
        self.norm = build.layer_norm("embeddings.LayerNorm", hidden, eps)
        self.layers = [
            EncoderLayer(build, f"encoder.layer.{number}", read, eps)
            for number in range(read.size("num_hidden_layers"))
        ]
        self._separator: int | None = config.get("pair_separator")

    def forward(self, input_ids: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        """input_ids, positions: [num_tokens] int64 of whole prompts; returns hidden states
        [num_tokens, hidden], or those of context.rows."""
        rows = rows_of(context.batch)
        mask = self._mask(context.batch)
        x = self.words(input_ids) + self.places(positions + self._first)
        x = self.norm(x + self.types(self._types_of(input_ids, rows)))
        for layer in self.layers:
            x = layer(x, rows, mask)
        return x if context.rows is None else self._xp.index_select(x, 0, context.rows)

    def _mask(self, batch: AttentionBatch) -> Tensor | None:
        """[num_tokens] model dtype, added to the scores of each key; None: no token is padding."""
        if not batch.is_padded:
            return None
        hidden: Tensor = (batch.slot_mapping < 0).to(self._xp.dtype(self._dtype)) * HIDDEN
        return hidden

    def _types_of(self, input_ids: Tensor, rows: list[tuple[int, int]]) -> Tensor:
        xp = self._xp
        found = xp.zeros_like(input_ids)
        if self._separator is None:
            return found
        is_end = (input_ids == self._separator).long()
        for first, end in rows:
            own = is_end[first:end]
            before = xp.cumsum(own, 0) - own
            found[first:end] = (before > 0).long()
        return found

    def load_weights(self, tensors: Iterable[tuple[str, StoredTensor]]) -> list[str]:
        """Take every known tensor by checkpoint name; returns the unknown names."""
        return self.weights.load(tensors)


class RobertaLM(BertLM):
    """RobertaModel and XLMRobertaModel: positions count from after that of padding."""

    @staticmethod
    def first_position(config: Mapping[str, Any]) -> int:
        """Row of the position table that the first token takes."""
        return int(config.get("pad_token_id") or 1) + 1


class Table:
    """A small embedding, whole on every rank: there may be fewer rows than ranks."""

    def __init__(self, build: ModelBuilder, name: str, size: int, hidden: int) -> None:
        self._xp = build.xp
        self.rows = build.zeros((size, hidden), build.xp.dtype(build.dtype))

        def accept(tensor: Tensor) -> None:
            self.rows[:] = tensor.to(self.rows.dtype)

        region = (slice(0, size), slice(0, hidden))
        build.weights.add(Placement(f"{name}.weight", (size, hidden), region, accept))

    def __call__(self, ids: Tensor) -> Tensor:
        """[n] int64 to [n, hidden]."""
        found: Tensor = self._xp.index_select(self.rows, 0, ids)
        return found


class EncoderLayer:
    """norm(x + attention(x)), then norm(x + feed_forward(x))."""

    def __init__(self, build: ModelBuilder, prefix: str, read: ConfigReader, eps: float) -> None:
        hidden, inner = read.size("hidden_size"), read.size("intermediate_size")
        names = [f"{prefix}.attention.self.{name}" for name in ("query", "key", "value")]
        self.projections = [
            build.linear(name, hidden, hidden, bias=True, parallel="column") for name in names
        ]
        self.output = build.linear(
            f"{prefix}.attention.output.dense", hidden, hidden, bias=True, parallel="row"
        )
        self.attention_norm = build.layer_norm(f"{prefix}.attention.output.LayerNorm", hidden, eps)
        self.up = build.linear(
            f"{prefix}.intermediate.dense", hidden, inner, bias=True, parallel="column"
        )
        self.down = build.linear(f"{prefix}.output.dense", inner, hidden, bias=True, parallel="row")
        self.norm = build.layer_norm(f"{prefix}.output.LayerNorm", hidden, eps)
        self._dim, self._xp = read.head_dim(), build.xp

    def __call__(self, x: Tensor, rows: list[tuple[int, int]], mask: Tensor | None) -> Tensor:
        """x: [num_tokens, hidden]. rows, mask: see BertLM."""
        x = self.attention_norm(x + self.output(self._attend(x, rows, mask)))
        return self.norm(x + self.down(self._xp.gelu(self.up(x))))

    def _attend(self, x: Tensor, rows: list[tuple[int, int]], mask: Tensor | None) -> Tensor:
        xp, dim, found = self._xp, self._dim, []
        q, k, v = (part(x).reshape([x.shape[0], -1, dim]) for part in self.projections)
        for first, end in rows:
            size, heads = end - first, [t[first:end].transpose(0, 1) for t in (q, k, v)]
            own = None if mask is None else mask[first:end].unsqueeze(0).expand([size, size])
            seen = xp.attend(heads[0].unsqueeze(1), heads[1], heads[2], own, dim**-0.5)
            found.append(seen.squeeze(1).transpose(0, 1).reshape([size, -1]))
        return xp.cat(found)


def rows_of(batch: AttentionBatch) -> list[tuple[int, int]]:
    """The first token of each row, and the one after its last; padding of a padded step
    included."""
    ends = batch.cu_seqlens_q[: batch.num_seqs + 1].tolist()
    return list(pairwise(ends))
