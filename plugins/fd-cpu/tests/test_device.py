"""The device: captured steps, threads, choice, and natives against the core's definitions."""

from __future__ import annotations

import time

import numpy as np
import pytest
from fastdeploy_core.contracts.attention import AttentionBatch, AttentionSpec
from fastdeploy_core.contracts.device import DeviceOptions, DeviceQuestion
from fastdeploy_core.errors import CapabilityError, ConfigError, WorkerError
from fastdeploy_core.tensor import available
from fd_cpu import hooks, keeping, kernels
from fd_cpu.attention import X86Attention
from fd_cpu.capture import NativeGraph, RepeatedCall
from fd_cpu.device import X86Device
from fd_cpu.formats import prepare
from fd_cpu.packing import CODING_ISAS
from fd_cpu.team import team
from fd_cpu.topology import processors_of, spread


@pytest.fixture
def device(fd_tensor):
    made = X86Device(DeviceOptions(tensor_library=fd_tensor, num_threads=2))
    with made.xp.no_grad():
        yield made
    made.close()


def random(device, *shape):
    return device.to_device(np.random.default_rng(len(shape)).standard_normal(shape).astype("f4"))


def slots_of(device, rows, num_slots=9):
    """What prepare_decode reads and writes, for so many rows of which each is its own slot."""
    xp = device.xp

    def zeros(*shape, dtype=None):
        return xp.zeros(shape, dtype=dtype or xp.int64)

    state = [zeros(num_slots, 2, dtype=xp.int32), zeros(num_slots), zeros(num_slots)]
    state += [zeros(num_slots, 0), zeros(num_slots), zeros(num_slots) + 16]
    batch = [zeros(rows), zeros(rows), zeros(rows), zeros(rows, dtype=xp.int32)]
    batch.append(zeros(rows, 2, dtype=xp.int32))
    return xp.arange(rows, dtype=xp.int64), state, batch


def test_a_captured_step_is_one_plan_and_leaves_padding_rows_alone(device):
    table, weight = random(device, 40, 64), prepare(random(device, 64, 64))
    rows, state, batch = slots_of(device, 8)
    made, turn = {}, device.xp.zeros((1,), dtype=device.xp.int64)

    def run():
        kernels.prepare_decode(rows, *state, 16, turn, *batch)
        made["x"] = kernels.embedding(batch[0], table)
        made["y"] = kernels.linear(made["x"], weight, None)

    def head():
        made["ids"] = kernels.greedy_linear(made["y"], weight, None)[0]

    for call in (run, head):
        call()
    graph, behind = device.capture(run), device.capture(head)
    assert isinstance(graph, NativeGraph) and isinstance(behind, NativeGraph)
    captured, ids = made["y"], made["ids"]
    for real in (8, 3, 5):
        state[2].copy_(device.to_device(np.arange(9) * real % 40))
        rows.copy_(device.to_device(np.where(np.arange(8) < real, np.arange(8), 8)))
        captured.fill_(777.0)
        ids.fill_(-7)
        graph.replay()
        behind.replay()
        got, drawn = np.array(device.to_host(captured)), np.array(device.to_host(ids))
        run()
        head()
        assert np.array_equal(got[:real], device.to_host(made["y"])[:real])
        assert np.array_equal(drawn[:real], device.to_host(made["ids"])[:real])
        assert (got[real:] == 777.0).all() and (drawn[real:] == -7).all()


