"""Commands of `fastdeploy`: what a plugin adds through group `fastdeploy.commands`, and the core's own.

The entry point's name is what the user types: `bench` is called as `fastdeploy bench`. A dot stands
for the space of a command in a group: `plugins.check` is called as `fastdeploy plugins check`.
`fastdeploy --help` shows the summary of the distribution's metadata and imports nothing of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol, runtime_checkable


@runtime_checkable
class Command(Protocol):
    """The target of an entry point: a function, imported when the command is called."""

    def __call__(self, arguments: Sequence[str], /) -> int:
        """Run with the words after the command's name; returns the exit code.

        A FastDeployError becomes one line on stderr and exit code 1. SystemExit, such as argparse
        raises, keeps its code. Added in contract 0.13."""
        ...


# Groups of commands, with their summaries. Plugins add commands to them, not groups of their own.
GROUPS: Final = {"plugins": "what is installed, what is chosen and why"}

# The core's own commands: name -> ("module:function", summary). A plugin cannot take these names.
CORE_COMMANDS: Final[dict[str, tuple[str, str]]] = {
    name: (f"fastdeploy_core.cli.{target}", summary)
    for name, target, summary in (
        ("serve", "serve:main", "start the OpenAI-compatible server"),
        ("chat", "chat:chat", "talk to a running server"),
        ("complete", "chat:complete", "complete text with a running server"),
        ("bench", "bench:main", "measure: throughput, latency, serve"),
        ("run-batch", "run_batch:main", "answer the requests of an OpenAI batch file"),
        ("quantize", "quantize:main", "write a checkpoint in fewer bits"),
        ("tokenizer", "tokenizer_command:main", "encode, decode and inspect a tokenizer"),
        ("plugins.list", "plugins_list:main", "name, kind, distribution, version, status"),
        ("plugins.show", "plugins_show:main", "drivers, hooks and capabilities of one plugin"),
        ("plugins.why", "plugins_why:main", "every candidate, its answer, and the winner"),
        ("plugins.doctor", "plugins_doctor:main", "load each plugin in a child process"),
        ("collect-env", "collect_env:main", "describe this machine for a bug report"),
        ("version", "version:main", "print the version"),
    )
}
