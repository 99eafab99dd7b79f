"""Routes over the API: with each whole answer, and taken with a prompt."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from checkpoint import MODEL, PROMPTS
from fd_rollout.experts import decode

from tests.server_process import serving

SHAPE = (7, 2, 8)


def test_routes_are_told_and_taken(fd_tensor: str) -> None:
    options = ("--dtype", "float32", "--tensor-library", fd_tensor, "--max-model-len", "256")
    with (
        serving(MODEL, *options, "--enable-return-routed-experts", "--enforce-eager") as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        fields: dict[str, Any] = {"model": MODEL.name, "max_tokens": 8, "temperature": 0}
        more = {"return_token_ids": True, "ignore_eos": True}
        made = client.completions.create(prompt=PROMPTS[0], **fields, extra_body=more)
        choice = made.choices[0]
        routes = decode(choice.routed_experts, *SHAPE)
        assert len(routes) == len(PROMPTS[0]) + 7 and routes[:, :-1].min() >= 0
        scored = client.completions.create(
            prompt=[*PROMPTS[0], *choice.token_ids],
            **{**fields, "max_tokens": 1},
            extra_body={"routed_experts": choice.routed_experts, "prompt_logprobs": 0},
        )
        told = decode(scored.choices[0].routed_experts, *SHAPE)[: len(routes)]
        assert (told[routes >= 0] == routes[routes >= 0]).all()
        asked = [{"role": "user", "content": "Where is the capital of China?"}]
        chat = client.chat.completions.create(messages=asked, **fields)
        assert len(decode(chat.choices[0].routed_experts, *SHAPE)) == chat.usage.total_tokens - 1
        with pytest.raises(openai.BadRequestError, match="base64"):
            client.completions.create(prompt="a", **fields, extra_body={"routed_experts": "%%"})
