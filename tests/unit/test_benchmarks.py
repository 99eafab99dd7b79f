"""Benchmarks: figures as a program reads them, two checkouts in turns, steps rather than calls."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fastdeploy_core.types import RequestOutputDelta, SequenceDelta, TokenDeltas

ROOT = Path(__file__).resolve().parents[2]
FAKE = """
import json, sys
from pathlib import Path
import fastdeploy_core
with open(sys.argv[2], "a") as log:
    log.write(Path.cwd().name)
print("a table")
print(json.dumps({{"figures": {{"step, ms": {times}, "prefill, tokens/s": [100.0], {own}}}}}))
"""


@pytest.fixture(autouse=True)
def benchmarks_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Python has it for a script of that folder."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def load(path: str) -> ModuleType:
    """A script, as a module."""
    spec = importlib.util.spec_from_file_location(f"benchmark_{Path(path).stem}", ROOT / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def checkout(folder: Path, times: list[float], own: str) -> Path:
    """A folder with a core and one benchmark that prints these figures."""
    (folder / "fastdeploy_core").mkdir(parents=True)
    (folder / "fastdeploy_core" / "__init__.py").touch()
    (folder / "bench.py").write_text(FAKE.format(times=times, own=own))
    return folder


def run_comparison(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """compare_checkouts.py's exit status."""
    module = load("benchmarks/compare_checkouts.py")
    monkeypatch.setattr(sys, "argv", ["compare_checkouts.py", *map(str, arguments)])
    status: int = module.main()
    return status


def test_checkouts_run_in_turns_and_ratios_tell_what_is_worse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = checkout(tmp_path / "b", [1.0, 2.0, 9.0], '"old, us": [1]')
    after = checkout(tmp_path / "a", [2.1], '"new, us": [1]')
    log = tmp_path / "log"
    both = (before, after, "--rounds", 3, "--worse-at-most")
    assert run_comparison(monkeypatch, *both, 3, "--", "bench.py", log) == 1
    assert log.read_text() == "baabba"  # no checkout is always the first one
    printed = capsys.readouterr().out
    (line,) = (line for line in printed.splitlines() if line.startswith("step, ms"))
    assert line.split() == [
        *("step,", "ms", "2", "(2", "to", "2)", "2.1", "(2.1", "to", "2.1)"),
        *("1.05", "(1.05", "to", "1.05)", "5.0", "%", "worse"),
    ]
    assert "left out: old, us (3 and 0 values)" in printed
    assert "left out: new, us (0 and 3 values)" in printed
    assert run_comparison(monkeypatch, *both, 6, "--", "bench.py", log) == 0


def test_more_of_a_rate_is_better() -> None:
    module = load("benchmarks/compare_checkouts.py")
    assert module.Comparison("prefill, tokens/s", [100.0], [80.0]).worse_percent == 25.0
    assert module.Comparison("prefill, ms", [100.0], [80.0]).worse_percent == pytest.approx(-20)


def test_a_checkout_without_the_benchmark_or_with_a_failing_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, after = (checkout(tmp_path / name, [1.0], "") for name in "ba")
    (after / "bench.py").write_text("raise SystemExit('no GPU here')")
    with pytest.raises(SystemExit, match=r"bench.py in .*/a: exit status 1\nno GPU here"):
        run_comparison(monkeypatch, before, after, "--", "bench.py", tmp_path / "log")
    (after / "bench.py").unlink()
    with pytest.raises(SystemExit, match=r"/a has no bench.py"):
        run_comparison(monkeypatch, before, after, "--", "bench.py", tmp_path / "log")


def test_a_checkout_whose_packages_come_from_elsewhere_is_refused(tmp_path: Path) -> None:
    folder = checkout(tmp_path / "a", [1.0], "")
    (folder / ".venv" / "bin").mkdir(parents=True)
    python = folder / ".venv" / "bin" / "python"
    python.write_text("#!/bin/sh\necho fastdeploy_core /elsewhere/fastdeploy_core/__init__.py\n")
    python.chmod(0o755)
    with pytest.raises(SystemExit, match="imports fastdeploy_core from /elsewhere"):
        load("benchmarks/compare_checkouts.py").Checkout(folder).check("bench.py")


def test_figures_come_back_as_they_were_printed(capsys: pytest.CaptureFixture[str]) -> None:
    figures: Any = load("benchmarks/figures.py")
    parser = argparse.ArgumentParser()
    figures.add_json_option(parser)
    figures.print_figures(parser.parse_args([]), {"step, ms": [1.0]})
    assert capsys.readouterr().out == ""
    figures.print_figures(parser.parse_args(["--json"]), {"step, ms": [1.0, 2.5]})
    assert figures.read_figures("table\n" + capsys.readouterr().out) == {"step, ms": [1.0, 2.5]}
    with pytest.raises(ValueError, match="--json"):
        figures.read_figures('table\n{"batch": 1}')


class Clock:
    """Seconds of calls that begin and end as said."""

    def __init__(self, steps: Any) -> None:
        self._steps = steps
        self._now = 0.0

    def call(self, *outputs: Any, seconds: float = 1.0) -> None:
        self._now += seconds
        self._steps.add(self._now, self._now, list(outputs))


def tokens(rows: int, each: int = 1) -> TokenDeltas:
    """Tokens of so many requests."""
    names = [str(row) for row in range(rows)]
    return TokenDeltas(names, [0] * rows, [0] * rows, [7] * (rows * each), [each] * rows)


