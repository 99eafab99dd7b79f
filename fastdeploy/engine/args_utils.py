"""EngineArgs under its FastDeploy 2.x path: what an LLM is made with, before it is made.

LLM(**asdict(EngineArgs(model="DIR", max_model_len=4096))) and LLM.from_engine_args make it.
"""

from __future__ import annotations

from dataclasses import dataclass, make_dataclass
from typing import TYPE_CHECKING, Any

from fastdeploy_core.config.argument_table import PART_SPELLINGS
from fastdeploy_core.config.argument_values import BY_SPELLING, NEGATIVE
from fastdeploy_core.config.other_flags import OTHER_FLAGS

if TYPE_CHECKING:

    @dataclass
    class EngineArgs:
        """Every known argument is a field; None: it is not given."""

        model: str = ""

        def __init__(self, model: str = "", **arguments: Any) -> None: ...

else:
    _names = {"model": None, **BY_SPELLING, **NEGATIVE, **PART_SPELLINGS, **OTHER_FLAGS}
    EngineArgs = make_dataclass("EngineArgs", [(name, Any, None) for name in _names])

__all__ = ["EngineArgs"]
