"""Commands of plugins, as wheels: found by name, imported when called, alone when broken."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fastdeploy_core.plugins.core_commands import CORE_COMMANDS
from fastdeploy_core.plugins.known import providers, summaries
from tests.plugins.test_template import build
from tests.plugins.wheels import REPOSITORY, build_wheel, fastdeploy, install

COUNT = '''
"""Counts words."""
from fastdeploy_core.errors import ConfigError
def main(arguments):
    """Count words."""
    if not arguments:
        raise ConfigError("nothing to count")
    print(len(arguments), *arguments)
    return 7
'''
BROKEN = "raise RuntimeError('the runtime is absent')"
POINTS = "[fastdeploy.commands]\n{0} = {1}:main\n"


def add(site: Path, name: str, module: str, command: str, *, summary: str = "") -> None:
    """Install a distribution fd-NAME with one command."""
    stem = name.replace("-", "_")
    points = POINTS.format(command, stem)
    wheel = build_wheel(site.parent, f"fd-{name}", {f"{stem}.py": module}, points, summary=summary)
    install(site, wheel)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    return tmp_path / "site"


def test_a_command_gets_its_words_and_gives_its_exit_code(site: Path) -> None:
    add(site, "count", COUNT, "count")
    done = fastdeploy(site, "count", "a", "--help")
    assert (done.returncode, done.stdout, done.stderr) == (7, "2 a --help\n", "")
    failed = fastdeploy(site, "count")
    assert failed.returncode == 1
    assert failed.stderr == "fastdeploy: error: nothing to count\n"


def test_a_dot_is_a_command_of_a_group(site: Path) -> None:
    add(site, "count", COUNT, "plugins.count", summary="Counts words.")
    assert fastdeploy(site, "plugins", "count", "a").returncode == 7
    assert "count        Counts words. (fd-count)" in fastdeploy(site, "plugins", "--help").stdout
    assert "Counts words" not in fastdeploy(site, "--help").stdout


def test_help_shows_summaries_and_imports_none_of_them(site: Path) -> None:
    add(site, "count", "import time; time.sleep(600)", "count", summary="Counts words.")
    add(site, "plain", BROKEN, "plain")
    done = fastdeploy(site, "--help", timeout_s=300)
    assert done.returncode == 0 and not done.stderr
    assert "  count        Counts words. (fd-count)\n" in done.stdout
    assert "  plain        no summary (fd-plain)\n" in done.stdout


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (BROKEN, "RuntimeError: the runtime is absent"),
        ("import vendor_sdk", "No module named 'vendor_sdk'"),
        ("import sys\nsys.exit(3)", "SystemExit: 3"),
        ("other = 1", "main"),
        ("main = 1", "bad:main is int, not a function"),
    ],
)
def test_a_broken_command_breaks_itself_alone(site: Path, module: str, words: str) -> None:
    add(site, "bad", module, "bad")
    add(site, "count", COUNT, "count")
    broken = fastdeploy(site, "bad")
    assert broken.returncode == 1 and len(broken.stderr.splitlines()) == 1
    assert "command 'bad' of fd-bad 0.1.0 failed to load" in broken.stderr
    assert words in broken.stderr
    assert fastdeploy(site, "count", "a").returncode == 7
    assert fastdeploy(site, "version").returncode == 0


def test_two_claims_are_an_error_that_names_both(site: Path) -> None:
    add(site, "one", COUNT, "count")
    add(site, "two", COUNT, "count")
    done = fastdeploy(site, "count", "a")
    assert done.returncode == 1 and "fd-one 0.1.0 and fd-two 0.1.0" in done.stderr
    helped = fastdeploy(site, "--help").stdout
    assert helped.count("  count ") == 1 and "fd-one 0.1.0 and fd-two 0.1.0" in helped
    kept = fastdeploy(site, "count", "a", FD_PLUGINS_DISABLED="fd-two")
    assert kept.returncode == 7


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("version", "the core's own command of that name stays in use"),
        ("plugins.list", "the core's own command of that name stays in use"),
        ("plugins", "the core's own group of that name stays in use"),
        ("serve.fast", "no group of commands 'serve'; there are: plugins"),
    ],
)
def test_a_name_that_cannot_be_had_is_refused(site: Path, name: str, reason: str) -> None:
    add(site, "greedy", COUNT, name)
    listed = fastdeploy(site, "plugins", "list", "--json")
    entries = json.loads(listed.stdout)["plugins"]
    mine = [(e["status"], e["reason"]) for e in entries if e["distribution"] == "fd-greedy"]
    assert mine == [("refused", reason)]
    assert fastdeploy(site, "version").returncode == 0
    assert "fd-greedy" not in fastdeploy(site, "--help").stdout


def test_a_disabled_command_says_so(site: Path) -> None:
    add(site, "count", COUNT, "count")
    done = fastdeploy(site, "count", "a", FD_PLUGINS_DISABLED="fd-count")
    assert done.returncode == 1 and "named by FD_PLUGINS_DISABLED" in done.stderr
    assert "fd-count" not in fastdeploy(site, "--help", FD_PLUGINS_DISABLED="fd-count").stdout


def test_an_unknown_command_names_what_is_near(site: Path) -> None:
    add(site, "count", COUNT, "count")
    add(site, "more", COUNT, "plugins.count")
    assert "did you mean 'count'?" in fastdeploy(site, "cuont").stderr
    assert "did you mean 'plugins count'?" in fastdeploy(site, "plugins", "cuont").stderr
    far = fastdeploy(site, "plugins", "qqq")
    assert far.returncode == 1 and "possible: list, check" in far.stderr and "count" in far.stderr


def test_known_commands_are_not_the_cores() -> None:
    assert not set(providers("command")) & set(CORE_COMMANDS)


def alone(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line where nothing is installed but the core."""
    return subprocess.run(
        [sys.executable, "-S", "-P", "-m", "fastdeploy_core.cli.main", *arguments],
        env={"PYTHONPATH": str(REPOSITORY), "PATH": os.environ["PATH"]},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("name", providers("command"))
def test_core_alone_answers_with_the_command_that_installs(name: str) -> None:
    words, distribution = name.split("."), providers("command")[name]
    done = alone(*words, "--help")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"fastdeploy: error: `fastdeploy {' '.join(words)}` is in the distribution {distribution}: "
        f"pip install {distribution}\n"
    )
    helped = alone(*words[:-1], "--help")
    assert helped.returncode == 0
    installed, _, missing = helped.stdout.partition("not installed:\n")
    (row,) = (line for line in missing.splitlines() if line.startswith(f"  {words[-1]:<12} "))
    assert row.endswith(f"{summaries()[name]} (pip install {distribution})")
    assert f"  {words[-1]} " not in installed


