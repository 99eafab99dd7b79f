"""Random settings and requests of engines on the fake device, and what must hold at each step."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

from fastdeploy_core.types import Request, branch_id
from tests.null_engine import make_request

MAX_MODEL_LEN = 60
POISON = 63  # a prompt that ends with it makes its step fail


@dataclass
class Event:
    """At `step`, a request arrives, or one that arrived is aborted, or one of its branches."""

    step: int
    request: Request | None = None
    abort: str = ""


@dataclass
class Life:
    """An engine's settings and what happens to it."""

    options: dict[str, Any]
    events: list[Event] = field(default_factory=list)


def make_random_request(random: Random, index: int, poisonous: bool) -> Request:
    prompt = [(i * 5) % 50 + 4 for i in range(random.randrange(21))]
    prompt += [random.randrange(4, 63) for _ in range(random.randrange(1, 13))]
    if poisonous and random.random() < 0.15:
        prompt[-1] = POISON
    n = random.choice([1, 1, 1, 2, 4])
    sampling: dict[str, Any] = {}
    if n > 1 or random.random() < 0.5:
        sampling = {"temperature": 1.0, "seed": random.randrange(100)}
    if random.random() < 0.1:
        sampling["prompt_logprobs"] = 0
    return make_request(
        f"r{index}",
        prompt,
        max_tokens=random.randrange(25),
        eos=random.random() < 0.5,
        n=n,
        tenant=random.choice(["", "", "a", "b"]),
        priority=random.randrange(3),
        cache_salt=random.choice(["", "", "salt"]),
        **sampling,
    )


def make_options(random: Random) -> dict[str, Any]:
    """Settings of an engine: options of make_config."""
    chunked = random.random() < 0.7
    null = {
        "mixed_batches": random.random() < 0.8,
        "max_prefills_per_step": random.choice([None, None, 1]),
        "block_sharing": random.random() < 0.8,
        "decodes_per_step": random.choice([1, 4]),
    }
    return {
        "null": null,
        "overlap": random.random() < 0.6,
        "prefix_caching": random.random() < 0.7,
        "output_caching": random.random() < 0.7,
        "enable_chunked_prefill": chunked,
        "max_num_partial_prefills": random.choice([1, 1, 3]),
        "long_prefill_token_threshold": random.choice([0, 7]),
        "max_num_batched_tokens": random.choice([8, 13, 64]) if chunked else MAX_MODEL_LEN,
        "max_num_seqs": random.choice([1, 3, 8]),
        "num_blocks": random.choice([15, 20, 64]),
        "host_blocks": random.choice([0, 1, 30]),
        "num_drafts": random.choice([0, 0, 2]),
        "policy": random.choice(["fcfs", "priority"]),
        "max_model_len": MAX_MODEL_LEN,
    }


def make_life(seed: int, poisonous: bool = False) -> Life:
    """A life by number. (Drawing every choice from hypothesis would cost far more than living
    it.)"""
    random = Random(seed)
    life = Life(make_options(random))
    if poisonous:
        life.options["faults"] = ({"kind": "raise", "token": POISON},)
    for index in range(random.randrange(1, 12)):
        step = random.randrange(31)
        request = make_random_request(random, index, poisonous)
        life.events.append(Event(step, request))
        if request.sampling.n > 1 and random.random() < 0.3:
            branch = branch_id(f"r{index}", random.randrange(request.sampling.n))
            life.events.append(Event(step + random.randrange(40), abort=branch))
        if random.random() < 0.25:
            life.events.append(Event(step + random.randrange(40), abort=f"r{index}"))
    life.events.sort(key=lambda event: event.step)
    return life


def check_step(core) -> None:
    """Nothing writes into a block that another sequence reads; the budget is kept."""
    batch = core.scheduler
    step = core._executor.steps[-1]
    num_tokens = step.rows.counts.sum() // step.num_decodes  # at once
    assert 0 < num_tokens <= batch.settings.batch.max_num_batched_tokens
    assert step.rows.seq_ids.size <= batch.settings.batch.max_num_seqs
    tables = {
        seq.seq_id: seq.table.blocks
        for request in batch.roster.requests.values()
        for seq in request.sequences
        if seq.table.blocks
    }
    size = batch.kv.block_size
    for seq_id, (start, count) in core._executor.worker.written.items():
        blocks = tables.get(seq_id)
        if blocks is None:
            continue  # it ended or was preempted with this very step's results
        first, last = start // size, (start + count - 1) // size
        written = set(blocks[first : last + 1])
        assert len(written) == last - first + 1
        for other, held in tables.items():
            assert other == seq_id or not written & set(held), "a written block is shared"
    batch.kv.check()
