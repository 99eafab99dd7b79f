"""What a loaded model keeps resident, and the most it took on the way.

    python plugins/fd-cpu/benchmarks/memory.py --model DIR [--quantization JSON] \\
        [--weight-cache DIR]

Bytes are anonymous memory of this process, which holds the whole engine: files that are mapped are
the system's to take back. "interpreter" is what stands after the tensor library's import.
"""

from __future__ import annotations

import argparse
import gc
import threading
import time
from pathlib import Path


def anonymous_bytes() -> int:
    """Resident memory that no file backs."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(x for x in lines if x.startswith("RssAnon")).split()[1])


class Peak:
    """The most, looked at every few milliseconds."""

    def __init__(self) -> None:
        self.bytes, self._stop = 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.003):
            self.bytes = max(self.bytes, anonymous_bytes())


def main() -> None:
    """Load, look, generate, look again."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--quantization", default="")
    parser.add_argument("--weight-cache", default="")
    parser.add_argument("--kv-mib", type=int, default=64, help="few enough to be filled")
    parser.add_argument("--threads", type=int, default=2)
    asked = parser.parse_args()

    import torch
    from fastdeploy import LLM, SamplingParams
    from fd_cpu.packing import Packed

    torch.zeros(1)
    interpreter = anonymous_bytes()
    began = time.perf_counter()
    with Peak() as peak:
        llm = LLM(
            asked.model,
            device="x86",
            quantization=asked.quantization,
            weight_cache=asked.weight_cache,
            num_threads=asked.threads,
            max_model_len=512,
            max_num_seqs=8,
            kv_cache_memory_bytes=asked.kv_mib << 20,
        )
    took = time.perf_counter() - began
    gc.collect()
    with llm:
        loaded = anonymous_bytes()
        llm.generate(
            [{"prompt_token_ids": [5 + number] * 480} for number in range(8)],
            SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, detokenize=False),
            use_tqdm=False,
        )
        used = anonymous_bytes()
        weights = {id(x.native): x.native for x in gc.get_objects() if type(x) is Packed}
        packed = sum(int(x.num_bytes) for x in weights.values())
    rest = used - packed - (asked.kv_mib << 20) - interpreter
    print(f"loaded in {took:.1f} s; MB:")
    for name, size in (
        ("interpreter", interpreter),
        ("packed weights", packed),
        ("KV cache", asked.kv_mib << 20),
        ("everything else", rest),
        ("resident after loading", loaded),
        ("resident after generating", used),
        ("most while loading", peak.bytes),
    ):
        print(f"{name:>28} {size / 1e6:9.1f}")


if __name__ == "__main__":
    main()
