"""The progress bar of offline generation."""

from __future__ import annotations

import time
from typing import Any, Self

from fastdeploy_core.types import RequestOutput


class Progress:
    """A tqdm bar over finished prompts with the speed in tokens; nothing when switched off."""

    def __init__(self, total: int, enabled: bool) -> None:
        self._bar: Any = None
        self._started = time.monotonic()
        self._tokens_in = 0
        self._tokens_out = 0
        if enabled and total:
            from tqdm import tqdm

            self._bar = tqdm(total=total, desc="Processed prompts", dynamic_ncols=True)

    def finished(self, output: RequestOutput) -> None:
        """One more prompt is done."""
        if self._bar is None:
            return
        self._tokens_in += len(output.prompt_token_ids)
        self._tokens_out += sum(len(answer.token_ids) for answer in output.outputs)
        elapsed = max(time.monotonic() - self._started, 1e-9)
        self._bar.set_postfix_str(
            f"input: {self._tokens_in / elapsed:.1f} tok/s, "
            f"output: {self._tokens_out / elapsed:.1f} tok/s",
            refresh=False,
        )
        self._bar.update(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
