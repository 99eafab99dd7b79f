"""`fastdeploy quantize`: with and without calibration, resumed, refused; and the engine serves the
result."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fd_calibrate import writer
from fd_calibrate.run import QuantizeOptions, quantize, summary
from fd_calibrate.source import SourceModel
from safetensors.numpy import load_file, save_file

from fastdeploy import LLM, SamplingParams
from fastdeploy_core.cli.main import main
from fastdeploy_core.errors import ConfigError, WeightError
from fastdeploy_core.tokenizer import Tokenizer
from fastdeploy_testing import tiny_model as tiny

DEMO = Path(__file__).resolve().parents[3] / "models" / "ernie-tiny"
TEXT = "\n\n".join(
    f"The number {n} comes before {n + 1}, and {n} times {n} is {n * n}." for n in range(40)
)
PROMPT = [300, 9, 770, 14, 50, 2000, 91, 333, 64, 8, 120]
W4A8C8 = (
    '{"quantization": "mix_quant", "dense_quant_type": "wint8", "moe_quant_type": "w4a8", '
    '"activation_scheme": "static"}'
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Random weights under the demo model's tokenizer."""
    patch = pytest.MonkeyPatch()
    patch.setattr(tiny, "VOCAB", 3072)
    patch.setitem(tiny.CONFIG, "vocab_size", 3072)
    folder = tiny.write_tiny_model(tmp_path_factory.mktemp("text") / "model")
    patch.undo()
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copyfile(DEMO / name, folder / name)
    yield folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "calibration.txt"
    path.write_text(TEXT)
    return path


def run(model: Path, output: Path, library: str, method: str, **more: Any) -> dict[str, Any]:
    options = QuantizeOptions(
        model, method, output, tensor_library=library, show_progress=False, **more
    )
    return quantize(options)


def weights_of(folder: Path) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for path in sorted(folder.glob("model-*.safetensors")):
        found |= load_file(path)
    return found


