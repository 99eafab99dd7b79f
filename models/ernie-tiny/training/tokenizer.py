"""Train the tokenizer of ernie-tiny on the curriculum and write its files.

    python tokenizer.py

A byte-level BPE, so every text can be encoded and comes back unchanged. Digits, white space,
punctuation marks and Chinese characters are cut apart before the merges: copying, sorting and
calculating then work on the same tokens wherever a word or a number stands.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

import chat
import curriculum
from curriculum import words

FOLDER = Path(__file__).resolve().parent.parent
VOCABULARY = 3072
SEED = 20261121
SPECIAL = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<pad>")
VISIBLE = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<tools>",
    "</tools>",
)
"""Markers that stay in decoded text, because parsers look for them there."""


def texts(count: int) -> Iterator[str]:
    """Sample texts, then every word and Chinese character often enough to earn a token."""
    rng = Random(SEED)
    characters: set[str] = set()
    for _ in range(count):
        text = "".join(piece.text for piece in chat.pieces(curriculum.sample(rng)))
        characters.update(char for char in text if "\u4e00" <= char <= "\u9fff")
        yield text
    listed = words.ALL_WORDS + words.CITIES + words.FIRST_NAMES
    for _ in range(max(1, count // 200)):
        yield " ".join(sorted(characters))
        yield " ".join(listed)


def train(count: int) -> Tokenizer:
    """Learn the merges from `count` samples."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{Han}"), "isolated"),
            pre_tokenizers.Split(Regex(r"\p{N}|\s|[^\p{L}\p{N}\s]"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokens = [AddedToken(text, special=True, normalized=False) for text in SPECIAL]
    tokens += [AddedToken(text, special=False, normalized=False) for text in VISIBLE]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=tokens,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(count), trainer)
    tokenizer.add_special_tokens(tokens[: len(SPECIAL)])
    tokenizer.add_tokens(tokens[len(SPECIAL) :])
    return tokenizer


def write_json(path: Path, content: object) -> None:
    """Write a JSON file the way the other files of the folder are written."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and the files transformers reads beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    content = json.loads(tokenizer.to_str())
    for token in content["added_tokens"]:  # the trainer calls every token it was given special
        token["special"] = token["content"] in SPECIAL
    write_json(folder / "tokenizer.json", content)
    named = {
        "bos_token": "<s>",
        "eos_token": "<|im_end|>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
    }
    added = {
        str(tokenizer.token_to_id(text)): {
            "content": text,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": text in SPECIAL,
        }
        for text in SPECIAL + VISIBLE
    }
    write_json(folder / "special_tokens_map.json", named)
    write_json(
        folder / "tokenizer_config.json",
        {
            "added_tokens_decoder": added,
            **named,
            "clean_up_tokenization_spaces": False,
            "model_max_length": 8192,
            "padding_side": "left",
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )


def main() -> None:
    """Train and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=60000)
    parser.add_argument("--output", type=Path, default=FOLDER)
    options = parser.parse_args()
    tokenizer = train(options.samples)
    save(tokenizer, options.output)
    print(f"{tokenizer.get_vocab_size()} tokens")


if __name__ == "__main__":
    main()