def test_plans_are_walked_through_many_times_in_one_call(device):
    """Each step is fed what the one before drew; the last results of each row are kept."""
    xp, rows, size = device.xp, 4, 5
    table, weight = random(device, 40, 64), prepare(random(device, 40, 64))
    where, state, batch = slots_of(device, rows)
    results, kept = xp.zeros((rows, 1), dtype=xp.int64), xp.zeros((rows, size), dtype=xp.int64)
    made, turn = {}, xp.zeros((1,), dtype=xp.int64)

    def forward():
        kernels.prepare_decode(where, *state, 16, turn, *batch)
        made["x"] = kernels.embedding(batch[0], table)

    def draw():
        ids, peaks = kernels.greedy_linear(made["x"], weight, None)
        held = (state[3], state[4], state[1], state[2], results)
        kernels.finish_decode(where, ids, ids, peaks, *held, None)
        kernels.keep_results(where, results, state[1], kept)

    def begin():
        where.copy_(device.to_device(np.array([2, 0, 1, 8])))  # the last row is padding
        state[1].copy_(device.to_device(np.array([3, 1, 7, *[0] * 6])))
        state[2].copy_(device.to_device(np.array([5, 30, 17, *[0] * 6])))
        kept.fill_(-9)

    for call in (forward, draw):
        call()
    graphs = [device.capture(call) for call in (forward, draw)]
    assert all(isinstance(graph, NativeGraph) for graph in graphs)
    for times in (1, 3, 5, 8):
        begin()
        device.replay_times(graphs, times)
        got = [np.array(device.to_host(x)) for x in (kept, state[1], state[2])]
        begin()
        drawn = []
        for _ in range(times):
            forward()
            draw()
            drawn.append(np.array(device.to_host(results))[:, 0])
        for found, wanted in zip(got, (kept, state[1], state[2]), strict=True):
            assert np.array_equal(found, device.to_host(wanted))
        start = np.array([7, 3, 1])
        for nth, tokens in enumerate(drawn[-size:], max(0, times - size) + 1):
            assert np.array_equal(got[0][range(3), (start + nth) % size], tokens[:3])
        assert (got[0][3] == -9).all()


def test_captured_graphs_that_are_no_plans_are_repeated_too(device):
    weight, x = prepare(random(device, 64, 64)), random(device, 3, 64)

    def own():
        x.copy_(kernels.linear(x, weight, None))

    graph = device.capture(own)
    assert isinstance(graph, RepeatedCall)
    before = np.array(device.to_host(x))
    device.replay_times([graph], 2)
    got = np.array(device.to_host(x))
    x.copy_(device.to_device(before))
    for _ in range(2):
        own()
    assert np.array_equal(got, device.to_host(x)) and not np.array_equal(got, before)


def prompt_batch(device, starts, size):
    """What a captured step of up to `size` tokens in as many rows as `starts` says is given."""
    xp, rows = device.xp, starts.shape[0] - 1
    tokens, lengths = xp.zeros((size,), dtype=xp.int64), xp.zeros((rows,), dtype=xp.int32)
    return AttentionBatch(
        num_seqs=rows,
        num_tokens=size,
        cu_seqlens_q=np.array([0] + [size] * rows, np.int32),
        seq_lens=np.full(rows, size, np.int32),
        block_tables=np.zeros((rows, 1), np.int32),
        cu_seqlens_q_dev=starts,
        seq_lens_dev=lengths,
        block_tables_dev=xp.zeros((rows, 1), dtype=xp.int32),
        slot_mapping=tokens - 1,
        positions=tokens,
        is_exact=False,
    )


def test_a_captured_prompt_takes_any_number_of_tokens_and_little_memory(device):
    """Numbers of tokens are read at each replay, and results go over the memory of earlier ones."""
    xp, size = device.xp, 400
    table, weight = random(device, 40, 64), prepare(random(device, 64, 64))
    spec = AttentionSpec("gqa", 1, 1, 64, 64, 1.0, dtype="float32")
    attention = X86Attention(spec, 16, device, {})
    starts, ids = xp.zeros((3,), dtype=xp.int32), xp.zeros((size,), dtype=xp.int64)
    ids.copy_(device.to_device(np.arange(size) % 40))
    batch = prompt_batch(device, starts, size)
    made = []

    def run():
        attention.prepare(batch)
        x = kernels.embedding(ids, table)
        for _ in range(6):
            x = kernels.linear(x, weight, None)
            made.append(x.data_ptr())
        return x

    kept = []
    graph = device.capture(lambda: kept.append(run()))
    assert isinstance(graph, NativeGraph) and graph.is_any_size
    assert len(set(made)) < 4
    (captured,) = kept
    expected = np.array(device.to_host(run()))
    for first, last in ((3, 399), (0, 7), (400, 400)):
        starts.copy_(device.to_device(np.array([0, first, last], np.int32)))
        captured.fill_(777.0)
        graph.replay()
        got = np.array(device.to_host(captured))
        assert np.array_equal(got[:last], expected[:last])
        assert (got[last:] == 777.0).all()


