"""Turn curriculum samples into packed rows of tokens, in worker processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from multiprocessing.synchronize import Event
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.data import IterableDataset, get_worker_info

import chat
import curriculum
from curriculum import Sample

TARGET, START = 1, 2
"""Flags of a token: the model writes it; a document starts with it."""
PAD_ID, BOS_ID = 5, 1
BOS_SHARE = 0.1
"""Share of documents that begin with <s>: allowed, but not needed."""


class Document(NamedTuple):
    """The tokens of one sample with their flags."""

    tokens: NDArray[np.uint16]
    flags: NDArray[np.uint8]


class Place(NamedTuple):
    """Where a document lies in a batch: row and columns."""

    row: int
    start: int
    stop: int


def encode(tokenizer: Tokenizer, samples: list[Sample], only_last: bool = False) -> list[Document]:
    """Encode samples; `only_last` flags the last answer alone as a target."""
    cut = [chat.pieces(sample) for sample in samples]
    encoded = iter(
        tokenizer.encode_batch_fast(
            [p.text for part in cut for p in part], add_special_tokens=False
        )
    )
    documents = []
    for part in cut:
        last = max(at for at, piece in enumerate(part) if piece.target)
        tokens: list[int] = []
        flags: list[int] = []
        for at, piece in enumerate(part):
            ids = next(encoded).ids
            tokens += ids
            flags += [TARGET if piece.target and (at == last or not only_last) else 0] * len(ids)
        flags[0] |= START
        documents.append(Document(np.array(tokens, np.uint16), np.array(flags, np.uint8)))
    return documents


def with_bos(document: Document) -> Document:
    """The document after a <s> token."""
    flags = document.flags.copy()
    flags[0] &= ~START & 0xFF
    return Document(np.insert(document.tokens, 0, BOS_ID), np.insert(flags, 0, START))


def pack(documents: list[Document], rows: int, length: int) -> tuple[Document, list[Place | None]]:
    """Lay documents into rows, long ones first, each where it fits first.

    Gives the batch as one document of shape [rows, length] and the place of every document, None
    for those that found none.
    """
    tokens = np.full((rows, length), PAD_ID, np.uint16)
    flags = np.zeros((rows, length), np.uint8)
    used = [0] * rows
    places: list[Place | None] = [None] * len(documents)
    first = 0
    for at in sorted(range(len(documents)), key=lambda at: -len(documents[at].tokens)):
        size = len(documents[at].tokens)
        row = next((row for row in range(first, rows) if used[row] + size <= length), None)
        if row is None:
            continue
        start = used[row]
        tokens[row, start : start + size] = documents[at].tokens
        flags[row, start : start + size] = documents[at].flags
        used[row] += size
        places[at] = Place(row, start, start + size)
        while first < rows and used[first] >= length - 8:
            first += 1
    for row in range(rows):
        if used[row] < length:
            flags[row, used[row]] = START
    return Document(tokens, flags), places


class Batches(IterableDataset[tuple[Tensor, Tensor]]):
    """Fresh training batches until `enough` is set; every worker draws from its own seed."""

    def __init__(
        self, tokenizer_file: Path, rows: int, length: int, seed: int, enough: Event
    ) -> None:
        super().__init__()
        self.enough = enough
        self.tokenizer_file = tokenizer_file
        self.rows, self.length, self.seed = rows, length, seed

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        worker = get_worker_info()
        rng = Random(f"{self.seed}:{worker.id if worker else 0}")
        tokenizer = Tokenizer.from_file(str(self.tokenizer_file))
        waiting: list[Document] = []
        while not self.enough.is_set():
            size = sum(len(document.tokens) for document in waiting)
            while size < self.rows * self.length:
                fresh = encode(tokenizer, [curriculum.sample(rng) for _ in range(256)])
                fresh = [with_bos(one) if rng.random() < BOS_SHARE else one for one in fresh]
                fresh = [one for one in fresh if len(one.tokens) <= self.length]
                waiting += fresh
                size += sum(len(one.tokens) for one in fresh)
            batch, places = pack(waiting, self.rows, self.length)
            waiting = [one for one, place in zip(waiting, places, strict=True) if place is None]
            yield torch.from_numpy(batch.tokens.astype(np.int16)), torch.from_numpy(batch.flags)


class Inputs(NamedTuple):
    """What the model and its loss need of a batch, on the device."""

    tokens: Tensor
    flags: Tensor
    documents: Tensor
    positions: Tensor


def inputs(tokens: Tensor, flags: Tensor) -> Inputs:
    """Number the documents of every row and the positions inside them."""
    starts = (flags & START) > 0
    index = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
    begin = torch.where(starts, index, 0).cummax(dim=1).values
    return Inputs(tokens.long(), flags, starts.cumsum(dim=1), index - begin)


MaskMaker = Callable[[Tensor], object]


def dense_mask(documents: Tensor) -> Tensor:
    """Causal and inside one document, for scaled dot product attention: [rows, 1, n, n]."""
    same = documents[:, :, None] == documents[:, None, :]
    return same.tril()[:, None]


def block_mask(documents: Tensor) -> object:
    """The same for flex attention, by blocks."""
    rows, length = documents.shape

    def seen(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (documents[row, query] == documents[row, key])

    return create_block_mask(seen, rows, None, length, length, documents.device, _compile=True)
