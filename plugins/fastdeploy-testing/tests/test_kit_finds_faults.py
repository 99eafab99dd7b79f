"""The kit must fail what is broken: each suite against drivers with one deliberate fault."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from fd_accelerator import expert_communicator
from fd_parsers.hermes import HermesToolParser
from shared_queue import SharedQueue

from fastdeploy_core.config import RequestSchedulerConfig
from fastdeploy_core.contracts.quantizer import LayerSpec
from fastdeploy_core.contracts.scheduler import Capacity
from fastdeploy_core.contracts.small import ParsedDelta, ToolCallDelta
from fastdeploy_core.contracts.speculative import HostDraftInput
from fastdeploy_core.scheduler.local import LocalScheduler
from fastdeploy_core.tensor import load
from fastdeploy_testing.conformance.declared import DeclaredKernels
from fastdeploy_testing.conformance.test_attention import (
    BATCHES,
    BEYOND_PLAIN,
    AttentionConformance,
    gqa_spec,
)
from fastdeploy_testing.conformance.test_drafter import DrafterConformance
from fastdeploy_testing.conformance.test_expert_communicator import (
    ExpertCommunicatorConformance,
)
from fastdeploy_testing.conformance.test_ops import OpsConformance
from fastdeploy_testing.conformance.test_quantized_ops import QuantizedOpsConformance
from fastdeploy_testing.conformance.test_quantizer import QuantizerConformance
from fastdeploy_testing.conformance.test_request_scheduler import RequestSchedulerConformance
from fastdeploy_testing.conformance.test_stream_parser import TOOL, StreamParserConformance

FAILURE = (AssertionError, pytest.fail.Exception)


@pytest.fixture(scope="module")
def device(tensor_library: str) -> Any:
    from fastdeploy_core.contracts.device import DeviceOptions
    from fastdeploy_core.reference.device import CpuDevice

    return CpuDevice(DeviceOptions(tensor_library=tensor_library, num_threads=1))


@pytest.fixture(scope="module")
def kernels() -> Any:
    from fastdeploy_core.plugins.kernels import build_kernel_table

    return build_kernel_table("cpu")


class Schedulers(RequestSchedulerConformance):
    patience_s = 1.0
    lease_s = 0.3


class Forgets(LocalScheduler):
    """Loses every third request that an engine takes."""

    def get_requests(self, *args: Any) -> Any:
        return [r for r in super().get_requests(*args) if not r.request_id.endswith("3")]


class Doubles(LocalScheduler):
    """Shows results twice."""

    def get_results(self, *args: Any) -> Any:
        results = super().get_results(*args)
        return [*results, *results]


class Unfenced(LocalScheduler):
    """Believes every attempt."""

    def _publish(self, delta: Any) -> None:
        entry = self._entries.get(delta.request_id)
        if entry is not None:
            delta.attempt = entry.request.attempt
        super()._publish(delta)


class UnfencedQueue(SharedQueue):
    """Believes whoever was handed the request before, too."""

    def put_results(self, outputs: Any) -> None:
        for delta in outputs:
            if delta.request_id in self.topic.tasks:
                delta.attempt = self.topic.tasks[delta.request_id].attempt
        super().put_results(outputs)


class Sleeper(SharedQueue):
    """Takes leases back although their engine reports."""

    def report_load(self, load: Any) -> None:
        pass


class Hoarder(SharedQueue):
    """Hands out what the instance has no blocks for."""

    def _take(self, capacity: Any) -> Any:
        return super()._take(replace(capacity, num_free_blocks=10**6))


class Greedy(SharedQueue):
    """Leaves a request in the queue when it hands it out."""

    def _take(self, capacity: Any) -> Any:
        taken = super()._take(capacity)
        for request in taken:
            self.topic.tasks[request.request_id].owner = None
        return taken


class Timeless(SharedQueue):
    """Leaves a restarted instance what its earlier start held."""

    def _replace_earlier_epochs(self) -> None:
        pass


class Keeper(SharedQueue):
    """Keeps its leases when it is closed."""

    def close(self) -> None:
        pass


class Mortal(SharedQueue):
    """Takes its requests with it."""

    def close(self) -> None:
        tasks = self.topic.tasks
        for name in [name for name, task in tasks.items() if task.front is self]:
            del tasks[name]


class Hoards(SharedQueue):
    """Goes on taking for an engine that drains."""

    def report_load(self, load: Any) -> None:
        self._take(Capacity(8, 10**6, 64, 10**9))
        super().report_load(load)


class Loyal(SharedQueue):
    """Keeps ids for front ends that are gone."""

    def close(self) -> None:
        super().close()
        self.is_closed = False


class Restarts(SharedQueue):
    """Counts the attempts of an id that is put again anew."""

    def _put(self, request: Any) -> Any:
        reason = super()._put(request)
        self.topic.tasks[request.request_id].attempt = 0
        return reason


class Deaf(LocalScheduler):
    """Ignores aborts."""

    def abort(self, request_ids: Any) -> None:
        pass


class Boundless(LocalScheduler):
    """Never says that the queue is full."""

    def __init__(self, config: RequestSchedulerConfig) -> None:
        super().__init__(RequestSchedulerConfig(max_size=0, lease_s=config.lease_s))


class Believer(LocalScheduler):
    """Takes the engine's word for how old its report is."""

    def loads(self) -> Any:
        return [load for load, _ in self._loads.values()]


