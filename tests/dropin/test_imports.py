"""The import surface that programs written for FastDeploy or vLLM rely on."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict, fields
from pathlib import Path

import pytest

import fastdeploy
from fastdeploy_core.errors import ConfigError, InvalidRequest
from fastdeploy_core.types import CompletionOutput, RequestOutput, SamplingParams
from tests import hf_tokenizer_child
from tests.server_process import environment

HEAVY = ("torch", "paddle", "transformers", "fastapi", "uvicorn", "jinja2", "tokenizers", "zmq")


def test_everything_named_can_be_had() -> None:
    for name in fastdeploy.__all__:
        assert getattr(fastdeploy, name) is not None
    assert set(fastdeploy.__all__) <= set(dir(fastdeploy))


def test_unknown_names_are_attribute_errors() -> None:
    assert not hasattr(fastdeploy, "nothing")
    with pytest.raises(AttributeError, match=r"fastdeploy.*nothing"):
        _ = fastdeploy.nothing


def test_the_paths_of_2x_lead_to_the_same_objects() -> None:
    from fastdeploy.engine.args_utils import EngineArgs
    from fastdeploy.engine.request import RequestOutput as OldOutput
    from fastdeploy.engine.sampling_params import SamplingParams as OldParams
    from fastdeploy.entrypoints.llm import LLM
    from fastdeploy.input.ernie4_5_tokenizer import Ernie4_5Tokenizer
    from fastdeploy.tokenizer import Tokenizer

    assert EngineArgs is fastdeploy.EngineArgs
    assert Ernie4_5Tokenizer is Tokenizer
    assert LLM is fastdeploy.LLM
    assert OldParams is fastdeploy.SamplingParams
    assert OldOutput is fastdeploy.RequestOutput


def test_tokenizers_are_called_as_those_of_hugging_face() -> None:
    from fastdeploy.input.ernie4_5_tokenizer import Ernie4_5Tokenizer

    models = Path(__file__).parents[2] / "models"
    talk = [{"role": "system", "content": "Be kind"}, {"role": "user", "content": "Hi there"}]
    picture = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}
    text = "Hello, you"
    jobs = [
        {"path": str(models / "ernie-tiny"), "text": text, "messages": talk},
        {"path": str(models / "qwen3-vl-tiny"), "text": text, "messages": [*talk, picture]},
    ]
    for job, theirs in zip(jobs, hf_tokenizer_child.ask("called", jobs), strict=True):
        path, messages = job["path"], job["messages"]
        tokenizer = Ernie4_5Tokenizer.from_pretrained(path, trust_remote_code=True)
        assert hf_tokenizer_child.called(tokenizer, text, messages) == theirs
        with pytest.raises(InvalidRequest, match="return_tensors is not supported"):
            tokenizer.apply_chat_template(messages, tokenize=True, return_tensors="pt")
    # As FastDeploy 2.x's documents print it.
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    shown = tokenizer.apply_chat_template([*talk, picture], tokenize=False)
    assert "<|image_pad|>" in shown


def test_arguments_of_engines_are_those_of_llms() -> None:
    args = fastdeploy.EngineArgs(model="m", max_model_len=64, trust_remote_code=True)
    given = {name: value for name, value in asdict(args).items() if value is not None}
    assert given == {"model": "m", "max_model_len": 64, "trust_remote_code": True}
    with pytest.raises(TypeError, match="max_model_length"):
        fastdeploy.EngineArgs(model="m", max_model_length=64)
    with pytest.raises(ConfigError, match="'/nowhere/m'"):
        fastdeploy.LLM.from_engine_args(fastdeploy.EngineArgs(model="/nowhere/m"))


def test_importing_is_light_and_writes_nothing(tmp_path: Path) -> None:
    code = (
        "import sys, fastdeploy; fastdeploy.SamplingParams(temperature=0);"
        f"print([m for m in {HEAVY!r} if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"
    assert list(tmp_path.iterdir()) == []


def test_the_offline_api_needs_no_tensor_library_to_be_imported() -> None:
    code = (
        "import sys; from fastdeploy import LLM; "
        "print([m for m in ('torch', 'paddle', 'fastapi') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_sampling_params_have_vllms_names_and_defaults() -> None:
    params = SamplingParams()
    expected = {
        "n": 1,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "seed": None,
        "stop": None,
        "stop_token_ids": None,
        "bad_words": None,
        "ignore_eos": False,
        "max_tokens": 16,
        "min_tokens": 0,
        "logprobs": None,
        "prompt_logprobs": None,
        "detokenize": True,
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
        "include_stop_str_in_output": False,
        "logit_bias": None,
        "allowed_token_ids": None,
        "structured_outputs": None,
    }
    assert {name: getattr(params, name) for name in expected} == expected


def test_outputs_have_vllms_names() -> None:
    request = {"request_id", "prompt", "prompt_token_ids", "prompt_logprobs", "outputs"}
    request |= {"finished", "metrics", "num_cached_tokens"}
    assert request <= {field.name for field in fields(RequestOutput)}
    answer = {"index", "text", "token_ids", "cumulative_logprob", "logprobs"}
    answer |= {"finish_reason", "stop_reason"}
    assert answer <= {field.name for field in fields(CompletionOutput)}


@pytest.mark.parametrize(
    "wrong",
    [
        {"n": 0},
        {"n": 10**9},
        {"temperature": -1},
        {"temperature": float("nan")},
        {"top_p": 1.5},
        {"top_k": -2},
        {"top_k": 1.5},
        {"min_p": 2},
        {"presence_penalty": 3},
        {"repetition_penalty": 0},
        {"max_tokens": -1},
        {"min_tokens": 5, "max_tokens": 4},
        {"stop": [""]},
        {"stop": "x", "detokenize": False},
        {"bad_words": [""]},
        {"logprobs": -2},
        {"logit_bias": {"x": 1}},
        {"n": 2, "temperature": 0},
        {"seed": 2**63},
    ],
)
def test_wrong_parameters_are_value_errors_that_name_the_field(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="|".join(wrong)):
        SamplingParams(**wrong)


def test_a_command_without_counterpart_says_what_there_is() -> None:
    words = [sys.executable, "-m", "fastdeploy.entrypoints.openai.multi_api_server", "--ports", "1"]
    ended = subprocess.run(words, env=environment(), capture_output=True, text=True, check=False)
    assert ended.returncode == 1 and "--data-parallel-size N" in ended.stderr
