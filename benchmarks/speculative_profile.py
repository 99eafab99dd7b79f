"""Where the time of a speculative decode step goes on an accelerator: a profile of steady steps.

    python benchmarks/speculative_profile.py --methods mtp ngram_match --k 1 --batch 1 32

The device's own time stamps show how long each captured graph of a step takes (the model with its
drafts; sampling, verifying and drafting), how long the device waits between graphs and between
steps, and which calls of the host waited for the device meanwhile. Needs torch with a device that
its profiler knows.

Before that, without the profiler: the time of a greedy step when the host is never late. Its graphs
are queued many times, alone and with a copy of the results to the host, as on devices that cannot
post results.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Callable
from itertools import islice, pairwise
from pathlib import Path
from statistics import median
from typing import Any

from speculative_acceptance import Runs, add_arguments, print_conditions, questions

WAITS = ("Synchronize", "cudaMemcpy ", "cuMemcpyDtoH")
KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")


def parse_arguments() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--methods", nargs="+", default=["", "mtp"], help="'': without")
    parser.add_argument("--k", nargs="+", type=int, default=[1])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 32])
    parser.add_argument(
        "--steps", type=int, default=60, help="pieces of each answer in the profile"
    )
    add_arguments(parser)
    return parser.parse_args()


def profile(llm: Any, prompts: list[str], num_steps: int, folder: Path) -> list[dict[str, Any]]:
    """Events of some steady decoding, in the thread that launches it."""
    import torch
    from torch.profiler import ProfilerActivity

    from fastdeploy import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=600, ignore_eos=True)
    pieces = llm.generate(prompts, params, use_tqdm=False, stream=True)
    for _ in islice(pieces, 50 * len(prompts)):
        pass
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as found:
        for _ in islice(pieces, num_steps * len(prompts)):
            pass
    pieces.close()
    path = folder / "trace.json"
    found.export_chrome_trace(str(path))
    events: list[dict[str, Any]] = json.loads(path.read_text("utf-8"))["traceEvents"]
    return [event for event in events if event.get("ph") == "X"]


def queued(llm: Any, batch: int, times: int = 100) -> None:
    """Print microseconds per step of so many rows whose graphs are queued before the device needs
    them."""
    import torch

    runner = llm._live_engine()._core._executor._worker._runner
    graphs, slots, device = runner._graphs, runner.slots.state, runner._device
    step = graphs.find(batch, graphs.plan.widths[-1])
    target = device.host_buffer(1 << 16)
    parts = {"the model": step._forward.replay, "sampled": step._greedy.replay}
    results = step._buffers.results
    if graphs.plan.draft_numbers:
        key = (True, graphs.plan.draft_numbers[-1])
        parts["sampled and drafted"] = step._drafting[key].replay
        results = step._drafts[key]
    slots.rows[:batch] = torch.arange(batch, device=slots.rows.device)
    slots.room[:batch], slots.limit[:] = 1024, runner.slots.max_drafts

    def measured(*calls: Callable[[], None]) -> float:
        found = []
        for _ in range(7):
            slots.num_computed[:batch], slots.newest[:batch] = 100, 100
            ends = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            torch.cuda._sleep(2_000_000)  # until some of them are queued
            ends[0].record()
            for _ in range(times):
                for call in calls:
                    call()
            ends[1].record()
            torch.cuda.synchronize()
            found.append(1000 * ends[0].elapsed_time(ends[1]) / times)
        return median(found)

    def copy() -> None:
        device.download(results, target[: results.numel() * results.element_size()])

    model, *others = parts.values()
    words = [f"{measured(model):.0f} the model"]
    for name, other in zip(list(parts)[1:], others, strict=True):
        words.append(f"{measured(model, other):.0f} {name}")
    words.append(f"{measured(model, others[-1], copy):.0f} and copied")
    print(f"  queued, us a step: {', '.join(words)}", flush=True)
    slots.forget()  # the host's state does not include these steps


def busy(events: list[dict[str, Any]]) -> float:
    """Microseconds in which any of the events ran; kernels overlap where one waits for the previous
    one."""
    total, end = 0.0, 0.0
    for event in sorted(events, key=lambda e: e["ts"]):
        stop = event["ts"] + event["dur"]
        total += max(0.0, stop - max(end, event["ts"]))
        end = max(end, stop)
    return total


def report(events: list[dict[str, Any]]) -> None:
    """Print a summary of the events."""
    calls = [e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")]
    waits = Counter(e["name"] for e in calls if any(w in e["name"] for w in WAITS))
    launches = sorted((e for e in calls if "GraphLaunch" in e["name"]), key=lambda e: e["ts"])
    work: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        if event.get("cat") in KERNELS:
            work.setdefault(event["args"].get("correlation", -1), []).append(event)
    graphs = [work[c] for c in (e["args"]["correlation"] for e in launches) if c in work]
    spans = [
        (
            min(e["ts"] for e in graph),
            max(e["ts"] + e["dur"] for e in graph),
            busy(graph),
            len(graph),
        )
        for graph in graphs
    ]
    sizes = [span[3] for span in spans]
    # The smallest graph is the one that samples; a step's first graph, before it, is the model.
    drawing = min(sizes, default=0)
    firsts = [n - 1 for n, size in enumerate(sizes) if size == drawing and n]
    width = firsts[1] - firsts[0] if len(firsts) > 1 else 1
    steps = [spans[n : n + width] for n in firsts if n + width <= len(spans)]
    waits["cudaDeviceSynchronize"] -= 1  # the profiler's own, at its end
    print(f"  {len(steps)} steps of {width} captured graphs; calls that wait for the device: "
          f"{dict(+waits) or 'none'}")  # fmt: skip
    if not steps:
        print("  the profile holds no replayed captured graphs: nothing is captured on this device")
        return
    for nth in range(width):
        parts = [step[nth] for step in steps]
        before = [step[nth][0] - step[nth - 1][1] for step in steps] if nth else [0.0]
        print(
            f"  captured graph {nth + 1}: {parts[0][3]} kernels, "
            f"{median(p[1] - p[0] for p in parts):.0f} us "
            f"of which busy {median(p[2] for p in parts):.0f}; the device waited "
            f"{median(before):.1f} us before it"
        )
    between = [b[0][0] - a[-1][1] for a, b in pairwise(steps)]
    whole = [b[0][0] - a[0][0] for a, b in pairwise(steps)]
    if whole:
        print(f"  from step to step {median(whole):.0f} us; between steps {median(between):.1f} us")
    ahead = [e for e, s in zip(launches, spans, strict=False) if s[0] - e["ts"] - e["dur"] > 0]
    late = [spans[n][0] - launches[n]["ts"] - launches[n]["dur"] for n in firsts]
    if late:
        print(
            f"  {len(ahead)} of {len(spans)} captured graphs were launched before the device came "
            f"to them; those of the model {median(late):.0f} us before"
        )
    names = Counter[str]()
    for event in events:
        if event.get("cat") in KERNELS:
            names[event["name"][:60]] += event["dur"]
    for name, duration in names.most_common(12):
        print(f"  {duration / max(1, len(steps)):8.1f} us/step  {name}")


def main() -> None:
    """Measure and print."""
    options = parse_arguments()
    print_conditions(options)
    runs = Runs(options)
    with tempfile.TemporaryDirectory() as folder:
        for method in options.methods:
            for k in options.k if method else [0]:
                with runs.engine(method, k, max(options.batch), adaptive_length=False) as llm:
                    for batch in options.batch:
                        prompts = questions(options.model, "reciting", batch)
                        print(f"{method or 'none'} k={k} batch {batch}", flush=True)
                        queued(llm, batch)
                        report(profile(llm, prompts, options.steps, Path(folder)))


if __name__ == "__main__":
    main()