class LastFirst(LocalScheduler):
    """Hands out the newest first."""

    def get_requests(self, *args: Any) -> Any:
        return super().get_requests(*args)[::-1]


@pytest.mark.parametrize(
    ("driver", "test"),
    [
        (Forgets, "test_requests_come_once_and_in_order"),
        (LastFirst, "test_requests_come_once_and_in_order"),
        (LastFirst, "test_smaller_priority_goes_first"),
        (Doubles, "test_results_come_once_and_in_order"),
        (Doubles, "test_repeated_deltas_are_shown_once"),
        (Unfenced, "test_deltas_of_unknown_requests_and_attempts_are_dropped"),
        (Deaf, "test_abort_of_a_waiting_request_keeps_it_from_running"),
        (Deaf, "test_abort_of_a_running_request_reaches_its_engine_once"),
        (Deaf, "test_abort_before_its_request_cancels_it"),
        (Believer, "test_load_reports_are_seen_with_their_age"),
        (Boundless, "test_full_queue_refuses_one_by_one"),
        (Boundless, "test_request_that_waits_too_long_is_answered"),
    ],
)
def test_broken_schedulers_fail(driver: Any, test: str) -> None:
    def make(**settings: Any) -> Any:
        return driver(RequestSchedulerConfig(**{"lease_s": 20.0, **settings}))

    with pytest.raises(FAILURE):
        getattr(Schedulers(), test)(make)


@pytest.mark.parametrize(
    ("driver", "test"),
    [
        (UnfencedQueue, "test_what_a_dead_instance_held_is_handed_out_again"),
        (Sleeper, "test_heartbeats_keep_a_lease"),
        (Greedy, "test_two_instances_share_one_queue"),
        (Hoarder, "test_full_instance_leaves_requests_to_another"),
        (Timeless, "test_new_start_of_an_instance_ends_what_the_old_one_held"),
        (Keeper, "test_closed_instance_gives_back_at_once_and_in_order"),
        (Mortal, "test_waiting_requests_outlive_who_put_them"),
        (Hoards, "test_a_draining_instance_keeps_nothing_that_it_was_not_given"),
        (Loyal, "test_an_id_is_put_again_when_its_front_end_is_gone"),
        (Restarts, "test_an_id_is_put_again_when_its_front_end_is_gone"),
    ],
)
def test_broken_shared_queues_fail(driver: Any, test: str) -> None:
    def make(*, lease_s: float = 20.0, **settings: Any) -> Any:
        options = {"topic": f"{driver.__name__} {test} {lease_s}"}
        return driver(RequestSchedulerConfig(options=options, lease_s=lease_s, **settings))

    with pytest.raises(FAILURE):
        getattr(Schedulers(), test)(driver, make)


def wrapped(kernels: Any, name: str, change: Callable[..., Any]) -> Any:
    """The table with one kernel spoilt."""

    class Table:
        device = "cpu"

        def __getitem__(self, operation: str) -> Any:
            return change if operation == name else kernels[operation]

        def __contains__(self, operation: object) -> bool:
            return operation in kernels

        def __getattr__(self, attribute: str) -> Any:
            return getattr(kernels, attribute)

    return Table()


