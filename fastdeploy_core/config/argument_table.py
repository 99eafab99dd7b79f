"""The argument table. One row is one argument: its inside name, every spelling the original and
vLLM use for it, its type, default, bounds and help.

`argument_values.py` reads the rows; `refused.py` lists what is refused. Rows about captured graphs
are in graphs.py, with what they mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

ArgumentType = Literal["str", "int", "float", "bool", "json", "list", "ints"]
Scope = Literal["engine", "server"]


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument. `name` in underscores is the keyword; `--name-with-dashes` the flag."""

    name: str
    type: ArgumentType
    default: Any
    help: str
    group: str
    scope: Scope = "engine"
    aliases: tuple[str, ...] = ()  # other long spellings, in underscores
    negative: tuple[str, ...] = ()  # spellings that switch a bool off
    short: tuple[str, ...] = ()  # such as -tp
    choices: tuple[str, ...] = ()
    translate: Mapping[str, Any] = field(default_factory=dict)  # other projects' values to ours
    low: float | None = None
    high: float | None = None
    repeatable: bool = False  # a list given as --x a --x b instead of --x a b
    secret: bool = False

    @property
    def flag(self) -> str:
        """The spelling shown in help and errors."""
        return "--" + self.name.replace("_", "-")

    @property
    def spellings(self) -> tuple[str, ...]:
        """Every keyword spelling, the inside name first."""
        return (self.name, *self.aliases)


def group(title: str, scope: Scope, *rows: Argument) -> tuple[Argument, ...]:
    return tuple(replace(each, group=title, scope=scope) for each in rows)


def row(name: str, type_: ArgumentType, default: Any, help_: str, **more: Any) -> Argument:
    return Argument(name=name, type=type_, default=default, help=help_, group="", **more)


_MODEL = group(
    "model",
    "engine",
    row(
        "model",
        "str",
        None,
        "folder of the model (Hugging Face or Paddle layout), or a file in a format of a plugin",
    ),
    row(
        "served_model_name",
        "list",
        None,
        "names clients may ask for; without it any name is accepted",
    ),
    row("tokenizer", "str", None, "folder of the tokenizer; default: the model's"),
    row(
        "dtype",
        "str",
        "auto",
        "precision of weights and activations",
        choices=("auto", "float32", "float16", "bfloat16"),
        translate={"half": "float16", "float": "float32"},
    ),
    row(
        "max_model_len",
        "int",
        None,
        "longest prompt plus answer in tokens; default: all that config.json allows",
        translate={"auto": None, "-1": None},
        low=16,
        high=2**24,
    ),
    row(
        "load_format",
        "str",
        "auto",
        "how weights are read; dummy makes random ones",
        aliases=("load_choices",),
        choices=("auto", "safetensors", "dummy"),
        translate={"default": "auto", "default_v1": "auto"},
    ),
    row("quantization", "str", None, "number format of the weights, by name", short=("-q",)),
    row(
        "weight_cache",
        "str",
        None,
        "folder where weights are kept as the device lays them out, for faster starts",
    ),
    row(
        "seed",
        "int",
        0,
        "seed of random weights and of requests without one",
        low=0,
        high=2**63 - 1,
    ),
    row("chat_template", "str", None, "a Jinja chat template, or the path of one"),
    row(
        "trust_special_tokens",
        "bool",
        False,
        "special tokens in the text of messages act as such, instead of being plain text",
    ),
    row(
        "generation_config",
        "str",
        "auto",
        "default sampling parameters: the model's own file (auto), none, or the folder of one",
        translate={"vllm": "none"},
    ),
    row("override_generation_config", "json", None, "default sampling parameters, as JSON"),
    row("hf_overrides", "json", None, "values that replace those of config.json, as JSON"),
    row(
        "max_logprobs",
        "int",
        20,
        "most alternatives a request may ask for; -1: all",
        low=-1,
        high=2**20,
    ),
    row(
        "logprobs_mode",
        "str",
        "raw_logprobs",
        "what logprobs are taken from",
        choices=("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"),
    ),
    row("logits_processors", "list", None, "logits processors to load, by name, in this order"),
    row(
        "speculative_config",
        "json",
        None,
        "speculative decoding: method, num_speculative_tokens and the method's own options",
    ),
)

