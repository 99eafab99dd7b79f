"""A plugin on the path that is no distribution of ours, for tests of `fastdeploy plugins`."""

from __future__ import annotations

import sys
import textwrap
from importlib.util import find_spec

from fastdeploy_core.cli import commands
from fastdeploy_core.plugins import discovery
from fastdeploy_core.plugins.manager import forget_managers


def installed(tmp_path, monkeypatch):
    """A distribution fd-chip with a device, hooks and an attention driver, on sys.path."""
    if find_spec("fd_cpu") is not None:  # its device would win
        monkeypatch.setenv("FD_PLUGINS_DISABLED", "fd-cpu")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "chip", raising=False)  # another test's
    (tmp_path / "chip.py").write_text(
        textwrap.dedent(
            '''
            """Made of sand."""
            from fastdeploy_core.contracts import Accept, Candidate, Decline, hookimpl
            class Device:
                """One chip."""
                name = "chip"
                contract = (1, 0)
                option_docs = {"speed": "how fast"}
            class Flash:
                contract = (1, 0)
                unit = "core"
            @hookimpl
            def fd_device_probe():
                return Candidate("chip", Decline("no sand here"))
            @hookimpl
            def fd_attention_backends(question):
                if question.spec.kind == "mla":
                    return [Candidate("flash", Decline("no mla"))]
                return [Candidate("flash", Accept(120, "tuned"))]
            @hookimpl
            def fd_doctor_checks():
                return [("fan turns", True, ""), ("sand is dry", False, "warm it up")]
            '''
        )
    )
    info = tmp_path / "fd_chip-0.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: fd-chip\nVersion: 0.3\nSummary: Sand\n"
        "Project-URL: Docs, https://example.org/sand\n"
    )
    (info / "entry_points.txt").write_text(
        "[fastdeploy.devices]\nchip = chip:Device\n[fastdeploy.hooks]\nchip = chip\n"
        "[fastdeploy.attention]\nflash = chip:Flash\n"
    )
    discovery.forget()
    forget_managers()
    yield tmp_path
    discovery.forget()
    forget_managers()


def command(name, *arguments):
    return commands.find(f"plugins.{name}")(arguments)


def run(capsys, *argv):
    code = command(*argv)
    return code, capsys.readouterr()