@pytest.mark.parametrize("name", providers("command"))
def test_a_known_command_is_its_distributions(name: str, site: Path, tmp_path: Path) -> None:
    """Its real wheel, before this checkout on the path."""
    distribution = providers("command")[name]
    install(site, build(REPOSITORY / "plugins" / distribution, tmp_path))
    done = fastdeploy(site, *name.split("."), "--help")
    assert done.returncode == 0 and f"usage: fastdeploy {name.replace('.', ' ')}" in done.stdout
    shown = json.loads(fastdeploy(site, "plugins", "list", "--json").stdout)["plugins"]
    mine = [p for p in shown if p["kind"] == "command" and p["name"] == name]
    assert [(p["distribution"], p["status"]) for p in mine] == [(distribution, "ok")]
    assert not any((site / "fastdeploy_core").glob("*"))


def test_help_reads_metadata_once_after_each_installation(site: Path, tmp_path: Path) -> None:
    """What it keeps is read again when a distribution comes or goes or the operator chooses
    otherwise, and where it is damaged or there is no place for it."""
    cache = tmp_path / "cache"

    def shown(**variables: str) -> tuple[bool, bool, bool]:
        """Whether `count` and `more` are shown, and whether metadata was read."""
        done = fastdeploy(
            site, "--help", FD_CACHE_DIR=str(cache), PYTHONPROFILEIMPORTTIME="1", **variables
        )
        assert done.returncode == 0
        names = [f"  {name} " in done.stdout for name in ("count", "more")]
        return (names[0], names[1], "fastdeploy_core.plugins.discovery\n" in done.stderr)

    add(site, "count", COUNT, "count")
    assert shown() == (True, False, True)
    assert shown() == (True, False, False)
    assert shown(FD_PLUGINS_DISABLED="fd-count") == (False, False, True)
    assert shown() == (True, False, True)
    add(site, "more", COUNT, "more")
    assert shown() == (True, True, True)
    shutil.rmtree(next(site.glob("fd_more*.dist-info")))
    assert shown() == (True, False, True)
    (kept,) = cache.rglob("*.json")
    for damaged in ("", "[]", "{}", "\udcff"):
        kept.write_text(damaged, "utf-8", "surrogateescape")
        assert shown() == (True, False, True)
    assert shown() == (True, False, False)
    shutil.rmtree(cache)
    cache.write_text("")
    assert shown() == (True, False, True)
