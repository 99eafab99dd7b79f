"""The whole configuration: frozen, validated where it is built, never changed afterwards.

Names here are the inside names; docs/reference/names.md maps command-line spellings to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model, in which precision, up to which length."""

    path: Path
    tokenizer_path: Path
    served_names: tuple[str, ...] = ()
    dtype: str = "float32"  # resolved: never "auto" here
    dtype_is_auto: bool = False  # the checkpoint's own, which may give way to what the device has
    max_model_len: int = 2048
    load_format: Literal["auto", "safetensors", "dummy"] = "auto"
    seed: int = 0
    quantization: str = ""
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    hf_config: Mapping[str, Any] = field(default_factory=dict)  # config.json as read
    chat_template: str | None = None
    trust_special_tokens: bool = False  # those in users' text act as the template's own
    weight_cache: str = ""  # folder where laid-out weights are kept; empty: nowhere
    checkpoint_format: str = ""  # the driver that reads `path`; empty: a folder of safetensors

    @property
    def architecture(self) -> str:
        """The architecture string of config.json."""
        return str((self.hf_config.get("architectures") or [""])[0])


@dataclass(frozen=True, slots=True)
class KVEventsConfig:
    """Where events of the prefix cache are published, by vLLM's names."""

    enable_kv_cache_events: bool = False
    publisher: str = "zmq"
    # With * or of ipc:// it is bound, else connected to; engine i adds i to the port.
    endpoint: str = ""
    replay_endpoint: str = ""  # always bound; empty: no replay
    buffer_steps: int = 10_000  # batches kept for replay
    hwm: int = 100_000  # batches that a slow subscriber may be behind before it misses some
    topic: str = ""


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The KV pool and what may stay in it."""

    block_size: int = 64
    num_blocks_override: int | None = None
    memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    swap_space_bytes: int = 0
    enable_prefix_caching: bool = True
    enable_output_caching: bool = True
    kv_dtype: str = "auto"
    events: KVEventsConfig | None = None  # None: none
    kv_store: str = ""  # driver that keeps blocks outside the engine; empty: none does
    kv_store_options: Mapping[str, Any] = field(default_factory=dict)
    kv_store_timeout_s: float = 5.0  # what a request waits for its blocks at most


@dataclass(frozen=True, slots=True)
class HandoverConfig:
    """How prompts that one instance computed are handed to another one."""

    transport: str = ""  # KV transport, or "auto"; empty: none are handed over
    address: str = ""  # HOST:PORT where it listens; empty: the driver's choice
    role: Literal["mixed", "prefill", "decode"] = "mixed"  # at the start
    timeout_s: float = 60.0  # what a request waits for its blocks at most


@dataclass(frozen=True, slots=True)
class BatchConfig:
    """Who runs in a step: settings of the batch scheduler."""

    max_num_seqs: int = 32
    max_num_batched_tokens: int = 2048
    enable_chunked_prefill: bool = True
    max_num_partial_prefills: int = 1
    max_long_partial_prefills: int = 1
    long_prefill_token_threshold: int = 0
    policy: Literal["fcfs", "priority"] = "fcfs"
    overlap: bool = True


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Ranks. Worker rank 0 lives in the engine process."""

    tensor_parallel_size: int = 1
    data_parallel_size: int = 1  # engines of this server, each with tensor_parallel_size ranks
    data_parallel_rank: int = 0  # which of them has this configuration
    # Ranks hold whole experts, not a share of each.
    enable_expert_parallel: bool = False
    meeting_folder: str = ""  # where ranks of engines that share experts meet
    # Carries tokens to them in steps that hold prompts; empty: none does, ranks add up what they
    # have.
    expert_communicator: str = ""
    # How experts move to where load is least, read by part `experts`; None: they stay.
    eplb: dict[str, Any] | None = None

    @property
    def divides_experts(self) -> bool:
        """Whether there are ranks to divide them over: those of all engines."""
        return self.enable_expert_parallel and self.num_ranks > 1

    @property
    def shares_experts(self) -> bool:
        """Whether the ranks that divide experts are of several engines."""
        return self.enable_expert_parallel and self.data_parallel_size > 1

    @property
    def num_ranks(self) -> int:
        """Of all engines together."""
        return self.tensor_parallel_size * self.data_parallel_size


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    """What was asked for; empty strings mean: negotiate."""

    device: str = ""
    tensor_library: str = ""
    attention_backend: str = ""
    moe_backend: str = ""
    kernel_objective: str = ""  # what kernels are chosen for, where there are several
    capture_shapes: str = ""  # a file: what operations were called with
    num_threads: int = 0
    allow_fallback: bool = True  # False (--no-fallback): a missing kernel is an error