def test_a_captured_prompt_goes_on_with_needed_rows(device):
    """They are counted at each replay, and what is captured after the plan goes by the same
    number."""
    xp, size, most = device.xp, 60, 8
    table, weight = random(device, 40, 64), prepare(random(device, 64, 64))
    spec = AttentionSpec("gqa", 1, 1, 64, 64, 1.0, dtype="float32")
    attention = X86Attention(spec, 16, device, {})
    starts, ids = xp.zeros((3,), dtype=xp.int32), xp.zeros((size,), dtype=xp.int64)
    ids.copy_(device.to_device(np.arange(size) % 40))
    needed, batch, made = xp.zeros((most,), dtype=xp.int64), prompt_batch(device, starts, size), {}

    def run():
        attention.prepare(batch)
        x = kernels.embedding(ids, table)
        y, x = (kernels.select_rows(z, needed) for z in (kernels.linear(x, weight, None), x))
        made["y"] = kernels.linear_add(y, weight, None, x)

    def head():
        made["ids"] = kernels.greedy_linear(made["y"], weight, None)[0]

    graphs = [device.capture(call) for call in (run, head)]
    assert all(isinstance(graph, NativeGraph) for graph in graphs)
    captured, drawn = made["y"], made["ids"]
    for last, rows in ((60, [3, 17, 59]), (7, [6]), (50, [*range(0, 48, 6)])):
        starts.copy_(device.to_device(np.array([0, 1, last], np.int32)))
        needed.copy_(device.to_device(np.array(rows + [0] * (most - len(rows)))))
        captured.fill_(777.0)
        drawn.fill_(-7)
        device.replay_times(graphs, 1)
        got, tokens = np.array(device.to_host(captured)), np.array(device.to_host(drawn))
        run()
        head()
        assert np.array_equal(got[: len(rows)], device.to_host(made["y"])[: len(rows)])
        assert np.array_equal(tokens[: len(rows)], device.to_host(made["ids"])[: len(rows)])
        assert (got[len(rows) :] == 777.0).all() and (tokens[len(rows) :] == -7).all()


def test_work_of_the_library_makes_a_captured_graph_repeat_its_call(device):
    weight, x = prepare(random(device, 64, 64)), random(device, 3, 64)
    out = device.xp.zeros((3, 64))

    def run():
        out.copy_(kernels.linear(x + x, weight, None))

    run()
    graph = device.capture(run)
    assert isinstance(graph, RepeatedCall) and not graph.is_any_size
    x.copy_(random(device, 3, 64) * 2)
    graph.replay()
    got = np.array(device.to_host(out))
    run()
    assert np.array_equal(got, device.to_host(out))


def test_a_capture_that_fails_leaves_the_device_usable(device):
    weight, x = prepare(random(device, 64, 64)), random(device, 3, 64)

    def fail():
        kernels.linear(x, weight, None)
        raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        device.capture(fail)
    assert np.isfinite(device.to_host(kernels.linear(x, weight, None))).all()


def test_draws_are_the_references(device):
    from fastdeploy_testing.drivers import build_kernel_table

    ours, theirs = build_kernel_table("x86"), build_kernel_table("cpu")
    xp, rng = device.xp, np.random.default_rng(3)
    logits = (rng.standard_normal((40, 3001)) * 2).astype("f4")
    seeds = device.to_device(rng.integers(-(2**62), 2**62, 40))
    places = device.to_device(np.arange(40))
    got, wanted = (
        np.array(device.to_host(t["sample"](device.to_device(logits.copy()), seeds, places)))
        for t in (ours, theirs)
    )
    assert np.array_equal(got, wanted)
    top_k = device.to_device(rng.integers(0, 50, 40))
    top_p = device.to_device(rng.uniform(0.3, 1.0, 40).astype("f4"))
    min_p = device.to_device(rng.uniform(0, 0.05, 40).astype("f4"))
    kept = [
        np.isfinite(device.to_host(
            t["filter_logits"](device.to_device(logits.copy()), top_k, top_p, min_p)))
        for t in (ours, theirs)
    ]  # fmt: skip
    assert np.array_equal(*kept) and 40 <= kept[0].sum() < 40 * 50
    assert xp.dtype_name(seeds.dtype) == "int64"


