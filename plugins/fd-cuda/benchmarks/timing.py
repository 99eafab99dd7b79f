"""Times of kernels in captured graphs."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch


def time_s(run: Callable[[], Any], count: int = 1, repeats: int = 5, replays: int = 8) -> float:
    """Median seconds of one of the `count` launches that `run` queues, as replays of a graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    times: list[float] = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / replays / count)
    return statistics.median(times)