_CACHE = group(
    "KV cache",
    "engine",
    row("block_size", "int", 64, "tokens in one block of the KV cache", low=1, high=1024),
    row(
        "num_gpu_blocks_override",
        "int",
        None,
        "number of KV blocks; default: what fits in memory",
        aliases=("num_blocks_override", "num_kv_blocks"),
        low=1,
        high=2**31,
    ),
    row(
        "gpu_memory_utilization",
        "float",
        0.9,
        "share of the device's memory this server may use",
        aliases=("memory_utilization",),
        low=0.01,
        high=1.0,
    ),
    row(
        "kv_cache_memory_bytes",
        "int",
        None,
        "bytes for KV blocks; overrides --gpu-memory-utilization",
        aliases=("kv_cache_memory",),
        low=1,
        high=2**50,
    ),
    row(
        "swap_space",
        "float",
        0.0,
        "GiB of host memory for KV blocks that left the device; with --kv-store 1 by default",
        low=0.0,
        high=2**20,
    ),
    row("enable_prefix_caching", "bool", True, "reuse the KV blocks of equal prompt beginnings"),
    row(
        "enable_output_caching",
        "bool",
        True,
        "let generated tokens be reused as a prompt beginning too",
    ),
    row("kv_cache_dtype", "str", "auto", "number format of the KV cache"),
    row("kv_store", "str", "", "driver that keeps KV blocks outside the engine, such as disk"),
    row("kv_store_config", "json", None, "its options, such as --kv-store-config.path"),
    row("kv_store_timeout", "float", 5.0, "seconds to wait for its blocks", low=0.001, high=3600),
)

_BATCH = group(
    "batching",
    "engine",
    row("max_num_seqs", "int", 32, "most sequences in one step", low=1, high=65536),
    row(
        "max_num_batched_tokens",
        "int",
        None,
        "most tokens in one step; default: 2048, or --max-model-len without chunked prefill",
        low=1,
        high=2**24,
    ),
    row(
        "enable_chunked_prefill",
        "bool",
        True,
        "split long prompts over steps, beside decoding sequences",
    ),
    row(
        "max_num_partial_prefills",
        "int",
        1,
        "prompts that may be split at the same time",
        low=1,
        high=65536,
    ),
    row("max_long_partial_prefills", "int", 1, "of these, how many may be long", low=1, high=65536),
    row(
        "long_prefill_token_threshold",
        "int",
        0,
        "a prompt above this length is long, and cut into chunks of at most this size; 0: 4 %% of "
        "--max-model-len when several prompts may be cut at a time, else none is",
        low=0,
        high=2**24,
    ),
    row(
        "scheduling_policy",
        "str",
        "fcfs",
        "order of waiting requests",
        choices=("fcfs", "priority"),
    ),
    row(
        "async_scheduling",
        "bool",
        True,
        "schedule the next step while one executes",
        aliases=("enable_overlap_schedule", "overlap"),
    ),
)

_DEVICE = group(
    "device",
    "engine",
    row("device", "str", "", "device driver by name; default: the best that answers"),
    row("tensor_library", "str", "", "paddle or torch; default: what the device driver names"),
    row("attention_backend", "str", "", "attention driver by name; default: negotiated"),
    row("moe_backend", "str", "", "MoE driver by name; default: negotiated"),
    row(
        "num_threads",
        "int",
        0,
        "threads a host device may use; 0: all",
        low=0,
        high=4096,
        aliases=("cpu_threads",),
    ),
    row(
        "fallback",
        "bool",
        True,
        "use the reference operation where a device has no kernel of its own",
    ),
    row(
        "tensor_parallel_size",
        "int",
        1,
        "ranks one layer is split over",
        aliases=("tp_size",),
        short=("-tp",),
        low=1,
        high=1024,
    ),
    row(
        "data_parallel_size",
        "int",
        1,
        "engines behind the port, each with devices (or processors), weights and a KV cache of its "
        "own",
        aliases=("dp_size",),
        short=("-dp",),
        low=1,
        high=64,
    ),
    row(
        "enable_expert_parallel",
        "bool",
        False,
        "ranks hold whole experts instead of a share of each",
    ),
    row(
        "expert_communicator",
        "str",
        "",
        "carries tokens to divided experts in steps with prompts, by name, or auto; default: none, "
        "results are summed over ranks",
    ),
)