def test_idle_threads_take_no_processor_time(device):
    kernels.linear(random(device, 8, 64), prepare(random(device, 64, 64)), None)
    time.sleep(0.05)  # longer than threads look for more work
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.05


def test_devices_of_a_process_share_the_threads(device, fd_tensor):
    other = X86Device(DeviceOptions(tensor_library=fd_tensor, num_threads=2))
    assert other._team is device._team is team()
    other.close()
    assert team() is device._team


def test_kernels_without_a_device_say_so(fd_tensor):
    X86Device(DeviceOptions(tensor_library=fd_tensor, num_threads=1)).close()
    with pytest.raises(WorkerError, match="no such device is open"):
        team()


def test_an_unknown_instruction_set_is_refused(fd_tensor, monkeypatch):
    monkeypatch.setenv("FD_CPU_ISA", "mmx")
    with pytest.raises(ConfigError, match=r"FD_CPU_ISA=mmx.*possible: scalar"):
        X86Device(DeviceOptions(tensor_library=fd_tensor, num_threads=1))


def test_threads_that_would_wait_for_each_other_are_refused(fd_tensor):
    second = DeviceOptions(index=1, tensor_library=fd_tensor, num_threads=1)
    X86Device(second).close()  # has all processors, as the first
    with pytest.raises(ConfigError, match=r"4096 threads are asked for .*possible: 1 to \d+"):
        X86Device(DeviceOptions(tensor_library=fd_tensor, num_threads=4096))


def test_more_processes_than_processors_are_refused(fd_tensor):
    crowd = DeviceOptions(tensor_library=fd_tensor, num_threads=1, num_ranks=4096)
    with pytest.raises(ConfigError, match=r"4096 processes .* are to share \d+ processors"):
        X86Device(crowd)


def test_why_steps_repeat_their_call_is_said_once(device, caplog):
    weight = random(device, 4, 4)

    def with_the_library():
        weight @ weight

    with caplog.at_level("INFO", "fd_cpu"):
        kinds = {type(device.capture(with_the_library)) for _ in range(3)}
    assert kinds == {RepeatedCall}
    assert len([r for r in caplog.records if "repeat their call" in r.message]) == 1


def test_the_probe_says_which_level_it_found(fd_tensor):
    answer = hooks.fd_device_probe(DeviceQuestion(fd_tensor))
    assert answer.verdict.score > 1 and answer.details["tensor_library"] == (
        fd_tensor or available()[0]
    )
    assert answer.details["instructions"] in ("scalar", "avx2", "avx512", "amx")
    other = next((name for name in ("jax", *available()) if name not in available()), "jax")
    assert "not installed" in hooks.fd_device_probe(DeviceQuestion(other)).verdict.reason
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hooks.platform, "machine", lambda: "aarch64")
        assert "aarch64" in hooks.fd_device_probe(DeviceQuestion()).verdict.reason


def test_threads_take_a_core_each_before_they_share_one(tmp_path):
    for cpu in range(6):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}")
    assert spread([1, 2, 3, 4], tmp_path) == [1, 2, 4, 3]
    assert spread([0, 1, 9], tmp_path / "absent") == [0, 1, 9]


def machine(folder, nodes):
    """A host in the form of Linux' files: for each node its cores, as processors that share one."""
    for node, cores in enumerate(nodes):
        for cpus in cores:
            for cpu in cpus:
                (folder / f"cpu{cpu}" / "topology").mkdir(parents=True)
                (folder / f"cpu{cpu}" / f"node{node}").mkdir()
                file = folder / f"cpu{cpu}" / "topology" / "thread_siblings_list"
                file.write_text(",".join(map(str, cpus)))
    return folder


