"""Which decode steps are captured, as FastDeploy and vLLM spell it."""

from __future__ import annotations

from typing import Any

import pytest

from fastdeploy_core.config import GraphConfig
from fastdeploy_core.config.argument_values import with_defaults
from fastdeploy_core.config.graphs import read_graphs
from fastdeploy_core.errors import ConfigError


def read(**values: Any) -> GraphConfig:
    return read_graphs(with_defaults(values))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, GraphConfig()),
        ({"enforce_eager": True}, GraphConfig(enabled=False)),
        ({"cudagraph_capture_sizes": ["8", "1", "8"]}, GraphConfig(sizes=(1, 8))),
        ({"cudagraph_capture_sizes": [8, 1]}, GraphConfig(sizes=(1, 8))),
        ({"graph_capture_sizes": "4"}, GraphConfig(sizes=(4,))),
        ({"max_cudagraph_capture_size": 64}, GraphConfig(max_size=64)),
        ({"cuda_graph_sizes": ["64"]}, GraphConfig(max_size=64)),
        ({"cuda_graph_sizes": ["1", "64"]}, GraphConfig(sizes=(1, 64))),
        ({"graph_optimization_config": '{"use_cudagraph": true}'}, GraphConfig()),
        ({"graph_optimization_config": {"use_cudagraph": False}}, GraphConfig(enabled=False)),
        (
            {
                "graph_optimization_config": {
                    "graph_opt_level": 0,
                    "cudagraph_capture_sizes": [2, 4],
                }
            },
            GraphConfig(sizes=(2, 4)),
        ),
        ({"compilation_config": {"cudagraph_mode": "none"}}, GraphConfig(enabled=False)),
        ({"compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"}}, GraphConfig()),
        ({"compilation_config": {"max_cudagraph_capture_size": 16}}, GraphConfig(max_size=16)),
        ({"compilation_config": 3}, GraphConfig()),
        ({"compilation_config": {"mode": 3, "cudagraph_mode": "PIECEWISE"}}, GraphConfig()),
        ({"compilation_config": {"pass_config": {"fuse_norm_quant": True}}}, GraphConfig()),
        ({"graph_optimization_config": {"graph_opt_level": 2}}, GraphConfig()),
        ({"graph_optimization_config": {"cudagraph_only_prefill": True}}, GraphConfig()),
        ({"use_warmup": 1}, GraphConfig()),
        (
            {
                "cudagraph_capture_sizes": ["2"],
                "compilation_config": {"cudagraph_capture_sizes": [2]},
            },
            GraphConfig(sizes=(2,)),
        ),
    ],
    ids=str,
)
def test_every_spelling_is_read(values: dict[str, Any], expected: GraphConfig) -> None:
    assert read(**values) == expected


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"compilation_config": {"cudagraph_mode": "HALF"}}, "NONE, FULL"),
        ({"compilation_config": {"cudagraph_mod": "NONE"}}, "unknown"),
        ({"graph_optimization_config": {"use_cudagraph": "yes"}}, "use_cudagraph"),
        ({"cudagraph_capture_sizes": ["0"]}, "from 1 to"),
        ({"cudagraph_capture_sizes": ["two"]}, "list of integers"),
        ({"compilation_config": {"cudagraph_capture_sizes": [True]}}, "True"),
        ({"graph_optimization_config": {"cudagraph_capture_sizes": []}}, "no batch size"),
        ({"enforce_eager": True, "cudagraph_capture_sizes": ["1"]}, "--enforce-eager captures"),
        (
            {"cudagraph_capture_sizes": ["1"], "cuda_graph_sizes": ["1", "2"]},
            "different things",
        ),
        ({"max_cudagraph_capture_size": 0}, "between 1 and"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_with_the_reason(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read(**values)
