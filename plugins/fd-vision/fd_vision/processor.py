"""What a front end does with pictures and videos: check, read, decode in a process of its own,
hash, and put as many placeholders into the prompt as the model has vectors.

A video is cut into its frame pairs, and each is an item of its own for the engine: so a long one is
encoded, cached and fed piece by piece.
"""

from __future__ import annotations

import hashlib
import struct
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from fastdeploy_core.contracts.model import MediaPart, MediaRules
from fastdeploy_core.errors import ConfigError, InvalidRequest
from fastdeploy_core.types import EmbeddedSpan, MediaItem, SequenceExtras

from .child import Answer, Job
from .patches import PatchRule, read_image_rule
from .pool import DecodingPool, QuickSwitches
from .positions import Run, three_axes
from .sources import Source, read_source
from .video import MAX_FRAMES, VideoRule

VERSION = "fd-vision 3"  # of what is done to pixels; enters every digest
MAX_ITEMS = {"image": 8, "video": 1}  # of a prompt, unless the operator says otherwise
MAX_FPS = 60  # that a request may ask for
MAX_PIXELS = 33_500_000  # of a picture as it comes
MAX_FRAME_PIXELS = 8_300_000  # of a video's frame as it comes
MAX_REQUEST_PIXELS = 64_000_000  # of all pictures of a prompt, and of all frames as they are shown
KEPT_BYTES = 2**27  # of patches that were made and may be asked for again
TIME_LIMIT_S = {"image": 10.0, "video": 30.0}  # to decode one
QUICK_SWITCHES = QuickSwitches()  # of all processors, as Python's interval is


@dataclass(frozen=True, slots=True)
class Place:
    """Where a prompt has a picture or a video: tokens first to end, without end."""

    kind: str
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Made:
    """A picture, or a video in frame pairs."""

    kind: str
    items: list[MediaItem]
    merged: tuple[int, int]  # rows and columns of the vectors of one item
    seconds: list[float]  # in the middle of each frame pair
    pair_s: float  # from one frame pair to the next one


@dataclass(slots=True)
class Written:
    """A prompt as it grows."""

    ids: list[int] = field(default_factory=list)
    spans: list[EmbeddedSpan] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    items: dict[bytes, MediaItem] = field(default_factory=dict)

    def text(self, ids: Sequence[int]) -> None:
        """Tokens that have embeddings."""
        self.ids += ids
        self.runs.append(Run(len(ids)))

    def vectors(
        self, token: int, made: Made, items: Sequence[MediaItem], time_step: float = 1.0
    ) -> None:
        """The vectors of some of a video's frame pairs, or of a picture, with nothing between."""
        rows, columns = made.merged
        for item in items:
            self.span(item, [token] * (rows * columns))
        grid = (len(items), rows, columns)
        self.runs.append(Run(len(items) * rows * columns, grid, time_step))

    def span(self, item: MediaItem, ids: Sequence[int]) -> None:
        """All vectors of an item, in the place of these tokens."""
        self.items[item.digest] = item
        self.spans.append(EmbeddedSpan(len(self.ids), len(ids), item.digest))
        self.ids += ids


class KeptAnswers:
    """What was decoded last, by digest: a picture that comes again, as in the next turn of a
    conversation, is not decoded again. Thread safe."""

    def __init__(self, max_bytes: int = KEPT_BYTES) -> None:
        self._max_bytes, self._num_bytes, self._lock = max_bytes, 0, threading.Lock()
        self._answers: OrderedDict[bytes, Answer] = OrderedDict()  # least recently used first

    def get(self, digest: bytes) -> Answer | None:
        """None: it is not kept."""
        with self._lock:
            if digest in self._answers:
                self._answers.move_to_end(digest)
            return self._answers.get(digest)

    def put(self, digest: bytes, answer: Answer) -> None:
        """Keep it, and drop others for it."""
        with self._lock:
            if digest not in self._answers:
                self._answers[digest] = answer
                self._num_bytes += len(answer.patches)
            while self._num_bytes > self._max_bytes:
                _, dropped = self._answers.popitem(last=False)
                self._num_bytes -= len(dropped.patches)


