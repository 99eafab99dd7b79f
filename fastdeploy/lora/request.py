"""LoRARequest with vLLM's other fields."""

from __future__ import annotations

from typing import Any

from fastdeploy_core import types
from fastdeploy_core.errors import InvalidRequest


class LoRARequest(types.LoRARequest, frozen=True):
    """An adapter. Its files are told apart by their content, so changed ones are read again whether
    `load_inplace` says so or not; the base is the LLM's whatever `base_model_name` says."""

    base_model_name: str | None = None
    tensorizer_config_dict: dict[str, Any] | None = None
    load_inplace: bool = False
    is_3d_lora_weight: bool = False

    def __post_init__(self) -> None:
        for name in ("tensorizer_config_dict", "is_3d_lora_weight"):
            if getattr(self, name):
                raise InvalidRequest(
                    f"{name} is not supported; adapters are folders that PEFT wrote", param=name
                )
