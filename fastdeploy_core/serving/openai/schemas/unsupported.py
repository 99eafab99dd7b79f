"""Known request fields that this server does not honour: refused, or without effect.

docs/reference/api.md shows these tables; a test compares them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastdeploy_core.errors import InvalidRequest

_INTERNAL = "is for servers talking to each other and is not taken from clients"
_TEXT_ONLY = "is not supported; only text models are served"

# Answered with 400, unless the value asks for what happens anyway.
REFUSED: dict[str, str] = {
    "audio": _TEXT_ONLY,
    "collect_metrics": "is not supported; see GET /metrics",
    "completion_token_ids": _INTERNAL,
    "disaggregate_info": _INTERNAL,
    "early_stopping": "belongs to beam search, which is not supported",
    "function_call": "is the old form; use tool_choice",
    "functions": "is the old form; use tools",
    "guided_decoding_backend": "is chosen by the server's --guided-decoding-backend",
    "guided_whitespace_pattern": "is not supported; the server has "
    "--guided-decoding-disable-any-whitespace",
    "include_draft_logprobs": "is not supported",
    "include_logprobs_decode_token": "cannot be turned off; return_tokens_as_token_ids shows ids",
    "kv_transfer_params": _INTERNAL,
    "length_penalty": "belongs to beam search, which is not supported",
    "logits_processors": "cannot be sent; the server loads them with --logits-processors",
    "logprob_token_ids": "is not supported; use logprobs with top_logprobs",
    "media_io_kwargs": _TEXT_ONLY,
    "mm_hashes": _TEXT_ONLY,
    "mm_processor_kwargs": _TEXT_ONLY,
    "modalities": _TEXT_ONLY,
    "prediction": "is not supported; speculation is the server's choice",
    "prompt_embeds": "is not supported; send text or token ids",
    "repetition_detection": "is not supported; use repetition_penalty or frequency_penalty",
    "response_max_tokens": "is not supported; use max_completion_tokens",
    "return_prompt_text": "is not supported; use return_token_ids with /detokenize",
    "session_id": "is for routers; requests with a common prefix share the cache by themselves",
    "temp_scaled_logprobs": "is not a request's choice; the server has --logprobs-mode",
    "top_p_normalized_logprobs": "is not a request's choice; the server has --logprobs-mode",
    "trace_context": "is not supported; traces are not exported",
    "use_beam_search": "is not supported; sample with n > 1",
    "verbosity": "is not supported; say it in the prompt",
    "vllm_xargs": "is not supported; use logits_processors_args",
    "web_search_options": "is not supported; give the model a tool",
}
# OpenAI's clients always send these; answers do not depend on them.
NO_EFFECT: dict[str, str] = {
    "metadata": "labels of the client; in chat, `enable_thinking` and `thinking_mode` in it go to "
    "the chat template, as FastDeploy 2.x did",
    "prompt_cache_key": "prefixes are found by their content",
    "prompt_cache_retention": "cached prefixes live until their blocks are needed",
    "safety_identifier": "nothing is kept about users",
    "service_tier": "there is one tier; see `priority`",
    "store": "nothing is stored",
    "user": "nothing is kept about users",
}
_HARMLESS: tuple[Any, ...] = (None, False, [], {})
_DEFAULTS: dict[str, Any] = {
    "function_call": "none",
    "include_logprobs_decode_token": True,
    "length_penalty": 1.0,
    "modalities": ["text"],
    "verbosity": "medium",
}


def refuse_unsupported(body: Mapping[str, Any]) -> None:
    """InvalidRequest for a field that asks for something this server does not do."""
    for name in sorted(body.keys() & REFUSED.keys()):
        value = body[name]
        if name in _DEFAULTS and value == _DEFAULTS[name]:
            continue
        # False asks for nothing, unless the default is True.
        if value is None or (value in _HARMLESS and _DEFAULTS.get(name) is not True):
            continue
        raise InvalidRequest(f"{name} {REFUSED[name]}", param=name)
