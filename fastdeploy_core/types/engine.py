"""What an engine reports about itself: fixed facts, health, counters."""

from __future__ import annotations

import msgspec


class EngineInfo(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Fixed facts of a started engine."""

    num_blocks: int
    num_host_blocks: int = 0
    block_size: int
    max_model_len: int
    vocab_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    served_names: list[str] = []
    model_path: str = ""
    architecture: str = ""
    dtype: str = ""
    device: str = ""
    tensor_library: str = ""
    tensor_parallel_size: int = 1
    drivers: dict[str, str] = {}  # kind to the name chosen
    overlap: bool = False
    on_host: bool = False  # the device computes on this host's processors during the whole step
    prefix_caching: bool = False
    max_request_tokens: (
        int  # of one sequence, prompt and output together; bounded by the model and by the pool
    )
    weight_bytes: int = 0
    bytes_per_block: int = 0
    startup_s: float = 0.0
    epoch: int = 0  # random 64 bit, new at every start
    report: list[str] = []  # one line per start-up decision
    bounded_bytes: int = 0  # of the pools of layers that do not need every token


class EngineHealth(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The engine as seen from the process that asks; cheap and never blocking."""

    alive: bool  # its process runs
    ready: bool  # loaded, making progress and not draining: it may get requests
    draining: bool = False
    last_progress_age_s: float = 0.0  # seconds since the last completed step or idle tick
    reason: str = ""  # why it is not ready
    num_restarts: int = 0


class EngineStats(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Gauges of this moment, and counters since the engine started (names end in _total or _s)."""

    # gauges
    control: str = ""  # JSON of part `rollout-engine`: what the engine was asked to do
    num_running: int = 0  # sequences in the batch
    num_waiting: int = 0  # sequences admitted to the engine and not in the batch
    num_queued: int = 0  # requests in the request scheduler, not yet taken by the engine
    num_requests: int = 0  # unfinished requests in the engine
    num_blocks_total: int = 0
    num_blocks_free: int = 0  # can be allocated now, cached ones included
    num_blocks_used: int = 0  # belong to a sequence
    num_blocks_cached: int = 0  # free, holding a reusable prefix
    num_blocks_quarantined: int = 0
    num_host_blocks_total: int = 0
    num_host_blocks_used: int = 0
    # requests
    requests_total: int = 0
    requests_finished_total: dict[str, int] = {}  # by finish reason, "error" and "abort" included
    requests_rejected_total: dict[str, int] = {}  # by class of errors.py
    preemptions_total: int = 0
    # tokens
    prompt_tokens_total: int = 0  # of admitted prompts
    generation_tokens_total: int = 0
    prefix_query_tokens_total: int = 0  # of prompts, counted at their first admission
    prefix_hit_tokens_total: int = 0  # of these, tokens found on the device or in host memory
    host_hit_tokens_total: int = 0  # brought back from host memory, also after preemptions
    host_saved_blocks_total: int = 0
    drafts_total: int = 0  # rows with drafts, summed over all steps
    draft_tokens_total: int = 0
    accepted_draft_tokens_total: int = 0
    accepted_drafts_at_total: list[int] = []  # entry i: rows whose first i + 1 drafts were accepted
    draft_failures_total: int = 0  # proposals lost because a drafter failed
    draft_s: float = 0.0  # seconds in drafters
    # steps
    steps_total: int = 0
    step_failures_total: int = 0
    step_tokens_total: int = 0  # tokens fed
    step_sequences_total: int = 0  # sequences per step, counted once per decode of the step
    schedule_s: float = 0.0  # seconds in which the scheduler chose what to run
    wait_s: float = 0.0  # seconds in which the engine waited for workers
    update_s: float = 0.0  # seconds in which the scheduler took results in
    execute_s: float = 0.0  # seconds of steps, as the workers measured them
    model_s: float = 0.0  # seconds of these in the model's forward pass
    last_step_s: float = 0.0
    last_step_num_seqs: int = 0
    kv_store_read_blocks_total: int = 0  # found in the KV store
    kv_store_written_blocks_total: int = 0
    kv_store_failures_total: int = 0  # calls of the store that failed
    # prompts handed to other instances, and taken from them; those that were computed after all
    kv_handed_over_total: int = 0
    kv_taken_over_total: int = 0
    kv_handover_failures_total: int = 0
    kv_role: str = ""  # what routers use it for; empty: it hands nothing over at the moment
    kv_ticket: str = ""  # what another instance connects with


class CommonHealth(EngineHealth, kw_only=True):
    """The health of several engines of one server: ready while one of them is."""

    engines: dict[int, EngineHealth]


class CommonStats(EngineStats, kw_only=True):
    """Sums over several engines; for the duration of the last step the longest."""

    engines: dict[int, EngineStats]  # those that answered
