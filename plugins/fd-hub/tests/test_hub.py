"""Models by name: the hubs' own libraries against a hub on this machine, in processes of their own,
because these libraries read their settings when they are imported."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import COMMIT, Repository, running

NAME = "baidu/ERNIE-4.5-0.3B-Paddle"
DEMO = Path(__file__).resolve().parents[3] / "models" / "ernie-tiny"
WEIGHTS = random.Random(0).randbytes(24_000_000)
FILES = {
    "config.json": b'{"architectures": ["Ernie4_5ForCausalLM"]}',
    "tokenizer.json": b"{}",
    "model.safetensors": WEIGHTS,
    "modeling_evil.py": b"raise SystemExit",
    "pytorch_model.bin": b"pickled",
    "consolidated.safetensors": b"the same weights again",
    "onnx/model.onnx": b"another format",
    "README.md": b"words",
}
FASTDEPLOY = [sys.executable, "-m", "fastdeploy_core.cli.main"]
TAKEN = {"config.json", "tokenizer.json", "model.safetensors"}


class User:
    """A user's machine: an environment, and `fastdeploy` in it."""

    def __init__(self, home: Path, url: str, name: str = "huggingface") -> None:
        self.home = home
        self.env = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("HF_", "FD_"))},
            "HOME": str(home),
            "HF_HOME": str(home / "hf"),
            "HF_ENDPOINT": url,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DOWNLOAD_TIMEOUT": "5",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "MODELSCOPE_ENDPOINT": url,
            "MODELSCOPE_CACHE": str(home / "ms"),
            "STUDIO_GIT_HOST": url,
            "FD_CACHE_DIR": str(home / "fd"),
            "FD_MODEL_SOURCE": name,
            "NO_PROXY": "*",
        }

    def run(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        """`fastdeploy WORDS`, with these variables beside the usual ones."""
        return subprocess.run(
            [*FASTDEPLOY, *words],
            env={**self.env, **env},
            cwd=self.home,
            capture_output=True,
            text=True,
            timeout=300,
        )

    def pull(self, name: str = NAME, *words: str, **env: str) -> Path:
        """The folder that `fastdeploy pull` prints."""
        done = self.run("pull", name, *words, **env)
        assert done.returncode == 0, done.stderr
        return Path(done.stdout.strip())

    def refused(self, name: str = NAME, *words: str, **env: str) -> str:
        """What it says when it fails: one line, no traceback."""
        done = self.run("pull", name, *words, **env)
        assert done.returncode == 1, done.stdout
        assert "Traceback" not in done.stderr
        lines = [x for x in done.stderr.splitlines() if x.startswith("fastdeploy: error: ")]
        assert len(lines) == 1, done.stderr
        return lines[0]


@pytest.fixture
def hub() -> Repository:
    return Repository(NAME, dict(FILES))


@pytest.fixture
def user(hub: Repository, tmp_path: Path) -> Iterator[User]:
    with running(hub) as url:
        yield User(tmp_path, url)


def names(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


def test_only_weights_settings_and_tokenizer_are_downloaded(hub: Repository, user: User) -> None:
    folder = user.pull()
    assert names(folder) == TAKEN
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert folder.name == COMMIT
    assert not [path for _, path, _ in hub.asked if path.endswith((".py", ".bin", ".onnx"))]


def test_the_second_time_nothing_is_downloaded(hub: Repository, user: User) -> None:
    first = user.pull()
    hub.asked.clear()
    assert user.pull() == first
    assert not [path for _, path, _ in hub.asked if "/resolve/" in path]


def test_a_bare_name_of_the_original_is_found(user: User) -> None:
    assert names(user.pull("ERNIE-4.5-0.3B")) == TAKEN
    assert names(user.pull("PaddlePaddle/ERNIE-4.5-0.3B-Paddle")) == TAKEN


def test_a_download_that_broke_off_goes_on(hub: Repository, user: User) -> None:
    """The hub sends most of it and falls silent; the process is killed, as a user's patience is."""
    hub.stall_after = 21_000_000
    child = subprocess.Popen([*FASTDEPLOY, "pull", NAME], env=user.env, cwd=user.home)
    try:
        assert hub.stalled.wait(60)
        deadline = time.monotonic() + 30
        while not any(p.stat().st_size > 0 for p in user.home.rglob("*.partial")):
            assert time.monotonic() < deadline, "nothing was written"
            time.sleep(0.05)
    finally:
        child.kill()
        child.wait()
    [partial] = user.home.rglob("*.partial")
    there = partial.stat().st_size
    hub.stall_after = -1
    hub.asked.clear()
    folder = user.pull()
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    ranges = [r for method, path, r in hub.asked if method == "GET" and "safetensors" in path]
    assert ranges == [f"bytes={there}-"]


def test_a_connection_that_is_lost_is_made_again(hub: Repository, user: User) -> None:
    hub.break_after = 11_000_000  # of each answer; the library keeps whole pieces of 10 MB
    folder = user.pull()
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS


def test_a_hub_that_fails_in_mid_download_says_run_again(hub: Repository, user: User) -> None:
    hub.fail_files = 503
    text = user.refused()
    assert "run again" in text and "503" in text


def test_offline_takes_what_is_complete(hub: Repository, user: User) -> None:
    assert "forbids downloads" in user.refused(HF_HUB_OFFLINE="1")
    assert hub.asked == []
    folder = user.pull()
    hub.asked.clear()
    assert user.pull(HF_HUB_OFFLINE="1") == folder
    assert user.pull(TRANSFORMERS_OFFLINE="1") == folder
    assert hub.asked == []
    (folder / "model.safetensors").unlink()
    assert "not complete" in user.refused(HF_HUB_OFFLINE="1")


def test_a_hub_that_is_down_is_no_obstacle_to_what_is_here(hub: Repository, user: User) -> None:
    assert "cannot be reached" in user.refused(HF_ENDPOINT="http://127.0.0.1:9")
    folder = user.pull()
    done = user.run("pull", NAME, HF_ENDPOINT="http://127.0.0.1:9")
    assert done.stdout.strip() == str(folder)
    assert "cannot be reached" in done.stderr


def test_revisions(user: User) -> None:
    assert user.pull(NAME, "--revision", "v1") == user.pull(NAME, "--revision", "master")
    assert user.pull(NAME, "--revision", COMMIT, HF_HUB_OFFLINE="1").name == COMMIT
    assert "no revision 'v9'" in user.refused(NAME, "--revision", "v9")


def test_a_name_that_no_hub_has(user: User) -> None:
    text = user.refused("nobody/nothing")
    assert "neither a folder on this machine nor a model" in text
    assert "FD_MODEL_SOURCE" in text


@pytest.mark.parametrize(
    "evil", ["../../evil.json", "/evil.json", "a/../../evil.json", "..\\e.json"]
)
def test_a_name_that_leaves_the_folder_ends_the_download(
    hub: Repository, user: User, evil: str
) -> None:
    hub.files[evil] = b"{}"
    assert "outside the model's folder" in user.refused()
    assert not [path for _, path, _ in hub.asked if "/resolve/" in path]
    assert not list(user.home.rglob("*evil*"))


def test_weights_that_are_not_those_listed_are_deleted(hub: Repository, user: User) -> None:
    hub.lies = True
    text = user.refused()
    assert "SHA-256" in text and "deleted" in text
    assert "not complete" in user.refused(HF_HUB_OFFLINE="1")
    hub.lies = False
    assert (user.pull() / "model.safetensors").read_bytes() == WEIGHTS


def test_a_file_that_was_changed_on_disk_is_noticed(user: User) -> None:
    blob = (user.pull() / "model.safetensors").resolve()
    blob.write_bytes(WEIGHTS[:-1] + bytes([WEIGHTS[-1] ^ 1]))
    assert "SHA-256" in user.refused()


def test_a_link_out_of_the_cache_is_refused(user: User) -> None:
    folder = user.pull()
    secret = user.home / "secret.json"
    secret.write_bytes(FILES["tokenizer.json"])
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to(secret)
    assert "link out of" in user.refused()
    assert secret.read_bytes() == FILES["tokenizer.json"]


def test_pickled_weights_alone_are_refused(hub: Repository, user: User) -> None:
    for name in ("model.safetensors", "consolidated.safetensors"):
        del hub.files[name]
    text = user.refused()
    assert "no *.safetensors" in text and ".bin" in text
    assert not [path for _, path, _ in hub.asked if "/resolve/" in path]


@pytest.mark.parametrize("variable", [True, False])
def test_the_folder_for_downloads(user: User, variable: bool) -> None:
    kept = user.home / "models"
    if variable:
        folder = user.pull(FD_MODEL_CACHE=str(kept))
    else:
        folder = user.pull(NAME, "--download-dir", str(kept))
    assert folder.is_relative_to(kept)
    assert not (user.home / "hf" / "hub").exists()


@pytest.mark.parametrize("source", ["modelscope", "aistudio"])
def test_the_other_hubs(tmp_path: Path, source: str) -> None:
    hub = Repository("PaddlePaddle/ERNIE-4.5-0.3B-Paddle", dict(FILES))
    with running(hub) as url:
        user = User(tmp_path, url, source)
        folder = user.pull()
        assert {n for n in names(folder) if not n.startswith(".")} == TAKEN
        assert (folder / "model.safetensors").read_bytes() == WEIGHTS
        assert user.pull(HF_HUB_OFFLINE="1") == folder
        assert "neither a folder" in user.refused(NAME, "--revision", "v9")
        hub.files["../evil.json"] = b"{}"
        assert "outside the model's folder" in user.refused()


def test_a_server_takes_a_name_and_calls_the_model_by_it(tmp_path: Path) -> None:
    hub = Repository(NAME, {p.name: p.read_bytes() for p in DEMO.iterdir() if p.is_file()})
    code = (
        "import json, sys\n"
        "from fastdeploy_core.config.arguments import build_engine_config, build_server_config\n"
        "from fastdeploy_core.plugins.checkpoints import find_model\n"
        "values = {'model': sys.argv[1], 'tokenizer': sys.argv[1]}\n"
        "engine = build_engine_config(values, find_model)\n"
        "server = build_server_config(values, engine)\n"
        "print(json.dumps([str(engine.model.path), str(engine.model.tokenizer_path),"
        " *server.served_names]))\n"
    )
    with running(hub) as url:
        user = User(tmp_path, url)
        done = subprocess.run(
            [sys.executable, "-c", code, NAME],
            env=user.env,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert done.returncode == 0, done.stderr
    path, tokenizer, served = json.loads(done.stdout)
    assert path == tokenizer
    assert Path(path).name == COMMIT
    assert served == NAME
