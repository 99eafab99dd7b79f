"""What one forward pass needs besides tokens; built by the model runner, passed explicitly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fastdeploy_core.contracts.attention import AttentionBatch, AttentionSpec, StateSpec

if TYPE_CHECKING:
    from fastdeploy_core.contracts.model import Retention
    from fastdeploy_core.tensor import Tensor


@dataclass(slots=True)
class EmbeddedRows:
    """Vectors that stand in the place of some tokens' embeddings."""

    tokens: Tensor  # [n] int64: which of the step's tokens
    vectors: Tensor  # [n, hidden], or as wide as the family's encode() makes them; model dtype


@dataclass(slots=True)
class ForwardContext:
    """The batch, what each attention driver prepared for it, and the cache of each layer."""

    batch: AttentionBatch
    metadata: dict[Any, Any]  # by spec; filled by each driver's prepare()
    caches: list[tuple[Tensor, ...]]  # in the order of ModelBuilder.kv_layers
    # [n] int64: tokens whose hidden states are read after the model, an index for select_rows;
    # None: all.
    rows: Tensor | None = None
    embedded: EmbeddedRows | None = None  # None: every token has its own embedding
    # [num_tokens, dim] float32 as ModelBuilder.cos_sin: the step's own, made by a family with
    # positions of three axes; None: the layers' table.
    rotary: Tensor | None = None
    # The batch with tables and places of each bounded group of layers; others have `batch`.
    more: Mapping[Retention, AttentionBatch] = field(default_factory=dict)
    # By number of block: [num_tokens, hidden] that a drafter's part in `layers` keeps of the step.
    kept: dict[int, Tensor] = field(default_factory=dict)

    def batch_of(self, spec: AttentionSpec | StateSpec) -> AttentionBatch:
        """The batch as layers of this spec see it."""
        return self.more.get(spec.retention, self.batch) if self.more else self.batch