def test_spoilt_kernels_fail(device: Any, kernels: Any) -> None:
    suite = OpsConformance()
    xp = device.xp

    def late_write(rows: Any, cache: Any, slots: Any) -> None:
        kernels["kv_write"](rows, cache, slots)
        cache[0][11] = cache[0][11] + 1  # somebody else's block

    def crowd_dependent(logits: Any, seeds: Any, places: Any) -> Any:
        return kernels["sample"](logits, seeds + logits.shape[0], places)

    spoilt: list[tuple[str, Any, Callable[[Any], None]]] = [
        ("kv_write", late_write,
         lambda t: suite.test_kv_write_touches_its_slots_only(device, t, "float32", 7)),
        ("linear", lambda x, w, b: kernels["linear"](x, w, None),
         lambda t: suite.test_linear(device, t, "float32", 7, True)),
        ("rms_norm", lambda x, w, eps: kernels["rms_norm"](x, w, eps) * 1.01,
         lambda t: suite.test_rms_norm(device, t, "float32", (7, 32))),
        ("rms_norm", lambda x, w, eps: kernels["rms_norm"](x.float(), w.float(), eps),
         lambda t: suite.test_rms_norm(device, t, "bfloat16", (7, 32))),
        ("greedy", lambda logits: 49 - xp.argmax(xp.index_select(
            logits, 1, xp.arange(50) * -1 + 49), -1),
         lambda t: suite.test_greedy_takes_the_smallest_of_equals(device, t)),
        ("sample", crowd_dependent,
         lambda t: suite.test_draw_depends_on_seed_position_and_logits_only(device, t)),
        ("sample", lambda logits, s, p: kernels["sample"](logits * 1.3, s, p),
         lambda t: suite.test_draws_follow_the_distribution(device, t)),
        ("filter_logits", lambda x, k, p, m: kernels["filter_logits"](x, k + 1, p, m),
         lambda t: suite.test_filter_logits_keeps_the_right_set(device, t, 40)),
    ]  # fmt: skip
    for name, change, check in spoilt:
        check(kernels)
        with pytest.raises(FAILURE):
            check(wrapped(kernels, name, change))
            raise LookupError(f"a spoilt {name} was not noticed")


@pytest.mark.parametrize("factor", [1.0, 1.25])
def test_a_cell_may_hand_itself_anything_but_the_product_stays(
    device: Any, kernels: Any, factor: float
) -> None:
    """Kernel.behind: what it returns is no tensor; its numbers must be those of both operations."""

    def product(x: Any, weight: Any, bias: Any) -> Any:
        x = x[0] if isinstance(x, list) else x
        return kernels["linear_w8a8"](x, weight, bias)

    table = wrapped(kernels, "linear_w8a8", product)
    table.behind = lambda operation, before: {
        "silu_and_mul": lambda x, weight: [kernels["silu_and_mul"](x) * factor],
        "add_rms_norm": None,
    }[before]
    suite, checked = QuantizedOpsConformance(), DeclaredKernels(table)
    if factor == 1.0:
        suite.test_what_stands_before_a_product(device, checked, "float32", "w8a8")
        return
    with pytest.raises(FAILURE):
        suite.test_what_stands_before_a_product(device, checked, "float32", "w8a8")


