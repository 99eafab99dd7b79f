"""The limits bite: each test fails when the core ignores the limit. Whole engines on simulated
devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fastdeploy_core.errors import CapabilityError
from fastdeploy_core.types import BatchRows, SchedulerOutput
from fastdeploy_testing.tiny_model import VOCAB, write_tiny_model
from tests.null_engine import Collector, make_request
from tests.vendors.conftest import DEVICES
from tests.vendors.engines import engine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


def prompt(length: int, seed: int = 0) -> list[int]:
    return [3 + (7 * i + 5 * seed) % (VOCAB - 3) for i in range(length)]


class Watch:
    """Sees the step messages and the shapes that reach the model."""

    def __init__(self, running: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[SchedulerOutput] = []
        self.rows: list[BatchRows] = []
        self.shapes: set[int] = set()
        self.known: dict[int, int] = {}
        worker = running._core._executor._worker
        launch, forward = worker.launch, worker._runner._model.forward

        def launch_and_note(step: SchedulerOutput) -> Any:
            self.steps.append(step)
            self.rows.append(self.rows[-1].next() if step.rows is None else step.rows)
            return launch(step)

        def forward_and_note(input_ids: Any, positions: Any, context: Any) -> Any:
            self.shapes.add(int(input_ids.shape[0]))
            return forward(input_ids, positions, context)

        monkeypatch.setattr(worker, "launch", launch_and_note)
        monkeypatch.setattr(worker._runner._model, "forward", forward_and_note)

    def prefills(self) -> list[list[bool]]:
        """For each step and row, whether it feeds prompt tokens."""
        found = []
        for step, rows in zip(self.steps, self.rows, strict=True):
            self.known |= {n.seq_id: n.num_prompt_tokens for n in step.new_sequences}
            pairs = zip(rows.seq_ids.tolist(), rows.starts.tolist(), strict=True)
            found.append([start < self.known[seq] for seq, start in pairs])
        return found


def run(running: Any, requests: list[Any], late: list[Any] = ()) -> Collector:
    collector, waiting = Collector(), list(late)
    for request in requests:
        running.add(request)
    while running.has_work() or waiting:
        if waiting and len(collector.order) >= 1:
            running.add(waiting.pop())
        collector.take(running.step())
    assert not collector.errors, collector.errors
    return collector


def test_gcu_never_shares_a_block(
    panels: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three requests with the same 70-token prompt, and one with three branches."""
    with engine(model, "gcu") as running:
        watch = Watch(running, monkeypatch)
        same = [make_request(f"r{i}", prompt(70), max_tokens=6) for i in range(2)]
        branches = make_request("n", prompt(70), max_tokens=6, n=3, temperature=1.0, seed=1)
        run(running, same, late=[branches])
        owner: dict[int, int] = {}
        for step, rows in zip(watch.steps, watch.rows, strict=True):
            for seq in step.finished_seq_ids:
                owner = {block: who for block, who in owner.items() if who != seq}
            for new in step.new_sequences:
                assert not set(new.block_ids) & set(owner), "a block has two owners"
                owner |= dict.fromkeys(new.block_ids, new.seq_id)
            for row, blocks in step.new_block_ids.items():
                assert not set(blocks) & set(owner)
                owner |= dict.fromkeys(blocks, int(rows.seq_ids[row]))
            assert not step.copies.device_to_device
        assert running.stats().prefix_hit_tokens_total == 0
        assert any("no KV block belongs to two" in line for line in running.info.report)


