"""One step on one rank: take the message, lay the rows out, run the model, sample, draft, publish.

A step is launched without waiting for the one before. The device keeps its own count of each
sequence's tokens and feeds what it sampled and drafted to the next step; results reach the host
later. A step waits for the results before it only where the host has a say: in its drafts, in how
its tokens are sampled, or in where its rows lie."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fastdeploy_core.config import EngineConfig
from fastdeploy_core.errors import RequestError, ResourceError, WorkerError
from fastdeploy_core.memory.transfers import wait_for
from fastdeploy_core.models.media import SequenceMedia
from fastdeploy_core.sampling.captured import CAPTURED, CapturedSampling
from fastdeploy_core.sampling.columns import FILTER, SamplingColumns
from fastdeploy_core.sampling.masks import note_failure
from fastdeploy_core.sampling.processors import has_processors, is_simple
from fastdeploy_core.sampling.state import SamplingState
from fastdeploy_core.types import ModelRunnerOutput, NewSequence, SchedulerOutput

from .caches import Caches
from .drafting import Drafting
from .graph_sizes import prompt_sizes
from .graphs import CapturedDecode, GraphPlan, Graphs, forward, max_decodes
from .layout import HostLayout, StepShapes
from .results import NO_TOKENS, NOT_KEPT, PendingOutput, Results
from .sampling_step import StepSampler, can_capture_sampling
from .slots import Slots
from .step import Launched, Sampling, StepRows

if TYPE_CHECKING:
    from fastdeploy_core.contracts.device import Communicator, DeviceBackend
    from fastdeploy_core.contracts.ops import KernelTable
    from fastdeploy_core.loading.drafters import Drafters
    from fastdeploy_core.loading.loader import LoadedModel
    from fastdeploy_core.tensor import Tensor


class ModelRunner:
    """Owns slots, caches and sampler of one rank. Calls may come from two threads: one launches
    steps, one reads their results."""

    def __init__(
        self,
        config: EngineConfig,
        device: DeviceBackend,
        kernels: KernelTable,
        loaded: LoadedModel,
        rank: int = 0,
        communicator: Communicator | None = None,
        graph_sizes: tuple[int, ...] = (),
        drafters: Drafters | None = None,
    ) -> None:
        self._config, self._device, self._xp = config, device, device.xp
        self.vocab_size, self._rank = loaded.shapes.vocab_size, rank
        self._loaded, self._model = loaded, loaded.model
        self.experts: Any = None  # an ExpertRanks, from when the scheduler's steps come
        self._agreed: int | None = None  # what its begin_step returned
        self.caches, max_num_seqs = Caches(device, kernels, loaded), config.batch.max_num_seqs
        self._columns = SamplingColumns(max_num_seqs, self.vocab_size)
        # Ranks other than 0 only need the tokens that rank 0 samples.
        made_of = (config, device, kernels, self._columns, loaded.load_driver)
        self.state = None if rank else SamplingState(*made_of)
        media = self.media = self._make_media(loaded.model)
        self._bring: list[Any] = [*([media] if media else []), *loaded.builder.parts]
        self._features = loaded.model.features & {"pooling"}
        self._features |= {name for part in self._bring for name in part.features}
        parts = [self._columns, *self._bring, *(self.state.parts if self.state else ())]
        captured = CapturedSampling(device, kernels, self._columns, max_num_seqs)
        self._is_alone = communicator is None  # one rank knows what all rows need
        captures_all = self._is_alone and can_capture_sampling(device, kernels)
        captures_most = captures_all and max(graph_sizes, default=0) >= max_num_seqs
        self.max_decodes = max_decodes(config, device) if captures_most else 1  # see WorkerInfo
        held, drafting = (self._columns, self.state, communicator), None
        if drafters is not None and config.speculative is not None:
            drafting = Drafting(device, kernels, loaded, config.speculative, drafters, *held)
        self._drafting = drafting
        slots = self.slots = Slots(
            *(device, kernels, config, self.vocab_size, parts),
            max_decodes=self.max_decodes,
            keeps_history=drafting is not None and drafting.reads_history and bool(graph_sizes),
            is_read=bool(graph_sizes) or (drafting is not None and drafting.on_device),
        )
        slots.add_groups(self.caches.rules)
        offsets = None if media is None else media.offsets
        if drafting is not None:
            drafting.attach(slots, captured, offsets)
        buckets, self._layout = device.limits.step_buckets, HostLayout(device, slots, media)
        self.shapes = None if buckets is None else StepShapes(config, buckets)
        self._lock = threading.RLock()
        self._sampler = StepSampler(device, kernels, loaded.model, slots, *held)
        self._results = Results(device, slots, self.state, self._lock, drafting)
        self._graphs: Graphs | None = None
        if graph_sizes:
            plan, sampling = self._graph_plan(graph_sizes), captured if captures_all else None
            self._graphs = Graphs(device, kernels, loaded, slots, plan, drafting, sampling, media)
        self._is_simple = np.zeros(max_num_seqs, dtype=bool)  # see is_simple()
        self._refused: dict[int, str] = {}  # by seq_id: what their parameters lack
        if loaded.builder.adapters is not None:
            loaded.builder.adapters.attach(slots.state.rows)

    def _make_media(self, model: Any) -> SequenceMedia | None:
        """Where pictures of sequences are kept; None: they bring none."""
        batch, media = self._config.batch, self._config.media
        # Steps of fixed shapes have no place for vectors.
        if "embeddings" not in model.features or self._device.limits.step_buckets is not None:
            return None
        return SequenceMedia(self._device, model, batch.max_num_seqs, media.max_encoder_cache)

    def _graph_plan(self, sizes: tuple[int, ...]) -> GraphPlan:
        config, drafting, loaded = self._config, self._drafting, self._loaded
        drivers, ranks = loaded.attention.values(), loaded.builder.expert_ranks
        prompts = prompt_sizes(config, self._device.limits, drivers, ranks)
        return GraphPlan(
            sizes=tuple(sorted(sizes)),
            widths=(1,) if drafting is None else drafting.widths(),
            draft_numbers=() if drafting is None else drafting.numbers(),
            prompt_sizes=() if self.caches.rules else prompts,  # those have one block table
            num_decodes=self.max_decodes,
        )

    def facts(self) -> dict[str, Any]:
        """What the batch scheduler must know of this rank, as fields of WorkerInfo."""
        drafting = self._drafting if self._graphs is not None else None
        feeds_unseen = drafting is not None and drafting.feeds_unseen
        captures_drafting = feeds_unseen and not has_processors(self._config)
        # Kept results have no place for drafts; posted ones do.
        takes_drafts = captures_drafting and self.slots.postbox is not None
        return {
            "features": self._features,
            "captures_drafts": drafting is not None,
            "captures_drafting": captures_drafting,
            "max_decodes": self.max_decodes,
            "max_drafted_decodes": self.max_decodes if takes_drafts else 1,
        }

    # -- caches and graphs ------------------------------------------------------------------------

    def allocate_cache(self, *sizes: int, is_touched: bool = True, host_files: Any = ()) -> None:
        """Zeroed caches of every layer, instead of what was there. See Caches.allocate."""
        self._drop_cache()
        self.caches.allocate(*sizes, host_files=host_files, is_touched=is_touched)

    def free_cache(self) -> None:
        """Drop caches and every sequence."""
        for seq_id in list(self.slots.slot_of):
            self._forget(seq_id)
        self._drop_cache()

    def _drop_cache(self) -> None:
        if self._graphs is not None:
            self._graphs.drop()
        self._results.clear()
        self.caches.drop()

    def capture_graphs(self) -> None:
        """Capture graphs over the caches there are, if any are wanted."""
        if self._graphs is not None:
            with self._xp.no_grad():
                self._graphs.capture(self.caches.tensors, is_first_rank=self._rank == 0)

    def rehearse(self, with_prompts: list[SchedulerOutput]) -> None:
        """Run what capture_graphs() will capture, and these steps where none with prompts are, or
        none with pictures."""
        graphs = self._graphs
        sees = self.media is not None and (graphs is None or graphs.vectors is None)
        if graphs is None or not graphs.plan.prompt_sizes or sees:
            self.run_largest(with_prompts)
        if graphs is not None:
            with self._xp.no_grad():
                graphs.rehearse(self.caches.tensors)

    def graph_bytes(self) -> int:
        """What capture_graphs() will take, measured over the caches there are."""
        if self._graphs is None:
            return 0
        with self._xp.no_grad():
            return self._graphs.estimate(self.caches.tensors)

    def run_largest(self, steps: list[SchedulerOutput]) -> None:
        """Run steps one by one, with as many drafts as their rows can have."""
        for step in steps:
            self.slots.num_drafts[:] = self.slots.max_drafts
            for new in step.new_sequences if self.caches.rules else ():
                new.block_ids = self.caches.spread(new.block_ids)
            self.launch(step).wait()

    def launch(self, step: SchedulerOutput) -> PendingOutput:
        """Queue the step. WorkerError: this rank is lost or was told nonsense; ResourceError: the
        step did not fit into device memory, and smaller ones may; anything else: as it came."""
        try:
            with self._xp.no_grad():
                return self._launch(step)
        except BaseException as error:
            # A lost device fails whatever is asked of it, which would hide why.
            if not self._device.is_lost(error):
                self.slots.forget()
            self._name_failure(step.step_id, error)
            raise

    def _launch(self, step: SchedulerOutput) -> PendingOutput:
        began, drafting = time.perf_counter(), self._drafting
        with self._lock:
            launched = self._take(step)
        if self.experts is not None:  # engines that share them agree on a captured step, or none
            self._agreed, rows = None, launched.rows
            own = self._graph_of(rows) if rows.slots.size else None
            told = int(rows.counts.sum()), 0 if own is None else own.size
            self._agreed = self.experts.begin_step(*told)
        pending, is_empty = PendingOutput(launched, self._read), not launched.rows.slots.size
        captured = None if is_empty and not self._agreed else self._find_captured(launched)
        model_began = time.perf_counter()
        if captured is not None:
            captured.replay()
        if is_empty:
            launched.results = ModelRunnerOutput(step_id=step.step_id, token_ids=NO_TOKENS)
            launched.times.launch_s = time.perf_counter() - began
            return pending
        logits = self._compute(launched) if captured is None else None
        launched.times.model_s = time.perf_counter() - model_began
        with self._lock:
            drafts: Tensor | None = None
            if captured is None:
                tokens = None if logits is None else self._sample(launched, logits)
            else:
                tokens, drafts = self._sample_captured(launched, captured)
            self.slots.note_drafts(launched.rows, launched.max_drafts)
            self._results.unread.append(launched)
        if drafting is not None and drafts is None and launched.concerns_drafters:
            drafts = drafting.propose(launched, captured)
            if captured is not None and drafts is not None:
                tokens = drafts  # they come after the results, in the same rows
        if captured is not None:
            tokens = self._repeat(launched, captured, tokens, drafts is not None)
        with self._lock:
            if self._rank and drafting is None:  # rank 0 answers; nobody here asks for the tokens
                tokens = None
            self._results.publish(launched, tokens, drafts)
        launched.times.launch_s = time.perf_counter() - began
        return pending

    def _take(self, step: SchedulerOutput) -> Launched:
        """Take over what the message says."""
        slots = self.slots
        for seq_id in step.finished_seq_ids:
            self._forget(seq_id)
        for new in step.new_sequences:
            self._add(new)
        self.caches.move(step.copies)
        rows = slots.rows(step)
        launched = Launched(step.step_id, rows, slots.version, step.max_drafts)
        for row, seq_id in enumerate(slots.seq_ids[rows.slots].tolist()) if self._refused else ():
            if seq_id in self._refused:
                launched.errors[row] = self._refused[seq_id]
        return launched

    def _find_captured(self, launched: Launched) -> CapturedDecode | None:
        """The graph that runs the step, if any; slots and rows are then as it needs them."""
        rows, graphs, slots = launched.rows, self._graphs, self.slots
        captured = self._graph_of(rows)
        if self._drafting is not None and not self._knows_enough(launched, captured):
            with self._lock:
                asks = slots.lacks_history(rows, launched.max_drafts) or rows.num_drafts.any()
                coming = self._results.coming(rows, reads_all=bool(asks))
                self._drafting.broadcast_drafts(rows)
                launched.rows = rows = slots.exact(rows, coming)
            launched.fed = rows.num_drafts
            captured = self._graph_of(rows)
        if captured is None:
            if rows.num_decodes > 1:
                raise WorkerError(
                    f"a step of {rows.num_decodes} decodes has {rows.slots.size} rows; graphs were "
                    f"captured of {graphs.plan.sizes if graphs else 'none'}"
                )
            if self.shapes is not None:
                launched.rows = replace(rows, shape=self.shapes.find(rows), sampled=None)
            return None
        with self._lock:
            fed = None if launched.fed is None or rows.width == 1 else rows
            slots.bring(rows, captured.size, launched.max_drafts, drafts=fed)
            if rows.positions().nth.size != rows.slots.size * captured.width:  # rows are padded
                made_of = (rows.slots, rows.starts, captured.width - 1, rows.num_decodes)
                launched.rows = slots.decodes(*made_of)
        return captured

    def _graph_of(self, rows: StepRows) -> CapturedDecode | None:
        if self._graphs is None or not rows.is_decode or self._agreed == 0:
            return None
        return self._graphs.find(self._agreed or rows.slots.size, rows.width)

    def _knows_enough(self, launched: Launched, captured: CapturedDecode | None) -> bool:
        """Whether the device alone knows enough: drafts stay there, and there are none or sampling
        needs no text. The same on every rank."""
        rows, slots, drafting = launched.rows, self.slots, self._drafting
        assert drafting is not None
        if not drafting.feeds_unseen:
            return False
        if launched.max_drafts <= 0 and rows.width == 1 and not slots.has_drafts:
            return True
        if captured is None or slots.lacks_history(rows, launched.max_drafts):
            return False
        if self._is_alone:
            return not np.count_nonzero(self._columns.flags[rows.slots] & ~CAPTURED)
        return bool(self._is_simple[rows.slots].all())

    def _compute(self, launched: Launched) -> Tensor | None:
        """A step laid out on the host: logits of the sampled positions, if there are any."""
        rows = launched.rows
        with self._lock:
            laid_out, read = self._layout.lay_out(rows), rows.read_tokens()
            for part in self._loaded.builder.parts:
                part.lay_out(rows.slots, laid_out.attention, read)
        drafting = self._drafting
        # Of every token for a drafter that follows, or was captured; the same on every rank.
        fills = launched.max_drafts >= 0 or (self._graphs is not None and self._graphs.fill)
        reads_all = drafting is not None and drafting.reads_hidden and bool(fills)
        wanted = self._sampler.wants_prompt_logprobs(rows)
        reads_all = reads_all or bool(wanted.size)
        step = rows, laid_out, None if reads_all else read
        launched.target = forward(self._graphs, self._loaded, self.caches.tensors, *step)
        hidden = launched.target.hidden
        if wanted.size:
            launched.prompt_logprobs = self._sampler.prompt_logprobs(hidden, rows, wanted)
        if not rows.samples.any():
            return None
        if reads_all and read is not None:
            hidden = self._xp.index_select(hidden, 0, self._device.to_device(read))
        return self._model.compute_logits(hidden)

    def _sample(self, launched: Launched, logits: Tensor) -> Tensor:
        """Tokens of a step laid out on the host, marked, on the device for the next step."""
        rows, slots, sampler = launched.rows, self.slots, self._sampler
        plan, has_drafts = sampler.plan(rows), bool(rows.num_drafts.any())
        if "pooling" in self._model.features:
            launched.pooled = logits[: plan.num_rows]
        if rows.shape is not None and not has_drafts and self._is_simple[rows.slots].all():
            launched.sampling, marked, where = sampler.sample_padded(logits, plan)
            slots.take_sampled(rows, where, launched.sampling.token_ids)
            return marked
        logits = logits if rows.shape is None else logits[: plan.num_rows]
        read_all, fed = self._results.read_all, rows.num_drafts
        sampling, marked = sampler.sample(logits, rows, plan, read_all, fed)
        launched.sampling = sampling
        if has_drafts:
            marked, sampling.accepted, kept = slots.verify(rows, sampling.token_ids, marked)
            sampler.count_kept(sampling, kept)
        else:
            slots.take_sampled(rows, plan.slots_dev, sampling.token_ids)
        slots.follow_history(rows, sampling.token_ids, launched.max_drafts)
        return marked

    def _sample_captured(
        self, launched: Launched, captured: CapturedDecode
    ) -> tuple[Tensor, Tensor | None]:
        """The same for a captured step; and, with the tokens, drafts where one graph makes both."""
        rows, drafting, num_rows = launched.rows, self._drafting, launched.rows.slots.size
        plan = self._sampler.plan(rows)
        launched.sampling = Sampling(plan)
        # Ranks must agree on it, although rank 0 alone knows everything.
        if plan.is_plain if self._is_alone else self._is_simple[rows.slots].all():
            if drafting is not None and drafting.drafts_after(launched):
                both = captured.replay_drafts(launched.max_drafts, is_greedy=True)
                return both, both
            return captured.replay_greedy(num_rows), None
        if captured.samples_at_random and not plan.flags & ~CAPTURED:
            filters = bool(plan.flags & FILTER)
            return captured.replay_random(rows.slots, filters=filters), None
        logits, positions = captured.replay_head(num_rows), None
        if drafting is not None and launched.fed is None:  # the device alone knows where they stand
            positions = captured.indices[: plan.num_rows] + 1
        sampling, marked = self._sampler.sample(
            *(logits, rows, plan, self._results.read_all, launched.fed, positions)
        )
        launched.sampling = sampling
        results = captured.write_back(num_rows, sampling.token_ids, marked)
        if launched.fed is not None and launched.fed.any():
            self._sampler.count_kept(sampling, results.reshape([-1]) != NOT_KEPT)
        return results, None

    def _repeat(
        self, launched: Launched, captured: CapturedDecode, tokens: Tensor, has_drafts: bool
    ) -> Tensor:
        """Queue the further decodes of a step of several, and expect what is posted."""
        rows, graphs = launched.rows, self._graphs
        assert graphs is not None
        if rows.num_decodes > 1:
            captured.repeat(rows.num_decodes - 1)
            if graphs.kept is not None:
                tokens = graphs.kept[: rows.slots.size]
        number = max(0, launched.max_drafts) if has_drafts else 0
        launched.arriving.posted = captured.expect(rows.slots.size, number, rows.num_decodes)
        return tokens

    # -- sequences and failures -------------------------------------------------------------------

    def _forget(self, seq_id: int) -> None:
        self.slots.remove(seq_id)
        self._refused.pop(seq_id, None)
        if self._drafting is not None:
            self._drafting.forget(seq_id)

    def _add(self, new: NewSequence) -> None:
        extras = new.extras
        if extras is not None and extras.needs - self._features:
            raise WorkerError(
                f"sequence {new.seq_id} brings {', '.join(sorted(extras.needs))}, which this "
                "worker does not report among its features"
            )
        slot = self.slots.add(new)
        self._is_simple[slot] = is_simple(new, self._config)
        self._refused.pop(new.seq_id, None)
        self._columns.add(slot, new.sampling, new.seed)
        try:
            for part in self._bring:
                if extras is not None:
                    part.add(slot, extras)
            if self.state is not None:
                self.state.add(slot, new)
        except RequestError as error:
            self._refused[new.seq_id] = f"InvalidRequest:{error.param or ''}: {error}"
        except BaseException as error:  # a plugin's own failure costs its request only
            note_failure(error, f"sequence {new.seq_id} cannot be sampled as asked")
            self._refused[new.seq_id] = f"sampling_setup_failed: {type(error).__name__}"

    def _read(self, launched: Launched) -> None:
        try:
            wait_for(launched.arriving.event)  # without the lock
            self._results.read_until(launched)
        except Exception as error:
            self._name_failure(launched.step_id, error)
            raise

    def _name_failure(self, step_id: int, error: BaseException) -> None:
        """What a device's library raises, in this project's terms; other errors stay."""
        if self._device.is_oom(error):
            raise ResourceError(
                f"device memory ran out in step {step_id}; lower --gpu-memory-utilization, "
                "--max-num-batched-tokens or --max-num-seqs"
            ) from error
        if self._device.is_lost(error):
            raise WorkerError(
                f"the device of rank {self._rank} is lost in step {step_id}: "
                f"{type(error).__name__}: {error}"
            ) from error
