"""fd-spec-mtp as its wheel, in an environment of its own: found, explained, drafting."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.plugins.test_template import Stranger, build, run
from tests.plugins.wheels import REPOSITORY

DEMO = REPOSITORY / "models" / "ernie-tiny"
PROGRAM = """
import json, sys
import fd_spec_mtp
from fastdeploy import LLM, SamplingParams
answers = []
always = {"method": "mtp", "num_speculative_tokens": 2, "adaptive_length": False}
for speculative in (None, always):
    with LLM(sys.argv[1], tensor_library=sys.argv[2], dtype="float32", max_model_len=256,
             num_gpu_blocks_override=16, num_threads=1, speculative_config=speculative) as llm:
        (out,) = llm.chat([{"role": "user", "content": "Sort these numbers: 27, 5, 61, 8"}],
                          SamplingParams(temperature=0, max_tokens=30), use_tqdm=False)
        answers.append((out.outputs[0].text, llm.get_metrics()["accepted_draft_tokens_total"]))
print(json.dumps({"file": fd_spec_mtp.__file__, "answers": answers}))
"""


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Stranger:
    folder = tmp_path_factory.mktemp("mtp")
    wheels = folder / "wheels"
    wheels.mkdir()
    environment = Stranger(folder / "venv")
    environment.install(build(REPOSITORY, wheels))
    for distribution in ("fd-tools", "fd-spec-mtp"):
        environment.install(build(REPOSITORY / "plugins" / distribution, wheels))
    return environment


def test_wheel_is_found_and_healthy(stranger: Stranger) -> None:
    listed = json.loads(stranger.fastdeploy("plugins", "list", "--json").stdout)
    mine = {p["kind"]: p for p in listed["plugins"] if p["distribution"] == "fd-spec-mtp"}
    assert set(mine) == {"speculative", "hooks"}
    assert all(p["status"] == "ok" and p["name"] == "mtp" for p in mine.values())
    checks = json.loads(stranger.fastdeploy("plugins", "doctor", "--json").stdout)["checks"]
    rows = [r for r in checks if r["origin"].startswith("fd-spec-mtp ")]
    assert len(rows) == 2 and all(r["verdict"] == "PASS" for r in rows), rows


def test_wheel_drafts_and_changes_nothing(stranger: Stranger, tensor_library: str) -> None:
    if not list(DEMO.glob("*.safetensors")):
        pytest.skip("this tree holds no demo weights (models/ernie-tiny/*.safetensors)")
    done = run(stranger.bin / "python", "-W", "ignore", "-c", PROGRAM, DEMO, tensor_library)
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    assert Path(answer["file"]).is_relative_to(stranger.bin.parent)
    (plain, none), (drafted, accepted) = answer["answers"]
    assert plain == drafted and plain
    assert none == 0 and accepted > 0