def test_gaudi_never_mixes_prompts_and_decodes(
    panels: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(model, "gaudi") as running:
        watch = Watch(running, monkeypatch)
        run(
            running,
            [make_request("a", prompt(9), max_tokens=12)],
            late=[make_request(f"late{i}", prompt(20 + i, i), max_tokens=3) for i in range(3)],
        )
        assert all(len(set(rows)) == 1 for rows in watch.prefills() if rows)
        assert any(rows and rows[0] for rows in watch.prefills()[2:]), "nothing arrived later"
        assert any("prompts or decodes" in line for line in running.info.report)


def gaudi_programs(panels: Path, model: Path) -> int:
    """Operations with shapes that the chip never met before, while serving prompts of any length,
    alone and together, in parts and after a cached prefix; batches that grow and shrink; sequences
    that reach the end."""
    from fd_simdevice.panel import Panel

    sizes = {"max_model_len": 300, "max_num_batched_tokens": 200, "max_num_seqs": 6}
    with engine(model, "gaudi", **sizes) as running:
        panel = Panel(panels, DEVICES["gaudi"])
        with panel.counting() as counted:
            lengths = (1, 3, 16, 77, 128, 129, 230)
            requests = [
                make_request(f"r{i}", prompt(n, i), max_tokens=5 + 3 * i)
                for i, n in enumerate(lengths)
            ]
            run(running, requests, late=[make_request("late", prompt(90, 9), max_tokens=4)])
            cached = make_request("cached", prompt(230, 6), max_tokens=4)
            run(running, [cached, make_request("full", prompt(293, 3), max_tokens=7)])
        assert running.stats().prefix_hit_tokens_total > 0, "nothing was cached"
        assert any("steps are padded" in line for line in running.info.report)
    assert counted["launches"] > 1000
    return counted.get("programs", 0)


def test_gaudi_compiles_nothing_after_warm_up(panels: Path, model: Path) -> None:
    assert gaudi_programs(panels, model) == 0


def test_what_gaudi_would_compile_without_padding(
    panels: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control for the above."""
    from fastdeploy_core.worker.layout import StepShapes

    monkeypatch.setattr(StepShapes, "fit", lambda shapes, rows: rows)
    assert gaudi_programs(panels, model) > 100


@pytest.mark.slow
def test_gaudi_runs_no_more_rows_than_it_has_shapes_for(
    panels: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"max_num_seqs": 70, "num_gpu_blocks_override": 80}
    with engine(model, "gaudi", **sizes) as running:
        watch = Watch(running, monkeypatch)
        run(running, [make_request(f"r{i}", prompt(3, i), max_tokens=60) for i in range(70)])
        assert max(rows.seq_ids.size for rows in watch.rows) == 64
        assert max(sum(rows) for rows in watch.prefills()) <= 3
        assert any("more than 64 sequences" in line for line in running.info.report)


def test_gaudi_has_no_float16(panels: Path, model: Path) -> None:
    with engine(model, "gaudi", dtype="float16") as running:
        assert any("dtype float32 instead of --dtype float16" in x for x in running.info.report)


def test_iluvatar_refuses_blocks_of_64(panels: Path, model: Path) -> None:
    with (
        pytest.raises(CapabilityError, match="--block-size 16"),
        engine(model, "iluvatar", block_size=64),
    ):
        pass


def test_iluvatar_runs_every_prompt_whole(
    panels: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(model, "iluvatar") as running:
        watch = Watch(running, monkeypatch)
        requests = [make_request(f"r{i}", prompt(90, i), max_tokens=3) for i in range(3)]
        run(running, requests)
        fed = [
            (start, count)
            for rows in watch.rows
            for start, count in zip(rows.starts.tolist(), rows.counts.tolist(), strict=True)
            if count > 1
        ]
        assert fed == [(0, 90)] * 3
        assert any("turned off: chunked prefill" in line for line in running.info.report)


def test_iluvatar_kv_memory_is_what_the_operator_says(
    panels: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FD_ILUVATAR_KVCACHE_MEM", "0.001")
    with engine(model, "iluvatar", num_gpu_blocks_override=None) as running:
        per_block = running.info.bytes_per_block
        assert running.info.num_blocks == int(0.001 * 1024**3) // per_block
        assert any("the device's plugin or its variable" in x for x in running.info.report)


def test_xpu_starts_one_prompt_per_step(
    panels: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(model, "xpu") as running:
        watch = Watch(running, monkeypatch)
        run(running, [make_request(f"r{i}", prompt(6, i), max_tokens=4) for i in range(4)])
        assert max(sum(rows) for rows in watch.prefills()) == 1
        assert any(sum(rows) and not all(rows) for rows in watch.prefills()), "nothing was mixed"


def test_several_ranks_than_a_device_has_chips_are_refused(panels: Path, model: Path) -> None:
    from fastdeploy_core.contracts.device import DeviceOptions
    from fastdeploy_core.errors import ConfigError
    from fastdeploy_core.plugins.drivers import lookup

    with pytest.raises(ConfigError, match="no chip 2: 2 visible"):
        lookup("device", "metax")(DeviceOptions(index=2))
