"""tokenizer.py and folder.py: tokenizers come out of a GGUF file as they went in."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizer_files
from fd_gguf.folder import tokenizer_folder
from fd_gguf.reader import GGUFModel
from gguf_files import write_small, write_tokenizer
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer

from fastdeploy_core.config import ModelConfig
from fastdeploy_core.config.model import read_model_config
from fastdeploy_core.errors import ConfigError
from fastdeploy_core.plugins.checkpoints import find_model
from fastdeploy_core.tokenizer import Tokenizer as OurTokenizer


def configure(path: Path, overrides: dict[str, Any] | None = None) -> ModelConfig:
    return read_model_config(path, overrides, find_model)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FD_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_small(tmp_path / "model.gguf")


def write_vocabulary(path: Path, fill: Callable[[gguf.GGUFWriter], None]) -> GGUFModel:
    writer = gguf.GGUFWriter(path, "qwen2")
    fill(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFModel(path)


# As the models' own tokenizer.json have them.
CUTS = {
    "qwen2": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| "
        r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+",
    ),
    "llama-bpe": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| "
        r"?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "deepseek-v3": (
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
}
TEXTS = [
    *tokenizer_files.TEXTS,
    "I'll say: it'S 12345 km!!\r\n\r\n  done\t\t1",
    "ﬁne e\u0301 가나다 カタカナ，你好 1234567",
]


@pytest.mark.parametrize("pre", CUTS)
def test_a_byte_level_tokenizer_comes_out_as_it_went_in(pre: str, tmp_path: Path) -> None:
    original = Tokenizer(models.BPE())
    if pre == "qwen2":
        original.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in CUTS[pre]]
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    original.pre_tokenizer = pre_tokenizers.Sequence([*cuts, level])
    original.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>", "<|user|>", "<|end|>"],
        show_progress=False,
    )
    original.train_from_iterator([*tokenizer_files.CORPUS, *TEXTS], trainer)
    original.add_tokens([AddedToken("<tool_call>", normalized=False)])
    original.save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": "{{ messages[0].content }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))

    model = write_vocabulary(tmp_path / "m.gguf", lambda w: write_tokenizer(w, tmp_path, pre))
    ours = OurTokenizer.load(tokenizer_folder(model, tmp_path / "cache"))
    for text in TEXTS:
        ids = original.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False) == ids
        assert ours.decode(ids) == original.decode(ids, skip_special_tokens=False)
    has_bos = pre == "llama-bpe"  # which llama.cpp adds where the file says nothing
    assert (ours.encode("")[:1] == [ours.bos_token_id]) is has_bos
    assert ours.eos_token_ids == [ours.token_to_id("</s>")]
    assert ours.special_token_ids == {
        ours.token_to_id(t) for t in ("<s>", "</s>", "<|user|>", "<|end|>")
    }
    assert ours.apply_chat_template([{"role": "user", "content": "hi"}]) == "hi"


def sentencepiece(
    writer: gguf.GGUFWriter, original: Tokenizer, *, prefix: bool | None = None
) -> None:
    """As the format has a SentencePiece vocabulary: a piece's score falls with the rank of its
    merge."""
    state = json.loads(original.to_str())
    vocabulary = {
        **state["model"]["vocab"],
        **{t["content"]: t["id"] for t in state["added_tokens"]},
    }
    ranks = {
        "".join(merge): rank for rank, merge in reversed(list(enumerate(state["model"]["merges"])))
    }
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    control = {t["content"] for t in state["added_tokens"] if t["special"]}
    types = [
        2 if t == "<unk>" else 3 if t in control else 6 if t.startswith("<0x") else 1
        for t in tokens
    ]
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(ranks.get(token, 10_000)) for token in tokens])
    writer.add_token_types(types)
    writer.add_bos_token_id(vocabulary["<s>"])
    writer.add_eos_token_id(vocabulary["</s>"])
    writer.add_eot_token_id(vocabulary["<|end|>"])
    writer.add_unk_token_id(vocabulary["<unk>"])
    if prefix is not None:
        writer.add_add_space_prefix(prefix)


def test_a_sentencepiece_tokenizer_comes_out_as_it_went_in(tmp_path: Path) -> None:
    original = tokenizer_files.byte_fallback()
    model = write_vocabulary(tmp_path / "m.gguf", lambda w: sentencepiece(w, original))
    ours = OurTokenizer.load(tokenizer_folder(model, tmp_path / "cache"))
    for text in TEXTS:
        ids = original.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False) == ids
        assert ours.decode(ids) == original.decode(ids, skip_special_tokens=False)
    assert ours.encode("hello") == [ours.bos_token_id, *ours.encode("hello", False)]
    assert ours.eos_token_ids == [ours.eos_token_id, ours.token_to_id("<|end|>")]
    assert ours.token_bytes(ours.token_to_id("<0xE4>")) == b"\xe4"


def test_a_vocabulary_without_space_prefix_adds_none(tmp_path: Path) -> None:
    original = tokenizer_files.byte_fallback()
    model = write_vocabulary(
        tmp_path / "m.gguf", lambda w: sentencepiece(w, original, prefix=False)
    )
    ours = OurTokenizer.load(tokenizer_folder(model, tmp_path / "cache"))
    assert ours.token_string(ours.encode("hello", False)[0])[0] == "h"
    assert ours.decode(ours.encode(" hello  world", False)) == " hello  world"


@pytest.mark.parametrize(
    ("fill", "message"),
    [
        (lambda w: None, "tokenizer.ggml.tokens is None; expected a list of texts"),
        (lambda w: w.add_token_list(["a"]), "tokenizer.ggml.model is None; expected gpt2"),
        (lambda w: (w.add_token_list(["a"]), w.add_tokenizer_model("gpt2"),
            w.add_tokenizer_pre("viking")),
         "tokenizer.ggml.pre is 'viking'; expected one of qwen2"),
        (lambda w: (w.add_token_list(["a", "b"]), w.add_tokenizer_model("gpt2"),
                    w.add_tokenizer_pre("qwen2"), w.add_token_merges(["a b"])),
         "merge 'a b' of tokenizer.ggml.merges names tokens that are not in the vocabulary"),
        (lambda w: (w.add_token_list(["a", "b"]), w.add_tokenizer_model("llama"),
                    w.add_token_scores([0.0])), "scores is 1 of them; expected 2 numbers"),
        (lambda w: (w.add_token_list(["a", "b"]), w.add_tokenizer_model("llama"),
                    w.add_token_scores([0.0, 0.0]), w.add_bos_token_id(7)),
         "bos_token_id is 7; expected a token id below 2"),
    ],
)  # fmt: skip
def test_a_tokenizer_that_cannot_be_read_is_explained(
    fill: Callable[[gguf.GGUFWriter], None], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        tokenizer_folder(write_vocabulary(tmp_path / "m.gguf", fill), tmp_path)


def test_the_unpacked_tokenizer_is_used_again_and_belongs_to_its_owner(
    model: Path, cache: Path, tmp_path: Path
) -> None:
    first = configure(model).tokenizer_path
    assert first.parent == cache / "gguf" and first.parent.stat().st_mode & 0o077 == 0
    made = (first / "tokenizer.json").stat().st_mtime_ns
    assert configure(model).tokenizer_path == first
    assert (first / "tokenizer.json").stat().st_mtime_ns == made
    assert configure(write_small(tmp_path / "b.gguf", context_length=64)).tokenizer_path != first


def test_a_tokenizer_of_ones_own_is_used_instead(model: Path, cache: Path, tmp_path: Path) -> None:
    own = tokenizer_files.write(tmp_path / "own", "byte_level")
    assert configure(model, {"tokenizer_path": own}).tokenizer_path == own
    assert not cache.exists()