class GridProcessor:
    """A contracts.model.MediaProcessor for families whose pictures become patches on a grid: each
    placeholder becomes as many as there are vectors. Families that write more override `places` and
    `write`. `image`, `video`: the placeholders' tokens; a family without a rule for videos refuses
    prompts with theirs."""

    def __init__(
        self,
        rules: MediaRules,
        image: PatchRule,
        video: VideoRule | None,
        tokens: Mapping[str, int],
    ) -> None:
        self.image, self.tokens, self._rules = image, tokens, rules
        self._prepared: dict[str, PatchRule | VideoRule] = {"image": image}
        if video is not None:
            self._prepared["video"] = video
        self.kinds: Sequence[str] = tuple(self._prepared)
        self._pool, self._kept = DecodingPool(), KeptAnswers()
        if not rules.is_trusted:  # a server; a program that holds an LLM may never show it anything
            self._pool.start()

    @QUICK_SWITCHES
    def prepare(
        self, token_ids: Sequence[int], parts: Sequence[MediaPart], salt: str
    ) -> tuple[list[int], SequenceExtras | None]:
        """See contracts.model.MediaProcessor."""
        ids = list(token_ids)
        places = self.places(ids)
        self._check(places, parts)
        if not parts:
            return ids, None
        made: dict[str, list[Made]] = {kind: [] for kind in self.kinds}
        num_pixels = 0
        for part in parts:
            try:
                source = read_source(part.value, part.kind, self._rules)
                rule = asked_rule(self._prepared[part.kind], part.options)
                found, pixels = self._make(rule, source, salt)
                num_pixels += pixels
                if num_pixels > MAX_REQUEST_PIXELS:
                    raise InvalidRequest(
                        f"the prompt's pictures have more than {MAX_REQUEST_PIXELS} pixels in all"
                    )
            except InvalidRequest as error:
                raise InvalidRequest(f"{part.where}: {error}", param=part.where) from None
            made[part.kind].append(found)
        written, first = Written(), 0
        for place in places:
            written.text(ids[first : place.first])
            self.write(written, made[place.kind].pop(0), ids[place.first : place.end])
            first = place.end
        written.text(ids[first:])
        positions, offset = three_axes(written.runs)
        return written.ids, SequenceExtras(
            embeddings=written.spans,
            positions=positions.tobytes(),
            position_offset=offset,
            media=list(written.items.values()),
        )

    def largest(self, num_vectors: int, most: int) -> list[MediaItem]:
        """Square black pictures, for start-up. See contracts.model.MediaProcessor."""
        rule = self.image
        pixels = min(rule.max_pixels, most * rule.step**2)
        side = max(1, int(pixels**0.5) // rule.step) * rule.merge
        grid, numbers = (1, side, side), [*rule.mean, *rule.std]
        rows, patches = self.item_rows(grid), bytes(3 * (side * rule.patch) ** 2)
        count = max(1, num_vectors // rows) if self._limit("image") else 0
        digests = (hashlib.sha256(b"start-up %d" % n).digest() for n in range(count))
        return [MediaItem(digest, rows, grid, patches, numbers) for digest in digests]

    def close(self) -> None:
        """End the decoding processes."""
        self._pool.close()

    # -- for families -----------------------------------------------------------------------------

    def places(self, ids: list[int]) -> list[Place]:
        """Where the prompt has pictures and videos, in order."""
        kinds = {token: kind for kind, token in self.tokens.items()}
        found = [(n, kinds[token]) for n, token in enumerate(ids) if token in kinds]
        return [Place(kind, n, n + 1) for n, kind in found]

    def write(self, written: Written, made: Made, ids: list[int]) -> None:
        """Write a picture or a video into the prompt, in the place of these tokens."""
        written.vectors(self.tokens[made.kind], made, made.items)

    def item_rows(self, grid: tuple[int, int, int]) -> int:
        """Vectors of an item with this grid of patches."""
        return grid[1] * grid[2] // self.image.merge**2

    # -- private ----------------------------------------------------------------------------------

    def _limit(self, kind: str) -> int:
        return int(self._rules.limits.get(kind, MAX_ITEMS[kind]))

    def _check(self, places: list[Place], parts: Sequence[MediaPart]) -> None:
        """Before anything is read: placeholders and parts are as many, of each kind."""
        for part in parts:
            if part.kind not in self.kinds:
                raise InvalidRequest(
                    f"{part.where} is of kind {part.kind!r:.40}; this model takes "
                    f"{', '.join(self.kinds)}",
                    param=part.where,
                )
        for kind in {place.kind for place in places} | {part.kind for part in parts}:
            own = [part for part in parts if part.kind == kind]
            word = {"image": "picture", "video": "video"}[kind]
            if own and len(own) > (most := self._limit(kind)):
                raise InvalidRequest(
                    f"the prompt has {len(own)} {word}s; at most {most} are possible "
                    "(--limit-mm-per-prompt)",
                    param=own[most].where,
                )
            found = sum(place.kind == kind for place in places)
            if found != len(own):
                raise InvalidRequest(
                    f"the prompt has {found} places for {word}s and {len(own)} {word}s: its text "
                    "spells a media token, or the chat template leaves them out of such a message",
                    param=own[0].where if own else "prompt",
                )

    def _make(self, rule: PatchRule | VideoRule, source: Source, salt: str) -> tuple[Made, int]:
        kind = "image" if isinstance(rule, PatchRule) else "video"
        identity = msgspec.json.encode([VERSION, kind, msgspec.to_builtins(rule)]).decode()
        whole = digest_of(source, identity, salt)
        answer = self._kept.get(whole)
        if answer is None:
            answer = self._decode(kind, rule, source)
            self._kept.put(whole, answer)
        return self._items(answer, rule, whole), answer.num_pixels

    def _decode(self, kind: str, rule: PatchRule | VideoRule, source: Source) -> Answer:
        return self._pool.run(
            Job(
                source=source.data,
                rule=rule,
                max_pixels=MAX_PIXELS if kind == "image" else MAX_FRAME_PIXELS,
                max_total=MAX_REQUEST_PIXELS,
                time_limit_s=TIME_LIMIT_S[kind],
                size=source.size,
                lengths=source.lengths,
                fps=source.fps,
            )
        )

    def _items(self, answer: Answer, prepared: PatchRule | VideoRule, digest: bytes) -> Made:
        """The picture, or the frame pairs of a video."""
        rule = prepared.patches if isinstance(prepared, VideoRule) else prepared
        frames, rows, columns = answer.grid
        # A process that decodes strangers' data made it: it is checked before a worker relies on
        # it.
        sides = rows * rule.patch, columns * rule.patch
        size = 3 * sides[0] * sides[1]
        if (
            len(answer.patches) != frames * size
            or any(side < 1 or side % rule.step for side in sides)
            or (
                rule is not prepared
                and (frames % 2 or len(answer.seconds) != frames or not answer.fps > 0)
            )
        ):
            raise InvalidRequest(f"the {'picture' if rule is prepared else 'video'} is damaged")
        numbers, merged = [*rule.mean, *rule.std], (rows // rule.merge, columns // rule.merge)
        if isinstance(prepared, PatchRule):
            own = MediaItem(
                digest, self.item_rows(answer.grid), answer.grid, answer.patches, numbers
            )
            return Made("image", [own], merged, [], 0.0)
        grid = (1 if prepared.is_joined else 2, rows, columns)
        items = [
            MediaItem(
                hashlib.sha256(digest + struct.pack("<Q", n)).digest(),
                self.item_rows(grid),
                grid,
                answer.patches[2 * n * size : 2 * (n + 1) * size],
                numbers,
                "video",
            )
            for n in range(frames // 2)
        ]
        pairs = zip(answer.seconds[::2], answer.seconds[1::2], strict=True)
        middles = [(first + second) / 2 for first, second in pairs]
        return Made("video", items, merged, middles, 2 / answer.fps)


def asked_rule(rule: PatchRule | VideoRule, options: Mapping[str, Any]) -> PatchRule | VideoRule:
    """The rule as a request wants it (mm_processor_kwargs), within that of the model's files.
    InvalidRequest for what is unknown or beyond it."""
    own = rule if isinstance(rule, PatchRule) else rule.patches
    most: dict[str, float] = {"min_pixels": own.max_pixels, "max_pixels": own.max_pixels}
    most |= {"fps": MAX_FPS, "num_frames": MAX_FRAMES}
    if isinstance(rule, VideoRule):
        most["num_frames"] = rule.max_frames
    for name, value in options.items():
        if name not in most:
            raise InvalidRequest(
                f"mm_processor_kwargs have {name!r:.60}, which is not known; possible: "
                f"{', '.join(most)}"
            )
        kinds = (int, float) if name == "fps" else (int,)
        if type(value) not in kinds or not 0 < value <= most[name]:
            raise InvalidRequest(
                f"mm_processor_kwargs have {name}={value!r:.60}; possible: a number above 0, at "
                f"most {most[name]}"
            )
    if "fps" in options and "num_frames" in options:
        raise InvalidRequest("mm_processor_kwargs have fps and num_frames; possible: one of them")
    pixels = {k: v for k, v in options.items() if k in ("min_pixels", "max_pixels")}
    own = msgspec.structs.replace(own, **pixels)
    if own.min_pixels > own.max_pixels:
        raise InvalidRequest(
            f"mm_processor_kwargs leave pixels from {own.min_pixels} to {own.max_pixels}; "
            "set both min_pixels and max_pixels"
        )
    if isinstance(rule, PatchRule):
        return own
    frames = {k: v for k, v in options.items() if k in ("fps", "num_frames")}
    return msgspec.structs.replace(rule, patches=own, **frames)


def media_tokens(
    config: Mapping[str, Any], folder: Path, **keys: str | tuple[str, ...]
) -> dict[str, int]:
    """Tokens by name, from keys of config.json (the first that it has); ConfigError if it lacks
    them."""
    found = {}
    for name, spelled in keys.items():
        names = (spelled,) if isinstance(spelled, str) else spelled
        token = next((config[k] for k in names if isinstance(config.get(k), int)), None)
        if token is None:
            raise ConfigError(f"config.json in {folder} lacks {' or '.join(names)}")
        found[name] = token
    return found


def image_rule(config: Mapping[str, Any], folder: Path, *, enlarges: bool = False) -> PatchRule:
    """The rule for pictures of the model in this folder; ConfigError if there is none."""
    vision = config.get("vision_config")
    patch, merge = ((vision or {}).get(name) for name in ("patch_size", "spatial_merge_size"))
    if not (isinstance(patch, int) and isinstance(merge, int) and patch > 0 and merge > 0):
        raise ConfigError(f"vision_config of {folder} lacks patch_size or spatial_merge_size")
    rule = read_image_rule(folder, patch, merge, enlarges=enlarges)
    return _as_served(rule, config.get("mm_processor_kwargs") or {})


def _as_served(rule: PatchRule, asked: Mapping[str, Any]) -> PatchRule:
    """The rule as the operator wants it (--mm-processor-kwargs), in vLLM's or FastDeploy 2.x's
    names."""
    pixels = {name.removeprefix("image_"): value for name, value in asked.items()}
    for name, value in pixels.items():
        if name not in ("min_pixels", "max_pixels") or type(value) is not int or value <= 0:
            raise ConfigError(
                f"--mm-processor-kwargs has {name}={value!r:.60}; possible: numbers above 0 as "
                "min_pixels and max_pixels of pictures; requests choose the frames of videos"
            )
    rule = msgspec.structs.replace(rule, **pixels)
    if rule.min_pixels > rule.max_pixels:
        raise ConfigError(
            f"--mm-processor-kwargs leaves pixels from {rule.min_pixels} to {rule.max_pixels}"
        )
    return rule


def digest_of(source: Source, identity: str, salt: str) -> bytes:
    """SHA-256 over each field after its length, so that no two pictures share a record. Without the
    size, the same bytes would be another picture's pixels; with the salt, nobody learns by a fast
    answer what another tenant has sent."""
    form = "file" if source.size is None else f"RGB {source.size[0]}x{source.size[1]}"
    form += f" {source.lengths} {source.fps}"
    hashed = hashlib.sha256()
    for part in (identity.encode(), salt.encode(), form.encode(), source.data):
        hashed.update(struct.pack("<Q", len(part)))
        hashed.update(part)
    return hashed.digest()
