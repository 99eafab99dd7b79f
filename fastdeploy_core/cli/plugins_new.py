"""`fastdeploy plugins new fd-mychip`: a device plugin from plugins/_template, names filled in."""

from __future__ import annotations

import argparse
import importlib.metadata
import re
from pathlib import Path
from typing import Final

from fastdeploy_core import __version__
from fastdeploy_core.contracts.base import DISTRIBUTION
from fastdeploy_core.errors import ConfigError

_INSTALLED: Final = "share/fastdeploy/plugin_template/pyproject.toml"


def run(arguments: argparse.Namespace) -> int:
    """Create the folder and say what to do next."""
    folder = create(arguments.name, Path(arguments.dir))
    chip = chip_name(arguments.name)
    print(
        f"created {folder}\n\n"
        f"next:\n"
        f"  pip install -e {folder}\n"
        f"  fastdeploy plugins list --kind device\n"
        f"  fastdeploy plugins check {chip}\n"
        f"then open {folder / 'src' / f'fd_{chip}' / 'device.py'}"
    )
    return 0


def chip_name(distribution: str) -> str:
    """The device's name: the distribution's without fd-."""
    match = re.fullmatch(r"fd-([a-z][a-z0-9]*)", distribution)
    if not match:
        raise ConfigError(
            f"plugin name {distribution!r} cannot be used; a name looks like fd-mychip: "
            "fd- and then lower-case letters and digits"
        )
    return match[1]


def create(distribution: str, parent: Path) -> Path:
    """Copy the template; refuses to touch a folder that exists."""
    chip = chip_name(distribution)
    target = parent / distribution
    if target.exists():
        raise ConfigError(f"{target} exists already; choose another --dir or remove it")
    source = template_folder()
    major, minor = (int(n) for n in __version__.split(".")[:2])
    upper = f"{major}.{minor + 1}" if major == 0 else f"{major + 1}"
    words = {
        "mychip": chip,
        "MyChip": chip.capitalize(),
        "__CORE_REQUIREMENT__": f"fastdeploy-core>={major}.{minor},<{upper}",
    }
    for path in sorted(source.rglob("*")):
        if path.is_dir() or "__pycache__" in path.parts:
            continue
        place = target / _filled(str(path.relative_to(source)), words)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(_filled(path.read_text("utf-8"), words), "utf-8")
    return target


def template_folder() -> Path:
    """At the top of the repository in a checkout, among the data files of an installed core."""
    checkout = Path(__file__).resolve().parents[2] / "plugins" / "_template"
    if (checkout / "pyproject.toml").is_file():
        return checkout
    for file in importlib.metadata.files(DISTRIBUTION) or []:
        if file.match(_INSTALLED):
            return Path(str(file.locate())).resolve().parent
    raise ConfigError(
        "the plugin template is missing from this installation; run: "
        "pip install --force-reinstall --no-deps fastdeploy-core"
    )


def _filled(text: str, words: dict[str, str]) -> str:
    for word, value in words.items():
        text = text.replace(word, value)
    return text
