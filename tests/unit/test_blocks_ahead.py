"""Where a step is several decodes, sequences get blocks for later steps, too: all at once, while
many are free, and never at anybody's cost.
"""

from __future__ import annotations

import numpy as np

from fastdeploy_core.config import BatchConfig
from fastdeploy_core.kvcache import KVCacheManager
from fastdeploy_core.scheduler import BatchScheduler
from fastdeploy_core.scheduler.settings import SchedulerSettings
from fastdeploy_core.types import ModelRunnerOutput, SamplingParams, each_delta
from tests.null_engine import make_core, make_request, run, worker_info

BLOCK, LENGTH, ROWS = 4, 100, 3


def serve(num_blocks: int) -> tuple[BatchScheduler, int, int]:
    """Answers of LENGTH tokens: the scheduler, its steps, and those that give blocks to sequences
    that run."""
    batch = BatchConfig(max_num_seqs=ROWS, max_num_batched_tokens=64, overlap=False)
    settings = SchedulerSettings(128, batch, worker_info(max_decodes=2))
    scheduler = BatchScheduler(settings, KVCacheManager(num_blocks, BLOCK))
    for row in range(ROWS):
        request = make_request(f"r{row}", [1] * (3 + row), max_tokens=LENGTH)
        request.sampling = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)
        scheduler.add(request)
    num_steps = num_growing = num_tokens = 0
    while scheduler.has_work():
        step = scheduler.schedule()
        assert step is not None
        num_steps += 1
        num_growing += bool(step.output.new_block_ids)
        counts = np.full(step.num_rows, step.num_decodes, dtype=np.int64)
        output = ModelRunnerOutput(
            step_id=step.output.step_id,
            token_ids=np.full(int(counts.sum()), 7, dtype=np.int64),
            counts=counts if step.num_decodes > 1 else None,
        )
        scheduler.update(step, output)
        scheduler.take_deltas()
        num_tokens += int(counts.sum())
    assert num_tokens == ROWS * LENGTH
    scheduler.check_idle()
    return scheduler, num_steps, num_growing


def test_while_many_are_free_few_steps_give_blocks() -> None:
    _, num_steps, num_growing = serve(1000)
    assert num_steps < 0.6 * LENGTH, "two decodes each"
    # For BLOCKS_AHEAD blocks or so each time, and to all rows at once.
    assert num_growing < LENGTH / (2 * BLOCK)


def test_no_cached_prefix_is_evicted_for_blocks_of_later_steps() -> None:
    prompt = list(range(4, 44))  # ten blocks, nine of which can be found again
    core = make_core(num_blocks=20, max_model_len=60, max_num_seqs=1, output_caching=False)
    run(core, [make_request("first", prompt, max_tokens=1)])
    assert core.scheduler.kv.pool.num_cached == 10
    core.add(make_request("other", [3] * 3, max_tokens=57, ignore_eos=True))
    num_tokens = 0
    while num_tokens < 36:  # 39 with its prompt: just all of the other blocks
        num_tokens += sum(len(d.sequences[0].token_ids) for d in each_delta(core.step()))
    core.abort(["other"])
    while core.has_work():
        core.step()
    again = run(core, [make_request("again", prompt, max_tokens=1)])
    assert again.first["again"].num_cached_tokens == 36


def test_nobody_has_to_yield_for_blocks_of_later_steps() -> None:
    """A pool that just holds all of them to their ends."""
    needed = sum(-(-(3 + row + LENGTH) // BLOCK) for row in range(ROWS))
    scheduler, _, num_growing = serve(needed)
    assert scheduler.roster.num_preemptions_total == 0
    assert num_growing > LENGTH / (2 * BLOCK)
