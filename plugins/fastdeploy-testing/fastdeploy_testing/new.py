"""`fastdeploy plugins new fd-mychip`: a plugin from one of templates/, names filled in."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fastdeploy_core import __version__
from fastdeploy_core.contracts.base import CONTRACT, DISTRIBUTION, HOOK_GROUP, KINDS
from fastdeploy_core.contracts.command import CommandParser
from fastdeploy_core.errors import ConfigError

TEMPLATE_FOLDER: Final = Path(__file__).with_name("templates")
SHARED: Final = "shared"  # files of every template that does not bring its own


@dataclass(frozen=True, slots=True)
class Template:
    """The kind of driver in a folder of templates/, and the names that stand for the new one's.

    A template without a pyproject.toml gets the shared one, whose entry point is `target`.
    """

    kind: str
    placeholder: str
    class_name: str
    first_file: str
    driver: str = "{name}"  # the name that it is registered under
    target: str = ""  # "module:attribute" in its package
    needs: tuple[str, ...] = ()  # distributions beside the core
    options: str = ""  # what `plugins check` wants beside the name


TEMPLATES: Final = {
    "device": Template("device", "mychip", "MyChip", "device.py"),
    "kernels": Template(
        "kernels", "myops", "MyOps", "table.py", target="table:TABLE", options=" --kind kernels"
    ),
    "attention": Template(
        "attention", "myflash", "MyFlash", "attention.py", target="attention:MyFlashAttention"
    ),
    "moe": Template("moe", "myexperts", "MyExperts", "experts.py", target="experts:MyExpertsMoE"),
    "state": Template("state", "mystates", "MyStates", "states.py", target="states:MyStatesStates"),
    "expert_communicator": Template(
        *("expert_communicator", "mymesh", "MyMesh", "communicator.py"),
        target="communicator:MyMeshExperts",
        needs=("fd-accelerator",),
    ),
    "quantizer": Template("quantizer", "myformat", "MyFormat", "quantizer.py"),
    "model": Template(
        *("model", "mymodel", "MyModel", "model.py", "{class_name}ForCausalLM"),
        options=" --kind model --model DIR",
    ),
    "checkpoint_format": Template(
        *("checkpoint_format", "mysuffix", "MySuffix", "checkpoint.py"),
        target="checkpoint:MySuffixCheckpoint",
    ),
    "model_source": Template(
        "model_source", "myhub", "MyHub", "source.py", target="source:MyHubSource"
    ),
    "drafter": Template("speculative", "mydraft", "MyDraft", "drafter.py"),
    "scheduler": Template(
        *("scheduler", "myqueue", "MyQueue", "scheduler.py"),
        target="scheduler:MyQueueScheduler",
        needs=("fd-scale-out", "msgspec"),
        options=" --option folder=/tmp",
    ),
    "kv_transport": Template(
        *("kv_transport", "mywire", "MyWire", "transport.py"),
        target="transport:MyWireTransport",
        needs=("fd-kv-shm",),
    ),
    "kv_store": Template(
        *("kv_store", "mydisk", "MyDisk", "store.py"),
        target="store:MyDiskStore",
        needs=("fd-scale-out",),
    ),
    "reasoning_parser": Template(
        *("reasoning_parser", "mythoughts", "MyThoughts", "parser.py"),
        target="parser:MyThoughtsParser",
    ),
    "tool_parser": Template("tool_parser", "mycalls", "MyCalls", "parser.py"),
    "logits_processor": Template(
        *("logits_processor", "mybias", "MyBias", "processor.py"),
        target="processor:MyBiasProcessor",
    ),
    "grammar": Template(
        *("grammar", "mygrammar", "MyGrammar", "backend.py"),
        target="backend:MyGrammarBackend",
        needs=("numpy", "tokenizers"),
    ),
    "launcher": Template("launcher", "mycluster", "MyCluster", "launcher.py"),
    "command": Template("command", "mycommand", "MyCommand", "command.py", target="command:main"),
}


def main(argv: Sequence[str]) -> int:
    """Create the folder and say what to do next."""
    arguments = _parser().parse_args(argv)
    template = TEMPLATES[arguments.kind]
    folder = create(arguments.name, Path(arguments.dir), arguments.kind)
    name = driver_name(arguments.name)
    package = arguments.name.replace("-", "_")
    driver = template.driver.format(name=name, class_name=name.capitalize())
    print(
        f"created {folder}\n\n"
        f"next:\n  pip install -e {folder}\n"
        f"  fastdeploy plugins list --kind {template.kind}\n"
        f"  fastdeploy plugins check {driver}{template.options}\n"
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
    own = TEMPLATE_FOLDER / kind
    if template.target:
        words = _shared_words(template, own, distribution, name, words)
        _copy(TEMPLATE_FOLDER / SHARED, target, words)
    _copy(own, target, words)
    return target


def _shared_words(
    template: Template, own: Path, distribution: str, name: str, words: dict[str, str]
) -> dict[str, str]:
    """What stands in the files that templates share, before the words of this one."""
    package = distribution.replace("-", "_")
    core = words["__CORE_REQUIREMENT__"]
    needs = [core]
    for need in template.needs:
        # Distributions of this repository have the core's versions.
        needs.append(core.replace(DISTRIBUTION, need) if need.startswith("fd-") else need)
    points = {KINDS[template.kind].group: f"{package}.{_filled(template.target, words)}"}
    if (own / "src" / f"fd_{template.placeholder}" / "hooks.py").exists():
        points[HOOK_GROUP] = f"{package}.hooks"
    title = template.kind.replace("_", " ").capitalize().replace("Kv", "KV").replace("Moe", "MoE")
    return {
        "__DISTRIBUTION__": distribution,
        "__PACKAGE__": package,
        "__SUMMARY__": f"{title} {name} for FastDeploy",
        "__DEPENDENCIES__": ", ".join(f'"{need}"' for need in needs),
        "__ENTRY_POINTS__": "\n\n".join(
            f'[project.entry-points."{group}"]\n{name} = "{place}"'
            for group, place in points.items()
        ),
        **words,
    }


def _copy(source: Path, target: Path, words: dict[str, str]) -> None:
    for path in sorted(source.rglob("*")):
        if path.is_dir() or "__pycache__" in path.parts:
            continue
        place = target / _filled(str(path.relative_to(source)), words)
        place.parent.mkdir(parents=True, exist_ok=True)
        text = _filled(path.read_text("utf-8"), words)
        text = re.sub(r"contract = \(\d+, \d+\)", f"contract = {CONTRACT}", text)
        place.write_text(text, "utf-8")


def _filled(text: str, words: dict[str, str]) -> str:
    for word, value in words.items():
        text = text.replace(word, value)
    return text
