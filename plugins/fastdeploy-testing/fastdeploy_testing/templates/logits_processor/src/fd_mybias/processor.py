"""Says no token again that the prompt or the answer has, on request: logits_processors_args={"mybias": [1, 2]}."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fastdeploy_core.contracts.small import ProcessorContext
from fastdeploy_core.errors import InvalidRequest
from fastdeploy_core.types import SamplingParams

if TYPE_CHECKING:
    from fastdeploy_core.tensor import Tensor

NEVER = -1e30  # finite, so that a row with nothing else keeps a meaning


class MyBiasProcessor:
    """One instance per worker, for all its sequences."""

    arguments = frozenset({"mybias"})  # of logits_processors_args; others are refused

    def __init__(self, context: ProcessorContext) -> None:
        self._context = context
        # By sequence: the tokens, and which of them its prompt has.
        self._tokens: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def validate(self, params: SamplingParams) -> None:
        """Raise InvalidRequest for arguments that cannot be used."""
        self._read(params)

    def add(self, seq_id: int, params: SamplingParams, prompt_token_ids: np.ndarray) -> bool:
        """A sequence arrives; whether this processor has anything to do with it."""
        tokens = self._read(params)
        if tokens.size:
            self._tokens[seq_id] = tokens, np.intersect1d(tokens, prompt_token_ids)
        return bool(tokens.size)

    def remove(self, seq_id: int) -> None:
        """It has ended."""
        self._tokens.pop(seq_id, None)

    def apply(
        self, logits: Tensor, seq_ids: Sequence[int], output_token_ids: Sequence[np.ndarray]
    ) -> Tensor:
        """logits: [rows, vocab_size] float32; a sequence has several rows where drafts are tried."""
        xp, size = self._context.xp, self._context.vocab_size
        places = []
        for row, seq_id in enumerate(seq_ids):
            tokens, known = self._tokens[seq_id]
            said = np.union1d(known, np.intersect1d(tokens, output_token_ids[row]))
            places.append(row * size + said)
        where = xp.to_device(xp.from_numpy(np.concatenate(places)), self._context.device)
        never = xp.full([where.shape[0]], NEVER, dtype=xp.float32, device=self._context.device)
        xp.index_copy_(logits.view([-1]), 0, where, never)
        return logits

    def _read(self, params: SamplingParams) -> np.ndarray:
        """Token ids; none without the argument."""
        given: Any = (params.logits_processors_args or {}).get("mybias", [])
        size = self._context.vocab_size
        is_list = isinstance(given, list | tuple)
        if not is_list or not all(type(t) is int and 0 <= t < size for t in given):
            wanted = f"logits_processors_args.mybias is a list of token ids below {size}"
            raise InvalidRequest(wanted, param="logits_processors_args")
        return np.unique(np.array(given, dtype=np.int64))
