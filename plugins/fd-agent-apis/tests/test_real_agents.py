"""Real agents, unchanged from npm and PyPI, on a real server without any other network: `nox -s
agents`. Each reads a file, changes it and ends.

AGENT_CLIS names the folders of their commands, separated as in PATH. The network is that of a
namespace that has loopback only, so this also shows that they need nothing else.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from agent_script import CLOSING, NEW, OLD, TASK
from server_process import REPOSITORY, ServerProcess, serving

TESTS = Path(__file__).parent
COMMANDS = os.environ.get("AGENT_CLIS", "/nowhere")
CODEX = """
model = "local"
model_provider = "fastdeploy"
[model_providers.fastdeploy]
name = "FastDeploy"
base_url = "{url}/v1"
env_key = "FASTDEPLOY_KEY"
wire_api = "responses"
[analytics]
enabled = false
"""
pytestmark = [
    pytest.mark.skipif("AGENT_CLIS" not in os.environ, reason="run by nox -s agents"),
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """64k positions, random weights, and the demo model's tokenizer and template."""
    import torch
    import transformers

    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=3072,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=65536,
        eos_token_id=4,
        tie_word_embeddings=True,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    for file in (REPOSITORY / "models" / "ernie-tiny").glob("*t*"):
        if file.name.startswith(("tokenizer", "special", "chat_template")):
            shutil.copy(file, folder)
    return folder


@pytest.fixture(scope="module")
def agent_server(model: Path) -> Iterator[ServerProcess]:
    options = ("--served-model-name", "local", "--tensor-library", "torch", "--dtype", "float32")
    parsers = ("--reasoning-parser", "qwen3", "--tool-call-parser", "hermes")
    limits = ("--num-gpu-blocks-override", "1000", "--max-num-batched-tokens", "2048")
    script = ("--logits-processors", "agent_script:Script")
    path = f"{REPOSITORY}:{TESTS}"
    with serving(model, *options, *parsers, *limits, *script, extra={"PYTHONPATH": path}) as server:
        yield server


def run(command: list[str], folder: Path, **environment: str) -> str:
    """What an agent printed, run in a folder that is also its home."""
    home = folder / "home"
    home.mkdir(exist_ok=True)
    path = f"{COMMANDS}:{os.environ['PATH']}"
    done = subprocess.run(
        command,
        cwd=folder,
        env={"HOME": str(home), "PATH": path, "LANG": "C.UTF-8", **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    """What the agent is to change; afterwards it is changed."""
    path = tmp_path / "note.txt"
    path.write_text(f"{OLD}\n")
    yield path
    assert path.read_text() == f"{NEW}\n"


@pytest.fixture
def cached(agent_server: ServerProcess) -> Iterator[None]:
    """The turns after the first were found in the prefix cache."""
    before = queries(agent_server)
    yield
    asked, found = (now - then for now, then in zip(queries(agent_server), before, strict=True))
    assert found > 0.4 * asked, f"{found:.0f} of {asked:.0f} prompt tokens were cached"


def queries(server: ServerProcess) -> tuple[float, float]:
    """Prompt tokens that were looked up in the prefix cache, and those that were found."""
    text = httpx.get(f"{server.url}/metrics").text

    def value(name: str) -> float:
        found = re.search(rf"^fastdeploy:{name}\S* (\S+)$", text, re.MULTILINE)
        assert found, name
        return float(found[1])

    return value("prefix_cache_query_tokens"), value("prefix_cache_token_num")


@pytest.mark.usefixtures("cached")
def test_codex(agent_server: ServerProcess, file: Path) -> None:
    config = file.parent / "home" / ".codex" / "config.toml"
    config.parent.mkdir(parents=True)
    config.write_text(CODEX.format(url=agent_server.url))
    free = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    task = TASK.format(path=file)
    printed = run(["codex", "exec", "--json", *free, task], file.parent, FASTDEPLOY_KEY="x")
    events = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    commands = [item for item in items if item["type"] == "command_execution"]
    assert [(c["exit_code"], c["aggregated_output"]) for c in commands] == [
        (0, f"{OLD}\n"),
        (0, f"{NEW}\n"),
    ]
    assert items[-1]["text"] == CLOSING


@pytest.mark.usefixtures("cached")
def test_claude_code(agent_server: ServerProcess, file: Path) -> None:
    printed = run(
        [
            *("claude", "-p", TASK.format(path=file), "--allowedTools", "Read,Edit"),
            *("--output-format", "stream-json", "--verbose"),
        ],
        file.parent,
        ANTHROPIC_BASE_URL=agent_server.url,
        ANTHROPIC_API_KEY="x",
        ANTHROPIC_MODEL="local",
        ANTHROPIC_DEFAULT_HAIKU_MODEL="local",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
    )
    last = json.loads(printed.splitlines()[-1])
    assert last["type"] == "result" and not last["is_error"] and last["result"] == CLOSING


@pytest.mark.usefixtures("cached")
def test_opencode(agent_server: ServerProcess, file: Path) -> None:
    limits = {"context": 65536, "output": 8192}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{agent_server.url}/v1", "apiKey": "x"},
        "models": {"local": {"name": "local", "limit": limits}},
    }
    config = file.parent / "opencode.json"
    config.write_text(json.dumps({"provider": {"fastdeploy": provider}}))
    printed = run(
        ["opencode", "run", "--model", "fastdeploy/local", TASK.format(path=file)],
        file.parent,
        OPENCODE_DISABLE_MODELS_FETCH="1",
        OPENCODE_DISABLE_AUTOUPDATE="1",
    )
    assert CLOSING in printed


@pytest.mark.usefixtures("cached")
def test_qwen_code(agent_server: ServerProcess, file: Path) -> None:
    printed = run(
        ["qwen", "--auth-type", "openai", "--yolo", "-p", TASK.format(path=file)],
        file.parent,
        OPENAI_BASE_URL=f"{agent_server.url}/v1",
        OPENAI_API_KEY="x",
        OPENAI_MODEL="local",
    )
    assert CLOSING in printed


@pytest.mark.usefixtures("cached")
def test_cline(agent_server: ServerProcess, file: Path) -> None:
    where = ["-k", "x", "-m", "local", "-b", f"{agent_server.url}/v1"]
    run(["cline", "auth", "openai-compatible", *where], file.parent)
    command = ["cline", "--json", "-P", "openai-compatible", "-m", "local"]
    assert CLOSING in run([*command, TASK.format(path=file)], file.parent)


def test_aider(agent_server: ServerProcess, file: Path) -> None:
    quiet = ["--no-analytics", "--no-check-update", "--no-git", "--map-tokens", "0"]
    printed = run(
        [
            *("aider", "--model", "openai/local", "--edit-format", "diff", *quiet, "--yes-always"),
            *("--message", TASK.format(path=file), str(file)),
        ],
        file.parent,
        OPENAI_API_BASE=f"{agent_server.url}/v1",
        OPENAI_API_KEY="x",
        LITELLM_LOCAL_MODEL_COST_MAP="True",
    )
    assert CLOSING in printed
