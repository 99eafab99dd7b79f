"""Which quantization_config this distribution serves. Imports no tensor library."""

from __future__ import annotations

from typing import Final

from fastdeploy_core.contracts.base import Accept, Candidate, Decline
from fastdeploy_core.contracts.hookspecs import hookimpl
from fastdeploy_core.contracts.quantizer import QuantizationQuestion

_METHOD: Final = "gguf"
_SCORE: Final = 20


@hookimpl
def fd_quantizer_for(question: QuantizationQuestion) -> Candidate | None:
    """The matrices of a GGUF file that stay packed; a Decline for any other checkpoint."""
    if question.name != _METHOD:
        return None
    config = question.config
    if not config.get("is_quantized"):
        reason = (
            "gguf keeps the numbers of a GGUF file, and the model is none; possible while loading: "
            "wint8, wint4, w8a8, w4a8, block_wise_fp8, wfp8afp8"
        )
        return Candidate(_METHOD, Decline(reason))
    experts = (kind for matrix, kind in config["matrices"].items() if ".experts." in matrix)
    details = {"experts": ",".join(dict.fromkeys(experts)), "inner": "wint8,wint4"}
    return Candidate(_METHOD, Accept(_SCORE, "from the checkpoint"), details)