_SCHEDULER = group(
    "request scheduler",
    "engine",
    row("scheduler_name", "str", "local", "request scheduler by name"),
    row(
        "scheduler_max_size",
        "int",
        1024,
        "most waiting requests, one more is answered with 429; 0 or -1: unbounded",
        aliases=("max_num_queued_reqs",),
        low=-1,
        high=2**31,
    ),
    row(
        "max_num_queued_tokens",
        "int",
        0,
        "most waiting prompt tokens; 0: unbounded",
        low=0,
        high=2**40,
    ),
    row("scheduler_ttl", "float", 900.0, "seconds a request may wait", low=0.001, high=1e9),
    row(
        "scheduler_lease",
        "float",
        10.0,
        "seconds an instance may be silent before a shared queue gives its requests to another",
        low=0.001,
        high=1e6,
    ),
    row("scheduler_instance", "str", "", "name of this instance"),
    row(
        "scheduler_config",
        "json",
        None,
        "options of the scheduler plugin, such as --scheduler-config.host",
    ),
)

_MEDIA = group(
    "pictures",
    "engine",
    row(
        "limit_mm_per_prompt",
        "json",
        None,
        'most pictures of a prompt, such as {"image": 4}; 0: none; default: as the plugin says',
    ),
    row("allowed_media_domains", "list", None, "hosts that image URLs may name; default: none"),
    row(
        "allowed_local_media_path",
        "str",
        None,
        "folder below which file: URLs may be read; default: none may",
    ),
    row(
        "max_encoder_cache",
        "int",
        16384,
        "vectors of pictures that a device keeps for later requests",
        low=0,
        high=2**31,
    ),
    row(
        "max_encode_tokens",
        "int",
        0,
        "vectors of pictures made in one step, at least one picture; 0: a quarter of "
        "--max-num-batched-tokens",
        low=0,
        high=2**24,
    ),
)

# FastDeploy 2.x spells parts of --scheduler-config out. Their values stay as written: only the
# driver that declares a part knows its type, and refuses what it does not declare.
PART_SPELLINGS: dict[str, tuple[str, str]] = {
    f"scheduler_{part}": ("scheduler_config", part)
    for part in (
        "host",
        "port",
        "db",
        "password",
        "topic",
        "min_load_score",
        "load_shards_num",
        "sync_period",
    )
}

_STRUCTURED = group(
    "structured output",
    "engine",
    row(
        "guided_decoding_backend",
        "str",
        "auto",
        "grammar backend by name; auto: the one installed, off: none",
        aliases=("structured_outputs_backend",),
        translate={"guidance": "llguidance"},
    ),
    row(
        "guided_decoding_disable_any_whitespace",
        "bool",
        False,
        "allow no optional white space in constrained JSON",
        aliases=("structured_outputs_disable_any_whitespace",),
    ),
    row(
        "structured_outputs_config",
        "json",
        None,
        "backend, disable_any_whitespace, compile_timeout_s, max_source_bytes, max_depth",
    ),
)

_WATCHDOG = group(
    "watchdog",
    "engine",
    row(
        "progress_timeout",
        "float",
        30.0,
        "seconds without progress after which the engine counts as hung",
        low=0.1,
        high=1e6,
    ),
    row(
        "startup_timeout", "float", 600.0, "seconds an engine may take to start", low=0.1, high=1e6
    ),
    row(
        "max_restarts",
        "int",
        3,
        "times a dead engine process is started again within ten minutes",
        low=0,
        high=1000,
    ),
)

