"""What a stranger makes from the documentation alone: the commands of each page, word for word.

Each task has an environment of its own, of the core, the conformance kit and what its own
distribution requires. Nobody writes a line; the model, which is code on its page, is in
test_model_plugin.py.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.plugins.test_template import build
from tests.plugins.wheels import REPOSITORY, install, python

DOCS = REPOSITORY / "docs"
COMMAND = re.compile(r"(?:^ *|`|bin/)fastdeploy (plugins (?:new|check) [^`\n|]*)", re.MULTILINE)
pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Task:
    """`needs`: distributions beside the core that the new one requires."""

    page: str
    distribution: str
    needs: tuple[str, ...] = ()


TASKS = {
    "device": Task("tutorials/first-device-plugin.md", "fd-mychip"),
    "rms_norm": Task("how-to/write-a-kernel.md", "fd-ops-cpu"),
    "scheduler": Task("how-to/write-a-request-scheduler.md", "fd-sched-myqueue", ("fd-scale-out",)),
    "transport": Task("how-to/write-a-kv-transport.md", "fd-kv-mywire", ("fd-kv-shm",)),
    "quantizer": Task("how-to/write-a-quantizer.md", "fd-quant-mine"),
    "drafter": Task("how-to/write-a-drafter.md", "fd-spec-mine"),
    "tool parser": Task("how-to/write-a-parser.md", "fd-mycalls"),
    "reasoning parser": Task("how-to/write-a-parser.md", "fd-mythoughts"),
    "logits processor": Task("how-to/write-a-logits-processor.md", "fd-mybias"),
    "grammar": Task("how-to/write-a-grammar-backend.md", "fd-mygrammar"),
    "KV store": Task("how-to/keep-kv-blocks-on-disk.md", "fd-kv-mystore", ("fd-scale-out",)),
    "launcher": Task("how-to/write-a-launcher.md", "fd-mycluster", ("fd-launch",)),
}


def commands(task: Task) -> tuple[list[str], list[str]]:
    """Words of the page's `plugins new` and `plugins check` of that distribution."""
    found = [shlex.split(c) for c in COMMAND.findall((DOCS / task.page).read_text("utf-8"))]
    driver = task.distribution.rpartition("-")[2]
    made = [words for words in found if words[1:3] == ["new", task.distribution]]
    checked = [words for words in found if words[1:3] == ["check", driver]]
    assert made and checked, f"{task.page} lacks one of the two: {found}"
    return made[0], checked[0]


@pytest.mark.parametrize("name", TASKS)
def test_the_pages_commands_make_a_plugin_that_passes(
    name: str, tmp_path: Path, tensor_library: str
) -> None:
    task, site = TASKS[name], tmp_path / "site"
    new, check = commands(task)
    plugins = ",".join((task.distribution, "fastdeploy-testing", *task.needs))
    library = [] if "--tensor" in check else ["--tensor", tensor_library]

    def fastdeploy(words: list[str]) -> subprocess.CompletedProcess[str]:
        program = ("-m", "fastdeploy_core.cli.main", *words)
        return python(site, *program, timeout_s=580, FD_PLUGINS=plugins)

    if "--dir" in new:  # the page's own folder
        new[new.index("--dir") + 1] = str(tmp_path)
    else:
        new += ["--dir", str(tmp_path)]
    made = fastdeploy(new)
    assert made.returncode == 0, made.stderr
    assert f"plugins check {check[2]}" in made.stdout, "what the command says to do next"
    install(site, build(tmp_path / task.distribution, tmp_path))
    done = fastdeploy([*check, *library])
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert re.search(r"\b[1-9]\d* passed", done.stdout) and "FAIL" not in done.stdout
