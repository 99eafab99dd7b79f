"""Random configurations of every text architecture give the logits and tokens of transformers, or a
refusal that names a field (tests/config_fuzz.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastdeploy_core.plugins import names
from tests.config_fuzz import FAMILIES, Case, run

_OTHER_NAMES = {"Ernie4_5_ForCausalLM"}  # of a family that FAMILIES has


def test_every_text_architecture_is_drawn() -> None:
    served = {name for name in names("model") if name.endswith("ForCausalLM")}
    assert {f"{family}ForCausalLM" for family in FAMILIES} == served - _OTHER_NAMES


def _check(cases: list[Case], folder: Path, library: str) -> None:
    report = run(cases, folder, library)
    assert not report.failed, "\n".join(report.failed.values())
    assert not report.refused, "\n".join(report.refused.values())


def test_one_configuration_of_some_families(tmp_path: Path, tensor_library: str) -> None:
    """Of all of them in the slow run."""
    some = list(FAMILIES)[::3] if tensor_library == "torch" else list(FAMILIES)[1::6]
    _check([Case(family, 1) for family in some], tmp_path, tensor_library)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", FAMILIES)
def test_many_configurations(family: str, tmp_path: Path, tensor_library: str) -> None:
    number = 40 if tensor_library == "torch" else 10
    _check([Case(family, 1000 + seed) for seed in range(number)], tmp_path, tensor_library)