@pytest.mark.parametrize("fixed", [0.0, 1e-6, 1e-5, 0.3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_norm_with_an_eps_of_its_own_fails(
    device: Any, kernels: Any, fixed: float, dtype: str
) -> None:
    if dtype not in device.limits.dtypes:
        pytest.skip(f"the device's dtypes are {device.limits.dtypes}")
    suite, tables = OpsConformance(), {}
    for name, place in (("rms_norm", 2), ("add_rms_norm", 3)):
        kernel = kernels[name]
        tables[name] = wrapped(
            kernels,
            name,
            lambda *a, kernel=kernel, place=place: kernel(*a[:place], fixed, *a[place + 1 :]),
        )
    suite.test_rms_norm(device, kernels, dtype, (7, 32))
    with pytest.raises(FAILURE):
        suite.test_rms_norm(device, tables["rms_norm"], dtype, (7, 32))
    suite.test_add_rms_norm(device, kernels, dtype, 7)
    with pytest.raises(FAILURE):
        suite.test_add_rms_norm(device, tables["add_rms_norm"], dtype, 7)


class _Attention(AttentionConformance):
    """Runs a spoilt reference backend."""

    def __init__(self, spoil: Callable[[Any], Any]) -> None:
        self._spoil = spoil

    def _backend(self, request: Any, device: Any, kernels: Any, spec: Any, size: int) -> Any:
        from fastdeploy_core.reference.attention import ReferenceAttention

        return self._spoil(ReferenceAttention(spec, size, device, kernels))


def writes_elsewhere(backend: Any) -> Any:
    forward = backend.forward

    def spoilt(q: Any, k: Any, v: Any, cache: Any, metadata: Any, rotary: Any = None) -> Any:
        cache[0][0] = cache[0][0] * 0
        return forward(q, k, v, cache, metadata, rotary)

    backend.forward = spoilt
    return backend


def sees_the_future(backend: Any) -> Any:
    prepare = backend.prepare

    def spoilt(batch: Any) -> Any:
        batch.seq_lens = batch.seq_lens + 1
        return prepare(batch)

    backend.prepare = spoilt
    return backend


def ignores_the_table(backend: Any) -> Any:
    prepare = backend.prepare

    def spoilt(batch: Any) -> Any:
        batch.block_tables = np.sort(batch.block_tables, axis=-1)
        return prepare(batch)

    backend.prepare = spoilt
    return backend


@pytest.mark.parametrize("spoil", [writes_elsewhere, sees_the_future, ignores_the_table])
def test_spoilt_attention_fails(device: Any, kernels: Any, spoil: Any) -> None:
    spec, rows = gqa_spec("gqa 4:2", "float32"), [(1, 200), (1, 133)]
    _Attention(lambda b: b)._check(None, device, kernels, spec, rows, "float32")  # type: ignore[arg-type]
    with pytest.raises((*FAILURE, IndexError, ValueError)):
        _Attention(spoil)._check(None, device, kernels, spec, rows, "float32")  # type: ignore[arg-type]
    assert BATCHES


class _DeclaresEverything(AttentionConformance):
    """Plain attention that declares what it does not compute."""

    def _backend(self, request: Any, device: Any, kernels: Any, spec: Any, size: int) -> Any:
        from fastdeploy_core.reference.attention import ReferenceAttention

        plain = ReferenceAttention(gqa_spec("gqa 4:2", spec.dtype), size, device, kernels)
        forward = plain.forward
        plain.forward = lambda *given, sinks=None: forward(*given)  # type: ignore[method-assign]
        return plain


@pytest.mark.parametrize("name", BEYOND_PLAIN)
def test_a_driver_that_declares_what_it_does_not_compute_fails(
    device: Any, kernels: Any, name: str
) -> None:
    suite = _DeclaresEverything()
    suite.test_mixed_batches_equal_the_oracle_gqa(None, device, kernels, "float32")  # type: ignore[arg-type]
    with pytest.raises(FAILURE):
        suite.test_what_it_declares_equals_the_oracle(None, device, kernels, "float32", name)  # type: ignore[arg-type]


def test_spoilt_expert_communicator_fails(device: Any) -> None:
    class Unweighted(expert_communicator.LoopbackExperts):
        def combine(self, y: Any, handle: Any) -> Any:
            handle.weights = handle.weights * 0 + 1
            return super().combine(y, handle)

    class Stale(expert_communicator.LoopbackExperts):
        def set_expert_map(self, version: int, physical_to_logical: list[int]) -> None:
            if version < 2:
                super().set_expert_map(version, physical_to_logical)

    suite = ExpertCommunicatorConformance()
    with pytest.raises(FAILURE):
        suite.test_round_trip(Unweighted, device, "contiguous", 7, 2, "random")
    with pytest.raises(FAILURE):
        suite.test_new_expert_map_moves_the_work_not_the_result(Stale, device)


def test_spoilt_quantizer_fails(device: Any, tensor_library: str) -> None:
    xp = load(tensor_library)
    layer = LayerSpec("l", "linear", 64, 48)
    quantizer = SimpleNamespace(
        parameters=lambda layer: {},
        quantize=lambda layer, weight: {"weight": weight},
        prepare=lambda layer, tensors: tensors["weight"],
        apply=lambda layer, prepared, x, bias: xp.linear(x, prepared) + x.sum(),
    )
    suite = QuantizerConformance()
    with pytest.raises(FAILURE):
        suite.test_tensors_are_as_declared(device, quantizer, layer)
    with pytest.raises(FAILURE):
        suite.test_product_is_near_full_precision(device, quantizer, layer, 9, 0.1)
    with pytest.raises(FAILURE):
        suite.test_rows_do_not_influence_each_other(device, quantizer, layer)


class SpoiltDrafter:
    """Drafts too much, changes histories, depends on chance, and never forgets."""

    name, runs_on = "spoilt", "host"
    kept: ClassVar[list[Any]] = []

    def __init__(self, context: Any) -> None:
        self.random = np.random.default_rng()

    def propose(self, batch: HostDraftInput) -> list[list[int]]:
        for tokens in batch.token_ids:
            self.kept.append(np.ones(2**13))
            tokens[0] = 9
        return [self.random.integers(0, 99, 9).tolist() for _ in batch.seq_ids]

    def observe(self, *_: Any) -> None:
        return None

    def forget(self, seq_id: int) -> None:
        return None


def test_spoilt_drafter_fails(device: Any) -> None:
    suite, drafter = DrafterConformance(), SpoiltDrafter(None)
    num_before = threading.active_count()  # of other tests
    with pytest.raises(FAILURE):
        suite.test_proposals_stay_within_their_limits(drafter)
    with pytest.raises((AssertionError, ValueError)):
        suite.test_histories_are_left_alone(drafter)
    with pytest.raises(FAILURE):
        suite.test_same_state_gives_the_same_proposal(SpoiltDrafter, device, {}, drafter)
    with pytest.raises(FAILURE):
        suite.test_memory_does_not_grow_with_forgotten_sequences(drafter)
    SpoiltDrafter.kept.clear()
    good, bad = {"together": [[1]], "alone": [[1]]}, {"together": [[1]], "alone": [[2]]}
    with pytest.raises(FAILURE):
        suite.test_answers_are_those_without_it(device, [good], {"runs": [bad]}, 0)
    silent = {"metrics": {"draft_tokens_total": 0, "draft_failures_total": 3}}
    with pytest.raises(FAILURE):
        suite.test_it_drafts(silent)
    with pytest.raises(FAILURE):
        suite.test_the_core_rejects_none_of_its_proposals(silent)
    assert threading.active_count() < num_before + 10


class Impatient(HermesToolParser):
    """Gives away the beginning of a marker."""

    def push(self, text: str) -> ParsedDelta:
        if text.startswith("<") and not self.markers[0].startswith(text):
            return ParsedDelta(content=text)
        return super().push(text)


class Forgetful(HermesToolParser):
    """Loses what it held back."""

    def finish(self) -> ParsedDelta:
        super().finish()
        return ParsedDelta()


class Trimming(HermesToolParser):
    """Strips each piece."""

    def push(self, text: str) -> ParsedDelta:
        return super().push(text.strip())


class Shared(HermesToolParser):
    """Keeps text in the class."""

    held: ClassVar[list[str]] = []

    def push(self, text: str) -> ParsedDelta:
        found = super().push(text)
        found.content = "".join(self.held) + found.content
        self.held[:] = [found.content[-1:]]
        found.content = found.content[:-1]
        return found


class Repeating(HermesToolParser):
    """Says a call's name with every piece of its arguments."""

    def push(self, text: str) -> ParsedDelta:
        found = super().push(text)
        found.tool_calls += [
            ToolCallDelta(c.index, name=c.name) for c in found.tool_calls if c.name
        ]
        return found


@pytest.mark.parametrize(
    ("driver", "test"),
    [
        (Impatient, "test_any_split_of_the_stream_gives_the_same"),
        (Forgetful, "test_the_beginning_of_a_marker_is_text_after_all"),
        (Trimming, "test_any_split_of_the_stream_gives_the_same"),
        (Trimming, "test_text_without_markers_stays_whole"),
        (Shared, "test_answers_at_the_same_time_do_not_meet"),
        (Repeating, "test_calls_have_a_name_once_and_arguments_of_json"),
    ],
)
def test_broken_parsers_fail(driver: Any, test: str) -> None:
    suite = StreamParserConformance()
    getattr(suite, test)(HermesToolParser, lambda: HermesToolParser([TOOL]))
    with pytest.raises(FAILURE):
        getattr(suite, test)(driver, lambda: driver([TOOL]))
