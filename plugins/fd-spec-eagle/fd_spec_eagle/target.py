"""What a drafter reads of the target: hidden states between its blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastdeploy_core.contracts.small import ExtensibleLM
from fastdeploy_core.errors import CapabilityError

from .layout import DraftFolder, read_folder

if TYPE_CHECKING:
    from fastdeploy_core.contracts.speculative import DraftBatch, DrafterContext
    from fastdeploy_core.layers import ForwardContext
    from fastdeploy_core.tensor import Tensor


@dataclass(slots=True)
class Watched:
    """A block of the target whose output is kept for the drafter."""

    block: Any
    number: int

    def __call__(
        self, x: Tensor, residual: Tensor | None, positions: Tensor, context: ForwardContext,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """As contracts.small.ExtensibleLM.block says; a copy, since the next block may overwrite
        what it is given."""
        x, residual = self.block(x, residual, positions, context, rows)
        context.kept[self.number] = x.clone() if residual is None else x + residual
        return x, residual


def draft_of(
    method: str, context: DrafterContext
) -> tuple[ExtensibleLM, DraftFolder, Callable[[Sequence[str]], None]]:
    """The target, the folder that option `model` names, and what loads it (load_weights of the
    context); CapabilityError where no such draft can be built."""
    target = context.model
    if not isinstance(target, ExtensibleLM) or not isinstance(_blocks(target), list):
        raise CapabilityError(
            f"method {method!r} reads what the target's blocks return; {type(target).__name__} "
            "does not offer them (contracts.small.ExtensibleLM, with a list `layers`); a "
            "method without weights such as 'ngram' works"
        )
    if context.load_weights is None:
        raise CapabilityError(
            f"method {method!r} has layers of its own and was built without builder and "
            "load_weights (contracts.speculative.DrafterContext)"
        )
    if not context.options.get("quantization"):
        context.builder.quantizer = None  # published drafts are in full precision
    draft = read_folder(method, str(context.options.get("model")), context.hf_config)
    return target, draft, context.load_weights


def _blocks(target: Any) -> Any:
    return getattr(target, "layers", None)


class HiddenStates:
    """Those of several blocks, counted from 1, side by side."""

    def __init__(self, xp: Any, target: Any, numbers: Sequence[int]) -> None:
        """Lays a Watched around each of these blocks."""
        self._xp, self._numbers, blocks = xp, tuple(numbers), _blocks(target)
        for number in numbers:
            blocks[number - 1] = Watched(blocks[number - 1], number)

    def of(self, batch: DraftBatch) -> Tensor:
        """[T, all of them], of the tokens that the step fed."""
        num_tokens = int(batch.input_ids.shape[0])
        # What a captured step kept may have padding after the step's tokens.
        kept = [batch.context.kept[number][:num_tokens] for number in self._numbers]
        return self._xp.cat(kept, -1)