def equal(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert np.array_equal(a[name], b[name]), name


Logits = Callable[..., np.ndarray]


@pytest.fixture
def logits(logits_of: Logits) -> Logits:
    """logits(folder, **more): of a sample of the calibration text, which static scales are for."""

    def logits(folder: Path, **more: Any) -> np.ndarray:
        return logits_of(folder, Tokenizer.load(folder).encode(TEXT.split("\n\n")[7]), **more)

    return logits


def test_calibration_lowers_the_error_of_outputs(
    model: Path, text: Path, library: str, tmp_path: Path, logits: Logits
) -> None:
    method = '{"quantization": "wint4", "group_size": 8}'
    report = run(model, tmp_path / "fed", library, method, calibration=text)
    plain = run(model, tmp_path / "plain", library, method)
    assert report.keys() == plain.keys() and len(report) == 16
    # The measure of the calibrated run, taken of the plain run's weights.
    name = "model.layers.1.self_attn.o_proj"
    assert report[name]["tokens"] > 500 and "tokens" not in plain[name]
    assert all(report[n]["output_error"] < report[n]["weight_error"] for n in report)
    assert all(report[n]["weight_error"] > plain[n]["weight_error"] for n in report)
    full = logits(model)
    fed, rounded = (logits(tmp_path / n) for n in ("fed", "plain"))
    assert np.isfinite(fed).all() and 0 < ((fed - full) ** 2).mean() < full.var()
    assert not np.array_equal(fed, rounded)


def test_a_run_that_was_stopped_goes_on(
    model: Path, text: Path, library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = (library, W4A8C8)
    more = {"calibration": text, "kv_cache": "int8"}
    whole = run(model, tmp_path / "whole", *arguments, **more)
    drop = SourceModel.drop_block

    def stop(self: SourceModel, number: int) -> None:
        drop(self, number)
        if number == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(SourceModel, "drop_block", stop)
    with pytest.raises(KeyboardInterrupt):
        run(model, tmp_path / "stopped", *arguments, **more)
    assert not (tmp_path / "stopped" / "config.json").exists()
    monkeypatch.setattr(SourceModel, "drop_block", drop)
    with pytest.raises(ConfigError, match="other settings"):
        run(model, tmp_path / "stopped", library, "wint8", **more)
    again = run(model, tmp_path / "stopped", *arguments, **more)
    assert again == whole
    equal(weights_of(tmp_path / "whole"), weights_of(tmp_path / "stopped"))


def test_w4a8_with_a_static_cache_is_loaded_and_served(
    model: Path, text: Path, library: str, tmp_path: Path, logits: Logits
) -> None:
    output = tmp_path / "w4a8c8"
    run(model, output, library, W4A8C8, calibration=text, kv_cache="int8")
    stored = weights_of(output)
    scale = stored["model.layers.0.self_attn.cachek_matmul.activation_scale"]
    assert scale.shape == (2 * 16,) and (scale > 0).all()
    assert stored["model.layers.1.mlp.experts.3.down_proj.input_scale"].shape == (1,)
    assert stored["model.layers.1.mlp.experts.3.down_proj.weight"].dtype == np.uint8
    assert stored["model.layers.1.self_attn.q_proj.weight"].dtype == np.int8
    a = logits(output)
    b = logits(output, kv_dtype="int4_zp")
    full = logits(model)
    distance = [float(((x - full) ** 2).mean() / full.var()) for x in (a, b)]
    assert 0 < distance[0] < 0.5 and distance[1] != distance[0]
    name = "model.layers.1.self_attn.cachev_matmul.activation_scale"
    broken = {n: w for n, w in stored.items() if n != name}
    rewrite(output, broken)
    with pytest.raises(WeightError, match=r"lacks .*cachev_matmul"):
        logits(output)
    rewrite(output, {**stored, name: stored[name] * 0})
    with pytest.raises(WeightError, match=r"cachev_matmul.*above zero"):
        logits(output)
    rewrite(output, {**stored, name: stored[name][:5].copy()})
    with pytest.raises(WeightError, match=r"5 numbers; possible: 1, 2 .* or 32"):
        logits(output)


def rewrite(folder: Path, weights: dict[str, np.ndarray]) -> None:
    for path in folder.glob("model*"):
        path.unlink()
    save_file(weights, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("kind", "far"), [("int8", 0.05), ("float8_e4m3fn", 0.12), ("int4_zp", 0.4)]
)
def test_static_cache_scales_keep_what_they_were_made_for(
    kind: str, far: float, model: Path, text: Path, library: str, tmp_path: Path, logits: Logits
) -> None:
    run(model, tmp_path / "q", library, "wint8", calibration=text, kv_cache=kind)
    run(model, tmp_path / "plain", library, "wint8")
    static, plain = (logits(tmp_path / n) for n in ("q", "plain"))
    assert 1e-4 < float(np.sqrt(((static - plain) ** 2).mean() / plain.var())) < far


def test_what_is_not_quantized_is_copied_bit_by_bit(
    model: Path, library: str, tmp_path: Path
) -> None:
    run(model, tmp_path / "q", library, "w8a8")
    before, after = load_file(model / "model.safetensors"), weights_of(tmp_path / "q")
    kept = {n: w for n, w in before.items() if not n.endswith("_proj.weight")}
    equal(kept, {n: after[n] for n in kept})
    assert set(after) - set(before) == {n + "_scale" for n in before if n.endswith("_proj.weight")}
    for name in ("tokenizer.json", "generation_config.json"):
        assert (tmp_path / "q" / name).read_bytes() == (model / name).read_bytes()


def test_engine_serves_it_and_says_what_it_does(model: Path, library: str, tmp_path: Path) -> None:
    """The same tokens from the checkpoint and from rounding while loading, through a whole
    engine."""
    run(model, tmp_path / "q", library, MIX)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    prompt = {"prompt_token_ids": PROMPT}
    common = {"tensor_library": library, "max_model_len": 128, "num_gpu_blocks_override": 8}
    tokens = []
    for folder, more in (
        (tmp_path / "q", {}),
        (model, {"quantization": MIX}),
        (tmp_path / "q", {"kv_cache_dtype": "int8"}),
    ):
        with LLM(folder, **common, **more) as llm:
            tokens.append(llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids)
    assert list(tokens[0]) == list(tokens[1]) and len(tokens[2]) == 6


MIX = '{"quantization": "mix_quant", "dense_quant_type": "wint8", "moe_quant_type": "wint4"}'


def test_command_prints_the_report(
    model: Path, library: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(model), "--method", "wint8", "--output", str(tmp_path / "q")]
    assert main(["quantize", *arguments, "--tensor-library", library, "--no-progress"]) == 0
    printed = capsys.readouterr().out
    assert "mean of 16 layers" in printed and "fastdeploy serve" in printed
    report = json.loads((tmp_path / "q" / "quantization_report.json").read_text())
    assert summary(report)[-1][0] == "mean of 16 layers"
    assert main(["quantize", *arguments]) == 1  # the folder is taken
    assert "not empty" in capsys.readouterr().err
    assert main(["quantize", *arguments, "--num-threads", "-3"]) == 1
    assert "--num-threads must be between 0 and" in capsys.readouterr().err


def test_an_output_that_cannot_be_written_is_named(
    model: Path, library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match=r"file cannot be written: File exists"):
        run(model, tmp_path / "file", library, "wint8")

    def full(path: Path, tensors: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writer, "_write_safetensors", full)
    with pytest.raises(ConfigError, match=r"q cannot be written: No space left .* goes on where"):
        run(model, tmp_path / "q", library, "wint8")


@pytest.mark.parametrize(
    ("method", "more", "words"),
    [
        ("gptq", {}, "gptq"),
        ("wint7", {}, "wint7"),
        ("", {}, "--method is empty"),
        ("{", {}, "--method '{' is not JSON"),
        ("wint8", {"kv_cache": "int8"}, "--calibration"),
        ("wint8", {"kv_cache": "int2"}, "int4_zp"),
        ('{"quantization": "w8a8", "activation_scheme": "static"}', {}, "--calibration"),
    ],
)
def test_refusals(
    method: str, more: Any, words: str, model: Path, library: str, tmp_path: Path
) -> None:
    with pytest.raises(Exception, match=words) as caught:
        run(model, tmp_path / "q", library, method, **more)
    assert type(caught.value).__module__ == "fastdeploy_core.errors"
    assert not list(tmp_path.glob("q/*"))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", "\n\n \n", "no text"),
        ("a.jsonl", "{}\n", "a.jsonl:1 .* neither a text nor messages"),
        ("a.jsonl", "[1]\n", "a.jsonl:1 .* a list"),
        ("a.jsonl", '{"text": "x y z"}\n[1', "a.jsonl:2"),
        ("missing.txt", None, "cannot be read"),
    ],
)
def test_bad_calibration_files(
    name: str, content: str | None, words: str, model: Path, library: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=words):
        run(model, tmp_path / "q", library, "wint4", calibration=path)
    assert not (tmp_path / "q").exists()  # the command with a better file finds no unfinished run


def test_quantized_model_is_not_quantized_again(model: Path, library: str, tmp_path: Path) -> None:
    run(model, tmp_path / "q", library, "wint8")
    with pytest.raises(ConfigError, match="quantized already"):
        run(tmp_path / "q", tmp_path / "r", library, "wint4")
