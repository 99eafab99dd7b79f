"""A model family: its tokens are those of transformers, in every batch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastdeploy_core.contracts.model import MODEL_FEATURES
from fastdeploy_core.errors import ConfigError
from fastdeploy_testing import oracle
from fastdeploy_testing.generate import sampled_tokens

from .base import OnDevice

MAX_TOKENS = 24
NUM_LOGPROBS = 5
# Largest distance of a chosen token's logit from the best one's, relative to the logits' size:
# float32 sums in another order move no logit further.
NEARLY_BEST = 1e-4


class ModelConformance(OnDevice):
    """Needs a folder with a checkpoint of the family, which transformers can read (--fd-model, or
    the fixture `model`), best a small one with random weights in float32."""

    kind = "model"

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, request: pytest.FixtureRequest) -> Path:
        """The checkpoint's folder."""
        folder = request.config.getoption("--fd-model")
        if not folder:
            pytest.skip("tokens are compared with --model DIR only, a checkpoint of this family")
        return Path(folder)

    @pytest.fixture(scope="class")
    @classmethod
    def config(cls, model: Path) -> dict[str, Any]:
        """config.json."""
        config: dict[str, Any] = json.loads((model / "config.json").read_text("utf-8"))
        return config

    @pytest.fixture(scope="class")
    @classmethod
    def prompts(cls, config: dict[str, Any]) -> list[list[int]]:
        """One token, lengths around a block of the cache, and two with a common prefix."""
        rng = np.random.default_rng(11)
        # A place of a picture needs its picture.
        places = {v for k, v in config.items() if k.endswith(("image_token_id", "video_token_id"))}
        text = [token for token in range(config["vocab_size"]) if token not in places]
        picks = [rng.integers(0, len(text), n) for n in (1, 7, 63, 64, 65)]
        found = [[text[pick] for pick in picked] for picked in picks]
        return [*found, [*found[-1][:64], 3, 2]]

    @pytest.fixture(scope="class")
    @classmethod
    def engine_args(cls, device: Any) -> dict[str, Any]:
        """Of both engines."""
        return {
            "device": device.name,
            "tensor_library": device.xp.name,
            "block_size": device.limits.default_block_size,
            "dtype": "float32" if "float32" in device.limits.dtypes else device.limits.dtypes[0],
        }

    @pytest.fixture(scope="class")
    @classmethod
    def answer(
        cls, model: Path, prompts: list[list[int]], engine_args: dict[str, Any]
    ) -> dict[str, Any]:
        """What the engine makes of the prompts, each of them whole; see sampled_tokens."""
        return sampled_tokens(
            model,
            prompts,
            [{}],
            max_tokens=MAX_TOKENS,
            num_logprobs=NUM_LOGPROBS,
            enable_prefix_caching=False,
            **engine_args,
        )

    @pytest.fixture(scope="class")
    @classmethod
    def found(cls, answer: dict[str, Any]) -> dict[str, list[list[int]]]:
        """Greedy tokens of the engine."""
        tokens: dict[str, list[list[int]]] = answer["runs"][0]
        return tokens

    @pytest.fixture(scope="class")
    @classmethod
    def expected(
        cls,
        model: Path,
        prompts: list[list[int]],
        found: dict[str, list[list[int]]],
        engine_args: dict[str, Any],
    ) -> list[np.ndarray]:
        """Logits of transformers where each token was chosen, [num_tokens, vocab] float64."""
        torch = pytest.importorskip("torch", reason="the comparison needs torch")
        transformers = pytest.importorskip("transformers", reason="the comparison needs it")
        if engine_args["dtype"] != "float32":
            pytest.skip("float32 is not among limits.dtypes; tokens of other dtypes may differ")
        model_of_theirs = transformers.AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32
        )
        logits = []
        for prompt, tokens in zip(prompts, found["together"], strict=True):
            with torch.no_grad():
                of_all = model_of_theirs.eval()(torch.tensor([[*prompt, *tokens]])).logits[0]
            logits.append(of_all[len(prompt) - 1 : -1].double().numpy())
        return logits

    def test_declares_features_that_there_are(self, driver: Any) -> None:
        assert driver.features <= MODEL_FEATURES, "words of contracts.model.MODEL_FEATURES"

    def test_shapes_need_no_tensor_library(self, driver: Any, model: Path) -> None:
        code = (
            "import importlib, json, sys\n"
            f"family = importlib.import_module({driver.__module__!r})\n"
            f"config = json.load(open({str(model / 'config.json')!r}))\n"
            f"family.{driver.__qualname__}.shapes(config, 1, 'float32')\n"
            "print([m for m in ('torch', 'paddle') if m in sys.modules])"
        )
        done = subprocess.run(  # noqa: S603 - our own interpreter
            [sys.executable, "-c", code], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
        assert done.stdout.strip() == "[]", "shapes() is asked in processes without tensors"

    def test_ranks_have_their_share_or_are_refused(
        self, driver: Any, config: dict[str, Any]
    ) -> None:
        one = driver.shapes(config, 1, "float32")
        for ranks in (2, 3, 64):
            try:
                share = driver.shapes(config, ranks, "float32")
            except ConfigError:
                continue
            assert len(share.layers) == len(one.layers)
            assert share.layers[0].num_heads * ranks == one.layers[0].num_heads

    def test_tokens_are_those_of_transformers(
        self,
        prompts: list[list[int]],
        found: dict[str, list[list[int]]],
        expected: list[np.ndarray],
    ) -> None:
        for prompt, tokens, logits in zip(prompts, found["together"], expected, strict=True):
            missed = logits.max(-1) - logits[np.arange(len(tokens)), tokens]
            worst = int(missed.argmax())
            assert missed[worst] <= NEARLY_BEST * np.abs(logits).max(), (
                f"token {worst} after a prompt of {len(prompt)} is {tokens[worst]}; transformers "
                f"prefers {int(logits[worst].argmax())} by {missed[worst]:.3g}"
            )

    def test_log_probabilities_are_those_of_transformers(
        self,
        prompts: list[list[int]],
        answer: dict[str, Any],
        expected: list[np.ndarray],
    ) -> None:
        for prompt, found, logits in zip(prompts, answer["logprobs"], expected, strict=True):
            wanted = oracle.log_softmax(logits)
            bound = NEARLY_BEST * np.abs(logits).max()
            for at, row in enumerate(found):
                errors = {n: abs(p - wanted[at, int(n)]) for n, p in row.items()}
                worst = max(errors, key=errors.__getitem__)
                assert errors[worst] <= bound, (
                    f"the log-probability of token {worst}, {at} tokens after a prompt of "
                    f"{len(prompt)}, is {row[worst]:.6f}; transformers has "
                    f"{wanted[at, int(worst)]:.6f}, and float32 explains {bound:.1g}"
                )

    def test_prompts_in_chunks_and_from_the_cache_give_the_same_tokens(
        self,
        model: Path,
        prompts: list[list[int]],
        found: dict[str, list[list[int]]],
        engine_args: dict[str, Any],
    ) -> None:
        if engine_args["dtype"] != "float32":
            pytest.skip("float32 is not among limits.dtypes; tokens of other dtypes may differ")
        again = sampled_tokens(
            model,
            prompts,
            [{}],
            max_tokens=MAX_TOKENS,
            # Least possible, and not a multiple: prompts are cut within blocks.
            max_num_batched_tokens=engine_args["block_size"] + 3,
            max_num_seqs=len(prompts),
            enable_prefix_caching=True,
            **engine_args,
        )
        assert again["runs"][0] == found
        longest = max(map(len, prompts))
        if longest >= engine_args["block_size"]:
            assert again["metrics"]["prefix_hit_tokens_total"] > 0, "nothing came from the cache"

    def test_tokens_alone_equal_tokens_in_a_batch(
        self, found: dict[str, list[list[int]]], device: Any
    ) -> None:
        if "float32" not in device.limits.dtypes:
            pytest.skip("float32 is not among limits.dtypes; tokens of other dtypes may differ")
        assert found["alone"] == found["together"]


class TestModel(ModelConformance):
    """Run by `fastdeploy plugins check`."""
