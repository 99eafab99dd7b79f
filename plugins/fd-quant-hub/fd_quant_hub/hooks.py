"""Which checkpoints this distribution reads. Imports no tensor library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from fastdeploy_core.contracts.base import Accept, Candidate, Decline
from fastdeploy_core.contracts.hookspecs import hookimpl
from fastdeploy_core.contracts.quantizer import QuantizationQuestion
from fastdeploy_core.errors import ConfigError

from .gptq import awq_problem, gptq_problem
from .schemes import read_schemes

_SCORE: Final = 10
# Other spellings of vLLM and transformers. Each is an entry point too, so that the core can name
# this distribution where it is not installed.
_ALIASES: Final[dict[str, str]] = {
    "gptq_marlin": "gptq",
    "awq_marlin": "awq",
    "compressed_tensors": "compressed-tensors",
}
_DRIVERS: Final = ("gptq", "awq", "compressed-tensors")


@hookimpl
def fd_quantizer_for(question: QuantizationQuestion) -> Candidate | None:
    """The driver of that method; a Decline for a checkpoint that it cannot read."""
    config = question.config
    name = _ALIASES.get(question.name, question.name)
    if name not in _DRIVERS:
        return None
    if not (config.get("is_quantized") or config.get("is_moe_quantized")):
        reason = (
            f"{name} is the format of a checkpoint, and config.json has no quantization_config; "
            "possible while loading: wint8, wint4, w8a8, w4a8, block_wise_fp8, wfp8afp8; or run: "
            "fastdeploy quantize"
        )
        return Candidate(name, Decline(reason))
    try:
        experts = _experts(name, config)
    except ConfigError as error:
        return Candidate(name, Decline(str(error)))
    return Candidate(name, Accept(_SCORE, "from the checkpoint"), {"experts": experts})


def _experts(name: str, config: Mapping[str, Any]) -> str:
    """Internal formats that the experts may have; ConfigError if the checkpoint cannot be read."""
    if name == "compressed-tensors":
        return ",".join(dict.fromkeys(scheme.format for scheme in read_schemes(config)))
    problem = gptq_problem(config) if name == "gptq" else awq_problem(config)
    if problem:
        raise ConfigError(problem)
    if name == "awq":
        return "wint4_zp"
    return f"wint{config['bits']}" + ("" if config.get("sym", True) else "_zp")
