"""`fastdeploy plugins new fd-mychip`: a plugin from one of templates/, names filled in."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fastdeploy_core import __version__
from fastdeploy_core.contracts.base import CONTRACT
from fastdeploy_core.contracts.command import CommandParser
from fastdeploy_core.errors import ConfigError

TEMPLATE_FOLDER: Final = Path(__file__).with_name("templates")


@dataclass(frozen=True, slots=True)
class Template:
    """The kind of driver in a folder of templates/, and the names that stand for the new one's."""

    kind: str
    placeholder: str
    class_name: str
    first_file: str
    driver: str = "{name}"  # the name that it is registered under


TEMPLATES: Final = {
    "device": Template("device", "mychip", "MyChip", "device.py"),
    "model": Template("model", "mymodel", "MyModel", "model.py", "{class_name}ForCausalLM"),
    "drafter": Template("speculative", "mydraft", "MyDraft", "drafter.py"),
    "quantizer": Template("quantizer", "myformat", "MyFormat", "quantizer.py"),
    "launcher": Template("launcher", "mycluster", "MyCluster", "launcher.py"),
    "tool_parser": Template("tool_parser", "mycalls", "MyCalls", "parser.py"),
}


def main(argv: Sequence[str]) -> int:
    """Create the folder and say what to do next."""
    arguments = _parser().parse_args(argv)
    template = TEMPLATES[arguments.kind]
    folder = create(arguments.name, Path(arguments.dir), arguments.kind)
    name = driver_name(arguments.name)
    package = arguments.name.replace("-", "_")
    driver = template.driver.format(name=name, class_name=name.capitalize())
    with_model = " --kind model --model DIR" if template.kind == "model" else ""
    print(
        f"created {folder}\n\n"
        f"next:\n  pip install -e {folder}\n"
        f"  fastdeploy plugins list --kind {template.kind}\n"
        f"  fastdeploy plugins check {driver}{with_model}\n"
        f"then open {folder / 'src' / package / template.first_file}"
    )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="fastdeploy plugins new", description="Start a plugin from a template."
    )
    parser.add_argument("name", help="name of the distribution, such as fd-mychip")
    parser.add_argument("--kind", choices=list(TEMPLATES), default="device")
    parser.add_argument("--dir", default=".", help="where to create the folder")
    return parser


def driver_name(distribution: str) -> str:
    """The driver's name: the last part of the distribution's."""
    match = re.fullmatch(r"fd-(?:[a-z][a-z0-9]*-)*([a-z][a-z0-9]*)", distribution)
    if not match:
        raise ConfigError(
            f"plugin name {distribution!r} cannot be used; a name looks like fd-mychip: "
            "fd- and then lower-case letters and digits, parts divided by -"
        )
    return match[1]


def create(distribution: str, parent: Path, kind: str = "device") -> Path:
    """Copy the template; refuses to touch a folder that exists."""
    name, template = driver_name(distribution), TEMPLATES[kind]
    target = parent / distribution
    if target.exists():
        raise ConfigError(f"{target} exists already; choose another --dir or remove it")
    source = TEMPLATE_FOLDER / kind
    major, minor = (int(n) for n in __version__.split(".")[:2])
    upper = f"{major}.{minor + 1}" if major == 0 else f"{major + 1}"
    stands = template.placeholder
    words = {
        f"fd-{stands}": distribution,
        f"fd_{stands}": distribution.replace("-", "_"),
        stands: name,
        template.class_name: name.capitalize(),
        "__CORE_REQUIREMENT__": f"fastdeploy-core>={major}.{minor},<{upper}",
    }
    for path in sorted(source.rglob("*")):
        if path.is_dir() or "__pycache__" in path.parts:
            continue
        place = target / _filled(str(path.relative_to(source)), words)
        place.parent.mkdir(parents=True, exist_ok=True)
        text = _filled(path.read_text("utf-8"), words)
        text = re.sub(r"contract = \(\d+, \d+\)", f"contract = {CONTRACT}", text)
        place.write_text(text, "utf-8")
    return target


def _filled(text: str, words: dict[str, str]) -> str:
    for word, value in words.items():
        text = text.replace(word, value)
    return text
