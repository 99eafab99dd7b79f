"""The hook manager: one guarded call per plugin, failures reported by distribution."""

from __future__ import annotations

import inspect
import mmap
import time

import pytest

from fastdeploy_core.contracts import hookspecs
from fastdeploy_core.contracts.base import Accept, Candidate
from fastdeploy_core.contracts.device import DeviceQuestion
from fastdeploy_core.errors import PluginError, PluginLoadError
from fastdeploy_core.plugins import drivers, preflight
from fastdeploy_core.plugins.manager import HookManager, call_with_limit, hook_names
from tests.plugin_modules import core_entry, entry, module_writer

HEAD = "from fastdeploy_core.contracts import Accept, Candidate, Decline, hookimpl\n"


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.delenv("FD_TRACE_PLUGINS", raising=False)
    monkeypatch.setenv("FD_PLUGIN_PREFLIGHT", "0")  # tests that want it set it
    writer = module_writer(tmp_path, monkeypatch)
    return lambda name, source: writer(name, HEAD + inspect.cleandoc(source))


def models(manager):
    return [(a.plugin.distribution, a.value) for a in manager.ask("fd_register_models")]


def test_answers_come_with_their_plugin_strangers_first_by_name(write):
    for name in ("ma", "mb", "mcore"):
        write(name, f"@hookimpl\ndef fd_register_models():\n    return {{'{name}': 'x:y'}}")
    manager = HookManager(
        [entry("hooks", "h", "mb", "fd-b"), core_entry("hooks", "h", "mcore"),
         entry("hooks", "h", "ma", "fd-a")]
    )  # fmt: skip
    assert [d for d, _ in models(manager)] == ["fd-a", "fd-b", "fastdeploy-core"]
    assert [told for _, told in models(manager)] == [{"ma": "x:y"}, {"mb": "x:y"}, {"mcore": "x:y"}]


def test_first_result_stops_at_the_first_answer(write):
    write("f1", "@hookimpl\ndef fd_quantizer_for(question):\n    return None")
    write("f2", "@hookimpl\ndef fd_quantizer_for():\n    return Candidate('q', Accept(1))")
    write("f3", "@hookimpl\ndef fd_quantizer_for():\n    raise AssertionError('asked')")
    manager = HookManager([entry("hooks", "h", f"f{i}", f"fd-{i}") for i in (1, 2, 3)])
    answer = manager.first("fd_quantizer_for", question=None)
    assert answer is not None and answer.value == Candidate("q", Accept(1))
    assert not manager.problems


@pytest.mark.parametrize(
    "source",
    [
        "raise RuntimeError('x')",
        "import sys; sys.exit(3)",
        "raise KeyError",
        "import nowhere_at_all",
    ],
)
def test_module_that_fails_to_load_is_left_out_and_named(write, source):
    write("bad", source)
    write("good", "@hookimpl\ndef fd_register_models():\n    return {'g': 'x:y'}")
    manager = HookManager(
        [entry("hooks", "h", "bad", "fd-bad"), entry("hooks", "h", "good", "fd-good")]
    )
    assert models(manager) == [("fd-good", {"g": "x:y"})]
    assert len(manager.problems) == 1 and "fd-bad 1.0" in manager.problems[0]
    assert [e.distribution for e in manager.entries] == ["fd-good"]


def test_unknown_hook_is_skipped_and_the_plugins_others_work(write):
    write(
        "typo",
        """
        @hookimpl
        def fd_register_modles():
            return {}
        @hookimpl
        def fd_register_models(wrong):
            return {}
        @hookimpl
        def fd_doctor_checks():
            return [("fan", True, "")]
        """,
    )
    manager = HookManager([entry("hooks", "h", "typo", "fd-typo")])
    assert [a.value for a in manager.ask("fd_doctor_checks")] == [[("fan", True, "")]]
    assert models(manager) == []
    assert any("fd_register_modles" in p and "did you mean fd_register_models" in p
               for p in manager.problems)  # fmt: skip
    assert any("wants wrong" in p for p in manager.problems)
    assert manager.hooks_of(manager.entries[0]) == ["fd_doctor_checks"]


def test_wrappers_are_refused(write):
    write(
        "wrap",
        """
        from fastdeploy_core.contracts.hookspecs import hookimpl as impl
        @impl(wrapper=True)
        def fd_register_models():
            result = yield
            return []
        """,
    )
    manager = HookManager([entry("hooks", "h", "wrap", "fd-wrap")])
    assert models(manager) == [] and "wrappers" in manager.problems[0]


def test_third_failure_silences_a_hook_of_a_plugin(write):
    write(
        "shaky",
        """
        calls = []
        @hookimpl
        def fd_step_stats(stats):
            calls.append(stats)
            raise SystemExit(9)
        """,
    )
    manager = HookManager([entry("hooks", "h", "shaky", "fd-shaky")])
    import shaky

    for step in range(6):
        manager.notify("fd_step_stats", stats={"step": step})
    assert [c["step"] for c in shaky.calls] == [0, 1, 2]
    assert len(manager.problems) == 3 and "not called again" in manager.problems[-1]


