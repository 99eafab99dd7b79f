"""`fastdeploy quantize MODEL --method NAME --output DIR`: writes a quantized checkpoint."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from fastdeploy_core.cli.parsing import whole
from fastdeploy_core.contracts.command import CommandParser

_EPILOG = """\
METHOD is what --quantization takes: a name (wint8, wint4, w8a8, w4a8, block_wise_fp8, wfp8afp8;
with fd-quant-wint2 also wint2, tet2) or JSON, such as
  '{"quantization": "wint4", "group_size": 128}'
  '{"quantization": "mix_quant", "dense_quant_type": "wint8", "moe_quant_type": "w4a8"}'
A run that was stopped goes on where it was when the same command is given again.
"""


def main(argv: Sequence[str]) -> int:
    """Run the command and print its report."""
    arguments = _parser().parse_args(argv)
    from fastdeploy_core.config.argument_values import normalise
    from fastdeploy_core.plugins.report import table
    from fd_calibrate.run import QuantizeOptions, quantize, summary

    on = {name: getattr(arguments, name) for name in ("device", "tensor_library", "num_threads")}
    report = quantize(
        QuantizeOptions(
            model=arguments.model,
            method=arguments.method,
            output=arguments.output,
            calibration=arguments.calibration,
            kv_cache=arguments.kv_cache,
            max_tokens=arguments.calibration_tokens,
            max_length=arguments.calibration_length,
            **normalise(on),
            show_progress=False if arguments.no_progress else None,
        )
    )
    header = ("layer", "relative error of weights", "of outputs")
    print(table(header, summary(report)))
    print(f"\nwrote {arguments.output}; serve it with: fastdeploy serve {arguments.output}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="fastdeploy quantize",
        description="Write a checkpoint in fewer bits, which `fastdeploy serve` loads.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", type=Path, help="folder of the model in full precision")
    parser.add_argument("--method", required=True, help="number format; see below")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="an empty folder")
    parser.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="text the model should stay good at: .txt, or .jsonl with text or messages",
    )
    parser.add_argument(
        "--calibration-tokens",
        type=whole(2),
        default=65536,
        metavar="N",
        help="use at most so many (default: 65536)",
    )
    parser.add_argument(
        "--calibration-length",
        type=whole(2),
        default=1024,
        metavar="N",
        help="cut samples to N tokens (default: 1024)",
    )
    parser.add_argument(
        "--kv-cache",
        default="",
        metavar="FORMAT",
        help="also compute static cache scales: int8, float8_e4m3fn, int4_zp",
    )
    parser.add_argument("--device", default="", help="device to compute on; default: the best")
    parser.add_argument("--tensor-library", default="", help="torch or paddle")
    parser.add_argument("--num-threads", default=0, metavar="N", help="0: all (default)")
    parser.add_argument("--no-progress", action="store_true", help="no progress bar")
    return parser
