"""Speculative methods on the demo model's tasks: acceptance and tokens per step.

    python benchmarks/speculative_acceptance.py                        # acceptance, k = 1 to 5
    python benchmarks/speculative_acceptance.py --methods mtp eagle3 --k 1 3  # with their plugins

Questions are held out of the model's training; answers are greedy and end where the model ends
them. Acceptance is accepted drafts divided by all drafts. Tokens per step count the steps of one
sequence after its prompt. Method `draft_model` drafts with the first layers of the target.
speculative_speed.py measures speed. The default methods come with fd-speculative, mtp with
fd-spec-mtp, eagle3 and dflash with fd-spec-eagle.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TASKS = (
    "arithmetic",
    "copying",
    "sorting",
    "extraction",
    "recall",
    "facts",
    "reciting",
    "plain_copy",
)


def parse_arguments() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--methods", nargs="+", default=["ngram_match", "suffix", "draft_model"])
    parser.add_argument("--k", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--tasks", nargs="+", default=None)
    parser.add_argument("--count", type=int, default=20, help="questions of a task")
    add_arguments(parser)
    return parser.parse_args()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of engines; speculative_speed.py uses them, too."""
    parser.add_argument("--model", default=str(ROOT / "models" / "ernie-tiny"))
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--draft-layers", type=int, default=2)
    for method in ("eagle3", "dflash"):
        folder = ROOT / "models" / f"ernie-tiny-{method}"
        parser.add_argument(f"--{method}", default=str(folder), help=f"checkpoint of {method}")
    parser.add_argument("--device", default="")
    parser.add_argument("--tensor-library", default="")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", action="store_true", help="print one JSON line as well")


def print_conditions(options: argparse.Namespace) -> None:
    """What is measured, and where."""
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    import fastdeploy_core

    print(
        f"fastdeploy {fastdeploy_core.__version__}, Python {platform.python_version()}, "
        f"{options.dtype}, {options.threads} threads, device {options.device or 'automatic'}, "
        f"{options.tensor_library or 'automatic'}, model {Path(options.model).name}"
    )


def questions(model: str, task: str, count: int) -> list[str]:
    """Prompts of one task, as the chat template writes them."""
    training = str(Path(model) / "training")
    if training not in sys.path:
        sys.path.insert(0, training)
    import chat
    import curriculum

    return [chat.prompt_text(sample) for sample in curriculum.held_out(task, count, 2026)]


def first_layers(model: str, number: int, folder: Path) -> str:
    """The target's first layers as a model of their own, in its vocabulary."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    source = Path(model)
    config = json.loads((source / "config.json").read_text("utf-8"))
    config["num_hidden_layers"] = number
    config.pop("num_nextn_predict_layers", None)
    with safe_open(source / "model.safetensors", framework="pt") as file:
        kept = {
            name: file.get_tensor(name)
            for name in file.keys()  # noqa: SIM118 - not a mapping
            if ".mtp_" not in name
            and not (name.startswith("model.layers.") and int(name.split(".")[2]) >= number)
        }
    folder.mkdir(parents=True)
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    shutil.copy(source / "tokenizer.json", folder)
    return str(folder)


class Runs:
    """Engines of one model, with and without speculation."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self._draft = ""

    def engine(self, method: str = "", k: int = 0, batch: int = 32, **settings: Any) -> Any:
        """An LLM with that method, or without any."""
        from fastdeploy import LLM

        options = self.options
        section = None
        if method:
            section = {"method": method, "num_speculative_tokens": k, **settings}
            if method == "draft_model":
                section["model"] = self._draft_folder()
            elif method in ("eagle3", "dflash"):
                section["model"] = getattr(options, method)
        return LLM(
            options.model,
            device=options.device,
            tensor_library=options.tensor_library,
            dtype=options.dtype,
            num_threads=options.threads,
            max_model_len=1024,
            max_num_seqs=batch,
            enable_prefix_caching=False,
            num_gpu_blocks_override=16 * batch + 16,
            cudagraph_capture_sizes=[2**n for n in range(11) if 2**n <= batch],
            speculative_config=section,
        )

    def _draft_folder(self) -> str:
        if not self._draft:
            folder = Path(tempfile.mkdtemp()) / "draft"
            self._draft = first_layers(self.options.model, self.options.draft_layers, folder)
        return self._draft


def generate(
    llm: Any,
    prompts: list[str],
    max_tokens: int,
    *,
    ignore_eos: bool = False,
    temperature: float = 0.0,
    clock: Callable[[], float] = time.perf_counter,
    answers: list[list[int]] | None = None,
) -> tuple[float, int, dict[str, Any]]:
    """(seconds, tokens, change of the engine's counters). The tokens are added to `answers`."""
    from fastdeploy import SamplingParams

    params = SamplingParams(
        temperature=temperature, top_p=0.95, seed=1, max_tokens=max_tokens, ignore_eos=ignore_eos
    )
    before = llm.get_metrics()
    began = clock()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = clock() - began
    after = llm.get_metrics()
    found = [list(output.outputs[0].token_ids) for output in outputs]
    tokens = sum(map(len, found))
    if answers is not None:
        answers += found
    change = {
        name: after[name] - before[name]
        for name in after
        if isinstance(after[name], int | float) and name.endswith(("_total", "_s"))
    }
    return seconds, tokens, change


def acceptance(runs: Runs) -> list[dict[str, Any]]:
    """One row per method, k and task."""
    options, rows = runs.options, []
    tasks = options.tasks or TASKS
    prompts = {task: questions(options.model, task, options.count) for task in tasks}
    header = "".join(f"{task:>12}" for task in tasks)
    print(f"\naccepted drafts in percent / tokens per step\n{'method':14}{'k':>3}{header}")
    for method in options.methods:
        for k in options.k:
            cells = []
            with runs.engine(method, k, adaptive_length=False) as llm:
                for task in tasks:
                    _, tokens, change = generate(llm, prompts[task], options.max_tokens)
                    drafted, right = (
                        change["draft_tokens_total"],
                        change["accepted_draft_tokens_total"],
                    )
                    decoded = tokens - options.count  # the first token comes with the prompt
                    per_step = decoded / max(1, change["step_sequences_total"] - options.count)
                    share = 100 * right / max(1, drafted)
                    rows.append(
                        {
                            "method": method,
                            "k": k,
                            "task": task,
                            "acceptance": share,
                            "tokens_per_step": per_step,
                            "drafts_per_token": drafted / max(1, decoded),
                        }
                    )
                    cells.append(f"{share:6.1f} /{per_step:4.2f}")
            print(f"{method:14}{k:3d}" + "".join(f"{cell:>12}" for cell in cells), flush=True)
    return rows


def main() -> None:
    """Measure and print."""
    options = parse_arguments()
    print_conditions(options)
    rows = acceptance(Runs(options))
    if options.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