def test_answer_that_hangs_is_given_up(write, monkeypatch):
    monkeypatch.setenv("FD_PLUGIN_HOOK_TIMEOUT_S", "0.2")
    write("slow", "import time\n@hookimpl\ndef fd_register_models():\n    time.sleep(600)")
    write("fast", "@hookimpl\ndef fd_register_models():\n    return {'f': 'x:y'}")
    manager = HookManager(
        [entry("hooks", "h", "slow", "fd-slow"), entry("hooks", "h", "fast", "fd-fast")]
    )
    assert models(manager) == [("fd-fast", {"f": "x:y"})]
    assert "no answer within 0.2 s" in manager.problems[0]


def test_an_answer_that_imports_for_long_does_not_hang():
    """On a busy machine: it goes on touching new memory."""

    def imports():
        kept, end = [], time.monotonic() + 1.0
        while time.monotonic() < end:
            # a mapping of its own: what earlier tests freed would be given out again, untouched
            kept.append(mmap.mmap(-1, 1 << 16))
            kept[-1].write(b"x" * (1 << 16))
            time.sleep(0.005)
        return len(kept)

    assert call_with_limit(imports, 0.2) > 1
    with pytest.raises(TimeoutError, match=r"no answer within 0\.2 s"):
        call_with_limit(lambda: time.sleep(600), 0.2)


def test_preflight_keeps_a_killer_out_and_probes_strangers_elsewhere(write, monkeypatch):
    monkeypatch.setenv("FD_PLUGIN_PREFLIGHT", "1")
    write("killer", "import os\nos._exit(7)")
    write(
        "chip",
        """
        import os
        @hookimpl
        def fd_device_probe(question):
            return Candidate("chip", Accept(5, f"{os.getpid()} {question.tensor_library}"))
        """,
    )
    manager = HookManager(
        [entry("hooks", "h", "killer", "fd-killer"), entry("hooks", "h", "chip", "fd-chip")]
    )
    assert "exit code 7" in manager.problems[0]
    import os

    for library in ("", "paddle"):
        answers = manager.ask("fd_device_probe", question=DeviceQuestion(library))
        process, _, told = answers[0].value.verdict.note.partition(" ")
        assert process != str(os.getpid()), "a stranger's probe ran in this process"
        assert told == library


def test_the_child_that_tries_hooks_tries_what_is_loaded_later(write, monkeypatch, fd_plugins):
    monkeypatch.setenv("FD_PLUGIN_PREFLIGHT", "1")
    started, popen = [], preflight.subprocess.Popen

    def counted(*arguments, **options):
        started.append(arguments)
        return popen(*arguments, **options)

    monkeypatch.setattr(preflight.subprocess, "Popen", counted)
    write("later_hooks", "")
    write("later_good", "class Parser: pass")
    write("later_quits", "import os\nos._exit(5)")
    inventory = fd_plugins(
        entry("tool_parser", "good", "later_good:Parser", "fd-good"),
        entry("tool_parser", "quits", "later_quits:Parser", "fd-quits"),
    )
    for name in ("good", "quits"):
        drivers.find_soon("tool_parser", name, inventory)
    manager = HookManager([entry("hooks", "h", "later_hooks")])
    assert [plugin.name for plugin in manager.entries] == ["h"] and not manager.problems
    assert drivers.lookup("tool_parser", "good", inventory=inventory).__name__ == "Parser"
    with pytest.raises(PluginLoadError, match="exit code 5"):
        drivers.lookup("tool_parser", "quits", inventory=inventory)
    assert len(started) == 1


def test_tracing_shows_call_answer_and_plugin(write, monkeypatch, capsys):
    monkeypatch.setenv("FD_TRACE_PLUGINS", "1")
    write("seen", "@hookimpl\ndef fd_register_models():\n    return {'s': 'x:y'}")
    manager = HookManager([entry("hooks", "h", "seen", "fd-seen")])
    manager.ask("fd_register_models")
    error = capsys.readouterr().err
    assert "fd-trace fd_register_models() fd-seen 1.0 -> {'s': 'x:y'} in " in error


def test_asking_an_unknown_hook_is_our_own_mistake(write):
    manager = HookManager([])
    with pytest.raises(PluginError, match="fd_bogus"):
        manager.ask("fd_bogus")


def test_errors_of_a_watched_call_come_through():
    def fail():
        raise ValueError("inside")

    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(ValueError, match="inside"):
        call_with_limit(fail, 10)
    with pytest.raises(RuntimeError, match="KeyboardInterrupt"):
        call_with_limit(interrupt, 10)
    assert call_with_limit(lambda: 3, 10) == 3


def test_every_hook_is_documented_with_the_contract_it_came_in():
    assert len(hook_names()) >= 20
    for name in hook_names():
        text = inspect.getdoc(getattr(hookspecs, name)) or ""
        assert "Added in contract" in text and len(text) > 60, name
