"""Rewrites a checkpoint with the compressed-tensors library, and what that library reads back.

Run as a program in a child process (`compress` does that), because the library needs torch and the
suite may be running on Paddle. For each scheme a folder with the compressed checkpoint and one,
`expected`, with the weights that the library itself decompresses.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

INT4 = {"num_bits": 4, "type": "int"}
INT8 = {"num_bits": 8, "type": "int"}
FP8 = {"num_bits": 8, "type": "float"}
TOKEN = {"dynamic": True, "strategy": "token", "symmetric": True}
# name: (format, weights, input activations)
SCHEMES: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "w4-group": ("pack-quantized", {**INT4, "strategy": "group", "group_size": 8}, None),
    "w4-channel-zero": (
        "pack-quantized",
        {**INT4, "strategy": "channel", "symmetric": False},
        None,
    ),
    "w8-channel": ("pack-quantized", {**INT8, "strategy": "channel"}, None),
    "fp8-weights": ("float-quantized", {**FP8, "strategy": "channel"}, None),
    "w8a8": ("int-quantized", {**INT8, "strategy": "channel"}, {**INT8, **TOKEN}),
    "fp8-tensor": ("float-quantized", {**FP8, "strategy": "tensor"}, {**FP8, **TOKEN}),
    "fp8-channel": ("float-quantized", {**FP8, "strategy": "channel"}, {**FP8, **TOKEN}),
}
WEIGHT_ONLY = [name for name, (_, _, inputs) in SCHEMES.items() if inputs is None]


def compress(model: Path, folder: Path) -> Path:
    """Write every scheme below `folder`; returns folder."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, __file__, str(model), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(f"compressed-tensors failed:\n{done.stderr[-4000:]}")
    return folder


def _main(model: Path, folder: Path) -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams
    from safetensors.torch import load_file, save_file

    weights = load_file(model / "model.safetensors")
    base = json.loads((model / "config.json").read_text())
    for name, (form, weight_args, inputs) in SCHEMES.items():
        scheme = QuantizationScheme(
            targets=["Linear"], weights=weight_args, input_activations=inputs, format=form
        )
        compressor = BaseCompressor.get_value_from_registry(form)
        stored, expected = {}, {}
        for key, weight in weights.items():
            if not key.endswith("_proj.weight"):
                stored[key] = expected[key] = weight
                continue
            prefix = key.removesuffix("weight")
            grouped = weight
            if weight_args["strategy"] == "tensor":
                grouped = weight.reshape(1, -1)
            if weight_args["strategy"] == "group":
                grouped = weight.reshape(weight.shape[0], -1, weight_args["group_size"])
            low, high = grouped.amin(-1), grouped.amax(-1)
            if weight_args["strategy"] == "channel":
                low, high = low[:, None], high[:, None]
            if weight_args["strategy"] == "tensor":
                low, high = low.reshape(1), high.reshape(1)
            scale, zero = calculate_qparams(low, high, scheme.weights)
            local = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
            packed = compressor.compress(local, scheme)
            restored = compressor.decompress(dict(packed), scheme)
            expected[key] = restored["weight"].float()
            stored |= {prefix + k: v.contiguous() for k, v in packed.items()}
        config = QuantizationConfig(
            config_groups={"group_0": scheme},
            format=form,
            ignore=["lm_head", "re:.*mlp.gate$"],
            quantization_status="compressed",
        )
        target = folder / name
        (target / "expected").mkdir(parents=True)
        said = json.loads(config.model_dump_json())
        said["quant_method"] = "compressed-tensors"
        (target / "config.json").write_text(json.dumps({**base, "quantization_config": said}))
        (target / "expected" / "config.json").write_text(json.dumps(base))
        save_file(stored, target / "model.safetensors")
        save_file(expected, target / "expected" / "model.safetensors")


if __name__ == "__main__":
    _main(Path(sys.argv[1]), Path(sys.argv[2]))
