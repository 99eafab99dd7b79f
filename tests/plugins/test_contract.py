"""A plugin built for contract 1.0, as a wheel, on cores that speak other contracts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.plugins.wheels import REPOSITORY, build_wheel, install, python

DEMO = REPOSITORY / "models" / "ernie-tiny"
TEMPLATES = REPOSITORY / "plugins" / "fastdeploy-testing" / "fastdeploy_testing" / "templates"
SOURCE = TEMPLATES / "drafter" / "src" / "fd_mydraft"
ENTRY_POINTS = """
[fastdeploy.speculative]
mydraft = fd_mydraft.drafter:MyDraftDrafter

[fastdeploy.hooks]
mydraft = fd_mydraft.hooks
"""
# In every process of the engine, before anything reads the number.
CORE_SPEAKS = """
import fastdeploy_core.contracts as contracts
contracts.CONTRACT = contracts.base.CONTRACT = {contract}
"""
GENERATE = """
import json, sys
from fastdeploy import LLM, SamplingParams
import fastdeploy_core.contracts
method = {"method": "mydraft", "num_speculative_tokens": 3} if sys.argv[2] else None
with LLM(sys.argv[1], device="cpu", speculative_config=method, max_model_len=96) as llm:
    prompt = {"prompt_token_ids": [3, 9, 77, 14, 3, 9, 77, 14, 3, 9]}
    output = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
print(json.dumps({
    "speaks": fastdeploy_core.contracts.CONTRACT, "tokens": output[0].outputs[0].token_ids,
}))
"""


def site_with(folder: Path, *, plugin: str, core: tuple[int, int]) -> Path:
    """The template's drafter in a wheel that declares `plugin`, on a core that speaks `core`."""
    files = {f"fd_mydraft/{p.name}": p.read_text("utf-8") for p in SOURCE.glob("*.py")}
    assert "contract = (1, 0)" in files["fd_mydraft/drafter.py"]
    drafter = files["fd_mydraft/drafter.py"]
    files["fd_mydraft/drafter.py"] = drafter.replace("contract = (1, 0)", f"contract = {plugin}")
    site = folder / "site"
    install(site, build_wheel(folder, "fd-mydraft", files, ENTRY_POINTS))
    (site / "sitecustomize.py").write_text(CORE_SPEAKS.format(contract=core))
    return site


def test_a_wheel_built_for_1_0_drafts_on_a_core_whose_minor_is_newer(tmp_path: Path) -> None:
    site = site_with(tmp_path, plugin="(1, 0)", core=(1, 1))
    answers = []
    for method in ("", "mydraft"):
        done = python(site, "-c", GENERATE, str(DEMO), method, timeout_s=300)
        assert done.returncode == 0, done.stderr[-2000:]
        answers.append(json.loads(done.stdout.strip().splitlines()[-1]))
    assert answers[1]["speaks"] == [1, 1] and len(answers[1]["tokens"]) == 24
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("plugin", "core", "words"),
    [
        ("(1, 2)", (1, 1), "may lack what it uses: upgrade fastdeploy-core"),
        ("(2, 0)", (1, 1), "written for contract 2.0; this core speaks 1.1: upgrade"),
        ("(0, 12)", (1, 1), "0.12; this core speaks 1.1: install a newer release of the plugin"),
        ("None", (1, 1), "declares no contract; got None; this core speaks 1.1"),
    ],
)
def test_a_wheel_built_for_another_contract_is_told_apart(
    tmp_path: Path, plugin: str, core: tuple[int, int], words: str
) -> None:
    site = site_with(tmp_path, plugin=plugin, core=core)
    code = (
        "import logging; logging.basicConfig()\n"
        "from fastdeploy_core.plugins import lookup\nlookup('speculative', 'mydraft')"
    )
    done = python(site, "-c", code, timeout_s=300)
    assert (done.returncode == 0) == (plugin == "(1, 2)"), done.stderr
    assert words in " ".join(done.stderr.split())
