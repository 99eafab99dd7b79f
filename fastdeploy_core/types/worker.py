"""What a worker tells the engine once its model is loaded: sizes, and limits to respect."""

from __future__ import annotations

import msgspec


class LayerGroup(msgspec.Struct, frozen=True, array_like=True):
    """Layers that need a bounded part of a sequence by one rule (contracts.model.Retention)."""

    kind: str
    tokens: int
    bytes_per_block: int  # one block in all of them


class WorkerInfo(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One rank's answer to `load()`. Bytes are this rank's."""

    # the model
    num_layers: int
    vocab_size: int
    max_model_len: int
    weight_bytes: int = 0
    # the KV pool
    bytes_per_block: int  # one block in all layers that need every token
    available_bytes: int  # what the KV pool may take
    memory_arithmetic: str = ""  # how available_bytes came about, for messages
    # What the batch scheduler must respect; from the device's limits and the configuration.
    block_size: int = 64
    block_sharing: bool = True  # False: no prefix cache
    mixed_batches: bool = True  # False: a step has prefills or decodes, never both
    max_prefills_per_step: int | None = None
    chunked_prefill: bool = True  # False: a prompt runs in one step
    max_step_tokens: int | None = None  # what the device takes in one step
    max_step_rows: int | None = None
    overlap: bool = True  # a step may be launched before the tokens of the one before are known
    asynchronous: bool = False  # launching a step only queues its work
    on_host: bool = False  # the device computes on this host's processors, all through a step
    host_tier: bool = True  # blocks can move to host memory and back
    logprobs: bool = True
    # Decode steps with drafts are captured graphs, in which no prompt has a place.
    captures_drafts: bool = False
    # So is drafting, on the device: drafting after a prompt, which is not captured, costs more than
    # a draft saves.
    captures_drafting: bool = False
    max_decodes: int = 1  # the most of SchedulerOutput.num_decodes
    max_drafted_decodes: int = 1  # the same of steps that draft after each decode
    # what sequences may bring beside token ids (SequenceExtras.needs)
    features: frozenset[str] = frozenset()
    # the start-up report
    device: str = ""
    tensor_library: str = ""
    drivers: dict[str, str] = {}  # kind to driver name
    report: list[str] = []  # one line per start-up decision, for the log and for `info`
    bounded: list[LayerGroup] = []  # layers that do not need every token
    kv_layout: str = ""  # dtypes and shapes of one block, for who keeps it beyond the engine
