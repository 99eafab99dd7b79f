"""Tokenizer folders: the same ids and texts as transformers, and clear refusals."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from fastdeploy_core.errors import ConfigError, InvalidRequest
from fastdeploy_core.tokenizer import Tokenizer
from tests import hf_tokenizer_child, tokenizer_files

# Style, tokenizer_config.json, further files.
FOLDERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "plain": ("byte_level", {}, {}),
    "bos_by_file": ("byte_level_with_bos", {}, {}),
    "file_wins_over_no_bos": ("byte_level_with_bos", {"add_bos_token": False}, {}),
    "file_wins_over_bos": ("byte_level", {"add_bos_token": True, "add_eos_token": True}, {}),
    "no_bos_token": ("byte_level", {"bos_token": None}, {}),
    "extra_special": ("byte_level", {"additional_special_tokens": ["<think>", "hello"]}, {}),
    "added_in_config": (
        "byte_level",
        {
            "added_tokens_decoder": {
                "900": {"content": "<extra>", "special": True, "normalized": False},
                "901": {"content": "<plain>", "special": False, "lstrip": True},
            }
        },
        {},
    ),
    "token_objects": (
        "byte_level",
        {"eos_token": {"__type": "AddedToken", "content": "<|end|>"}},
        {},
    ),
    "byte_fallback": ("byte_fallback", {"add_bos_token": True, "unk_token": "<unk>"}, {}),
    "metaspace": ("metaspace", {"unk_token": "<unk>"}, {}),
}


def _streams(name: str, vocab_size: int) -> list[list[int]]:
    rng = random.Random(name)
    return [[rng.randrange(vocab_size) for _ in range(20)] for _ in range(20)]


@pytest.fixture(scope="module")
def both_sides(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, tuple[Tokenizer, dict[str, Any]]]:
    """Our tokenizer and transformers' facts for every folder; one child process for all."""
    root = tmp_path_factory.mktemp("folders")
    ours: dict[str, Tokenizer] = {}
    jobs = []
    for name, (style, config, files) in FOLDERS.items():
        folder = tokenizer_files.write(root / name, style, config, **files)
        ours[name] = Tokenizer.load(folder)
        jobs.append(
            {
                "path": str(folder),
                "texts": tokenizer_files.TEXTS,
                "streams": _streams(name, ours[name].vocab_size),
            }
        )
    theirs = hf_tokenizer_child.ask("facts", jobs)
    return {name: (ours[name], facts) for name, facts in zip(FOLDERS, theirs, strict=True)}


@pytest.mark.parametrize("name", FOLDERS)
def test_ids_and_texts_equal_transformers(
    name: str, both_sides: dict[str, tuple[Tokenizer, dict[str, Any]]]
) -> None:
    ours, theirs = both_sides[name]
    texts, streams = tokenizer_files.TEXTS, _streams(name, ours.vocab_size)
    assert ours.vocab_size == theirs["length"]
    assert [ours.encode(text) for text in texts] == theirs["with"]
    assert ours.encode_batch(texts, add_special_tokens=False) == theirs["without"]
    assert sorted(ours.special_token_ids) == theirs["special_ids"]
    assert [ours.bos_token_id, ours.eos_token_id] == theirs["bos_eos"]
    assert [ours.decode(ids) for ids in streams] == theirs["decoded"]
    assert [ours.decode(ids, skip_special_tokens=True) for ids in streams] == theirs["skipped"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(
        tokenizer_files.write(tmp_path_factory.mktemp("tokenizer") / "plain", "byte_level")
    )


def test_special_tokens_of_the_map_file_are_known(tmp_path: Path) -> None:
    folder = tokenizer_files.write(
        tmp_path, "byte_level", special_tokens_map={"pad_token": "<pad>"}
    )
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.pad_token == "<pad>"
    assert tokenizer.encode("a<pad>")[-1] == tokenizer.pad_token_id
    assert tokenizer.pad_token_id in tokenizer.special_token_ids


def test_every_end_token_is_known_the_tokenizers_first(tmp_path: Path) -> None:
    folder = tokenizer_files.write(
        tmp_path, "byte_level", generation_config={"eos_token_id": [4, 1]}
    )
    assert Tokenizer.load(folder).eos_token_ids == [1, 4]
    (folder / "generation_config.json").unlink()
    (folder / "config.json").write_text('{"eos_token_id": 3}')
    assert Tokenizer.load(folder).eos_token_ids == [1, 3]
    for wrong in ('"</s>"', "[1, null]", "true"):
        (folder / "config.json").write_text(f'{{"eos_token_id": {wrong}}}')
        with pytest.raises(ConfigError, match=r"/config.json has eos_token_id .*; expected a"):
            Tokenizer.load(folder)


def test_single_tokens_keep_their_space_and_their_bytes(tmp_path: Path) -> None:
    for style in ("byte_level", "byte_fallback", "metaspace"):
        tokenizer = Tokenizer.load(tokenizer_files.write(tmp_path / style, style))
        ids = tokenizer.encode("hello there", add_special_tokens=False)
        spaced = "".join(tokenizer.token_text(token_id) for token_id in ids)
        assert spaced.strip() == "hello there"
        whole = b"".join(tokenizer.token_bytes(token_id) for token_id in ids)
        assert whole.decode() == spaced
    emoji = tokenizer_files.byte_level().encode("🚀").ids
    plain = Tokenizer.load(tmp_path / "byte_level")
    assert b"".join(plain.token_bytes(token_id) for token_id in emoji) == "🚀".encode()


def test_ids_without_a_token_are_left_out(plain: Tokenizer) -> None:
    ids = plain.encode("hello")
    assert plain.decode([plain.vocab_size + 5, *ids, 2**31]) == "hello"
    assert plain.token_text(plain.vocab_size + 5) == ""
    assert plain.token_bytes(2**40) == b""
    assert plain.token_string(-1) is None
    with pytest.raises(InvalidRequest, match="from 0 up"):
        plain.decode([-1])


def test_lone_surrogates_are_refused(plain: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="surrogates"):
        plain.encode("a\ud800b")


def test_sentencepiece_only_folders_are_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>")
    with pytest.raises(ConfigError, match=r"found tokenizer\.model.*fastdeploy tokenizer convert"):
        Tokenizer.load(tmp_path)


def test_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a folder"):
        Tokenizer.load(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    good = tokenizer_files.write(tmp_path / "good", "byte_level")
    for name, content in {
        "tokenizer_config.json": "{",
        "special_tokens_map.json": "[1]",
        "generation_config.json": "\x80",
        "tokenizer.json": '{"model": 3}',
    }.items():
        broken = tmp_path / f"broken_{name}"
        shutil.copytree(good, broken)
        (broken / name).write_bytes(content.encode("latin-1"))
        with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
            Tokenizer.load(broken)


def test_code_named_in_the_config_is_not_run(tmp_path: Path) -> None:
    folder = tokenizer_files.write(
        tmp_path, "byte_level", {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}}
    )
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w')")
    Tokenizer.load(folder)
    assert not (tmp_path / "marker").exists()


def test_truncation_and_padding_of_the_file_do_not_apply(tmp_path: Path) -> None:
    folder = tokenizer_files.write(tmp_path, "byte_level")
    state = json.loads((folder / "tokenizer.json").read_text())
    state["truncation"] = {
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
        "direction": "Right",
    }
    (folder / "tokenizer.json").write_text(json.dumps(state))
    assert len(Tokenizer.load(folder).encode("hello world, hello there")) > 2
