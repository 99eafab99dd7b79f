"""Answers at start-up. Light: imports no tensor library."""

from __future__ import annotations

from fastdeploy_core.contracts import Accept, Candidate, hookimpl
from fastdeploy_core.contracts.quantizer import QuantizationQuestion


@hookimpl
def fd_quantizer_for(question: QuantizationQuestion) -> Candidate | None:
    if question.name != "myformat":
        return None
    # What --quantization may say beside the name; anything else is refused as a typing error.
    return Candidate("myformat", Accept(20, "integers, one scale per output"), {"options": "bits"})
