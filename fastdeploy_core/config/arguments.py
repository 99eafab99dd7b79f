"""Arguments to configurations: the one way from names and values to frozen records.

The command line and `LLM(**kwargs)` both come here, so an argument means the same in both, an
unknown one is refused with the nearest valid name, and cross-field rules are checked once.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from fastdeploy_core import envs
from fastdeploy_core.errors import ConfigError

from .argument_table import Argument
from .argument_values import ARGUMENTS, normalise, of_scope, rows_of, with_defaults
from .engine import (
    BatchConfig,
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    HandoverConfig,
    KVEventsConfig,
    LoRAConfig,
    MediaConfig,
    ModelConfig,
    ParallelConfig,
    RequestSchedulerConfig,
    StructuredOutputsConfig,
    WatchdogConfig,
)
from .graphs import read_graphs
from .model import MODEL_SETTINGS, FindModel, find_folder, read_model_config
from .server import ServerConfig
from .speculative import read_speculative

__all__ = [
    "ARGUMENTS",
    "Argument",
    "build_engine_config",
    "build_server_config",
    "normalise",
    "of_scope",
    "rows_of",
    "with_defaults",
]

DEFAULT_BATCHED_TOKENS = 2048

T = TypeVar("T")


def _record(kind: type[T], v: Mapping[str, Any], **given: Any) -> T:
    """A record of the arguments that are fields under their own name, and of what is given."""
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    own = {name: v[name] for name in names if name in v and name not in given}
    frozen = {name: tuple(x) if isinstance(x, list) else x for name, x in own.items()}
    return kind(**frozen, **given)


def build_engine_config(values: Mapping[str, Any], find: FindModel = find_folder) -> EngineConfig:
    """The engine's configuration from arguments under any known spelling. `find`: see
    read_model_config.

    Raises ConfigError for unknown, refused or server-only names, wrong types, values out of range,
    a model folder that is missing, and settings that contradict each other.
    """
    values = normalise(values)
    for name in values:
        if ARGUMENTS[name].scope != "engine":
            raise ConfigError(f"{name} is an argument of the server, not of the engine")
    v = with_defaults(values)
    limits = _media_limits(v)
    v["language_model_only"] |= (limits.get("image"), limits.get("video")) == (0, 0)
    if v["language_model_only"]:  # families build no tower where config.json describes none
        v["hf_overrides"] = {**_mapping(v, "hf_overrides"), "vision_config": None}
    if asked := _mapping(v, "mm_processor_kwargs"):  # families that see read it there
        v["hf_overrides"] = {**_mapping(v, "hf_overrides"), "mm_processor_kwargs": asked}
    model = _model_config(v, find)
    v |= model.hf_config.get("engine_arguments", {})  # see contracts.small.PoolingLM
    return _record(
        EngineConfig,
        v,
        model=model,
        cache=_cache_config(v),
        handover=_handover_config(v),
        batch=_batch_config(v, model.max_model_len),
        parallel=_parallel_config(v),
        device=_record(DeviceConfig, v, allow_fallback=v["fallback"]),
        graphs=read_graphs(v),
        request_scheduler=_scheduler_config(v),
        structured_outputs=_structured_config(v),
        media=_media_config(v),
        lora=_record(LoRAConfig, v) if v["enable_lora"] or v["lora_modules"] else None,
        rollout=v["enable_rollout"] or v["enable_return_routed_experts"],
        routes=v["enable_return_routed_experts"],
        speculative=read_speculative(_mapping(v, "speculative_config"), v["tensor_parallel_size"]),
        watchdog=_record(
            WatchdogConfig,
            v,
            progress_timeout_s=v["progress_timeout"],
            startup_timeout_s=v["startup_timeout"],
        ),
    )


def _media_limits(v: Mapping[str, Any]) -> dict[str, Any]:
    """How many of a kind a prompt may have. vLLM's {"count": 2, "width": 512, ...} counts, too; its
    sizes are for measuring memory, of which pictures get their share here."""
    given = _mapping(v, "limit_mm_per_prompt")
    return {k: m.get("count", m) if isinstance(m, Mapping) else m for k, m in given.items()}


def _media_config(v: Mapping[str, Any]) -> MediaConfig:
    limits = _media_limits(v)
    for kind, most in limits.items():
        if type(most) is not int or most < 0 or (most and kind not in ("image", "video")):
            raise ConfigError(
                f"--limit-mm-per-prompt has {kind!r}: {most!r:.40}; expected image or video with a "
                'number, such as {"image": 4}'
            )
    folder = v["allowed_local_media_path"]
    if folder is not None and not Path(folder).is_dir():
        raise ConfigError(f"--allowed-local-media-path {folder!r} is not a folder on this machine")
    path = None if folder is None else Path(folder)
    return _record(MediaConfig, v, limit_mm_per_prompt=limits, allowed_local_media_path=path)


def _parallel_config(v: Mapping[str, Any]) -> ParallelConfig:
    if v["expert_communicator"] and not v["enable_expert_parallel"]:
        raise ConfigError(
            f"--expert-communicator {v['expert_communicator']} needs --enable-expert-parallel: "
            "without it every rank has a share of every expert"
        )
    eplb = _mapping(v, "eplb_config") if v["enable_eplb"] or v["eplb_config"] else None
    if eplb is not None and (not v["enable_expert_parallel"] or v["weight_cache"]):
        raise ConfigError("--enable-eplb needs --enable-expert-parallel, without --weight-cache")
    return _record(ParallelConfig, v, eplb=eplb)


def _model_config(v: Mapping[str, Any], find: FindModel) -> ModelConfig:
    if not v["model"]:
        raise ConfigError("no model given; name a folder: `fastdeploy serve DIR` or --model DIR")
    return read_model_config(
        v["model"],
        {
            **{name: v[name] for name in MODEL_SETTINGS & v.keys()},
            "tokenizer_path": v["tokenizer"],
            "served_names": tuple(v["served_model_name"] or ()),
            "override_generation_config": _mapping(v, "override_generation_config"),
            "hf_overrides": _mapping(v, "hf_overrides"),
            "pooler_config": _mapping(v, "pooler_config"),
            "chat_template": _chat_template(v["chat_template"]),
        },
        find,
    )


def _chat_template(value: str | None) -> str | None:
    """A template's text, read from a file when the value names one."""
    if value is None or "{" in value or "\n" in value:
        return value
    try:
        return Path(value).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--chat-template {value!r} is neither a template nor a readable file: {error.strerror}"
        ) from error


