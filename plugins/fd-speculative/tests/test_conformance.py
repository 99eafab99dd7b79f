"""The conformance kit on every method."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fastdeploy_testing.conformance.test_drafter import DrafterConformance
from fastdeploy_testing.conformance.test_hygiene import HygieneConformance


class TestNgram(DrafterConformance):
    driver_name = "ngram_match"


@pytest.mark.slow
class TestSuffix(DrafterConformance):
    driver_name = "suffix"


@pytest.mark.slow
class TestDraftModel(DrafterConformance):
    driver_name = "draft_model"

    @pytest.fixture(scope="class")
    @classmethod
    def options(cls, model: Path) -> dict[str, Any]:
        return {"model": str(model)}


class TestHygiene(HygieneConformance):
    kind = "speculative"
    driver_name = "ngram_match"
