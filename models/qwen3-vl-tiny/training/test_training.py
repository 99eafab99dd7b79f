"""The training's own parts against transformers, and what is held out.

python -m pytest test_training.py
"""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import torch
from jinja2 import Environment
from tokenizers import Tokenizer

import chat
import data
import evaluate
import scenes
import train
from model import CELL, Model, Sizes
from painter import Painter, sprites
from tokenizer import FOLDER, PAD, TEMPLATE


def test_the_model_computes_what_transformers_computes(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = Model(Sizes()).eval()
    with torch.no_grad():
        for weight in model.parameters():  # as they come back from the file
            weight.add_(torch.randn_like(weight) * 0.02)
            weight.copy_(weight.bfloat16())
        half = model.visual.patch_embed["proj"].weight
        half.copy_((half / 2).bfloat16() * 2)
    train.export(model, tmp_path)
    for file in FOLDER.glob("*token*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    reader, rng = evaluate.Reader(tmp_path), Random(5)
    for shape in ((6, 6), (7, 4), (4, 7)):
        asked = [chat.single(rng, "word") for _ in range(3)]
        arrays, shown = data.make(reader.tokenizer.backend_tokenizer, iter(asked), shape, 3)
        size = shape[1] * CELL, shape[0] * CELL
        pictures = [scenes.paint(rng, scene, size) for scene in shown]
        batch = data.on_device(arrays, size, torch.device("cpu"))
        with torch.no_grad():
            pixels = torch.from_numpy(np.stack([np.asarray(p) for p in pictures]))
            own = model(batch.tokens, batch.positions, pixels, batch.where)
            theirs = reader.model(
                input_ids=batch.tokens,
                attention_mask=torch.ones_like(batch.tokens),
                mm_token_type_ids=(batch.tokens == reader.image).int(),
                **reader.processor(pictures, return_tensors="pt"),
            ).logits
        assert (own - theirs)[batch.tokens != PAD].abs().max() < 1e-4


def test_conversations_are_written_as_the_template_writes_them() -> None:
    rng, template = Random(2), Environment().from_string(TEMPLATE)
    for _ in range(300):
        conversation = chat.converse(rng)
        messages = []
        if conversation.system:
            messages.append({"role": "system", "content": conversation.system})
        for asked in conversation.asked:
            parts = [{"type": "image"}] * asked.pictures
            parts.insert(0 if asked.is_text_first else len(parts), {
                "type": "text", "text": asked.turn.question
            })  # fmt: skip
            messages.append({"role": "user", "content": parts})
            messages.append({"role": "assistant", "content": asked.turn.answer})
        written = "".join(piece.text for piece in chat.pieces(conversation))
        assert template.render(messages=messages) == written + "\n"


def test_what_is_held_out_is_never_trained_on() -> None:
    rng = Random(3)
    for _ in range(2000):
        for scene in chat.converse(rng).scenes:
            assert not scene.is_held_out
            assert not any(scenes.is_new_pair(t.color, t.shape) for t in scene.things)
    for task in chat.SCORED:
        drawn = chat.single(rng, task if task in scenes.TASKS else "new pairs").scenes[0]
        pairs = [(t.color, t.shape) for t in drawn.things]
        assert drawn.is_held_out or any(scenes.is_new_pair(*pair) for pair in pairs)


def test_the_device_draws_what_the_processor_draws() -> None:
    """The middle of each shape has its colour, and the rest the background's."""
    rng, painter = Random(4), Painter(torch.device("cpu"))
    for shape in scenes.SHAPES:
        thing = scenes.Thing(shape, "blue", (1, 1))
        scene = scenes.Scene("yellow", (thing,))
        drawn = torch.from_numpy(sprites(rng, scene, (192, 192)))[None]
        device = painter(drawn, (192, 192))[0].numpy()
        picture = np.asarray(scenes.paint(rng, scene, (192, 192)))
        for pixels in (device, picture):
            blue = pixels[..., 2].astype(int) - pixels[..., 0] > 60
            rows, columns = np.nonzero(blue)
            assert rows.min() >= 64 and rows.max() < 128 and columns.min() >= 64
            area = blue.sum() / ((np.ptp(rows) + 1) * (np.ptp(columns) + 1))
            assert 0.2 < area < 1 and (shape == "ring") == (not blue[
                (rows.min() + rows.max()) // 2, (columns.min() + columns.max()) // 2
            ])  # fmt: skip


def test_a_batch_has_as_many_tokens_as_its_pictures_have_vectors() -> None:
    tokenizer, rng = Tokenizer.from_file(str(FOLDER / "tokenizer.json")), Random(6)
    drawn = iter(lambda: chat.converse(rng), None)
    arrays, shown = data.make(tokenizer, drawn, (4, 7), 24)
    assert len(shown) == 24 and len(arrays["where"]) == 24 * 28
