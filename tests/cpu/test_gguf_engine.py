"""A GGUF file as the model path of a whole engine: the demo model in a file, tokenizer included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Tokenizer

from fastdeploy import LLM, SamplingParams
from fastdeploy_core.cli.main import main
from fastdeploy_core.errors import ConfigError
from tests.gguf_files import write_gguf

DEMO = Path(__file__).resolve().parents[2] / "models" / "ernie-tiny"
MESSAGES = [[{"role": "user", "content": "What is 12 + 30?"}]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FD_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("FD_PLUGINS", "fd-gguf,fd-quant-formats")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By type; Q4_0 has Q8_0 where llama-quantize would have more bits, too."""
    if not list(DEMO.glob("*.safetensors")):
        pytest.skip("this tree holds no demo weights (models/ernie-tiny/*.safetensors)")
    folder = tmp_path_factory.mktemp("gguf")
    kinds = gguf.GGMLQuantizationType

    def mixed(name: str, array: Any) -> gguf.GGMLQuantizationType:
        return kinds.Q8_0 if "embd" in name or "attn_v" in name else kinds.Q4_0

    made: dict[str, Any] = {"BF16": "BF16", "Q8_0": "Q8_0", "Q4_0": mixed}
    return {
        name: write_gguf(DEMO, folder / f"{name}.gguf", kind, tokenizer=DEMO)
        for name, kind in made.items()
    }


def engine(path: Path, library: str, **settings: Any) -> LLM:
    return LLM(
        str(path),
        device="cpu",
        tensor_library=library,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=4,
        num_threads=1,
        **settings,
    )


def answers(path: Path, library: str, **settings: Any) -> tuple[list[int], str]:
    with engine(path, library, **settings) as llm:
        (output,) = llm.chat(MESSAGES, GREEDY)
        return list(output.outputs[0].token_ids), output.outputs[0].text


def test_the_demo_model_answers_from_a_file_as_from_its_folder(
    files: dict[str, Path], tensor_library: str
) -> None:
    want = answers(DEMO, tensor_library)
    assert "42" in want[1]
    assert answers(files["BF16"], tensor_library) == want
    # One of the few bits' errors must be far larger than it is before this answer changes.
    assert answers(files["Q8_0"], tensor_library)[1] == want[1]
    packed = answers(files["Q8_0"], tensor_library, quantization="gguf")
    assert packed == answers(files["Q8_0"], tensor_library)


def test_the_tokenizer_of_the_file_is_that_of_the_folder(
    files: dict[str, Path], tensor_library: str
) -> None:
    from fastdeploy_core.config.model import read_model_config
    from fastdeploy_core.plugins.checkpoints import find_model
    from fastdeploy_core.tokenizer import Tokenizer as Ours

    # The file names a way to cut text that is not quite the demo's; for these it is the same.
    ours = Ours.load(read_model_config(files["BF16"], {}, find_model).tokenizer_path)
    theirs = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    for text in ("What is 12 + 30?", "你好，世界！", "<|im_start|>user\nhi<|im_end|>"):
        assert ours.encode(text, False) == theirs.encode(text, add_special_tokens=False).ids
    stored = json.loads((DEMO / "tokenizer_config.json").read_text())
    assert ours.eos_token == stored["eos_token"] and ours.chat_template


def test_packed_is_refused_where_nothing_can_stay_packed(
    files: dict[str, Path], tensor_library: str
) -> None:
    with pytest.raises(
        ConfigError, match=r"no matrix in a format that can stay packed \(Q8_0, Q4_0\)"
    ):
        engine(files["BF16"], tensor_library, quantization="gguf")


def test_why_names_the_driver(files: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "why", "quantizer", "--model", str(files["Q4_0"])]) == 0
    assert "gguf" in capsys.readouterr().out
