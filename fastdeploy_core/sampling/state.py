"""Sampling parameters that need memory per slot: masks, grammars, penalties, processors."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from fastdeploy_core.config import EngineConfig, SpeculativeConfig
from fastdeploy_core.contracts.small import GrammarBackend, GrammarMatcher, ProcessorContext
from fastdeploy_core.errors import InvalidRequest
from fastdeploy_core.types import NewSequence, Request

from . import columns as bits
from .after_thinking import MatcherAfterThinking
from .columns import SamplingColumns
from .leniency import Leniency
from .masks import TokenMasks
from .penalties import PenaltyTables
from .processors import load_processors
from .sampler import Sampler

if TYPE_CHECKING:
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.contracts.ops import KernelTable


class SamplingState:
    """What rank 0 knows of its sequences for sampling: masks, grammars, penalties, processors; and
    the sampler that reads them."""

    def __init__(
        self,
        config: EngineConfig,
        device: DeviceBackend,
        kernels: KernelTable,
        columns: SamplingColumns,
        load_driver: Callable[[str, str], Any],
    ) -> None:
        """`load_driver(kind, name)` returns a driver class that was resolved at start-up."""
        self._load_driver = load_driver
        num_slots, vocab_size = config.batch.max_num_seqs, columns.vocab_size
        tokenizer = config.model.tokenizer_path
        tokenizer = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
        self._tokenizer_json = str(tokenizer) if tokenizer.is_file() else ""
        self._columns, self._vocab_size = columns, vocab_size
        self._masks = TokenMasks(columns, num_slots)
        self._penalties = PenaltyTables(device, num_slots, vocab_size)
        context = ProcessorContext(
            device.xp, device.device, vocab_size, num_slots, self._tokenizer_json
        )
        self._processors = load_processors(config.logits_processors, context, device, columns)
        self._grammars: dict[tuple[str, tuple[int, ...]], GrammarBackend] = {}
        self._threads = ThreadPoolExecutor(1, "fd-grammars")
        self.most_steps = self._masks.most_steps
        self.sampler = Sampler(
            device,
            kernels,
            self._masks,
            self._penalties,
            self._processors,
            config.logprobs_mode,
            _leniency(config.speculative),
        )
        self.parts: list[Any] = [self._masks, self._penalties, self._processors]

    def add(self, slot: int, new: NewSequence) -> None:
        """Prepare what the sequence's parameters ask for; InvalidRequest if it cannot be."""
        tokens = np.asarray(new.token_ids, dtype=np.int64)
        prompt, output = tokens[: new.num_prompt_tokens], tokens[new.num_prompt_tokens :]
        self._masks.add(slot, new.sampling, new.eos_token_ids)
        if self._columns.flags[slot] & bits.PENALTY:
            self._penalties.add(slot, prompt, output)
        self._processors.add(slot, new.seq_id, new.sampling, prompt)
        if new.grammar is not None:
            matcher = self._matcher(new)
            if new.grammar_start is not None:
                matcher = MatcherAfterThinking(matcher, new.grammar_start)
            if output.size and matcher.accept(output.tolist()) != output.size:
                raise InvalidRequest("the text so far does not fit the grammar")
            self._masks.add_matcher(slot, new.seq_id, matcher)

    def advance(self, slot: int, token_id: int) -> bool:
        """Tell the slot's grammar, if it has one, of a new token; False: it does not fit."""
        if slot not in self._masks.matchers:
            return True
        fits = self._masks.accept(slot, [token_id])
        self._masks.begin(slot)
        return fits

    def prepare(self, request: Request) -> Future[GrammarMatcher]:
        """Build what a request's grammar needs, in a thread of its own before the request runs.
        What fails here fails again when it does."""
        return self._threads.submit(self._matcher, request)

    def cut_forbidden(self, slots: np.ndarray, drafts: np.ndarray) -> None:
        """Drafts after the known tokens, [rows, k] with -1 after each row's last one: cut off what
        the slot's grammar would not take."""
        if not self._masks.matchers:
            return
        for row in np.flatnonzero(self._columns.flags[slots] & bits.GRAMMAR).tolist():
            tokens = drafts[row][drafts[row] >= 0].tolist()
            if tokens:
                drafts[row, self._masks.allowed(int(slots[row]), tokens) :] = -1

    def _matcher(self, new: NewSequence | Request) -> GrammarMatcher:
        key = (new.grammar_backend, tuple(new.eos_token_ids))
        if key not in self._grammars:
            if not self._tokenizer_json:
                raise InvalidRequest("structured outputs need the model's tokenizer.json")
            driver = self._load_driver("grammar", new.grammar_backend)
            self._grammars[key] = driver(self._tokenizer_json, self._vocab_size, new.eos_token_ids)
        return self._grammars[key].matcher(new.grammar or b"")


def _leniency(config: SpeculativeConfig | None) -> Leniency | None:
    """The lossy rule of acceptance, where it was asked for."""
    if config is None or config.acceptance == "lossless":
        return None
    return Leniency(config.max_candidate_len, config.verify_window)
