"""The conformance kit, with the demo model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fastdeploy_testing.conformance.test_drafter import DrafterConformance
from fastdeploy_testing.conformance.test_hygiene import HygieneConformance

DEMO = Path(__file__).resolve().parents[3] / "models" / "ernie-tiny"


class _Drafts(DrafterConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def model(cls) -> Path:
        return DEMO


@pytest.mark.slow
class TestEagle3(_Drafts):
    driver_name = "eagle3"

    @pytest.fixture(scope="class")
    @classmethod
    def options(cls) -> dict[str, Any]:
        return {"model": str(DEMO.with_name("ernie-tiny-eagle3"))}


@pytest.mark.slow
class TestDFlash(_Drafts):
    driver_name = "dflash"

    @pytest.fixture(scope="class")
    @classmethod
    def options(cls) -> dict[str, Any]:
        return {"model": str(DEMO.with_name("ernie-tiny-dflash"))}


class TestEagle3Hygiene(HygieneConformance):
    kind = "speculative"
    driver_name = "eagle3"


class TestDFlashHygiene(HygieneConformance):
    kind = "speculative"
    driver_name = "dflash"
