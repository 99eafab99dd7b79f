"""What a front end does with pictures: check, read, decode in a process of its own, hash, and put
as many placeholders into the prompt as the model has vectors.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from fastdeploy_core.contracts.model import MediaPart, MediaRules
from fastdeploy_core.errors import ConfigError, InvalidRequest
from fastdeploy_core.types import EmbeddedSpan, MediaItem, SequenceExtras

from .child import Job
from .patches import PatchRule, read_rule
from .pool import DecodingPool
from .positions import Run, three_axes
from .sources import Source, read_source

VERSION = "fd-vision 1"  # of what is done to pixels; enters every digest
MAX_IMAGES = 8  # of a prompt, unless the operator says otherwise
MAX_PIXELS = 33_500_000  # of a picture as it comes
MAX_REQUEST_PIXELS = 64_000_000  # of all pictures of a prompt
TIME_LIMIT_S = 10.0  # to decode one


@dataclass(frozen=True, slots=True)
class TokenIds:
    """Of the placeholder of a picture, and of tokens that a prompt must not have."""

    image: int
    unserved: tuple[int, ...] = ()


class ImageProcessor:
    """A contracts.model.MediaProcessor for families whose pictures become patches on a grid."""

    kinds: Sequence[str] = ("image",)

    def __init__(self, rule: PatchRule, tokens: TokenIds, rules: MediaRules) -> None:
        self.rule, self._tokens, self._rules = rule, tokens, rules
        self._limit = rules.limits.get("image", MAX_IMAGES)
        self._identity = msgspec.json.encode([VERSION, msgspec.to_builtins(rule)]).decode()
        self._pool = DecodingPool()

    @classmethod
    def of(
        cls, config: Mapping[str, Any], folder: Path, rules: MediaRules, image: str, *unserved: str
    ) -> ImageProcessor:
        """The processor of the model in this folder; `image` and `unserved` are keys of
        config.json."""
        vision = config.get("vision_config")
        if not isinstance(vision, Mapping) or not isinstance(config.get(image), int):
            raise ConfigError(f"config.json in {folder} lacks vision_config or {image}")
        sizes = [vision.get(name) for name in ("patch_size", "spatial_merge_size")]
        if not all(isinstance(size, int) and size > 0 for size in sizes):
            raise ConfigError(f"vision_config of {folder} lacks patch_size or spatial_merge_size")
        refused = tuple(config[name] for name in unserved if isinstance(config.get(name), int))
        rule = read_rule(folder, int(vision["patch_size"]), int(vision["spatial_merge_size"]))
        return cls(rule, TokenIds(config[image], refused), rules)

    def prepare(
        self, token_ids: Sequence[int], parts: Sequence[MediaPart], salt: str
    ) -> tuple[list[int], SequenceExtras | None]:
        """See contracts.model.MediaProcessor."""
        ids = list(token_ids)
        self._check(ids, parts)
        if not parts:
            return ids, None
        items: list[MediaItem] = []
        num_pixels = 0
        for part in parts:
            try:
                item, pixels = self._item(read_source(part.value, self._rules), salt)
                num_pixels += pixels
                if num_pixels > MAX_REQUEST_PIXELS:
                    raise InvalidRequest(
                        f"the prompt's pictures have more than {MAX_REQUEST_PIXELS} pixels in all"
                    )
            except InvalidRequest as error:
                raise InvalidRequest(f"{part.where}: {error}", param=part.where) from None
            items.append(item)
        return self._expand(ids, items)

    def close(self) -> None:
        """End the decoding processes."""
        self._pool.close()

    def _check(self, ids: list[int], parts: Sequence[MediaPart]) -> None:
        """Before anything is read: placeholders and pictures are as many."""
        for part in parts:
            if part.kind not in self.kinds:
                raise InvalidRequest(
                    f"{part.where} is of kind {part.kind!r:.40}; this model takes image",
                    param=part.where,
                )
        if len(parts) > self._limit:
            raise InvalidRequest(
                f"the prompt has {len(parts)} pictures; at most {self._limit} are possible "
                "(--limit-mm-per-prompt)",
                param=parts[self._limit].where,
            )
        found = ids.count(self._tokens.image)
        if found != len(parts) or any(token in ids for token in self._tokens.unserved):
            raise InvalidRequest(
                f"the prompt has {found} places for pictures and {len(parts)} pictures: its text "
                "spells a media token, or the chat template leaves pictures out of such a message",
                param=parts[0].where if parts else "prompt",
            )

    def _item(self, source: Source, salt: str) -> tuple[MediaItem, int]:
        job = Job(
            source=source.data,
            rule=self.rule,
            max_pixels=MAX_PIXELS,
            time_limit_s=TIME_LIMIT_S,
            size=source.size,
        )
        made = self._pool.run(job)
        _, rows, columns = grid = made.grid
        # It decodes strangers' data: what it says is checked before a worker relies on it.
        sides = (rows * self.rule.patch, columns * self.rule.patch)
        if len(made.patches) != 3 * sides[0] * sides[1] or any(s % self.rule.step for s in sides):
            raise InvalidRequest("the picture is damaged or incomplete")
        num_rows = rows * columns // self.rule.merge**2
        numbers = [*self.rule.mean, *self.rule.std]
        digest = digest_of(source, self._identity, salt)
        return MediaItem(digest, num_rows, grid, made.patches, numbers), made.num_pixels

    def _expand(self, ids: list[int], items: list[MediaItem]) -> tuple[list[int], SequenceExtras]:
        expanded: list[int] = []
        spans: list[EmbeddedSpan] = []
        runs: list[Run] = []
        first = 0
        for item in items:
            place = ids.index(self._tokens.image, first)
            expanded += ids[first:place]
            time, rows, columns = item.grid
            merged = (time, rows // self.rule.merge, columns // self.rule.merge)
            runs += [(place - first, None), (item.num_rows, merged)]
            spans.append(EmbeddedSpan(len(expanded), item.num_rows, item.digest))
            expanded += [self._tokens.image] * item.num_rows
            first = place + 1
        expanded += ids[first:]
        positions, offset = three_axes([*runs, (len(ids) - first, None)])
        return expanded, SequenceExtras(
            embeddings=spans,
            positions=positions.tobytes(),
            position_offset=offset,
            media=list({item.digest: item for item in items}.values()),
        )


def digest_of(source: Source, identity: str, salt: str) -> bytes:
    """SHA-256 over each field after its length, so that no two pictures share a record. Without the
    size, the same bytes would be another picture's pixels; with the salt, nobody learns by a fast
    answer what another tenant has sent."""
    form = "file" if source.size is None else f"RGB {source.size[0]}x{source.size[1]}"
    hashed = hashlib.sha256()
    for field in (b"image", identity.encode(), salt.encode(), form.encode(), source.data):
        hashed.update(struct.pack("<Q", len(field)))
        hashed.update(field)
    return hashed.digest()
