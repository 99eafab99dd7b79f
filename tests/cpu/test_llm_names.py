"""The offline API as programs for vLLM and FastDeploy 2.x write it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fastdeploy
from fastdeploy import LLM, LoRARequest, SamplingParams, TextPrompt, TokensPrompt
from fastdeploy.sampling_params import GuidedDecodingParams, RequestOutputKind
from fastdeploy_core.errors import InvalidRequest
from tests.llm_models import write_model

FOUR = SamplingParams(temperature=0, max_tokens=4)
CHAT = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory, tensor_library: str) -> Iterator[LLM]:
    folder: Path = write_model(tmp_path_factory.mktemp("model"))
    with LLM(
        folder,
        device="cpu",
        tensor_library=tensor_library,
        load_format="dummy",
        disable_log_stats=True,
        dtype="float32",
        block_size=16,
        num_gpu_blocks_override=64,
    ) as made:
        yield made


def ids_of(outputs: Any) -> list[list[int]]:
    return [answer.token_ids for output in outputs for answer in output.outputs]


def test_prompts_are_tokenized_as_a_call_says(llm: LLM) -> None:
    text = "The quick brown fox"
    whole = llm.get_tokenizer().encode(text)
    for options, expected in [
        ({"truncate_prompt_tokens": 3}, whole[-3:]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, whole[:3]),
        ({"add_special_tokens": False}, llm.get_tokenizer().encode(text, False)),
        ({}, whole),
        (None, whole),
    ]:
        (output,) = llm.generate(text, FOUR, use_tqdm=False, tokenization_kwargs=options)
        assert output.prompt_token_ids == expected
    for wrong in ({"padding": True}, {"truncate_prompt_tokens": 0}, {"truncation_side": "top"}):
        with pytest.raises(InvalidRequest) as caught:
            llm.generate(text, FOUR, tokenization_kwargs=wrong)
        assert caught.value.param == "tokenization_kwargs"


def test_typed_prompts_and_empty_fields_are_taken(llm: LLM) -> None:
    text: TextPrompt = {"prompt": "hello", "multi_modal_data": None, "mm_processor_kwargs": None}
    ids: TokensPrompt = {"prompt_token_ids": llm.get_tokenizer().encode("hello")}
    one, two = ids_of(llm.generate([text, ids], FOUR, use_tqdm=False, mm_processor_kwargs={}))
    assert one == two
    with pytest.raises(InvalidRequest, match="found: prompt_embeds"):
        llm.generate({"prompt_embeds": [[0.5]]}, FOUR)


def test_chat_takes_by_place_what_vllm_does(llm: LLM) -> None:
    template = "{{ messages[0].content }}!"
    (output,) = llm.chat(CHAT, FOUR, False, None, template, "auto", True, False, None, {}, None)
    assert output.prompt == "Hi!"
    with pytest.raises(InvalidRequest, match="possible: auto, string, openai"):
        llm.chat(CHAT, FOUR, chat_template_content_format="xml")
    with pytest.raises(InvalidRequest, match="tokenization_kwargs"):
        llm.chat(CHAT, FOUR, tokenization_kwargs={"truncate_prompt_tokens": 2})


def test_what_there_is_not_says_what_there_is(llm: LLM) -> None:
    for name, word in [
        ("collective_rpc", "hooks"),
        ("start_profile", "profiler"),
        ("llm_engine", "LLM.config"),
        ("embed", "runner='pooling'"),
        ("sleep", "enable_rollout=True"),
    ]:
        assert not hasattr(llm, name)
        with pytest.raises(AttributeError, match=word):
            getattr(llm, name)
    assert llm.get_world_size() == 1
    assert llm.reset_prefix_cache() is True
    with pytest.raises(InvalidRequest, match="reset_connector"):
        llm.reset_prefix_cache(reset_connector=True)
    assert "max_model_len" in repr(llm)


def test_results_and_parameters_can_be_copied(llm: LLM) -> None:
    (output,) = llm.generate("hello", SamplingParams(max_tokens=2, logprobs=2), use_tqdm=False)
    assert pickle.loads(pickle.dumps(output)) == copy.deepcopy(output) == output
    asked = llm.get_default_sampling_params()
    assert isinstance(asked, SamplingParams)
    changed = asked.clone()
    changed.max_tokens = 3
    assert asked.max_tokens != 3
    assert pickle.loads(pickle.dumps(FOUR)) == FOUR


def test_other_names_of_sampling_parameters_mean_ours() -> None:
    guided = GuidedDecodingParams(choice=["a", "b"])
    made = SamplingParams(guided_decoding=guided, reasoning_max_tokens=5, extra_args={"p": {}})
    ours = SamplingParams(
        structured_outputs=guided, thinking_token_budget=5, logits_processors_args={"p": {}}
    )
    assert made == ours
    assert SamplingParams.from_optional(temperature=None, top_p=0.5) == SamplingParams(top_p=0.5)
    final = SamplingParams(n=2, best_of=2, output_kind=RequestOutputKind.FINAL_ONLY)
    assert (final.n, final.best_of) == (2, 2)
    with pytest.raises(InvalidRequest, match="differ"):
        SamplingParams(reasoning_max_tokens=5, thinking_token_budget=6)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("best_of", 3),
        ("flat_logprobs", True),
        ("logits_processors", [print]),
        ("prompt_logprob_token_ids", [3]),
        ("stream_interval", 4),
        ("trace_decode_token_ids", [3]),
        ("truncate_prompt_tokens", 5),
        ("repetition_detection", {"min_count": 3}),
        ("routed_experts_prompt_start", 4),
        ("skip_reading_prefix_cache", True),
        ("watermarking", True),
    ],
)
def test_a_sampling_parameter_that_cannot_be_had_says_why(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=name) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


def test_arguments_that_no_processor_takes_are_refused(llm: LLM) -> None:
    asked = SamplingParams(max_tokens=1, extra_args={"no_repeat": True})
    with pytest.raises(InvalidRequest, match=r"args\.no_repeat; they take: nothing"):
        llm.generate("hello", asked, use_tqdm=False)
    assert llm.generate("hello", SamplingParams(max_tokens=1, extra_args={}), use_tqdm=False)


def test_names_are_where_programs_import_them_from() -> None:
    from fastdeploy.entrypoints.llm import LLM as by_path
    from fastdeploy.inputs import TokensPrompt as tokens
    from fastdeploy.lora.request import LoRARequest as lora
    from fastdeploy.outputs import CompletionOutput

    assert (by_path, tokens, lora) == (LLM, TokensPrompt, LoRARequest)
    assert CompletionOutput is fastdeploy.CompletionOutput
    assert LoRARequest("a", 1, "/a", base_model_name="b").lora_name == "a"
    with pytest.raises(InvalidRequest, match="PEFT"):
        LoRARequest("a", 1, "/a", tensorizer_config_dict={"x": 1})
