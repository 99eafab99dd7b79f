"""The argument table, server rows: listening, limits, API behaviour, logging."""

from __future__ import annotations

from .argument_table import Argument, group, row

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
        "API server processes of the port; they share one engine",
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

SERVER_ROWS: tuple[Argument, ...] = (*_SERVER, *_API, *_LOGS)
