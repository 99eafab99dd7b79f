"""The core's own commands: a table, so that `fastdeploy serve` starts without reading metadata."""

from __future__ import annotations

from typing import Final

# Groups of commands, with their summaries. Plugins add commands to them, not groups of their own.
GROUPS: Final = {"plugins": "what is installed, what is chosen and why"}

# The core's own commands: name -> ("module:function", summary). A plugin cannot take these names.
CORE_COMMANDS: Final[dict[str, tuple[str, str]]] = {
    name: (f"fastdeploy_core.cli.{target}", summary)
    for name, target, summary in (
        ("serve", "serve:main", "start the OpenAI-compatible server"),
        ("plugins.list", "plugins_list:main", "name, kind, distribution, version, status"),
        ("version", "version:main", "print the version"),
    )
}
