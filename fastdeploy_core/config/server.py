"""Configuration of the HTTP front end: frozen, validated where it is built, never changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Everything the API server needs to know beyond the engine's own configuration."""

    host: str = "127.0.0.1"
    port: int = 8180
    uds: str | None = None
    root_path: str = ""
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    admin_key: str = field(default="", repr=False)  # empty: there are no routes for operators
    api_key_limits: str = ""  # a file, read by fd-key-limits
    allowed_hosts: tuple[str, ...] = ()  # empty: any Host header
    allowed_origins: tuple[str, ...] = ()  # empty: no CORS headers at all
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    served_names: tuple[str, ...] = ()
    verify_model_name: bool = False  # True when names were given: any other name is answered 404
    api_server_count: int = 1  # processes; they share the port and its engines
    max_concurrency: int = 512  # of all API servers together
    max_body_bytes: int = 8 * 2**20
    body_timeout_s: float = 30.0
    keep_alive_s: float = 900.0  # longer than an agent's tool runs, so that none is closed in use
    stream_stall_timeout_s: float = 30.0
    request_timeout_s: float | None = None
    grace_s: float = 30.0
    reasoning_parser: str = ""
    tool_call_parser: str = ""
    chat_template: str | None = None
    default_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    trust_request_chat_template: bool = False
    share_prefix_cache: bool = False  # between keys; else a key sees only its own prefixes
    default_sampling: Mapping[str, Any] = field(default_factory=dict)  # from generation_config.json
    response_role: str = "assistant"
    return_tokens_as_token_ids: bool = False
    stream_interval: int = 1  # tokens per chunk, unless the request says otherwise
    force_include_usage: bool = False
    enable_per_request_metrics: bool = False
    log_requests: bool = False
    log_stats: bool = True
    stats_interval_s: float = 10.0
    tokenizer_threads: int = 2
    pooling: Mapping[str, Any] = field(default_factory=dict)  # see contracts.small.PoolingLM