def test_ranks_get_nodes_of_their_own(tmp_path):
    # Siblings are far apart in number, as on most servers.
    host = machine(tmp_path, [[(0, 8), (1, 9)], [(2, 10), (3, 11)], [(4, 12)], [(5, 13)]])
    every = [*range(6), *range(8, 14)]
    assert processors_of(0, 1, every, host)[:4] == [0, 1, 8, 9]
    assert sorted(processors_of(0, 1, every, host)) == every
    assert processors_of(0, 2, every, host) == [0, 1, 8, 9, 2, 3, 10, 11]
    assert processors_of(1, 2, every, host) == [4, 12, 5, 13]
    assert [processors_of(rank, 4, every, host) for rank in range(4)] == [
        [0, 1, 8, 9],
        [2, 3, 10, 11],
        [4, 12],
        [5, 13],
    ]
    # A container that may use one node only.
    assert processors_of(1, 2, [0, 1, 8, 9], host) == [1, 9]


def test_ranks_of_one_node_share_no_core(tmp_path):
    host = machine(tmp_path, [[(0, 4), (1, 5), (2, 6), (3, 7)]])
    assert processors_of(0, 2, list(range(8)), host) == [0, 1, 4, 5]
    assert processors_of(1, 2, list(range(8)), host) == [2, 3, 6, 7]
    parts = [processors_of(rank, 3, list(range(8)), host) for rank in range(3)]
    assert [len(part) for part in parts] == [2, 2, 2]
    assert len({cpu for part in parts for cpu in part}) == 6
    assert processors_of(1, 2, [0, 1, 2, 3], tmp_path / "absent") == [2, 3]


def test_groups_that_the_layout_cannot_hold_are_named(device):
    from fastdeploy_core.contracts.quant_formats import FORMATS, PackedWeight

    xp = device.xp
    tensors = {"weight": xp.zeros([8, 48], dtype=xp.int8), "scale": xp.ones([8, 2])}
    with pytest.raises(CapabilityError, match=r"groups of 24.*multiples of 32"):
        prepare(PackedWeight(FORMATS["wint8"], 8, 48, tensors, group_size=24))


def test_memory_of_a_large_result_is_used_again_when_nobody_has_it(device):
    weight, x = (
        prepare(random(device, 192, 128)),
        random(device, 1500, 128),
    )  # results above a megabyte
    first = kernels.linear(x, weight, None)
    where, values = first.data_ptr(), np.array(device.to_host(first))
    second = kernels.linear(x + x, weight, None)
    assert second.data_ptr() != where and np.array_equal(device.to_host(first), values)
    del first
    third = kernels.linear(x, weight, None)
    assert third.data_ptr() == where and np.array_equal(device.to_host(third), values)


def test_large_matrices_of_bfloat16_are_kept_in_twelve_bits(device):
    xp = device.xp
    if xp.name != "torch" or team().native.isa not in CODING_ISAS:
        pytest.skip("bfloat16 needs torch, and codes AVX512")
    weight = random(device, 1024, 600).to(xp.bfloat16)
    weight[70, 5] = float("inf")  # a patch
    x = random(device, 9, 600).to(xp.bfloat16)
    kept = prepare(weight)
    assert kept.native.num_bytes < 0.77 * 2 * 1024 * 600
    facts, arrays = keeping.dump(kept)
    again = keeping.restore(facts, [np.array(array) for array in arrays])
    wanted, got = (device.to_host(kernels.linear(x, w, None).float()) for w in (kept, again))
    assert np.array_equal(got, wanted) and np.isinf(np.asarray(got)[:, 70]).all()
    arrays[1][-8:] = 255
    with pytest.raises(ValueError, match="patches outside"):
        keeping.restore(facts, arrays)
    assert prepare(weight[:64]).native.num_patches == 0, "little is read from caches, as it is"
