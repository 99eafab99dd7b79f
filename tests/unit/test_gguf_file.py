"""gguf/: the container, its number formats, settings and tokenizers. No tensor library."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer

from fastdeploy_core.config.model import read_model_config
from fastdeploy_core.errors import ConfigError, UnsupportedModel, WeightError
from fastdeploy_core.gguf.blocks import FORMATS, split_q4_0, split_q8_0, to_bfloat16
from fastdeploy_core.gguf.folder import tokenizer_folder
from fastdeploy_core.gguf.reader import GGUFFile, GGUFModel, find_gguf
from fastdeploy_core.tokenizer import Tokenizer as OurTokenizer
from tests import tokenizer_files
from tests.gguf_files import write_byte_tokens, write_tokenizer

TYPES = gguf.GGMLQuantizationType
HIDDEN, VOCAB = 64, 40


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FD_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


# -- number formats -------------------------------------------------------------------------------


@pytest.mark.parametrize("number", FORMATS, ids=lambda n: FORMATS[n].name)
def test_every_format_is_decoded_bit_for_bit_as_the_gguf_package_does(number: int) -> None:
    ours = FORMATS[number]
    kind = TYPES(number)
    assert kind.name == ours.name
    assert gguf.GGML_QUANT_SIZES[kind] == (ours.values, ours.nbytes)
    width = ours.nbytes * (6 if ours.values > 1 else 96)
    # Any bytes at all, so infinite and undefined scales are among them.
    raw = np.random.default_rng(number).integers(0, 256, (40, width), dtype=np.uint8)
    with np.errstate(all="ignore"):
        theirs = gguf.quants.dequantize(raw, kind).astype(np.float32)
        decoded = ours.decode(raw)
    same = theirs.view(np.uint32) == decoded.view(np.uint32)
    assert (same | (np.isnan(theirs) & np.isnan(decoded))).all()
    assert np.isfinite(theirs).mean() > 0.5


@pytest.mark.parametrize(("split", "kind"), [(split_q8_0, TYPES.Q8_0), (split_q4_0, TYPES.Q4_0)])
def test_packed_numbers_times_scales_are_the_same_numbers(
    split: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]], kind: TYPES
) -> None:
    weight = np.random.default_rng(5).standard_normal((9, 96)).astype(np.float32)
    weight[2, 32:64] = 0  # a block of zeros, whose scale is 0 in the file
    raw = gguf.quants.quantize(weight, kind)
    numbers, scales = split(raw)
    if kind == TYPES.Q4_0:
        numbers = np.stack((numbers & 15, numbers >> 4), -1).reshape(9, 96).astype(np.int32) - 8
    assert (scales != 0).all()
    product = numbers.astype(np.float32) * np.repeat(scales.astype(np.float32), 32, axis=1)
    assert np.array_equal(product, gguf.quants.dequantize(raw, kind))


def test_bfloat16_rounds_to_nearest_even() -> None:
    exact = np.array([1.0, -2.5, 0.0, np.inf], np.float32)
    assert np.array_equal(to_bfloat16(exact).astype(np.uint32) << 16, exact.view(np.uint32))
    halfway = np.array([0x3F808000, 0x3F818000, 0x3F808001], np.uint32).view(np.float32)
    assert to_bfloat16(halfway).tolist() == [0x3F80, 0x3F82, 0x3F81]
    assert np.isnan((to_bfloat16(np.array([np.nan], np.float32)).astype(np.uint32) << 16).view("<f4"))


# -- container ------------------------------------------------------------------------------------


def write(path: Path, **changes: object) -> Path:
    """A one-block qwen2 model of random numbers; `changes` are settings below its name."""
    rng = np.random.default_rng(1)
    writer = gguf.GGUFWriter(path, "qwen2")
    settings = {
        "block_count": 1,
        "context_length": 128,
        "embedding_length": HIDDEN,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        **changes,
    }
    for key, value in settings.items():
        name = f"qwen2.{key}"
        if isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, list):
            writer.add_array(name, value)
        else:
            writer.add_uint32(name, value)
    write_byte_tokens(writer, VOCAB)
    shapes = {
        "token_embd.weight": (VOCAB, HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.ffn_norm.weight": (HIDDEN,),
        "blk.0.attn_q.weight": (64, HIDDEN),
        "blk.0.attn_k.weight": (32, HIDDEN),
        "blk.0.attn_v.weight": (32, HIDDEN),
        "blk.0.attn_output.weight": (HIDDEN, 64),
        "blk.0.ffn_gate.weight": (96, HIDDEN),
        "blk.0.ffn_up.weight": (96, HIDDEN),
        "blk.0.ffn_down.weight": (HIDDEN, 96),
    }
    for name, shape in shapes.items():
        writer.add_tensor(name, rng.standard_normal(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write(tmp_path / "model.gguf")


def test_settings_and_tensors_are_those_of_the_gguf_package(model: Path) -> None:
    ours, theirs = GGUFFile(model), gguf.GGUFReader(model)
    assert {t.name for t in theirs.tensors} == ours.tensors.keys()
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert mine.shape == tuple(reversed(tensor.shape.tolist()))
        assert np.array_equal(
            mine.format.decode(mine.rows(0, mine.num_rows)).reshape(mine.shape), tensor.data
        )
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            value, want = ours.settings[key], field.contents()
            assert value.tolist() == want if isinstance(value, np.ndarray) else value == want


def patch(path: Path, old: bytes, new: bytes) -> None:
    data = path.read_bytes()
    assert data.count(old) == 1, (old, data.count(old))
    path.write_bytes(data.replace(old, new))


def entry(name: str, dims: tuple[int, ...], kind: int = 0) -> bytes:
    """A row of the tensor table as far as its type; dims innermost first."""
    head = struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", len(dims))
    return head + struct.pack(f"<{len(dims)}QI", *dims, kind)


Q = entry("blk.0.attn_q.weight", (HIDDEN, 64))


@pytest.mark.parametrize(
    ("new", "message"),
    [
        (entry("blk.0.attn_q.weight", (HIDDEN, 64), 16), "tensor blk.0.attn_q.weight .* IQ2_XXS"),
        (entry("blk.0.attn_q.weight", (HIDDEN, 64), 77), "tensor blk.0.attn_q.weight .* number 77"),
        (entry("blk.0.attn_q.weight", (1 << 62, 64)), "blk.0.attn_q.weight of shape .* ends at byte"),
        (entry("blk.0.attn_q.weight", (HIDDEN, 65)), "tensor blk.0.attn_k.weight .* overlaps"),
        (entry("blk.0.attn_q.weight", (0, 64)), "tensor blk.0.attn_q.weight has shape"),
        (entry("blk.0.attn_q.weight", (100, 64), 2), "Q4_0 comes in rows of 32"),
        (entry("blk.0.attn_k.weight", (HIDDEN, 64)), "tensor blk.0.attn_k.weight occurs twice"),
        (Q[:27] + struct.pack("<I", 9) + Q[31:], "has 9 dimensions"),
    ],
)  # fmt: skip
def test_a_damaged_tensor_table_names_file_and_tensor(
    model: Path, new: bytes, message: str
) -> None:
    patch(model, Q, new)
    with pytest.raises(WeightError, match=message) as caught:
        GGUFFile(model)
    assert str(model) in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: b"GGML" + d[4:], "is no GGUF file"),
        (lambda d: d[:4] + struct.pack("<I", 1) + d[8:], "version 1"),
        (lambda d: d[:4] + struct.pack(">I", 3) + d[8:], "big-endian"),
        (lambda d: d[:8] + struct.pack("<Q", 1 << 60) + d[16:], "the number of tensors"),
        (lambda d: d[:16] + struct.pack("<Q", 199_999) + d[24:], "damaged"),
        (lambda d: d[:24] + struct.pack("<Q", 1 << 40) + d[32:], "the length of the name"),
        (lambda d: d[:40], "damaged"),
        (lambda d: d[:-1000], "ends at byte"),
        (lambda d: b"GGUF", "damaged"),
    ],
)
def test_a_damaged_header_is_explained(
    model: Path, change: Callable[[bytes], bytes], message: str
) -> None:
    model.write_bytes(change(model.read_bytes()))
    with pytest.raises(WeightError, match=message):
        GGUFFile(model)


def test_an_empty_file_and_a_text_are_no_models(tmp_path: Path) -> None:
    for number, data in enumerate((b"", b"GG", b"hello, this is text")):
        path = tmp_path / f"{number}.gguf"
        path.write_bytes(data)
        with pytest.raises(WeightError, match="is no GGUF file"):
            read_model_config(path)


def test_parts_of_a_split_model_are_found_and_missing_ones_named(model: Path) -> None:
    folder = model.parent / "split"
    folder.mkdir()
    first = folder / "m-00001-of-00002.gguf"
    first.write_bytes(model.read_bytes())
    with pytest.raises(WeightError, match=r"1 of 2 parts.*m-00002-of-00002.gguf"):
        GGUFModel(first)
    with pytest.raises(WeightError, match=r"part 2 of a split model; pass m-00001"):
        GGUFModel(folder / "m-00002-of-00002.gguf")
    writer = gguf.GGUFWriter(folder / "m-00002-of-00002.gguf", "qwen2")
    writer.add_tensor("more.weight", np.ones((2, 3), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = GGUFModel(first)
    assert len(found.tensors) == 12 and found.tensors["more.weight"].shape == (2, 3)
    assert find_gguf(folder) == first


def test_a_folder_with_one_model_is_that_model_and_with_two_an_error(model: Path) -> None:
    assert find_gguf(model.parent) == model
    assert read_model_config(model.parent).path == model
    write(model.parent / "other.gguf")
    with pytest.raises(WeightError, match=r"2 GGUF models: model.gguf, other.gguf"):
        read_model_config(model.parent)


# -- settings -------------------------------------------------------------------------------------


def test_settings_become_a_config(model: Path) -> None:
    config = read_model_config(model)
    assert config.architecture == "Qwen2ForCausalLM"
    assert config.hf_config["num_key_value_heads"] == 2
    assert config.hf_config["vocab_size"] == VOCAB
    assert config.hf_config["tie_word_embeddings"] is True
    assert (config.dtype, config.max_model_len) == ("float32", 128)
    assert config.generation_config == {"eos_token_id": [2]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_count": 2}, "block_count asks for 2 blocks, the file has tensors of 1"),
        ({"block_count": 4_000_000_000}, "block_count asks for 4000000000"),
        ({"embedding_length": 65}, r"tensor token_embd.weight has shape \[40, 64\]"),
        ({"attention.head_count": 5}, "tensor blk.0.attn_q.weight has shape"),
        ({"attention.head_count_kv": [1, 2]}, r"attention.head_count_kv is \[1, 2\]"),
        ({"attention.head_count": "many"}, "attention.head_count is 'many'"),
        ({"attention.key_length": 1 << 31}, "tensor blk.0.attn_q.weight has shape"),
        ({"feed_forward_length": 97}, "tensor blk.0.ffn_gate.weight has shape"),
        ({"rope.dimension_count": 8}, "of which 8 are rotated"),
        ({"rope.scaling.type": "longrope"}, "rope scaling 'longrope'"),
        ({"rope.scaling.type": "yarn"}, "rope.scaling.original_context_length"),
        ({"rope.freq_base": float("nan")}, "rope.freq_base is nan"),
    ],
)
def test_settings_that_do_not_fit_the_tensors_are_named(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_model_config(write(tmp_path / "bad.gguf", **changes))


def test_an_unknown_architecture_lists_the_known_ones(model: Path) -> None:
    data = model.read_bytes().replace(b"qwen2", b"mamba")
    model.write_bytes(data)
    with pytest.raises(UnsupportedModel, match="'mamba'; possible as GGUF: ernie4_5, ernie4_5-moe"):
        read_model_config(model)


# -- tokenizers -----------------------------------------------------------------------------------


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
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+",
    ),
    "llama-bpe": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "deepseek-v3": (
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
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
    ours = OurTokenizer.load(tokenizer_folder(model))
    for text in TEXTS:
        ids = original.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False) == ids
        assert ours.decode(ids) == original.decode(ids, skip_special_tokens=False)
    has_bos = pre == "llama-bpe"  # which llama.cpp adds where the file says nothing
    assert (ours.encode("")[:1] == [ours.bos_token_id]) is has_bos
    assert ours.eos_token_ids == [ours.token_to_id("</s>")]
    assert ours.special_token_ids == {ours.token_to_id(t) for t in ("<s>", "</s>", "<|user|>", "<|end|>")}
    assert ours.apply_chat_template([{"role": "user", "content": "hi"}]) == "hi"


def sentencepiece(
    writer: gguf.GGUFWriter, original: Tokenizer, *, prefix: bool | None = None
) -> None:
    """As the format has a SentencePiece vocabulary: a piece's score falls with the rank of its merge."""
    state = json.loads(original.to_str())
    vocabulary = {**state["model"]["vocab"], **{t["content"]: t["id"] for t in state["added_tokens"]}}
    ranks = {"".join(merge): rank for rank, merge in reversed(list(enumerate(state["model"]["merges"])))}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    control = {t["content"] for t in state["added_tokens"] if t["special"]}
    types = [
        2 if t == "<unk>" else 3 if t in control else 6 if t.startswith("<0x") else 1 for t in tokens
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
    ours = OurTokenizer.load(tokenizer_folder(model))
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
    ours = OurTokenizer.load(tokenizer_folder(model))
    assert ours.token_string(ours.encode("hello", False)[0])[0] == "h"
    assert ours.decode(ours.encode(" hello  world", False)) == " hello  world"


@pytest.mark.parametrize(
    ("fill", "message"),
    [
        (lambda w: None, "tokenizer.ggml.tokens is None; expected a list of texts"),
        (lambda w: w.add_token_list(["a"]), "tokenizer.ggml.model is None; expected gpt2"),
        (lambda w: (w.add_token_list(["a"]), w.add_tokenizer_model("gpt2"), w.add_tokenizer_pre("viking")),
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
        tokenizer_folder(write_vocabulary(tmp_path / "m.gguf", fill))


def test_the_unpacked_tokenizer_is_used_again_and_belongs_to_its_owner(
    model: Path, cache: Path, tmp_path: Path
) -> None:
    first = read_model_config(model).tokenizer_path
    assert first.parent == cache / "gguf" and first.parent.stat().st_mode & 0o077 == 0
    made = (first / "tokenizer.json").stat().st_mtime_ns
    assert read_model_config(model).tokenizer_path == first
    assert (first / "tokenizer.json").stat().st_mtime_ns == made
    assert read_model_config(write(tmp_path / "b.gguf", context_length=64)).tokenizer_path != first


def test_a_tokenizer_of_ones_own_is_used_instead(model: Path, cache: Path, tmp_path: Path) -> None:
    own = tokenizer_files.write(tmp_path / "own", "byte_level")
    assert read_model_config(model, {"tokenizer_path": own}).tokenizer_path == own
    assert not cache.exists()
