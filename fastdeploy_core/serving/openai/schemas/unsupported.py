"""Known request fields that this server does not honour: refused, or without effect, as
unsupported.json says.

docs/reference/api.md shows these tables; a test compares them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from fastdeploy_core.errors import InvalidRequest

_TABLES: Final = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
# Answered with 400, unless the value asks for what happens anyway.
REFUSED: Final[dict[str, str]] = _TABLES["refused"]
# OpenAI's clients always send these; answers do not depend on them.
NO_EFFECT: Final[dict[str, str]] = _TABLES["no effect"]
_DEFAULTS: Final[dict[str, Any]] = _TABLES["defaults"]
_OF_BEAMS: Final = {"length_penalty", "early_stopping"}  # refused where no beams are searched
_HARMLESS: tuple[Any, ...] = (None, False, [], {})


def refuse_unsupported(body: Mapping[str, Any]) -> None:
    """InvalidRequest for a field that asks for something this server does not do."""
    known = _OF_BEAMS if body.get("use_beam_search") is True else set()
    for name in sorted((body.keys() & REFUSED.keys()) - known):
        value, default = body[name], _DEFAULTS.get(name)
        # False asks for nothing, unless the default is True.
        if value in (None, default) or (value in _HARMLESS and default is not True):
            continue
        raise InvalidRequest(f"{name} {REFUSED[name]}", param=name)
