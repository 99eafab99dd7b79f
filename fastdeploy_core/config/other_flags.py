"""Arguments that FastDeploy 2.x or vLLM know and that have no row here: other_flags.json.

Each is answered in one of three ways. "always" asks for what happens anyway. "take" has no effect,
which one line of the log says: clients see no difference, unless that line tells one. "refuse"
stops the start: without it, answers, capacity or security would be other than was asked. A value
among `harmless` asks for what happens anyway.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from fastdeploy_core.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OtherFlag:
    """What becomes of an argument, and why. `value`: how many words it takes on a command line."""

    do: Literal["always", "take", "refuse"]
    reason: str
    value: Literal["none", "one", "many"] = "one"
    harmless: tuple[str, ...] = ()


def _read() -> tuple[dict[str, OtherFlag], dict[str, str], dict[str, list[str]]]:
    data = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
    flags = {
        name: OtherFlag(
            group["do"],
            group["reason"],
            group.get("value", "one"),
            tuple(group.get("harmless", ())),
        )
        for group in data["groups"]
        for name in group["names"]
    }
    return flags, data["short"], data["drivers"]


_read_flags, _read_short, _read_drivers = _read()
OTHER_FLAGS: Final = _read_flags  # by name in underscores
SHORT: Final = _read_short  # names of short flags, such as -pp
OTHER_DRIVERS: Final = _read_drivers  # by kind, names that vLLM has for its own, in lower case


def answer(name: str, value: Any, shown: str = "") -> None:
    """Take the argument with a line in the log, or raise ConfigError. `shown`: as it was written.

    The value of one that is taken is not logged: it may be a secret.
    """
    flag, shown = OTHER_FLAGS[name], shown or name
    if flag.do == "always":
        if value is False:
            raise ConfigError(f"{shown} cannot be turned off: {flag.reason}")
        return
    if value is None or value is False or str(value) in flag.harmless:
        return
    if flag.do == "take":
        logger.warning("%s has no effect: %s", shown, flag.reason)
        return
    possible = f"; possible: {', '.join(flag.harmless)}" if flag.harmless else ""
    asked = shown if flag.value == "none" else f"{shown} {value}"
    raise ConfigError(f"{asked:.120} is not supported: {flag.reason}{possible}")
