"""Pictures in requests: the family's processor, parts taken out of messages, and what is checked.

The family says what it takes (contracts.small.MultimodalLM); nothing here names one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from fastdeploy_core.config import EngineConfig
from fastdeploy_core.contracts.model import MediaPart, MediaProcessor, MediaRules
from fastdeploy_core.errors import InvalidRequest

if TYPE_CHECKING:
    from fastdeploy_core.plugins.resolve import ResolvedPlugins
    from fastdeploy_core.types import Request

MEDIA_THREADS = 8  # that wait for processes which decode


def media_processor(
    config: EngineConfig, resolved: ResolvedPlugins, *, is_trusted: bool = False
) -> MediaProcessor | None:
    """The processor of this model's family; None: it takes text. is_trusted: see MediaRules."""
    asked, model = config.media, config.model
    make = getattr(resolved.load("model", model.architecture), "media", None)
    if make is None or asked.language_model_only:
        return None
    places = asked.allowed_media_domains, asked.allowed_local_media_path
    rules = MediaRules(asked.limit_mm_per_prompt, *places, is_trusted)
    return cast("MediaProcessor", make(model.hf_config, model.path, rules))


def take_media(
    messages: Sequence[Any], kinds: Sequence[str], options: Mapping[str, Any] | None = None
) -> tuple[Sequence[Any], list[MediaPart]]:
    """The conversation with {"type": kind} in the place of every part of these kinds, and those
    parts in order. A part is {"type": "image_url", "image_url": URL or {"url": URL}} (or of type
    input_image) or {"type": "image", "image": ...}; so of other kinds. options: see MediaPart."""
    parts: list[MediaPart] = []
    names = {n.format(kind): kind for kind in kinds for n in ("{}", "{}_url", "{}_pil", "input_{}")}

    def taken(part: Any, where: str) -> Any:
        given = part if isinstance(part, Mapping) else {}  # vLLM's users may leave out the type
        name = given.get("type") or next((each for each in names if given.get(each)), None)
        kind = names.get(name) if isinstance(name, str) else None
        if kind is None:
            return part
        field = f"{kind}_url" if name == f"input_{kind}" else str(name)
        value = part.get(field)
        value = value.get("url") if isinstance(value, Mapping) else value
        if value is None:
            example = f'{{"type": "{kind}_url", "{kind}_url": {{"url": "data:{kind}/..."}}}}'
            raise InvalidRequest(f"{where} has no {field}; possible: {example}", param=where)
        parts.append(MediaPart(kind, value, where, options or {}))
        return {"type": kind}

    changed = []
    for number, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, list | tuple):
            where = f"messages[{number}].content"
            found = [taken(part, f"{where}[{n}]") for n, part in enumerate(content)]
            message = {**message, "content": found}
        changed.append(message)
    if options and not parts:
        raise InvalidRequest(
            "mm_processor_kwargs say how pictures and videos are prepared; the messages have none "
            f"that this model takes (possible: {', '.join(kinds) or 'text only'})",
            param="mm_processor_kwargs",
        )
    return (changed, parts) if parts else (messages, parts)


def num_media_tokens(request: Request) -> dict[str, int]:
    """Prompt tokens in whose places vectors stand, by kind: {"image_tokens": 96}."""
    found: Counter[str] = Counter()
    if (extras := request.extras) is not None:
        kinds = {item.digest: item.kind for item in extras.media}
        for span in extras.embeddings:
            found[f"{kinds.get(span.digest, 'image')}_tokens"] += span.count
    return dict(found)


def check_media(request: Request) -> None:
    """InvalidRequest if a request's spans, items and positions do not belong together: they come
    from another process, and a worker relies on them."""
    extras, length = request.extras, len(request.prompt_token_ids)
    if extras is None or not (extras.embeddings or extras.media or extras.positions):
        return
    rows = {item.digest: item.num_rows for item in extras.media}
    end, whole = 0, len(rows) == len(extras.media)
    for span in extras.embeddings:
        has_rows = span.first_row >= 0 and span.first_row + span.count <= rows.get(span.digest, 0)
        whole &= has_rows and span.count > 0 and span.start >= end
        end = span.start + span.count
    whole &= end <= length and len(extras.positions) in (0, 3 * 4 * length)
    whole &= all(len(digest) == 32 for digest in rows)
    if not whole:
        raise InvalidRequest(
            "the request's pictures, their places in the prompt and the positions do not belong "
            "together; a front end makes them with the family's processor",
            param="prompt",
        )
