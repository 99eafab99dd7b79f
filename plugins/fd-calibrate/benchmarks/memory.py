"""Bytes of a model's weights in every format, from its config.json.

    python plugins/fd-calibrate/benchmarks/memory.py MODEL_FOLDER [--tensor-parallel-size N]

Nothing is loaded: the sizes of the layers that `--load-format dummy` would fill are added up. A
gigabyte is 10^9 bytes, as on data sheets of accelerators.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from fd_calibrate.sizes import weight_bytes

METHODS = {
    "bf16": "",
    "wint8": "wint8",
    "wint4 (experts), wint8": "wint4",
    "wint4, groups of 128": '{"quantization": "wint4", "group_size": 128}',
    "w8a8": "w8a8",
    "w4a8 (experts), wint8": '{"quantization": "mix_quant", "dense_quant_type": "wint8", '
    '"moe_quant_type": "w4a8"}',
    "block_wise_fp8": "block_wise_fp8",
    "wint2: tet2 (experts), wint8": "wint2",
    "wint2: CCQ (experts), wint8": '{"quantization": "wint2", "moe_quant_type": "ccq2"}',
}
# The published mix: experts of the first layers in wint4.
PUBLISHED = {
    "quantization": "wint2",
    "moe_quant_type": "w4w2",
    "dense_quant_type": "wint8",
    "moe_quant_config": {"moe_w4_quant_config": {"quant_end_layer": 6}},
    "tensor_layout": "plain",
}


def main() -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="folder with config.json")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    options = parser.parse_args()
    config = json.loads((options.model / "config.json").read_text("utf-8"))
    print("| format | experts, GB | other layers, GB | embedding, head, norms, GB | total, GB |")
    print("|---|---|---|---|---|")
    rows = [(name, config, method) for name, method in METHODS.items()]
    rows.append(
        ("wint2: published mix (CCQ, wint4)", {**config, "quantization_config": PUBLISHED}, "")
    )
    for name, chosen, method in rows:
        parts = weight_bytes(chosen, method, tp_size=options.tensor_parallel_size)
        total = sum(parts.values())
        shown = [parts["experts"], parts["linear"], parts["other"], total]
        print(f"| {name} | " + " | ".join(f"{n / 1e9:.2f}" for n in shown) + " |")


if __name__ == "__main__":
    main()
