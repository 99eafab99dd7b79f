"""Arguments FastDeploy 2.x or vLLM know and this project refuses, each with the reason.

A refused argument still passes with a value listed in `harmless`: it asks for what happens anyway.
`ALWAYS` holds switches for what cannot be turned off here; giving them is allowed and changes
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Refused:
    """Why a known argument is not taken."""

    reason: str
    harmless: tuple[str, ...] = ()
    takes_value: bool = True


_LOCAL_ONLY = "models are read from a local folder and nothing is downloaded; give the folder"
_NO_PORT = "processes talk over sockets in a private folder; there is no such port"
_MULTIMODAL = "models answer with text; which take pictures is their plugin's to say"
_ROLES = "instances have no roles: fastdeploy router --prefill URL sends prompts to some of them"
_NO_READERS = "output goes to front ends directly; nothing reads or writes it in Redis"
_WARMUP = (
    "steps are warmed up at start-up when they are captured: --enforce-eager, --graph-capture-sizes"
)
_EXPERTS = "experts stay where they are: --enable-expert-parallel, --expert-communicator"
_NO_LORA = "LoRA adapters are not part of this version"
_ONE_COMMAND = "one command starts all engines, on this machine: --data-parallel-size"
_ENTRY_POINT = "parsers are found through entry points: install the plugin and name it with --{}"
_DECLARED = "block lifetimes need no tuning here"


def _many(
    reason: str, *names: str, takes_value: bool = True, harmless: tuple[str, ...] = ()
) -> dict[str, Refused]:
    return {name: Refused(reason, harmless, takes_value) for name in names}


REFUSED: dict[str, Refused] = {
    **_many(_LOCAL_ONLY, "revision", harmless=("master", "main")),
    **_many(_LOCAL_ONLY, "download_dir", "tokenizer_revision", "code_revision", "hf_token",
        "hf_config_path"),
    **_many("configuration is always read from config.json", "model_config_name",
        harmless=("config.json",)),
    **_many("code from a model folder is never run", "trust_remote_code", takes_value=False),
    **_many("the tokenizer runs in the server process", "tokenizer_base_url"),
    **_many("tokenizer.json is always used", "tokenizer_mode", harmless=("auto",)),
    **_many("requests need a tokenizer", "skip_tokenizer_init", takes_value=False),
    **_many("only text generation is served", "task", "runner", harmless=("auto", "generate")),
    **_many("only text generation is served", "convert", harmless=("auto", "none")),
    **_many("only text generation is served", "override_pooler_config", "pooler_config"),
    **_many("the model's own files say how pictures are prepared", "mm_processor_kwargs",
        "media_io_kwargs"),
    **_many("prepared pictures are not kept", "max_processor_cache", harmless=("0", "-1")),
    **_many(_MULTIMODAL, "deploy_modality", harmless=("text", "mixed")),
    **_many(_MULTIMODAL, "enable_mm_output", takes_value=False),
    **_many("a picture is encoded once however its prompt is cut", "disable_chunked_mm_input",
        takes_value=False),
    **_many("weights are loaded once", "dynamic_load_weight", takes_value=False),
    **_many("weights are loaded once", "load_strategy", harmless=("normal",)),
    **_many("weights are loaded once", "rsync_config"),
    **_many(_NO_PORT, "engine_worker_queue_port", "cache_queue_port", "pd_comm_port",
        "rdma_comm_ports", "controller_port", "innode_prefill_ports"),
    **_many("metrics are at /metrics of the API port, under the same keys", "metrics_port"),
    **_many("the watchdog covers this: --progress-timeout", "timeout", harmless=("0",)),
    **_many("a full queue is answered at once; --scheduler-ttl limits waiting", "max_waiting_time",
        harmless=("-1",)),
    **_many(_WARMUP, "use_warmup", harmless=("0", "1")),
    **_many("sparse attention is chosen by an attention driver: --attention-backend",
        "plas_attention_config", "moba_attention_config"),
    **_many("sampling masks are not returned", "enable_keep_sampling_mask", takes_value=False),
    **_many("token entropy is not computed", "enable_entropy", takes_value=False),
    **_many("repetition stops are not part of this version", "enable_early_stop",
        takes_value=False),
    **_many("repetition stops are not part of this version", "early_stop_config"),
    **_many("logits are always float32", "lm_head_fp32", takes_value=False),
    **_many("there is one model implementation", "model_impl", harmless=("auto", "fastdeploy")),
    **_many(_ONE_COMMAND, "data_parallel_size_local", harmless=("1",)),
    **_many(_ONE_COMMAND, "local_data_parallel_id", "data_parallel_rank",
        "data_parallel_start_rank", harmless=("0",)),
    **_many(_ONE_COMMAND, "data_parallel_address", "data_parallel_rpc_port"),
    **_many(_ONE_COMMAND, "data_parallel_backend", harmless=("mp",)),
    **_many("one place of this server chooses an engine for each request",
        "data_parallel_hybrid_lb", "data_parallel_external_lb", takes_value=False),
    **_many("pipeline parallelism is not part of this version", "pipeline_parallel_size", "pp_size",
        harmless=("1",)),
    **_many("context parallelism is not part of this version", "decode_context_parallel_size",
        "prefill_context_parallel_size", harmless=("1",)),
    **_many("ranks run on one machine in this version", "ips", "nnodes", "node_rank", "master_addr",
        "master_port"),
    **_many("worker processes are started by the engine", "distributed_executor_backend",
        harmless=("mp",)),
    **_many(_EXPERTS, "enable_eplb", "enable_chunked_moe", "ep_prefill_use_worst_num_tokens",
        "use_internode_ll_two_stage", "disable_sequence_parallel_moe", takes_value=False),
    **_many(_EXPERTS, "eplb_config", "chunked_moe_size", "routing_replay_config"),
    **_many("collectives belong to the device driver", "disable_custom_all_reduce",
        "enable_flashinfer_allreduce_fusion", "shutdown_comm_group_if_worker_idle",
        takes_value=False),
    **_many("all of the pool serves prefill and decode alike", "kv_cache_ratio", harmless=("1",
        "1.0")),
    **_many(_DECLARED, "prealloc_dec_block_slot_num_threshold", "static_decode_blocks"),
    **_many("--kv-store says where KV blocks are kept, such as disk", "kvcache_storage_backend",
        "kv_transfer_config", "kv_events_config", "write_policy"),
    **_many(_ROLES, "splitwise_role", harmless=("mixed",)),
    **_many(_ROLES, "cache_transfer_protocol", "router"),
    **_many("an instance that was silent for --scheduler-lease seconds is dead, and its load is "
        "released at once", "scheduler_expire_period", "scheduler_release_load_expire_period"),
    **_many(_NO_READERS, "scheduler_reader_parallel", "scheduler_writer_parallel",
        "scheduler_reader_batch_size", "scheduler_writer_batch_size"),
    **_many("schedulers are found through entry points: --scheduler-name", "scheduler_cls"),
    **_many("workers are not replaceable; write a device driver", "worker_cls",
        "worker_extension_cls"),
    **_many(_ENTRY_POINT.format("tool-call-parser"), "tool_parser_plugin"),
    **_many(_ENTRY_POINT.format("reasoning-parser"), "reasoning_parser_plugin"),
    **_many(_NO_LORA, "enable_lora", takes_value=False),
    **_many(_NO_LORA, "lora_modules", "max_loras", "max_lora_rank"),
    **_many("weights stay on the device", "cpu_offload_gb", harmless=("0",)),
    **_many("plugins have their own sections", "additional_config"),
    **_many("middleware cannot be injected; a plugin may add routes", "middleware"),
    **_many("text and tool parts are told apart by themselves", "chat_template_content_format",
        harmless=("auto", "string")),
    **_many("comments are not sent into streams", "sse_keep_alive_interval", harmless=("0",)),
    **_many("traces are not exported", "otlp_traces_endpoint"),
    **_many("the engine cannot sleep", "enable_sleep_mode", takes_value=False),
    **_many("no renamed metrics exist yet", "show_hidden_metrics_for_version"),
}  # fmt: skip

# Switches for what always happens here. Their --no- form asks for something impossible and is
# refused.
ALWAYS: dict[str, str] = {
    "enable_mm": "a model whose plugin takes pictures is given them",
    "enable_logprob": "log-probabilities are always available",
    "enable_auto_tool_choice": "tool_choice auto works whenever --tool-call-parser is set",
    "enable_request_id_headers": "X-Request-Id is always answered",
    "enable_prompt_tokens_details": "cached tokens are always reported",
    "enable_server_load_tracking": "/load always answers",
    "disable_fastapi_docs": "no documentation pages are served",
    "disable_log_requests": "requests are logged only with --enable-log-requests",
}