def _mapping(v: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = {} if v[name] is None else v[name]
    if not isinstance(value, Mapping):
        raise ConfigError(f"{ARGUMENTS[name].flag} must be a JSON object, got {value!r:.60}")
    return dict(value)


def _cache_config(v: Mapping[str, Any]) -> CacheConfig:
    if v["enable_output_caching"] and not v["enable_prefix_caching"]:
        v = {**v, "enable_output_caching": False}
    if (v["kv_store"] or _handover_config(v).transport) and not v["swap_space"]:
        v = {**v, "swap_space": 1.0}  # GiB: blocks come and go through the host tier
    return _record(
        CacheConfig,
        v,
        num_blocks_override=v["num_gpu_blocks_override"],
        memory_utilization=v["gpu_memory_utilization"],
        swap_space_bytes=int(v["swap_space"] * 2**30),
        kv_dtype=v["kv_cache_dtype"],
        events=_kv_events(v),
        kv_store_options=_mapping(v, "kv_store_config"),
        kv_store_timeout_s=v["kv_store_timeout"],
    )


def _handover_config(v: Mapping[str, Any]) -> HandoverConfig:
    role = v["splitwise_role"]
    transport = v["kv_transport"] or ("" if role == "mixed" else "auto")
    asked = f"--kv-transport {transport} (--splitwise-role {role})"
    if transport and v["kv_store"]:
        raise ConfigError(f"{asked} and --kv-store exclude each other; leave one of them out")
    if transport and v["data_parallel_size"] > 1:
        raise ConfigError(
            f"{asked} is for one engine: start a server for each, without "
            f"--data-parallel-size {v['data_parallel_size']}"
        )
    address, timeout_s = v["kv_transport_address"], v["kv_transport_timeout"]
    return HandoverConfig(transport, address, role, timeout_s)


def _kv_events(v: Mapping[str, Any]) -> KVEventsConfig | None:
    flag, given = "--kv-events-config", _mapping(v, "kv_events_config")
    events = _from_section(KVEventsConfig, flag, given, {})
    if not events.enable_kv_cache_events or events.publisher == "null":
        return None
    if not events.endpoint.startswith(("tcp://", "ipc://")) or events.publisher != "zmq":
        raise ConfigError(
            f"{flag} needs publisher zmq and an endpoint: tcp://*:5557 for other hosts (whoever "
            "reaches it reads the token ids of prompts), or ipc://PATH for this machine"
        )
    if min(events.buffer_steps, events.hwm) < 1 or not v["enable_prefix_caching"]:
        raise ConfigError(f"{flag} needs the prefix cache, and buffer_steps and hwm above 0")
    return events


def _batch_config(v: Mapping[str, Any], max_model_len: int) -> BatchConfig:
    num_seqs, chunked = v["max_num_seqs"], v["enable_chunked_prefill"]
    tokens = v["max_num_batched_tokens"]
    if tokens is None:
        tokens = max(DEFAULT_BATCHED_TOKENS, num_seqs, v["block_size"])
        if not chunked:
            tokens = max(tokens, max_model_len)
    tokens = min(tokens, max(max_model_len * num_seqs, v["block_size"]))  # no step can have more
    rules = [
        (tokens < num_seqs, f"be at least --max-num-seqs ({num_seqs})"),
        (
            chunked and tokens < v["block_size"],
            f"be at least --block-size ({v['block_size']}) with chunked prefill",
        ),
        (
            not chunked and tokens < max_model_len,
            f"be at least --max-model-len ({max_model_len}) without chunked prefill",
        ),
    ]
    for broken, rule in rules:
        if broken:
            raise ConfigError(f"--max-num-batched-tokens {tokens} must {rule}")
    if v["max_long_partial_prefills"] > v["max_num_partial_prefills"]:
        raise ConfigError(
            f"--max-long-partial-prefills {v['max_long_partial_prefills']} must not exceed "
            f"--max-num-partial-prefills ({v['max_num_partial_prefills']})"
        )
    threshold = v["long_prefill_token_threshold"]
    if threshold > max_model_len:
        raise ConfigError(
            f"--long-prefill-token-threshold {threshold} must not exceed --max-model-len "
            f"({max_model_len})"
        )
    own = {"policy": v["scheduling_policy"], "overlap": v["async_scheduling"]}
    return _record(BatchConfig, v, max_num_batched_tokens=tokens, **own)


def _scheduler_config(v: Mapping[str, Any]) -> RequestSchedulerConfig:
    return RequestSchedulerConfig(
        name=v["scheduler_name"],
        max_size=max(0, v["scheduler_max_size"]),
        max_tokens=v["max_num_queued_tokens"],
        ttl_s=v["scheduler_ttl"],
        lease_s=v["scheduler_lease"],
        instance=v["scheduler_instance"],
        options=_mapping(v, "scheduler_config") or None,
    )


def _from_section(
    section: type[T], flag: str, given: Mapping[str, Any], start: dict[str, Any]
) -> T:
    """A frozen section from its defaults and the JSON given, unknown keys refused."""
    known = {field.name: field for field in fields(section)}  # type: ignore[arg-type]
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"possible: {', '.join(known)}"
            raise ConfigError(f"{flag} has no option {key!r}; {hint}")
    values = {**start, **given}
    for name, value in given.items():
        wanted = type(known[name].default)
        fits = isinstance(value, wanted) or (wanted is float and isinstance(value, int))
        if not fits or (isinstance(value, bool) and wanted is not bool):
            raise ConfigError(f"{flag}.{name} must be of type {wanted.__name__}, got {value!r:.60}")
    return section(**values)


def _structured_config(v: Mapping[str, Any]) -> StructuredOutputsConfig:
    start = {
        "backend": v["guided_decoding_backend"],
        "disable_any_whitespace": v["guided_decoding_disable_any_whitespace"],
    }
    given = _mapping(v, "structured_outputs_config")
    if given.get("backend") == "guidance":  # vLLM's name, as for the flag
        given = {**given, "backend": "llguidance"}
    return _from_section(StructuredOutputsConfig, "--structured-outputs-config", given, start)


def _own_name(asked: str | None, path: Path) -> str:
    """What clients call a model that was given no name: its own where it was downloaded by one."""
    return path.name if asked is None or Path(asked).expanduser().exists() else asked


def build_server_config(
    values: Mapping[str, Any], engine: EngineConfig, environment: Mapping[str, str] | None = None
) -> ServerConfig:
    """The front end's configuration; api keys also come from FD_API_KEY and VLLM_API_KEY."""
    v = with_defaults(values)
    given = [*(v["api_key"] or ())]
    for name in ("FD_API_KEY", "VLLM_API_KEY"):
        given += envs.read(name, environment)
    keys = tuple(dict.fromkeys(key for key in given if key))
    admin_key = v["admin_key"] or envs.read("FD_ADMIN_KEY", environment)
    for key in (*keys, admin_key):
        if key.startswith("sha256:") and not re.fullmatch("sha256:[0-9a-f]{64}", key):
            raise ConfigError("a key sha256:HEX must have 64 digits of 0-9a-f: SHA-256 of the key")
    if bool(v["ssl_keyfile"]) != bool(v["ssl_certfile"]):
        raise ConfigError("--ssl-keyfile and --ssl-certfile go together; give both or none")
    origins = v["allowed_origins"] or []
    if not isinstance(origins, list) or not all(isinstance(o, str) for o in origins):
        raise ConfigError("--allowed-origins must be a JSON list of strings")
    return _record(
        ServerConfig,
        v,
        # without keys only this machine is served, unless the operator says otherwise
        host=v["host"] or ("0.0.0.0" if keys else "127.0.0.1"),  # noqa: S104
        api_keys=keys,
        admin_key=admin_key,
        allowed_origins=tuple(origins),
        served_names=engine.model.served_names or (_own_name(v["model"], engine.model.path),),
        verify_model_name=bool(v["served_model_name"]) or engine.lora is not None,
        body_timeout_s=v["body_timeout"],
        keep_alive_s=v["keep_alive"],
        stream_stall_timeout_s=v["stream_stall_timeout"],
        request_timeout_s=v["request_timeout"],
        grace_s=v["timeout_graceful_shutdown"],
        chat_template=engine.model.chat_template,
        default_chat_template_kwargs=_mapping(v, "default_chat_template_kwargs"),
        default_sampling=engine.model.generation_config,
        force_include_usage=v["enable_force_include_usage"],
        log_requests=v["enable_log_requests"],
        stats_interval_s=v["stats_interval"],
        pooling=engine.model.hf_config.get("pooling", {}),
    )
