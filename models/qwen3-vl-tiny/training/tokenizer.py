"""Make the tokenizer of qwen3-vl-tiny and its chat template.

    python tokenizer.py

A byte-level BPE, so that every text can be encoded. Capital letters and digits are tokens of their
own: words and numbers in pictures are spelled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

import chat

FOLDER = Path(__file__).resolve().parent.parent
VOCABULARY = 512
SPECIAL = (
    *("<pad>", "<|im_start|>", "<|im_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
)
PAD, TURN_END, IMAGE = 0, 2, 5
TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content %}
            {%- if part.type == 'image' %}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- elif part.type == 'video' %}
                {{- '<|vision_start|><|video_pad|><|vision_end|>' }}
            {%- elif part.type == 'text' %}
                {{- part.text }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def texts(count: int) -> Iterator[str]:
    """Conversations without their marks."""
    rng = Random(1)
    for _ in range(count):
        for asked in chat.converse(rng).asked:
            yield asked.turn.question
            yield asked.turn.answer


def train() -> Tokenizer:
    """Learn the merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{Lu}|\p{N}|\s?\p{Ll}+|\s|[^\p{L}\p{N}\s]"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokens = [AddedToken(text, special=True, normalized=False) for text in SPECIAL]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=tokens,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(20000), trainer)
    return tokenizer


def write_json(path: Path, content: object) -> None:
    """Write a JSON file the way the other files of the folder are written."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and the files transformers reads beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "tokenizer.json", json.loads(tokenizer.to_str()))
    named = {"eos_token": "<|im_end|>", "pad_token": "<pad>"}
    config = {
        **named,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
        "padding_side": "left",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    write_json(folder / "tokenizer_config.json", config)
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")


if __name__ == "__main__":
    made = train()
    save(made, FOLDER)
    print(f"{made.get_vocab_size()} tokens")
