"""`LLM.beam_search`: the search for many prompts at once, each step one batch of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from fastdeploy_core.api.inputs import Prompts, normalise_prompts, one_each
from fastdeploy_core.errors import InvalidRequest
from fastdeploy_core.types import Logprob, LoRARequest, RequestOutput, SamplingParams

from .params import BeamSearchOutput, BeamSearchParams, BeamSearchSequence, check_mode
from .search import BeamSearch, Finished

if TYPE_CHECKING:
    from fastdeploy_core.api.llm import LLM

Said = dict[int, Logprob]


def beam_search(
    llm: LLM,
    prompts: Prompts,
    params: BeamSearchParams,
    lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    use_tqdm: bool = False,
) -> list[BeamSearchOutput]:
    """Part `beam-llm`: the `params.beam_width` likeliest continuations of each prompt, best first.
    prompts, lora_request: as generate's, but for pictures."""
    check_mode(llm.config.logprobs_mode)
    given = normalise_prompts(prompts)
    if any(prompt.media for prompt in given):
        raise InvalidRequest("beam search takes prompts without pictures", param="prompts")
    token_ids = [
        llm.get_tokenizer().encode(prompt.text or "", prompt.add_special_tokens)
        if prompt.token_ids is None
        else list(prompt.token_ids)
        for prompt in given
    ]
    adapters = one_each("lora_request", lora_request, len(given))
    searches = [_search_of(llm, ids, params) for ids in token_ids]
    while open_ones := [i for i, search in enumerate(searches) if not search.is_done]:
        rows = [(i, beam) for i in open_ones for beam in searches[i].running]
        asked = SamplingParams(
            max_tokens=1,
            ignore_eos=True,
            logprobs=searches[open_ones[0]].num_asked,
            seed=0,
            detokenize=False,
        )
        answers = cast(
            "list[RequestOutput]",
            llm.generate(
                [{"prompt_token_ids": [*token_ids[i], *beam.token_ids]} for i, beam in rows],
                asked,
                use_tqdm,
                lora_request=[adapters[i] for i, _ in rows],
            ),
        )
        for i in open_ones:
            own = [answer for (j, _), answer in zip(rows, answers, strict=True) if j == i]
            searches[i].take([_likeliest(answer) for answer in own])
    return [
        BeamSearchOutput([_shown(llm, ids, one, params) for one in search.finished])
        for ids, search in zip(token_ids, searches, strict=True)
    ]


def _search_of(llm: LLM, token_ids: list[int], params: BeamSearchParams) -> BeamSearch[Said]:
    room = llm._limits.max_model_len - len(token_ids)
    stop_ids = {*(() if params.ignore_eos else llm._limits.eos_token_ids)}
    return BeamSearch(
        params.beam_width,
        max(1, min(params.max_tokens, room)),
        frozenset(stop_ids | {*(params.stop_token_ids or ())}),
        params.length_penalty,
        params.early_stopping,
    )


def _likeliest(answer: RequestOutput) -> list[tuple[int, float, Said]]:
    if answer.error is not None:
        raise RuntimeError(f"beam search cannot go on: {answer.error}")
    (position,) = answer.outputs[0].logprobs or []
    ranked = sorted(position.items(), key=lambda item: -item[1].logprob)
    return [(token, value.logprob, {token: value}) for token, value in ranked]


def _shown(
    llm: LLM, prompt: list[int], one: Finished[Said], params: BeamSearchParams
) -> BeamSearchSequence:
    tokens = [*prompt, *one.beam.token_ids]
    shown = tokens
    if one.stop_id is not None and not params.include_stop_str_in_output:
        shown = tokens[:-1]
    is_eos = one.stop_id is None or one.stop_id in llm._limits.eos_token_ids
    return BeamSearchSequence(
        tokens=tokens,
        logprobs=list(one.beam.said),
        cum_logprob=one.beam.logprob,
        score=one.score,
        text=None if llm._tokenizer is None else llm._tokenizer.decode(shown),
        finish_reason="length" if one.stop_id is None else "stop",
        stop_reason=None if is_eos else one.stop_id,
    )
