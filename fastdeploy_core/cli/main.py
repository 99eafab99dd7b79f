"""The `fastdeploy` command: finds the subcommand, imports only its module, turns errors into one line.

Nothing heavy is imported here: `fastdeploy --help` must answer in 0.15 s. Plugins may add commands
(hook `fd_cli_commands`); they are asked only for a name that is not built in.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence

# name -> (module in this package, summary)
COMMANDS: dict[str, tuple[str, str]] = {
    "serve": ("serve", "start the OpenAI-compatible server"),
    "chat": ("chat", "talk to a running server"),
    "complete": ("chat", "complete text with a running server"),
    "bench": ("bench", "measure: throughput, latency, serve"),
    "run-batch": ("run_batch", "answer the requests of an OpenAI batch file"),
    "quantize": ("quantize", "write a checkpoint in fewer bits"),
    "tokenizer": ("tokenizer_command", "encode, decode and inspect a tokenizer"),
    "plugins": ("plugins_command", "list, show, why, doctor, check, new"),
    "collect-env": ("collect_env", "describe this machine for a bug report"),
    "version": ("version", "print the version"),
}
EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_INTERRUPT = 130


def help_text() -> str:
    """What `fastdeploy --help` prints."""
    rows = "\n".join(f"  {name:<12} {summary}" for name, (_, summary) in COMMANDS.items())
    return (
        "usage: fastdeploy COMMAND [arguments]\n\n"
        f"commands:\n{rows}\n\n"
        "Each command explains itself: fastdeploy COMMAND --help. Plugins may add commands:\n"
        "fastdeploy plugins list. Start with: fastdeploy serve MODEL_FOLDER"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(help_text())
        return 0 if arguments else EXIT_USAGE
    name, rest = arguments[0], arguments[1:]
    if name in ("-v", "-V", "--version"):
        name, rest = "version", []
    from fastdeploy_core.errors import FastDeployError

    try:
        return _find(name)([name, *rest] if name in ("chat", "complete") else rest)
    except FastDeployError as error:
        print(f"fastdeploy: error: {error}", file=sys.stderr)
        return EXIT_ERROR
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output left; there is nobody to tell
        return EXIT_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPT
    except SystemExit as leave:  # argparse: --help and usage errors
        if leave.code is None or isinstance(leave.code, int):
            return leave.code or 0
        print(f"fastdeploy: error: {leave.code}", file=sys.stderr)
        return EXIT_ERROR


def _find(name: str) -> Callable[[list[str]], int]:
    if name in COMMANDS:
        module = importlib.import_module(f"fastdeploy_core.cli.{COMMANDS[name][0]}")
        found: Callable[[list[str]], int] = module.main
        return found
    from fastdeploy_core.errors import ConfigError

    added = _plugin_commands()
    if name in added:
        module_name, _, attribute = added[name].partition(":")
        command = getattr(importlib.import_module(module_name), attribute)
        return lambda arguments: int(command(arguments) or 0)
    import difflib

    near = difflib.get_close_matches(name, [*COMMANDS, *added], n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"possible: {', '.join(COMMANDS)}"
    raise ConfigError(f"unknown command {name!r}; {hint}")


def _plugin_commands() -> dict[str, str]:
    """Commands that installed plugins add; a plugin that fails to answer adds none."""
    from fastdeploy_core.plugins.manager import hook_manager

    commands: dict[str, str] = {}
    for answer in hook_manager(None).hook.fd_cli_commands():
        commands.update(answer or {})
    return commands


if __name__ == "__main__":
    sys.exit(main())
