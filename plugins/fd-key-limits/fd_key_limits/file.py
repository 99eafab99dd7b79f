"""Reads the file of limits: TOML, a section for each key."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fastdeploy_core.errors import ConfigError

DEFAULT = "default"  # the section for keys without one
TENANT_DIGITS = 16  # of a key's SHA-256: what the server knows a key by


@dataclass(frozen=True, slots=True)
class Limits:
    """What one key may use; None: as much as there is."""

    name: str = DEFAULT
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # of prompts and answers together
    running_requests: int | None = None


WORDS = tuple(field.name for field in fields(Limits) if field.name != "name")


def read(path: Path) -> dict[str, Limits]:
    """Limits by tenant, those of DEFAULT under the empty name. ConfigError says what is wrong."""
    try:
        sections = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"--api-key-limits {path} cannot be read: {error}") from error
    found: dict[str, Limits] = {"": Limits()}
    for name, section in sections.items():
        where = f"--api-key-limits {path}, [{name}]"
        if not isinstance(section, dict):
            raise ConfigError(f"{where}: a section is expected, such as [{name}] and lines below")
        tenant = "" if name == DEFAULT else _tenant(section.pop("key", None), where)
        if tenant in found and tenant:
            raise ConfigError(f"{where} has the key of [{found[tenant].name}]")
        found[tenant] = Limits(name, **{word: _number(section, word, where) for word in section})
    return found


def _tenant(key: Any, where: str) -> str:
    if not isinstance(key, str) or not re.fullmatch("sha256:[0-9a-f]{64}", key):
        raise ConfigError(
            f'{where}: key = "sha256:HEX" is expected, 64 digits of 0-9a-f; '
            "run: printf %s KEY | sha256sum"
        )
    return key.removeprefix("sha256:")[:TENANT_DIGITS]


def _number(section: dict[str, Any], word: str, where: str) -> int:
    value = section[word]
    if word not in WORDS:
        raise ConfigError(f"{where}: {word!r} is no limit; there are: key, {', '.join(WORDS)}")
    if type(value) is not int or value < 1:
        raise ConfigError(f"{where}: {word} = {value!r} is no whole number of at least 1")
    return value
