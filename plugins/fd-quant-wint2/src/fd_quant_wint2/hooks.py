"""Which quantization this distribution serves. Imports no tensor library."""

from __future__ import annotations

from typing import Final

from fastdeploy_core.contracts.base import Accept, Candidate
from fastdeploy_core.contracts.hookspecs import hookimpl
from fastdeploy_core.contracts.quantizer import QuantizationQuestion

_SCORE: Final = 20
_TET: Final = ("tet2", "tet3", "tet4")
# What --quantization may say beside the method.
_TET_OPTIONS: Final = "dense,seed,hadamard_block_size,modules_to_not_convert"
_WINT2_OPTIONS: Final = (
    "dense_quant_type,moe_quant_type,seed,hadamard_block_size,activation_scheme,lm_head,"
    "modules_to_not_convert,ignored_layers"
)


@hookimpl
def fd_quantizer_for(question: QuantizationQuestion) -> Candidate | None:
    """wint2 (published checkpoints, or tet2 experts with the rest in wint8), and the codes by
    name."""
    config = question.config
    is_stored = bool(config.get("is_quantized", False))
    note = "from the checkpoint" if is_stored else "while loading"
    if question.name == "wint2":
        kind = str(config.get("moe_quant_type") or ("w4w2" if is_stored else "tet2"))
        experts = "wint4,ccq2" if kind == "w4w2" else kind
        inner = f"{config.get('dense_quant_type') or 'wint8'},wint4"
        details = {"experts": experts, "options": _WINT2_OPTIONS, "inner": inner}
        return Candidate("wint2", Accept(_SCORE, note), details)
    if question.name in _TET:
        details = {"experts": question.name, "options": _TET_OPTIONS}
        return Candidate(question.name, Accept(_SCORE, note), details)
    return None
