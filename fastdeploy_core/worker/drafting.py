"""Drafting on one rank: has drafts made after every step, and survives drafters.

Drafts stay in the worker. Those made on the device lie in its slots, where the next step feeds
them; those of a host drafter, or with something for the host to say, lie in the host's slots. A
drafter that fails, or proposes nonsense, costs its drafts (speculative/guard.py)."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from fastdeploy_core.contracts.speculative import NO_DRAFT, Drafter
from fastdeploy_core.sampling.columns import SamplingColumns, SamplingPlan
from fastdeploy_core.speculative.guard import DrafterGuard

from .draft_batch import DraftBatches

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastdeploy_core.config import SpeculativeConfig
    from fastdeploy_core.contracts.device import Communicator, DeviceBackend
    from fastdeploy_core.contracts.ops import KernelTable
    from fastdeploy_core.loading.drafters import Drafters
    from fastdeploy_core.loading.loader import LoadedModel
    from fastdeploy_core.sampling.captured import CapturedSampling
    from fastdeploy_core.sampling.state import SamplingState
    from fastdeploy_core.tensor import Tensor
    from fastdeploy_core.types import ModelRunnerOutput

    from .graphs import CapturedDecode, CapturedPrompt
    from .slots import Slots
    from .step import Launched, StepRows, TargetStep


class Drafting:
    """Owns the drafter of one rank (none where another rank drafts) and how its proposals fare."""

    def __init__(
        self,
        device: DeviceBackend,
        kernels: KernelTable,
        loaded: LoadedModel,
        config: SpeculativeConfig,
        drafters: Drafters,
        columns: SamplingColumns,
        state: SamplingState | None,
        communicator: Communicator | None,
    ) -> None:
        self._device, self._xp, self._config = device, device.xp, config
        self._greedy, self._loaded, self._kernels = kernels["greedy"], loaded, kernels
        self._columns, self._state, self._communicator = columns, state, communicator
        self._drafter, self._follower = drafters.drafter, drafters.follower
        self._first_layer = drafters.first_layer
        self.on_device = drafters.on_device
        # Such a drafter samples nothing, so one graph serves every kind of sampling.
        self.reads_history = bool(getattr(drafters.drafter, "reads_history", False))
        # Whether it goes on from what the target computed of every token fed.
        self.reads_hidden = drafters.on_device and not self.reads_history
        # Whether a step can feed its drafts unseen: no host drafter has a say in them, and a draft
        # is accepted when it is the token that is sampled.
        self.stays_on_device = drafters.on_device and not drafters.is_continued
        self.feeds_unseen = self.stays_on_device and config.acceptance == "lossless"
        self._plan: SamplingPlan | None = None
        self.guard = DrafterGuard(columns.vocab_size)

    def attach(self, slots: Slots, sampling: CapturedSampling, offsets: Tensor | None) -> None:
        """The slots exist once it is known what drafters need. offsets: see SequenceMedia."""
        self._slots, self._sampling = slots, sampling
        made_of = (self._device, self._kernels, self._loaded, slots, self._first_layer, offsets)
        self._batches = DraftBatches(*made_of)

    def widths(self) -> tuple[int, ...]:
        """Tokens per row that decode steps are captured for; fewer drafts are padded."""
        most = self._config.num_speculative_tokens
        return tuple(sorted({1, 1 + most, 2 if self._config.adaptive_length and most > 2 else 1}))

    def numbers(self) -> tuple[int, ...]:
        """Numbers of drafts that a drafter on the device is captured for."""
        if not self.on_device:
            return ()
        most = self._config.num_speculative_tokens
        return tuple(sorted({1, most})) if self._config.adaptive_length else (most,)

    def broadcast_drafts(self, rows: StepRows) -> None:
        """Every rank gets the host's drafts of these rows from rank 0, which alone has them."""
        slots, communicator = self._slots, self._communicator
        if communicator is None or not rows.num_drafts.any():
            return
        at = rows.slots
        table = np.concatenate((slots.num_drafts[at, None], slots.draft_ids[at]), 1)
        table = self._device.to_host(communicator.broadcast(self._device.to_device(table), 0))
        slots.num_drafts[at], slots.draft_ids[at] = table[:, 0], table[:, 1:]

    def drafts_after(self, launched: Launched) -> bool:
        """Whether a drafter on the device has something to do after the step."""
        return self.on_device and launched.max_drafts >= int(self.reads_history)

    def propose(self, launched: Launched, captured: CapturedDecode | None) -> Tensor | None:
        """Have the device draft after a launched step, into its slots: [B, n] what was taken, after
        the results of a captured step. None: nothing is made here. Every rank comes here alike."""
        drafter, target, limit = self._drafter, launched.target, launched.max_drafts
        launched.target = None
        if drafter is None or not self.drafts_after(launched):
            return None
        began, rows, drafts = time.perf_counter(), launched.rows, None
        if captured is not None:
            if not self.reads_history:
                self._sampling.fill(rows.slots)
            drafts = captured.replay_drafts(limit)
        elif target is not None and target.captured is not None:
            # Drafts, which are not captured after prompts, would cost more than they save.
            sampling, batches = launched.sampling, self._batches
            next_ids = batches.next_ids(rows, target, sampling)
            target.captured.fill(next_ids, batches.last(rows, sampling))
        elif target is not None:
            drafts = self._propose(drafter, launched, target)
        if captured is None and limit > 0:
            where = self._slots.prepare_drafts(rows, limit)
            none = self._xp.zeros((rows.slots.size, 0), dtype=self._xp.int64, device=where.device)
            if drafts is None or launched.sampling is None:
                shape = (rows.slots.size, limit)
                drafts = self._xp.full(shape, NO_DRAFT, dtype=none.dtype, device=where.device)
            drafts = self._slots.keep_drafts(where, drafts, none, posts=False)
        launched.times.draft_s = time.perf_counter() - began
        return drafts

    def _propose(self, drafter: Drafter, launched: Launched, target: TargetStep) -> Tensor | None:
        rows, slots, limit = launched.rows, self._slots, launched.max_drafts
        plan = self._plan
        if plan is None or not plan.matches(self._columns, rows.slots):  # kept while they stay
            plan = self._plan = SamplingPlan(self._columns, rows.slots, self._device)

        def draw(logits: Tensor, step: int) -> Tensor:
            # The token sampled now stands one after the last verified one, the first draft two.
            ids = positions = batch.ends + (2 + step)
            if self._state is not None:
                ids = self._state.sampler.draw_at(logits, plan, positions)
            return ids if self._communicator is None else self._communicator.broadcast(ids, 0)

        batch = self._batches.make(rows, target, launched.sampling, limit, draw)
        if slots.state.history is not None:
            batch.history = slots.state.history
            batch.history_rows = self._device.to_device(rows.slots)
            batch.num_known = batch.ends + 2
        try:
            drafts = drafter.propose(batch)
            return self._checked(drafts, rows.slots.size, limit) if limit else None
        except Exception as error:
            if self._device.is_lost(error):
                raise
            self.guard.count(drafter, error)
            return None

    def propose_captured(
        self, captured: CapturedDecode, max_drafts: int, *, is_greedy: bool
    ) -> Tensor:
        """What is captured after a step: [rows, max_drafts]."""
        assert self._drafter is not None
        # A drafter that reads histories samples nothing.
        is_random = not is_greedy and not self.reads_history

        def sample(logits: Tensor, step: int) -> Tensor:
            if is_random:
                ids, _ = self._sampling.sample(logits, batch.ends + (1 + step))
            else:
                ids = self._greedy(logits)
            return ids if self._communicator is None else self._communicator.broadcast(ids, 0)

        batch = self._batches.make_captured(captured, captured.sampled, max_drafts, sample)
        batch.is_greedy = not is_random
        state = self._slots.state
        if state.history is not None:
            batch.history, batch.history_rows = state.history, state.rows[: captured.size]
            known = self._xp.index_select(state.num_computed, 0, batch.history_rows)
            batch.num_known = known + 1
        return self._checked(self._drafter.propose(batch), captured.size, max_drafts)

    @property
    def captured_fill(self) -> Callable[[CapturedPrompt], None] | None:
        """What is captured after prompts: a drafter on the device with layers of its own fills
        their cache. None: there is no such drafter, or the layers want what steps lack."""
        drafter = self._drafter
        if drafter is None or not self.reads_hidden or self._batches.is_plain:
            return None

        def fill(captured: CapturedPrompt) -> None:
            ids, batches = captured.next_ids, self._batches
            drafter.propose(batches.make_captured(captured, ids, 0, lambda x, _: self._greedy(x)))

        return fill

    def _checked(self, drafts: Any, num_rows: int, max_drafts: int) -> Tensor:
        """A drafter's answer, without what is no token."""
        xp = self._xp
        shape = tuple(int(size) for size in drafts.shape)
        if shape != (num_rows, max_drafts) or xp.dtype_name(drafts) != "int64":
            raise TypeError(
                f"propose() returned {xp.dtype_name(drafts)} {list(shape)}; expected int64 "
                f"{[num_rows, max_drafts]}"
            )
        return drafts

    # -- once a step's tokens are there -----------------------------------------------------------

    def observe(self, launched: Launched, found: ModelRunnerOutput) -> None:
        """Tell a host drafter how its last proposals fared."""
        drafter, slots = self._drafter, self._slots
        fed, accepted = found.num_drafts, found.num_accepted
        if drafter is None or self.on_device or fed is None or accepted is None:
            return
        stays = slots.stays(launched.rows.slots, launched.version)
        for row in np.flatnonzero(fed[0] if stays is None else fed[0] * stays).tolist():
            slot = int(launched.rows.slots[row])
            if row not in found.errors:
                drafted = slots.draft_ids[slot, : fed[0, row]].tolist()
                seq_id = int(slots.seq_ids[slot])
                self.guard.observe(drafter, seq_id, drafted, int(accepted[0, row]))

    def check(self, drafts: np.ndarray) -> None:
        """Count it if the device has found something that is no token among these proposals."""
        if self._drafter is not None:
            self.guard.check_taken(self._drafter, drafts)

    def collect(
        self, launched: Launched, found: ModelRunnerOutput, drafts: np.ndarray | None
    ) -> None:
        """Put the drafts for the rows' next step into the host's slots. drafts: [B, n] what the
        device has taken, -1 after it and -2 for nonsense; None: it made none."""
        slots, limit, store = launched.rows.slots, launched.max_drafts, self._slots
        stays = store.stays(slots, launched.version)
        goes_on = launched.rows.samples.copy() if stays is None else launched.rows.samples & stays
        if found.errors:
            goes_on[list(found.errors)] = False
        if self._drafter is None or limit <= 0:
            store.num_drafts[slots[goes_on]] = 0
            return
        table = np.full((slots.size, limit), NO_DRAFT, dtype=np.int64)
        if drafts is not None:
            self.check(drafts)
            table[:, : drafts.shape[1]] = np.maximum(drafts, NO_DRAFT)[:, :limit]
        for drafter in (None if self.on_device else self._drafter, self._follower):
            if drafter is None:
                continue
            known = store.num_known[slots]
            limits = np.clip(np.where(goes_on, store.max_model_len - 1 - known, 0), 0, limit)
            tokens = [store.token_ids[n, :k] for n, k in zip(slots, known.tolist(), strict=True)]
            self.guard.ask(drafter, store.seq_ids[slots], tokens, table, limits)
        if self._state is not None:
            self._state.cut_forbidden(slots, table)
        at = slots[goes_on]
        store.draft_ids[at, :limit] = np.maximum(table[goes_on], 0)
        store.num_drafts[at] = np.add.reduce(table[goes_on] != NO_DRAFT, 1)

    def forget(self, seq_id: int) -> None:
        """The sequence left."""
        for drafter in (self._drafter, self._follower):
            if drafter is not None:
                self.guard.forget(drafter, seq_id)
