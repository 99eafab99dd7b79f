"""The conformance kit, with the demo model's draft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fastdeploy_testing.conformance.test_drafter import DrafterConformance
from fastdeploy_testing.conformance.test_hygiene import HygieneConformance

DEMO = Path(__file__).resolve().parents[3] / "models" / "ernie-tiny"


@pytest.mark.slow
class TestEagle3(DrafterConformance):
    driver_name = "eagle3"

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls) -> Path:
        return DEMO

    @pytest.fixture(scope="class")
    @classmethod
    def options(cls) -> dict[str, Any]:
        return {"model": str(DEMO.with_name("ernie-tiny-eagle3"))}


class TestHygiene(HygieneConformance):
    kind = "speculative"
    driver_name = "eagle3"
