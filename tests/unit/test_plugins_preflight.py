"""The pre-flight child: whatever a plugin does at import, the others and this process go on."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fastdeploy_core.contracts.base import Accept, Candidate, Decline
from fastdeploy_core.plugins import preflight, preflight_child
from fastdeploy_core.plugins.discovery import HOOKS, discover
from fastdeploy_core.plugins.preflight import Job, decode_candidate, run
from tests.plugin_modules import module_writer
from tests.server_support import wait_for


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "outcomes_of", {})  # none has hung before
    return module_writer(tmp_path, monkeypatch)


def test_outcomes_come_in_order_and_name_what_happened(write):
    bad = {
        write("pf_raises",
            "raise RuntimeError('no driver\\nhere')"): "RuntimeError: no driver here",
        write("pf_syntax", "def (:"): "SyntaxError",
        write("pf_absent", "import no_such_library"): "ModuleNotFoundError",
        write("pf_exits", "import sys; sys.exit(3)"): "SystemExit: 3",
        write("pf_quits", "import os, sys; print('bye', file=sys.stderr, flush=True); os._exit(4)"):
            "ended the process with exit code 4 (bye)",
        write("pf_kills", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"):
            "was killed by signal SIGKILL",
        write("pf_hangs", "import time; time.sleep(600)"): "did not finish within 1 s",
        write("pf_interrupts", "raise KeyboardInterrupt"): "KeyboardInterrupt",
        "pf_nowhere": "ModuleNotFoundError",
    }  # fmt: skip
    good = write("pf_good", "class Driver:\n    contract = (1, 0)\n")
    jobs = [Job(m, 1.0 if m == "pf_hangs" else 30.0) for m in bad]
    jobs += [Job(f"{good}:Driver", 30.0), Job(f"{good}:Missing", 30.0)]
    outcomes = run(jobs)
    for expected, outcome in zip(bad.values(), outcomes, strict=False):
        assert expected in outcome.error
    assert outcomes[-2].error == "" and outcomes[-2].contract == (1, 0)
    assert "AttributeError" in outcomes[-1].error


def test_noise_of_a_plugin_is_not_mistaken_for_an_answer(write):
    noisy = write(
        "pf_noisy",
        """
        import os, sys
        print("x" * 200_000)
        print("y" * 200_000, file=sys.stderr)
        os.write(int(sys.argv[1]), b'garbage\\n{"id": 0}\\n[1]\\n')
        """,
    )
    outcome = run([Job(noisy, 30.0)])[0]
    assert outcome.error == ""


def test_probe_is_answered_in_the_child(write):
    hooks = write(
        "pf_hooks",
        """
        import os
        from fastdeploy_core.contracts import Accept, Candidate, hookimpl
        @hookimpl
        def fd_device_probe(question):
            return Candidate("chip", Accept(150, f"pid {os.getpid()} {question.tensor_library}"),
                             {"tensor_library": "torch"})
        """,
    )
    job = Job(hooks, 30.0, ("fd_device_probe",), {"tensor_library": "paddle"})
    candidate = decode_candidate(run([job])[0].answers["fd_device_probe"])
    assert candidate is not None and candidate.name == "chip"
    assert isinstance(candidate.verdict, Accept) and candidate.verdict.score == 150
    assert candidate.verdict.note.endswith("paddle")
    assert candidate.details == {"tensor_library": "torch"}


def test_decline_survives_the_way_back(write):
    hooks = write(
        "pf_decline",
        """
        from fastdeploy_core.contracts import Candidate, Decline, hookimpl
        @hookimpl
        def fd_device_probe():
            return Candidate("chip", Decline("no chip"))
        """,
    )
    answers = run([Job(hooks, 30.0, ("fd_device_probe",))])[0].answers
    assert decode_candidate(answers["fd_device_probe"]) == Candidate("chip", Decline("no chip"))


def test_those_that_hang_cost_their_limit_once(write):
    """Sleeping and computing ones, at import and when they are asked, all side by side."""
    sleeps = write("pf_sleeps", "import time; time.sleep(600)")
    computes = write("pf_computes", "while True: pass")
    asked = write(
        "pf_asked",
        """
        import time
        from fastdeploy_core.contracts import hookimpl
        @hookimpl
        def fd_device_probe():
            time.sleep(600)
        """,
    )
    good = write("pf_fine", "")
    modules = (sleeps, computes, asked, sleeps, asked)
    jobs = [Job(m, 60.0, ("fd_device_probe",), stall_s=2.0) for m in modules]
    outcomes = run([*jobs, Job(good, 60.0, stall_s=2.0)], at_once=9)
    assert [o.error for o in outcomes] == ["did not finish within 2 s"] * 5 + [""]


@pytest.mark.parametrize("works", ["open(__file__).read()", "kept.append(bytearray(2**20))"])
def test_one_that_goes_on_importing_is_given_its_limit(write, works):
    """As an import of a tensor library on a busy machine: it reads, or touches new memory."""
    imports = write(
        "pf_imports",
        f"""
        import time
        kept, end = [], time.monotonic() + 3
        while time.monotonic() < end:
            {works}
            time.sleep(0.02)
        """,
    )
    endless = write("pf_endless", "while True: open(__file__).read()")
    jobs = [Job(imports, 20.0, stall_s=1.0), Job(endless, 2.0, stall_s=1.0)]
    assert [o.error for o in run(jobs)] == ["", "did not finish within 2 s"]


def test_one_that_waits_for_a_processor_does_not_hang(monkeypatch):
    def fork():
        made = object.__new__(preflight_child._Fork)
        job = {"limit_s": 60.0, "stall_s": 2.0, "idle_s": 2.0}
        made._jobs, made._done, made._worker = [job], 0, 0
        made._restart()
        return made

    def limit_after(made, seconds, is_ready, computed_s):
        monkeypatch.setattr(preflight_child, "activity", lambda pid: (is_ready, computed_s, 5))
        return made.exceeded(made._started + seconds)

    starved, asleep = fork(), fork()
    assert limit_after(starved, 0, True, 0.1) == limit_after(asleep, 0, False, 0.1) == 0
    assert limit_after(starved, 30, True, 0.3) == 0, "it has had 0.2 s in 30 s"
    assert limit_after(starved, 31, True, 1.2) == 2, "it has had a second and read nothing"
    assert limit_after(asleep, 1.9, False, 0.1) == 0
    assert limit_after(asleep, 2.1, False, 0.1) == 2
    assert limit_after(starved, 61, True, 0.1) == 60
    monkeypatch.setattr(preflight_child, "activity", lambda pid: (False, 0.0, -1))
    unseen = fork()
    assert unseen.exceeded(unseen._started + 2.1) == 2, "where no system tells, the clock does"


def test_a_machine_that_stands_still_makes_nothing_hang(write, tmp_path):
    told = tmp_path / "told"
    rests = write(
        "pf_rests",
        f"""
        import os, time
        with open({str(told)!r}, "w") as file:
            file.write(f"{{os.getpid()}}.")
            file.flush()
            for _ in range(20):
                time.sleep(0.05)
        """,
    )

    def stand_still():
        text = wait_for(lambda: told.exists() and told.read_text().endswith(".") and told, "it")
        pids = [int(text.read_text()[:-1])]
        while (parent := parent_of(pids[-1])) != os.getpid():
            pids.append(parent)
        for number, seconds in ((signal.SIGSTOP, 2.5), (signal.SIGCONT, 0.0)):
            for pid in reversed(pids):
                os.kill(pid, number)
            time.sleep(seconds)

    thread = threading.Thread(target=stand_still)
    thread.start()
    assert [o.error for o in run([Job(rests, 60.0)])] == [""]
    thread.join()


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_more_than_a_thousand_files_may_be_open():
    reading, writing = os.pipe()
    with os.fdopen(reading) as low, os.fdopen(writing, "w") as told:
        try:
            high = fcntl.fcntl(low, fcntl.F_DUPFD, 1500)
        except OSError:
            pytest.skip("this process may not have so many")
        with os.fdopen(high):
            told.write("a line\n")
            told.close()
            assert [*preflight._lines(high, 60.0)] == [b"a line"]


def test_what_neither_computes_nor_reads_is_given_up_long_before_its_limit(write):
    sleeps = write("pf_asleep", "import time; time.sleep(600)")
    works = write("pf_works", "import time\nend = time.time() + 4\nwhile time.time() < end: pass")
    started = time.monotonic()
    outcomes = run([Job(sleeps, 300.0), Job(works, 300.0)])
    assert [o.error for o in outcomes] == ["did not finish within 2 s", ""]
    assert time.monotonic() - started < 60
    later = run([Job(write("pf_asleep_too", "import time; time.sleep(600)"), 300.0)])
    assert later[0].error == "did not finish within 0.5 s", "one has hung before"


def test_after_a_failure_the_rest_of_a_group_gets_a_fresh_process(write):
    marks = write("pf_marks", "import builtins; builtins.mark = 1; raise RuntimeError('no')")
    looks = write("pf_looks", "import builtins; assert not hasattr(builtins, 'mark')")
    shares = write("pf_shares", "import builtins; builtins.shared = 1")
    seen = write("pf_seen", "import builtins; assert builtins.shared == 1")
    jobs = [Job(m, 30.0, group="one") for m in (marks, looks, shares, seen)]
    assert [o.error for o in run(jobs)] == ["RuntimeError: no", "", "", ""]


def test_one_that_ends_its_parent_is_blamed_alone(write):
    killer = write("pf_killer", "import os, signal; os.kill(os.getppid(), signal.SIGKILL)")
    good = write("pf_good2", "")
    quits = write("pf_quits2", "import os; os._exit(0)")
    outcomes = run([Job(good, 30.0), Job(killer, 30.0), Job(quits, 30.0), Job(good, 30.0)])
    assert outcomes[0].error == outcomes[3].error == ""
    assert "ended its parent process" in outcomes[1].error
    assert outcomes[2].error == "ended the process with exit code 0"


def test_no_jobs_need_no_child():
    assert run([]) == []


def test_hook_modules_of_this_repository_import_nothing_heavy():
    """Each start imports all of them in processes of their own."""
    targets = [e.module for e in discover().of(HOOKS) if not e.is_core]
    heavy = ("torch", "paddle", "numpy", "pydantic", "fastapi")
    code = (
        "import importlib, sys\n"
        "for name in ('base', 'hookspecs', 'device', 'attention', 'moe'):\n"
        "    importlib.import_module(f'fastdeploy_core.contracts.{name}')\n"
        f"for name in {targets!r}:\n"
        "    importlib.import_module(name)\n"
        f"    print(*(f'{{name}} imports {{m}}' for m in {heavy!r} if m in sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not done.stdout.strip(), done.stdout.strip().splitlines()[0]
