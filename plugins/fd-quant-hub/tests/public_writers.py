"""Rewrites a checkpoint with the layers that AutoGPTQ and AutoAWQ write checkpoints with, and what
those layers themselves make of it.

Run as a program in a child process (`rewrite` does that): the layers need torch, and of their
distributions only the modules that hold them are imported, since the rest wants old transformers.
For each writer a folder with the checkpoint and one, `expected`, with the weights it stands for.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

GROUP = 32
# name: (distribution's package, bits)
WRITERS = {"gptq-4": ("auto_gptq", 4), "gptq-8": ("auto_gptq", 8), "awq": ("awq", 4)}


def rewrite(name: str, model: Path, folder: Path) -> Path:
    """Write `name` below `folder`; returns where."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, __file__, name, str(model), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(f"{name} failed:\n{done.stderr[-4000:]}")
    return folder / name


def _module(name: str) -> Any:
    """A module of a package, without what the package's own __init__ imports."""
    parts = name.split(".")
    if parts[0] not in sys.modules:
        spec = importlib.util.find_spec(parts[0])
        places = [str(place) for place in spec.submodule_search_locations]
        _bare(parts[0], places)
    for count in range(2, len(parts)):
        package, above = ".".join(parts[:count]), sys.modules[".".join(parts[: count - 1])]
        if package not in sys.modules:
            _bare(package, [f"{place}/{parts[count - 1]}" for place in above.__path__])
    return importlib.import_module(name)


def _bare(package: str, places: list[str]) -> None:
    module = types.ModuleType(package)
    module.__path__ = places
    sys.modules[package] = module


def _rounded(weight: Any, bits: int, *, symmetric: bool) -> tuple[Any, Any]:
    """Scale and zero [N, groups] of a weight [N, K]."""
    import torch

    groups, top = weight.reshape(weight.shape[0], -1, GROUP), 2**bits - 1
    if symmetric:
        scale = groups.abs().amax(-1) / (top // 2)
        return scale.half().float(), torch.full_like(scale, (top + 1) // 2)
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scale = ((high - low) / top).half().float()
    return scale, (-low / scale).round().clamp(0, top)


def _gptq(weight: Any, bits: int) -> tuple[dict[str, Any], Any]:
    import torch

    room = _module("auto_gptq.nn_modules.qlinear.qlinear_cuda_old")
    room._autogptq_cuda_available = False
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight.data = weight
    layer = room.QuantLinear(bits, GROUP, weight.shape[1], weight.shape[0], False)
    scale, zero = _rounded(weight, bits, symmetric=True)
    layer.pack(linear, scale, zero, None)
    meaning = layer(torch.eye(weight.shape[1], dtype=torch.float32)).t()
    return dict(layer.state_dict()), meaning


def _awq(weight: Any, bits: int) -> tuple[dict[str, Any], Any]:
    import torch

    room = _module("awq.modules.linear.gemm")
    packing = _module("awq.utils.packing_utils")
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight.data = weight
    scale, zero = _rounded(weight, bits, symmetric=False)
    layer = room.WQLinear_GEMM.from_linear(
        linear, bits, GROUP, scales=scale.t().contiguous(), zeros=zero.t().contiguous()
    )
    held = layer.state_dict()
    meaning = packing.dequantize_gemm(
        held["qweight"], held["qzeros"], held["scales"], bits, GROUP
    ).t()
    return dict(held), meaning


def _main(name: str, model: Path, folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    _, bits = WRITERS[name]
    one = _awq if name == "awq" else _gptq
    stored, expected = {}, {}
    for key, weight in load_file(model / "model.safetensors").items():
        if not key.endswith("_proj.weight"):
            stored[key] = expected[key] = weight
            continue
        tensors, meaning = one(weight.float(), bits)
        expected[key] = meaning.float().contiguous()
        stored |= {key.removesuffix("weight") + k: v.contiguous() for k, v in tensors.items()}
    said = {"quant_method": name.partition("-")[0], "bits": bits, "group_size": GROUP}
    said |= (
        {"zero_point": True, "version": "gemm"}
        if name == "awq"
        else {"desc_act": False, "sym": True}
    )
    base = json.loads((model / "config.json").read_text())
    target = folder / name
    (target / "expected").mkdir(parents=True)
    (target / "config.json").write_text(json.dumps({**base, "quantization_config": said}))
    (target / "expected" / "config.json").write_text(json.dumps(base))
    save_file(stored, target / "model.safetensors")
    save_file(expected, target / "expected" / "model.safetensors")


if __name__ == "__main__":
    _main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
