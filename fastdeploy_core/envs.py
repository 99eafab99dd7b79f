"""Every environment variable the project reads: one row each (name, type, default, doc).

`envs.FD_X` reads the variable now; a value of the wrong form raises ConfigError naming it. Nothing
else in the project touches os.environ for settings, so this file is the whole documentation.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from .errors import ConfigError


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable. `parse` gets a stripped, non-empty text and raises ValueError."""

    name: str
    type: str
    default: Any
    doc: str
    parse: Callable[[str], Any]
    keep_empty: bool = False  # "" is a value of its own and not the same as unset

    def read(self, environ: Mapping[str, str]) -> Any:
        """The value in `environ`, or the default."""
        text = environ.get(self.name)
        if text is None or (not text.strip() and not self.keep_empty):
            return self.default
        try:
            return self.parse(text.strip())
        except ValueError as error:
            raise ConfigError(
                f"environment variable {self.name} cannot be read: got {text!r:.80}, {error}; "
                f"expected {self.type}; unset it for the default ({self.default!r})"
            ) from None


def _boolean(text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off"):
        return False
    raise ValueError("not a yes or no")


def _number(low: float, high: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = float(text)
        if not low <= value <= high:
            raise ValueError(f"not between {low:g} and {high:g}")
        return value

    return parse


def _choice(*possible: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() not in possible:
            raise ValueError(f"not one of {', '.join(possible)}")
        return text.lower()

    return parse


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _text(text: str) -> str:
    return text


VARIABLES: Final[dict[str, Variable]] = {
    v.name: v
    for v in (
        Variable(
            "FD_PLUGINS",
            "comma-separated distribution names",
            None,
            "Which installed plugins take part. Unset or `all`: all of them; a list: only these "
            "(the core's own drivers and commands always do); empty: the core alone.",
            _names,
            keep_empty=True,
        ),
        Variable(
            "FD_PLUGINS_PREFERRED",
            "comma-separated distribution names",
            (),
            "Distributions whose drivers are used where another has the same name, the core's own "
            "included: a model family, a parser or a scheduler of the core is replaced so.",
            _names,
        ),
        Variable(
            "FD_PLUGINS_DISABLED",
            "comma-separated distribution names",
            (),
            "Plugins that take no part although installed. A name also in FD_PLUGINS is an error.",
            _names,
        ),
        Variable(
            "FD_TRACE_PLUGINS",
            "yes or no",
            False,
            "Write every hook call with its arguments, result and milliseconds to stderr.",
            _boolean,
        ),
        Variable(
            "FD_PLUGIN_PREFLIGHT",
            "yes or no",
            True,
            "Import third-party plugins first in a child process with a time limit, so that one "
            "that hangs, crashes or exits cannot take the server with it. Off saves its time at "
            "start-up.",
            _boolean,
        ),
        Variable(
            "FD_PLUGIN_HOOK_TIMEOUT_S",
            "seconds",
            2.0,
            "How long third-party hook modules may hang while they are imported and say which "
            "devices are here; they are asked side by side. One that goes on reading files or "
            "touching new memory, as an import does, may take as long as a driver. All later "
            "answers that hang may take half of it together.",
            _number(0.1, 3600),
        ),
        Variable(
            "FD_PLUGIN_DRIVER_TIMEOUT_S",
            "seconds",
            60.0,
            "How long importing one third-party driver may take: in the pre-flight child process, "
            "where one that neither computes nor reads is given up after 2 s, or of a checkpoint "
            "format in the process that reads the model path.",
            _number(0.1, 3600),
        ),
        Variable(
            "FD_FOR_TORCH_MODEL_FORMAT",
            "yes or no",
            False,
            "Read every checkpoint as torch stores it ([out, in] linear weights), regardless of "
            "its config.json.",
            _boolean,
        ),
        Variable(
            "FD_MODEL_SOURCE",
            "huggingface, modelscope, aistudio, or the name of a plugin's source",
            "huggingface",
            "Where a model comes from that is named instead of given as a folder.",
            str.lower,
        ),
        Variable(
            "VLLM_USE_MODELSCOPE",
            "yes or no",
            False,
            "The same as FD_MODEL_SOURCE=modelscope, as vLLM's deployments say it.",
            _boolean,
        ),
        Variable(
            "FD_MODEL_CACHE",
            "folder",
            None,
            "Where downloaded models are kept without --download-dir. Unset: the hub's own cache.",
            _text,
        ),
        Variable(
            "FD_CACHE_DIR",
            "folder",
            "~/.cache/fastdeploy",
            "Where files are kept that can be made again, such as a tokenizer unpacked from a "
            "checkpoint file.",
            _text,
        ),
        Variable(
            "FD_KV_SECRET",
            "at least 32 characters",
            "",
            "What instances that hand KV blocks to each other prove to know (--kv-transport). "
            "Unset: a file of this user in FD_CACHE_DIR, made when it is first needed.",
            _text,
        ),
        Variable(
            "FD_API_KEY",
            "comma-separated keys",
            (),
            "Keys clients of the API server must send (or sha256:HEX), beside those of --api-key.",
            _names,
        ),
        Variable("FD_ADMIN_KEY", "a key", "", "The same as --admin-key.", _text),
        Variable(
            "VLLM_API_KEY",
            "a key",
            (),
            "One more such key, under the name that vLLM's deployments set.",
            lambda text: (text,),
        ),
        Variable(
            "FD_LOG_LEVEL",
            "debug, info, warning or error",
            "info",
            "How much the command line tools and the server log.",
            _choice("debug", "info", "warning", "error"),
        ),
        Variable(
            "FD_LOG_FORMAT",
            "text or json",
            "text",
            "How log lines look: for people, or one JSON object for each.",
            _choice("text", "json"),
        ),
        Variable(
            "FD_LOG_DIR",
            "folder",
            None,
            "Where each process also keeps its log: server.log, engine.log and so on, a new file "
            "every midnight. Unset: standard error alone.",
            _text,
        ),
        Variable(
            "FD_LOG_BACKUP_COUNT",
            "a number of days",
            7.0,
            "How many days' files FD_LOG_DIR keeps of each process.",
            _number(1, 3650),
        ),
    )
}


def read(name: str, environ: Mapping[str, str] | None = None) -> Any:
    """The value of one variable, from os.environ unless given; KeyError for an unlisted one."""
    return VARIABLES[name].read(os.environ if environ is None else environ)


def __getattr__(name: str) -> Any:
    if name in VARIABLES:
        return read(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