@dataclass(frozen=True, slots=True)
class GraphConfig:
    """Which steps are captured as graphs, on a device that can capture any: decode steps of these
    batch sizes, and steps with prompts of token counts that the worker chooses."""

    enabled: bool = True
    sizes: tuple[int, ...] | None = None  # batch sizes, ascending; None: worker/graph_sizes.py's
    max_size: int | None = None  # larger batch sizes are not captured


@dataclass(frozen=True, slots=True)
class RequestSchedulerConfig:
    """The operator's settings; `options` is the driver's own section."""

    name: str = "local"
    max_size: int = 1024  # waiting requests; one more is refused with QueueFull. 0: unbounded
    max_tokens: int = 0  # waiting prompt tokens; 0: unbounded
    ttl_s: float = 900.0  # a request waiting longer than this is answered with RequestTimeout
    lease_s: float = 10.0  # for schedulers with leases; the local one has none
    instance: str = ""  # this engine's name among those that share the queue; empty: the only one
    epoch: int = 0  # random 64 bit, new at every start of the engine; 0: not an engine's object
    options: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class MediaConfig:
    """Pictures in requests, for a model that takes them."""

    language_model_only: bool = False  # no picture is taken, and nothing loaded that sees
    limit_mm_per_prompt: Mapping[str, int] = field(default_factory=dict)  # by kind
    allowed_media_domains: tuple[str, ...] = ()
    allowed_local_media_path: Path | None = None
    max_encoder_cache: int = 16384  # vectors kept on the device for later requests
    max_encode_tokens: int = 0  # vectors made in a step; 0: as many as its tokens


@dataclass(frozen=True, slots=True)
class LoRAConfig:
    """LoRA adapters of the model; fd-lora serves them."""

    lora_modules: tuple[str, ...] = ()  # NAME=FOLDER, or JSON
    lora_root: str = ""  # folder below which a running server finds more; empty: it loads none
    max_loras: int = 1  # different ones in a step
    max_lora_rank: int = 16
    max_cpu_loras: int = 0  # kept in host memory, at least max_loras
    lora_target_modules: tuple[str, ...] = ()  # last part of a layer's name; empty: all
    lora_experts: bool = False  # slots for routed experts, too


@dataclass(frozen=True, slots=True)
class StructuredOutputsConfig:
    """Limits on compiling grammars; reliability rule S-08."""

    backend: str = "auto"
    disable_any_whitespace: bool = False
    compile_timeout_s: float = 2.0
    max_source_bytes: int = 16 * 1024
    max_depth: int = 64


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """A speculative method by name with its own options; config/speculative.py reads it."""

    method: str
    num_speculative_tokens: int
    # "lossy_top_p": a draft also passes when it is one of the target's likeliest tokens up to
    # top_p, which changes the distribution of the output. The next two fields belong to it.
    acceptance: Literal["lossless", "lossy_top_p"] = "lossless"
    max_candidate_len: int = 5
    verify_window: int = 2
    # fewer drafts, or none, when measured times say that this is faster
    adaptive_length: bool = True
    disable_by_batch_size: int = 0  # no drafts while more sequences run; 0: no such limit
    benchmark_mode: bool = False  # draft and verify, but accept no draft
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WatchdogConfig:
    """When an engine that makes no progress is declared sick."""

    progress_timeout_s: float = 30.0
    startup_timeout_s: float = 600.0
    max_restarts: int = 3  # of a dead engine process within ten minutes; after that it stays dead


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything an engine needs to know."""

    model: ModelConfig
    cache: CacheConfig = field(default_factory=CacheConfig)
    handover: HandoverConfig = field(default_factory=HandoverConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    graphs: GraphConfig = field(default_factory=GraphConfig)
    request_scheduler: RequestSchedulerConfig = field(default_factory=RequestSchedulerConfig)
    structured_outputs: StructuredOutputsConfig = field(default_factory=StructuredOutputsConfig)
    media: MediaConfig = field(default_factory=MediaConfig)
    lora: LoRAConfig | None = None  # None: no adapters
    rollout: bool = False  # whether fd-rollout may pause the engine, and replace its weights
    routes: bool = False  # whether its answers name the experts of each token
    speculative: SpeculativeConfig | None = None
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)
    logits_processors: tuple[str, ...] = ()
    max_logprobs: int = 20
    logprobs_mode: Literal[
        "raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"
    ] = "raw_logprobs"

    @property
    def kept_states(self) -> int:
        """StateSpec.kept."""
        return 0 if self.speculative is None else 1 + self.speculative.num_speculative_tokens
