"""Batches of conversations: tokens, positions on three axes, and what is in the pictures, all of
one size; made by worker processes."""

from __future__ import annotations

import multiprocessing
import os
import queue
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

import chat
from model import CELL
from painter import sprites
from scenes import Scene
from tokenizer import IMAGE, PAD

# Rows and columns of cells: what pictures of about 37,000 pixels become.
SHAPES = (*[(6, 6)] * 24, (5, 5), (5, 6), (6, 5), (5, 7), (7, 5), (4, 7), (7, 4))
LENGTH = 192  # tokens of a row; longer conversations are left out


@dataclass(frozen=True)
class Batch:
    """What a step trains on; see Model.forward."""

    tokens: Tensor  # [rows, tokens]
    positions: Tensor  # [3, rows, tokens]
    targets: Tensor  # [rows, tokens] bool: what the model has to write
    where: Tensor  # [vectors of all pictures]
    size: tuple[int, int]  # width and height of the pictures
    drawn: Tensor | None = None  # [pictures, 1 + MOST, FIELDS]: see painter.sprites


def encode(
    tokenizer: Tokenizer, conversation: chat.Conversation, shape: tuple[int, int]
) -> tuple[list[int], list[bool], np.ndarray]:
    """Tokens, which of them are targets, and positions [3, tokens]."""
    ids: list[int] = []
    targets: list[bool] = []
    positions: list[np.ndarray] = []
    start, cells = 0, shape[0] * shape[1]
    pieces = chat.pieces(conversation)
    encoded = tokenizer.encode_batch([p.text for p in pieces], add_special_tokens=False)
    for piece, found in zip(pieces, encoded, strict=True):
        rest = found.ids
        while rest:
            count = rest.index(IMAGE) if IMAGE in rest else len(rest)
            ids += rest[:count]
            targets += [piece.target] * count
            positions.append(np.tile(np.arange(start, start + count), (3, 1)))
            start += count
            if count < len(rest):
                ids += [IMAGE] * cells
                targets += [False] * cells
                positions.append(np.indices((1, *shape)).reshape(3, -1) + start)
                start += max(shape)
            rest = rest[count + 1 :]
    return ids, targets, np.concatenate(positions, 1)


def make(
    tokenizer: Tokenizer,
    conversations: Iterator[chat.Conversation],
    shape: tuple[int, int],
    count: int,
) -> tuple[dict[str, np.ndarray], list[Scene]]:
    """The tokens of conversations about `count` pictures, in as many rows (those at the end may be
    empty), and what the pictures show."""
    tokens = np.full((count, LENGTH), PAD, np.int16)
    targets = np.zeros(tokens.shape, bool)
    positions = np.zeros((3, *tokens.shape), np.int16)
    row, shown = 0, list[Scene]()
    while len(shown) < count:
        conversation = next(conversations)
        left = count - len(shown) - len(conversation.scenes)
        # A row for each picture that is yet to come has to be left.
        if left < 0 or left > count - row - 1:
            continue
        ids, is_target, places = encode(tokenizer, conversation, shape)
        if len(ids) > LENGTH:
            continue
        shown += conversation.scenes
        tokens[row, : len(ids)], targets[row, : len(ids)] = ids, is_target
        positions[:, row, : len(ids)] = places
        row += 1
    where = np.flatnonzero(tokens == IMAGE).astype(np.int32)
    return {"tokens": tokens, "positions": positions, "targets": targets, "where": where}, shown


def on_device(arrays: dict[str, np.ndarray], size: tuple[int, int], device: torch.device) -> Batch:
    """A batch out of what `make` made."""
    held = {name: torch.from_numpy(array) for name, array in arrays.items()}
    if device.type == "cuda":  # what is pinned is copied while others compute
        held = {name: tensor.pin_memory() for name, tensor in held.items()}
    moved = {name: tensor.to(device, non_blocking=True) for name, tensor in held.items()}
    for name in ("tokens", "positions", "where"):
        moved[name] = moved[name].long()
    return Batch(size=size, **moved)


def _work(seed: int, file: Path, count: int, full: Any, enough: Event) -> None:
    """Make batches until there are enough, or the trainer is gone."""
    rng, tokenizer, trainer = Random(seed), Tokenizer.from_file(str(file)), os.getppid()

    def conversations() -> Iterator[chat.Conversation]:
        while True:
            yield chat.converse(rng)

    drawn = conversations()
    while not enough.is_set() and os.getppid() == trainer:
        shape = rng.choice(SHAPES)
        size = shape[1] * CELL, shape[0] * CELL
        arrays, shown = make(tokenizer, drawn, shape, count)
        arrays["drawn"] = np.stack([sprites(rng, scene, size) for scene in shown])
        while not enough.is_set() and os.getppid() == trainer:
            try:
                full.put((size, arrays), timeout=1)
                break
            except queue.Full:
                continue


class Batches:
    """Batches of `count` pictures, on a device. Must be made before the process has touched the
    device."""

    def __init__(self, file: Path, count: int, workers: int, seed: int) -> None:
        fork = multiprocessing.get_context("fork")
        self._enough, self._full = fork.Event(), fork.Queue(4 * workers)
        self._workers = [
            fork.Process(
                target=_work,
                args=(seed * 1000 + n, file, count, self._full, self._enough),
                daemon=True,
            )
            for n in range(workers)
        ]
        for worker in self._workers:
            worker.start()

    def get(self, device: torch.device) -> Batch:
        """The next batch, on its way to the device."""
        size, arrays = self._full.get(timeout=120)
        return on_device(arrays, size, device)

    def close(self) -> None:
        """End the processes."""
        self._enough.set()
        for worker in self._workers:
            worker.terminate()