def test_engine_counts_steps_and_not_calls() -> None:
    pytest.importorskip("torch")
    module = load("plugins/fd-cuda/benchmarks/engine.py")
    host = iter([10.0, 13.0])
    steps = module.Steps(2, 4, lambda: next(host))
    clock = Clock(steps)
    clock.call(tokens(1), seconds=50.0)  # the other's prompt
    clock.call(tokens(2), seconds=30.0)  # its first token: not a step of decodes alone
    clock.call(tokens(2, each=2), seconds=6.0)
    clock.call(tokens(2), seconds=3.5)
    clock.call(tokens(1, each=4), seconds=9.0)  # as many tokens as two rows would have
    ended = RequestOutputDelta(request_id="1", sequences=[SequenceDelta(token_ids=[1, 2])])
    clock.call(tokens(1, each=2), ended, seconds=8.0)  # after a call of one row
    assert steps.seconds == [3.0, 3.0, 3.5]
    assert steps.num_calls == 2
    assert steps.host == 1.5  # of the two steps of the first call: half of four have passed


def test_engine_runs_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    module = load("plugins/fd-cuda/benchmarks/engine.py")
    arguments = ["--device", "cpu", "--batch", "1", "3", "--prompt", "8", "--output", "8"]
    model = str(ROOT / "models" / "ernie-tiny")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # on a busy machine threads wait for each other
    monkeypatch.setattr(sys, "argv", ["engine.py", model, *arguments, "--rounds", "2", "--json"])
    assert module.main() == 0
    figures = load("benchmarks/figures.py").read_figures(capsys.readouterr().out)
    units = {"prefill": "tokens/s", "decode": "ms", "step": "ms", "host": "us", "outputs": "us"}
    wanted = [
        f"ernie-tiny batch {n}: {name}, {unit}" for n in (1, 3) for name, unit in units.items()
    ]
    assert list(figures) == wanted
    assert all(len(values) == 2 for values in figures.values())
    # decode is a difference of two times, which a busy machine may make negative
    assert all(min(v) > 0 for name, v in figures.items() if "decode" not in name)


def test_a_full_engine_stays_full(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(ROOT / "plugins" / "fd-cuda" / "benchmarks"))
    module = load("plugins/fd-cuda/benchmarks/steady.py")
    left: dict[str, int] = {}
    asked: list[tuple[int, int]] = []

    def add(request: Any) -> None:
        asked.append((len(request.prompt_token_ids), request.sampling.max_tokens))
        left[request.request_id] = request.sampling.max_tokens

    def step() -> list[TokenDeltas]:
        names = list(left)
        for name in names:
            left[name] -= 1
            if not left[name]:
                del left[name]
        return [TokenDeltas(names, [0] * len(names), [0] * len(names), [7] * len(names))]

    options = argparse.Namespace(prompt=10, output=20)
    load_of_all = module.Load(SimpleNamespace(add=add, step=step), 6, 100, options)
    assert all(prompt + answer == 30 for prompt, answer in asked)
    assert len({answer for _, answer in asked}) > 1  # they do not end together
    for _ in range(45):
        assert load_of_all.step() == 6
    assert asked[6:] and set(asked[6:]) == {(10, 20)}
    load_of_all.is_held = True
    for _ in range(20):
        load_of_all.step()
    assert load_of_all.step() == 0
    load_of_all.is_held = False
    load_of_all.step()
    assert load_of_all.step() == 6


@pytest.mark.parametrize(("length", "num_drafts"), [(1.0, 1), (1.7, 1), (2.5, 3), (4.0, 3)])
def test_as_many_drafts_are_accepted_as_were_asked_for(length: float, num_drafts: int) -> None:
    torch = pytest.importorskip("torch")
    synthetic, size, vocab = load("benchmarks/synthetic_acceptance.py"), 5000, 3
    torch.manual_seed(0)
    rows, drafts = torch.arange(size), torch.randint(vocab, (size, num_drafts))
    state = SimpleNamespace(drafts=drafts, num_computed=torch.randint(9000, (size,)))
    drawn = torch.randint(vocab, (size * (num_drafts + 1),))
    rate = synthetic.rate_of(length, num_drafts)
    found = synthetic.as_drafted(SimpleNamespace(state=state), rows, drawn, num_drafts + 1, rate)
    table = found.view(size, -1)
    accepted = (table[:, :-1] == drafts).long().cumprod(1).sum(1).double()
    assert abs(1 + float(accepted.mean()) - length) < 0.05
    assert torch.equal(table[:, -1], drawn.view(size, -1)[:, -1])
    assert int(found.min()) >= 0 and int(found.max()) < vocab
    with pytest.raises(ValueError, match=f"1 to {num_drafts + 1}"):
        synthetic.rate_of(num_drafts + 1.5, num_drafts)


@pytest.mark.parametrize("starts", ["1", "-1"])
def test_starts_that_cannot_be_compared_are_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], starts: str
) -> None:
    module = load("benchmarks/defence_overhead.py")
    monkeypatch.setattr(sys, "argv", ["defence_overhead.py", "models/x", "--starts", starts])
    with pytest.raises(SystemExit, match="2"):
        module.main()
    assert f"--starts {starts}: 0, or at least 2" in capsys.readouterr().err
