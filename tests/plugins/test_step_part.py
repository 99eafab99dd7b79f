"""A stranger's model family whose part sees the rows of each step: a wheel of its own."""

from __future__ import annotations

import json
from pathlib import Path

from tests.plugins.wheels import REPOSITORY, build_wheel, install, python

DEMO = REPOSITORY / "models" / "ernie-tiny"
ENTRY_POINTS = """
[fastdeploy.models]
SeenForCausalLM = fd_seen:SeenForCausalLM
"""
FAMILY = """
import json, os
from fastdeploy_core.models.ernie import Ernie4_5_MoeForCausalLM

class Seen:
    features = frozenset()

    def add(self, slot, extras):
        pass

    def reset(self, slot):
        pass

    def lay_out(self, rows, batch, read):
        lengths = [batch.cu_seqlens_q[n + 1] - batch.cu_seqlens_q[n] for n in range(len(rows))]
        ends = batch.seq_lens[: len(rows)]
        seen = [rows, ends, lengths, [] if read is None else read]
        with open(os.environ["SEEN"], "a") as file:
            print(json.dumps([[int(n) for n in numbers] for numbers in seen]), file=file)

class SeenForCausalLM(Ernie4_5_MoeForCausalLM):
    def __init__(self, config, build):
        super().__init__(config, build)
        build.parts.append(Seen())
"""
GENERATE = """
import json, os, sys
from fastdeploy import LLM, SamplingParams
prompts = [{"prompt_token_ids": list(range(3, 3 + n))} for n in (9, 4)]
with LLM(sys.argv[1], device="cpu", max_model_len=64, enforce_eager=True, seed=1) as llm:
    open(os.environ["SEEN"], "w").close()
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    print(json.dumps([o.outputs[0].token_ids for o in llm.generate(prompts, params)]))
"""


def test_a_familys_part_sees_the_rows_of_each_step(tmp_path: Path) -> None:
    site = tmp_path / "site"
    install(site, build_wheel(tmp_path, "fd-seen", {"fd_seen.py": FAMILY}, ENTRY_POINTS))
    model, notes = tmp_path / "model", tmp_path / "seen.jsonl"
    model.mkdir()
    for path in DEMO.iterdir():
        (model / path.name).symlink_to(path)
    config = json.loads((DEMO / "config.json").read_text("utf-8"))
    (model / "config.json").unlink()
    config["architectures"] = ["SeenForCausalLM"]
    (model / "config.json").write_text(json.dumps(config))
    answers, fed = [], {}  # fed: positions of the tokens of each slot
    for folder in (model, DEMO):
        done = python(site, "-c", GENERATE, str(folder), timeout_s=300, SEEN=str(notes))
        assert done.returncode == 0, done.stderr[-2000:]
        answers.append(done.stdout.strip().splitlines()[-1])
        for line in notes.read_text("utf-8").splitlines():
            slots, ends, lengths, read = json.loads(line)
            assert len(slots) == len(ends) == len(lengths)
            assert all(number < sum(lengths) for number in read)
            for slot, end, length in zip(slots, ends, lengths, strict=True):
                fed.setdefault(slot, []).extend(range(end - length, end))
    assert sorted(fed.values(), key=len) == [list(range(4 + 4)), list(range(9 + 4))]
    assert answers[0] == answers[1]