_SERVER = group(
    "server",
    "server",
    row(
        "host",
        "str",
        None,
        "address to listen on; default: 127.0.0.1, with an API key 0.0.0.0",
    ),
    row("port", "int", 8180, "port to listen on", low=0, high=65535),
    row("uds", "str", None, "listen on this unix socket instead"),
    row("root_path", "str", "", "path prefix a proxy strips"),
    row(
        "api_key",
        "list",
        None,
        "a key clients must send; may be repeated; also FD_API_KEY (comma list), VLLM_API_KEY",
        aliases=("api_keys",),
        repeatable=True,
        secret=True,
    ),
    row(
        "share_prefix_cache",
        "bool",
        False,
        "cached prefixes serve all keys; times then show a key what others have asked",
    ),
    row(
        "allowed_hosts",
        "list",
        None,
        "Host headers that are answered; default: all",
        aliases=("allowed_host",),
    ),
    row(
        "allowed_origins", "json", None, "origins browsers may call from (JSON list); default: none"
    ),
    row("ssl_keyfile", "str", None, "private key file for TLS"),
    row("ssl_certfile", "str", None, "certificate file for TLS"),
    row(
        "api_server_count",
        "int",
        1,
        "API server processes of the port; they share its engines",
        low=1,
        high=64,
        aliases=("workers",),
    ),
    row(
        "max_concurrency",
        "int",
        512,
        "requests in flight; one more is answered with 429",
        low=1,
        high=2**20,
    ),
    row("max_body_bytes", "int", 8 * 2**20, "largest request body", low=1024, high=2**32),
    row(
        "body_timeout",
        "float",
        30.0,
        "seconds a client may take to send a body",
        low=0.1,
        high=3600.0,
    ),
    row("keep_alive", "float", 75.0, "seconds an idle connection stays open", low=0.1, high=3600.0),
    row(
        "stream_stall_timeout",
        "float",
        30.0,
        "seconds a streaming client may stop reading",
        low=0.1,
        high=3600.0,
    ),
    row("request_timeout", "float", None, "seconds a request may take in all", low=0.001, high=1e6),
    row(
        "timeout_graceful_shutdown",
        "float",
        30.0,
        "seconds requests in flight may still take after SIGTERM",
        aliases=("shutdown_timeout",),
        low=0.0,
        high=1e6,
    ),
)

_API = group(
    "API",
    "server",
    row("reasoning_parser", "str", "", "parser that splits thinking from the answer"),
    row("tool_call_parser", "str", "", "parser that finds tool calls"),
    row(
        "default_chat_template_kwargs",
        "json",
        None,
        "values for the chat template unless a request gives them",
    ),
    row(
        "trust_request_chat_template",
        "bool",
        False,
        "let a request bring its own chat template (rendered in a killable process)",
    ),
    row("response_role", "str", "assistant", "role of answers"),
    row("return_tokens_as_token_ids", "bool", False, "write tokens of logprobs as token_id:N"),
    row(
        "stream_interval",
        "int",
        1,
        "tokens that a chunk of a stream waits for, unless the request says how many",
        low=1,
        high=4096,
    ),
    row("enable_force_include_usage", "bool", False, "put usage into every stream"),
    row("tokenizer_threads", "int", 2, "threads for tokenizing and templates", low=1, high=64),
)

_LOGS = group(
    "logging",
    "server",
    row(
        "log_level",
        "str",
        "info",
        "lowest level that is logged",
        aliases=("uvicorn_log_level",),
        choices=("debug", "info", "warning", "error"),
        translate={"critical": "error", "trace": "debug"},
    ),
    row(
        "enable_log_requests",
        "bool",
        False,
        "one line for each request (sizes only, never its text)",
    ),
    row(
        "log_stats",
        "bool",
        True,
        "a line with load and tokens per second at intervals",
        negative=("disable_log_stats",),
    ),
    row("stats_interval", "float", 10.0, "seconds between these lines", low=0.1, high=86400.0),
)

ENGINE_ROWS: tuple[Argument, ...] = (
    *_MODEL,
    *_CACHE,
    *_BATCH,
    *_DEVICE,
    *_SCHEDULER,
    *_MEDIA,
    *_STRUCTURED,
    *_WATCHDOG,
)
SERVER_ROWS: tuple[Argument, ...] = (*_SERVER, *_API, *_LOGS)
