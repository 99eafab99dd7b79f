"""The `fastdeploy` command: finds a command, imports only its module, turns errors into one line.

Nothing heavy is imported here: `fastdeploy --help` must answer in 0.15 s. Plugins add commands
through group `fastdeploy.commands`; metadata is read only for a name that is not the core's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from fastdeploy_core.cli import commands
from fastdeploy_core.plugins.core_commands import GROUPS

EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_INTERRUPT = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    while (opened := os.open(os.devnull, os.O_RDWR)) < 3:  # a supervisor closed this stream
        os.set_inheritable(opened, True)
    os.close(opened)
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] in (["-v"], ["-V"], ["--version"]):
        arguments = ["version"]
    name, rest = commands.split(arguments)
    from fastdeploy_core.errors import ConfigError, FastDeployError, PluginError

    try:
        if name == "" or name in GROUPS:
            print(commands.help_text(name))
            return 0 if rest else EXIT_USAGE
        return commands.find(name)(rest)
    except FastDeployError as error:
        print(f"fastdeploy: error: {error}", file=sys.stderr)
        never = name == "serve" and isinstance(error, ConfigError | PluginError)
        return EXIT_USAGE if never else EXIT_ERROR  # EXIT_USAGE: nobody has to try again
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


if __name__ == "__main__":
    sys.exit(main())
