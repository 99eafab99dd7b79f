"""The dashboard and the alert rules of deploy/monitoring/, against a real server's metrics, in the
real Prometheus (`apt install prometheus`), and read by Grafana's own library."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.server_process import serving
from tests.server_support import write_null_model

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "monitoring"
DASHBOARD = json.loads((FOLDER / "grafana.json").read_text("utf-8"))
RULES = yaml.safe_load((FOLDER / "alerts.yaml").read_text("utf-8"))["groups"][0]["rules"]
PANELS = {
    f"{panel['title']}: {target['legendFormat']}": target["expr"]
    for panel in DASHBOARD["panels"]
    for target in panel["targets"]
}
ALERTS = {rule["alert"]: rule["expr"] for rule in RULES}
LIMIT_S = 60


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One that has answered a request."""
    model = write_null_model(tmp_path_factory.mktemp("model"))
    with serving(model, "--device", "null") as server:
        httpx.get(f"{server.url}/v1/models", timeout=LIMIT_S).raise_for_status()
        body = {"prompt": "x", "max_tokens": 4}
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=LIMIT_S).raise_for_status()
        yield server.url


def test_all_that_is_drawn_and_watched_is_there(server: str) -> None:
    text = httpx.get(f"{server}/metrics", timeout=LIMIT_S).text
    there = set(re.findall(r"^# TYPE (fastdeploy:\w+)", text, re.MULTILINE))
    for where, expression in {**PANELS, **ALERTS}.items():
        named = {name.removesuffix("_bucket") for name in re.findall(r"fastdeploy:\w+", expression)}
        assert named and named <= there, (where, named - there)


def test_grafanas_library_reads_the_dashboard() -> None:
    reason = "needs grafana-foundation-sdk, which session `deploy` of nox installs"
    models = pytest.importorskip("grafana_foundation_sdk.models.dashboard", reason=reason)
    plugins = pytest.importorskip("grafana_foundation_sdk.cog.plugins", reason=reason)
    plugins.register_default_plugins()
    read = models.Dashboard.from_json(DASHBOARD)
    assert read.title == "FastDeploy" and len(read.panels) == len(DASHBOARD["panels"])
    assert {target.expr for panel in read.panels for target in panel.targets} == set(
        PANELS.values()
    )


@pytest.mark.skipif(not shutil.which("prometheus"), reason="no prometheus; run: apt install it")
def test_prometheus_loads_the_rules_and_answers_the_dashboard(server: str, tmp_path: Path) -> None:
    config = tmp_path / "prometheus.yml"
    scrape = {"job_name": "fastdeploy", "static_configs": [{"targets": [server[len("http://") :]]}]}
    settings = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(FOLDER / "alerts.yaml")],
        "scrape_configs": [scrape],
    }
    config.write_text(yaml.safe_dump(settings), "utf-8")
    command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'data'}"]
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    process = subprocess.Popen(
        [*command, f"--web.listen-address={address}"], stderr=subprocess.DEVNULL
    )
    try:
        asked = f"http://{address}/api/v1"
        _wait(lambda: len(_query(asked, "fastdeploy:engine_ready offset 3s")) == 1)
        for where, expression in PANELS.items():
            known = expression.replace("$__rate_interval", "1m").replace("$model", ".*")
            assert _query(asked, known), where
        _wait(lambda: {rule["health"] for rule in _rules(asked)} == {"ok"})
        assert {rule["name"]: rule["state"] for rule in _rules(asked)} == dict.fromkeys(
            ALERTS, "inactive"
        )
    finally:
        process.terminate()
        process.wait(LIMIT_S)


def _query(asked: str, expression: str) -> list[Any]:
    answer = httpx.get(f"{asked}/query", params={"query": expression}, timeout=LIMIT_S)
    found: list[Any] = answer.raise_for_status().json()["data"]["result"]
    return found


def _rules(asked: str) -> list[Any]:
    groups = httpx.get(f"{asked}/rules", timeout=LIMIT_S).json()["data"]["groups"]
    return [rule for group in groups for rule in group["rules"]]


def _wait(happens: Any) -> None:
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        try:
            if happens():
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    pytest.fail("it did not happen in time")
