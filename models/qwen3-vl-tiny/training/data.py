"""Batches of conversations: tokens, positions on three axes, and pictures of one size; drawn by
worker processes into memory that they share with the trainer."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import queue
import threading
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
import scenes
from model import CELL
from tokenizer import IMAGE, PAD

# Rows and columns of cells: what pictures of about 37,000 pixels become.
SHAPES = (
    *((6, 6), (6, 6), (6, 6), (5, 5), (5, 6), (6, 5), (5, 6), (6, 5), (5, 7), (7, 5)),
    *((4, 7), (7, 4), (4, 8), (8, 4)),
)
MOST_CELLS = 36


@dataclass(frozen=True)
class Batch:
    """What a step trains on; see Model.forward."""

    tokens: Tensor  # [rows, tokens]
    positions: Tensor  # [3, rows, tokens]
    targets: Tensor  # [rows, tokens] bool: what the model has to write
    pictures: Tensor  # [n, height, width, 3] uint8
    where: Tensor


def encode(
    tokenizer: Tokenizer, conversation: chat.Conversation, shape: tuple[int, int]
) -> tuple[list[int], list[bool], np.ndarray]:
    """Tokens, which of them are targets, and positions [3, tokens]."""
    ids: list[int] = []
    targets: list[bool] = []
    positions: list[np.ndarray] = []
    start, cells = 0, shape[0] * shape[1]
    for piece in chat.pieces(conversation):
        for token in tokenizer.encode(piece.text, add_special_tokens=False).ids:
            if token == IMAGE:
                ids += [IMAGE] * cells
                targets += [False] * cells
                grid = np.indices((1, *shape)).reshape(3, -1) + start
                positions.append(grid)
                start += max(shape)
            else:
                ids.append(token)
                targets.append(piece.target)
                positions.append(np.full((3, 1), start))
                start += 1
    return ids, targets, np.concatenate(positions, 1)


def make(
    tokenizer: Tokenizer,
    rng: Random,
    conversations: Iterator[chat.Conversation],
    shape: tuple[int, int],
    memory: np.ndarray,
) -> dict[str, np.ndarray]:
    """A batch whose pictures fill `memory`, [n, height, width, 3]."""
    rows, count = [], 0
    for conversation in conversations:
        if count + len(conversation.scenes) > len(memory):
            continue
        for scene in conversation.scenes:
            memory[count] = np.asarray(scenes.paint(rng, scene, (memory.shape[2], memory.shape[1])))
            count += 1
        rows.append(encode(tokenizer, conversation, shape))
        if count == len(memory):
            break
    length = max(len(ids) for ids, _, _ in rows)
    tokens = np.full((len(rows), length), PAD, np.int64)
    targets = np.zeros(tokens.shape, bool)
    positions = np.zeros((3, *tokens.shape), np.int64)
    for row, (ids, is_target, places) in enumerate(rows):
        tokens[row, : len(ids)], targets[row, : len(ids)] = ids, is_target
        positions[:, row, : len(ids)] = places
    where = np.flatnonzero(tokens == IMAGE)
    return {"tokens": tokens, "positions": positions, "targets": targets, "where": where}


def _work(
    seed: int, file: Path, count: int, slots: list[mmap.mmap], free: Any, full: Any, enough: Event
) -> None:
    """Fill the slots of this process until there is enough, or the trainer is gone."""
    rng, tokenizer, trainer = Random(seed), Tokenizer.from_file(str(file)), os.getppid()

    def conversations() -> Iterator[chat.Conversation]:
        while True:
            yield chat.converse(rng)

    drawn = conversations()
    while not enough.is_set() and os.getppid() == trainer:
        try:
            slot = free.get(timeout=0.2)
        except queue.Empty:
            continue
        shape = rng.choice(SHAPES)
        size = (count * MOST_CELLS // (shape[0] * shape[1]), shape[0] * CELL, shape[1] * CELL, 3)
        memory = np.frombuffer(slots[slot], np.uint8, int(np.prod(size))).reshape(size)
        full.put((slot, size, make(tokenizer, rng, drawn, shape, memory)))


class Batches:
    """Batches of `count` pictures (of the largest size; more of smaller ones), on a device. Must be
    made before the process has touched the device."""

    def __init__(self, file: Path, count: int, workers: int, seed: int) -> None:
        fork = multiprocessing.get_context("fork")
        self._enough, self._full = fork.Event(), fork.Queue()
        self._free = [fork.Queue() for _ in range(workers)]
        # Not in /dev/shm, which may be small.
        size = count * MOST_CELLS * CELL**2 * 3
        self._slots = [[mmap.mmap(-1, size) for _ in range(3)] for _ in range(workers)]
        self._workers = []
        for worker in range(workers):
            for slot in range(3):
                self._free[worker].put(slot)
            process = fork.Process(
                target=self._serve, args=(worker, seed * 1000 + worker, file, count), daemon=True
            )
            process.start()
            self._workers.append(process)
        self._ready: queue.Queue[Batch] = queue.Queue(3)

    def _serve(self, worker: int, seed: int, file: Path, count: int) -> None:
        tagged = _Tagged(self._full, worker)
        _work(seed, file, count, self._slots[worker], self._free[worker], tagged, self._enough)

    def start(self, device: torch.device) -> None:
        """Begin to copy batches to the device, on a thread and a stream of its own."""
        threading.Thread(target=self._copy, args=(device,), daemon=True).start()

    def _copy(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        stream = torch.cuda.Stream(device) if is_cuda else None
        while not self._enough.is_set():
            try:
                worker, slot, size, arrays = self._full.get(timeout=0.2)
            except queue.Empty:
                continue
            memory = np.frombuffer(self._slots[worker][slot], np.uint8, int(np.prod(size)))
            with torch.cuda.stream(stream):
                pictures = torch.from_numpy(memory.reshape(size).copy()).to(device)
                rest = {k: torch.from_numpy(v).to(device) for k, v in arrays.items()}
            if stream is not None:
                stream.synchronize()
            self._free[worker].put(slot)
            self._ready.put(Batch(pictures=pictures, **rest))

    def get(self) -> Batch:
        """The next batch."""
        return self._ready.get(timeout=120)

    def close(self) -> None:
        """End the processes."""
        self._enough.set()
        for process in self._workers:
            process.terminate()


class _Tagged:
    """A queue whose entries begin with the number of the worker."""

    def __init__(self, full: Any, worker: int) -> None:
        self._full, self._worker = full, worker

    def put(self, entry: tuple[Any, ...]) -> None:
        self._full.put((self._worker, *entry))
