"""Who may do what: passwords, users of Redis by role, TLS, and the key of the internal sockets."""

from __future__ import annotations

import secrets
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
import zmq
from fd_sched_redis import hooks, link
from fd_sched_redis.local_server import RedisProcess
from fd_sched_redis.options import read_options
from fd_sched_redis.scheduler import GlobalScheduler
from zmq.utils import z85

from fastdeploy_core.config import RequestSchedulerConfig
from fastdeploy_core.config.arguments import normalise
from fastdeploy_core.contracts.scheduler import InstanceLoad, SchedulerQuestion
from fastdeploy_core.errors import ConfigError
from fastdeploy_core.types import RequestOutputDelta, each_delta
from fastdeploy_testing.conformance.scheduler_side import PLENTY, delta, request

# As docs/how-to/serve-from-many-instances.md gives them.
COMMON = (
    "~{default:* +@read +@write +@connection +evalsha +script|load +time -@dangerous -@blocking"
)
FRONT_RULES = f"on >front-secret {COMMON}"
INSTANCE_RULES = f"on >instance-secret {COMMON} +blpop"


def open_one(options: dict[str, Any], instance: str = "") -> GlobalScheduler:
    return GlobalScheduler(
        RequestSchedulerConfig(
            lease_s=60.0,
            instance=instance,
            epoch=secrets.randbits(63) if instance else 0,
            options=options,
        )
    )


def answer_one(front: GlobalScheduler, engine: GlobalScheduler) -> list[RequestOutputDelta]:
    """One request's way through both; also an abort."""
    assert front.put_requests([request("r"), request("s")]) == [None, None]
    taken = []
    deadline = time.monotonic() + 60
    while len(taken) < 2 and time.monotonic() < deadline:
        taken += engine.get_requests(PLENTY, 0.05)
    engine.report_load(InstanceLoad("e", 1))
    front.abort(["s"])
    engine.put_results([delta(taken[0], 0, finished=True)])
    found: list[RequestOutputDelta] = []
    while len(found) < 2 and time.monotonic() < deadline:
        found += each_delta(front.get_results(0.05))
    return [d for d in found if d.request_id == "r"]


def test_without_the_password_nothing_is_read_or_changed(
    start_redis: Callable[..., RedisProcess],
) -> None:
    server = start_redis("--requirepass", "right")
    stranger = server.client()
    for call in (
        lambda: stranger.keys("*"),
        lambda: stranger.flushall(),
        lambda: stranger.eval("return 1", 0),
        lambda: stranger.hset("{default:0}:t:r", "attempt", 9),
    ):
        with pytest.raises(redis.RedisError, match="uthenticat"):
            call()
    for password in ({}, {"password": "wrong"}):
        question = SchedulerQuestion(
            RequestSchedulerConfig(name="global", options=server.options(**password))
        )
        needs = hooks.fd_scheduler_requirements(question)
        assert needs is not None and "refuses the login" in needs.refusals[0]
    front = open_one(server.options(password="right"))
    engine = open_one(server.options(password="right"), "e")
    assert [d.finished for d in answer_one(front, engine)] == [True]
    engine.close()
    front.close()


def test_a_user_of_redis_for_each_role_can_do_its_part_only(
    start_redis: Callable[..., RedisProcess], tmp_path: Path
) -> None:
    users = tmp_path / "users.acl"
    users.write_text(
        "user default off\n"
        f"user fd-front {FRONT_RULES}\nuser fd-instance {INSTANCE_RULES}\n"
        "user admin on >admin ~* +@all\n"
    )
    server = start_redis("--aclfile", str(users))
    secret = tmp_path / "password"
    secret.write_text("instance-secret\n")
    front = open_one(server.options(username="fd-front", password="front-secret"))
    engine = open_one(server.options(username="fd-instance", password_file=str(secret)), "e")
    assert [d.finished for d in answer_one(front, engine)] == [True]
    engine.close()
    front.close()
    for name, password in (("fd-front", "front-secret"), ("fd-instance", "instance-secret")):
        client = server.client(username=name, password=password)
        for call in (
            lambda c=client: c.set("elsewhere", 1),
            lambda c=client: c.get("{other:0}:t:r"),
            lambda c=client: c.config_get("*"),
            lambda c=client: c.flushall(),
            lambda c=client: c.keys("*"),
        ):
            with pytest.raises(redis.exceptions.NoPermissionError):
                call()
    with pytest.raises(redis.exceptions.NoPermissionError):
        server.client(username="fd-front", password="front-secret").blpop(["{default:0}:wake"], 1)


@pytest.mark.skipif(not shutil.which("openssl"), reason="openssl makes the certificates")
def test_tls(start_redis: Callable[..., RedisProcess], tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
         "-keyout", str(key), "-out", str(certificate)],
        check=True, capture_output=True,
    )  # fmt: skip
    from fd_sched_redis.local_server import free_port

    port = free_port()
    try:
        start_redis(
            "--tls-port", str(port), "--tls-cert-file", str(certificate), "--tls-key-file",
            str(key), "--tls-ca-cert-file", str(certificate), "--tls-auth-clients", "no",
        )  # fmt: skip
    except RuntimeError:
        if "Failed finding TLS support" in (tmp_path / "redis0" / "log").read_text():
            pytest.skip("this server was built without TLS")
        raise
    options = {"port": port, "tls": True, "tls_ca_file": str(certificate)}
    front, engine = open_one(options), open_one(options, "e")
    assert [d.finished for d in answer_one(front, engine)] == [True]
    engine.close()
    front.close()
    stranger = open_one({"port": port, "tls": True})  # it does not trust this certificate
    (refusal,) = stranger.put_requests([request("x")])
    assert refusal is not None and refusal.startswith("unavailable")
    stranger.close()


def test_without_the_key_a_peer_says_and_hears_nothing(
    shared_redis: RedisProcess, tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.write_bytes(secrets.token_bytes(32))
    topic = secrets.token_hex(4)
    options = shared_redis.options(topic=topic, key_file=str(key), listen_host="127.0.0.1")
    front, engine = open_one(options), open_one(options, "e")
    assert front.put_requests([request("r")]) == [None]
    taken = []
    deadline = time.monotonic() + 60
    while not taken and time.monotonic() < deadline:
        taken = engine.get_requests(PLENTY, 0.05)
    address = front._front._link.address  # type: ignore[union-attr]
    assert address.startswith("tcp://127.0.0.1:")
    other = tmp_path / "other"
    other.write_bytes(secrets.token_bytes(32))
    from fd_sched_redis.options import SocketKeys

    right = SocketKeys.of(read_options(options))
    wrong = SocketKeys.of(read_options({**options, "key_file": str(other)}))
    assert right is not None and wrong is not None
    anyone = zmq.curve_keypair()
    context: zmq.Context[Any] = zmq.Context()
    strangers = []
    # In plain text; with another key; and with the front end's public key, but not an instance's.
    for server_key, own in (
        (None, None),
        (wrong.front.public, (wrong.instance.public, wrong.instance.secret)),
        (right.front.public, anyone),
    ):
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, b"e/stranger")
        if server_key is not None and own is not None:
            socket.setsockopt(zmq.CURVE_SERVERKEY, server_key)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, own[0])
            socket.setsockopt(zmq.CURVE_SECRETKEY, own[1])
        socket.connect(address)
        forged = delta(taken[0], 0, finished=True)
        for message in (link.Hello("stranger"), link.Deltas([forged])):
            socket.send(link._encode(message), zmq.NOBLOCK)
        strangers.append(socket)
    assert front.get_results(1.0) == [], "a stranger's output was shown"
    assert "stranger" not in front._front._link.ages()  # type: ignore[union-attr]
    assert not any(socket.poll(0) for socket in strangers)
    engine.put_results([delta(taken[0], 0, finished=True)])
    found: list[RequestOutputDelta] = []
    while not found and time.monotonic() < deadline:
        found += each_delta(front.get_results(0.05))
    assert found[0].sequences[0].token_ids == delta(taken[0], 0).sequences[0].token_ids
    context.destroy(linger=0)
    engine.close()
    front.close()


def test_the_socket_of_one_host_is_for_this_user_only(shared_redis: RedisProcess) -> None:
    front = open_one(shared_redis.options(topic=secrets.token_hex(4)))
    front.get_results(0.0)
    path = Path(front._front._link.address.removeprefix("ipc://"))  # type: ignore[union-attr]
    assert path.is_socket() and path.parent.stat().st_mode & 0o077 == 0
    front.close()
    assert not path.parent.exists()


def test_keys_are_pairs_of_one_secret(tmp_path: Path) -> None:
    from fd_sched_redis.options import SocketKeys

    key = tmp_path / "key"
    key.write_bytes(b"k" * 32)
    one, two = (SocketKeys.of(read_options({"key_file": str(key)})) for _ in range(2))
    assert one == two and one is not None
    assert one.front.secret != one.instance.secret
    assert len(z85.decode(one.front.secret)) == 32


def test_a_password_given_as_text_is_taken_with_one_line_that_names_the_file(
    start_redis: Callable[..., RedisProcess], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = start_redis("--requirepass", "1e5")
    spelled_out = {"scheduler-port": str(server.port), "scheduler-password": "1e5"}
    options = normalise(spelled_out)["scheduler_config"]
    file = tmp_path / "password"
    file.write_text("1e5\n")
    for given, count in ((options, 1), (server.options(password_file=str(file)), 0)):
        question = SchedulerQuestion(RequestSchedulerConfig(name="global", options=given))
        needs = hooks.fd_scheduler_requirements(question)
        assert needs is not None and needs.refusals == ()
        assert [("password_file" in note, "1e5" in note) for note in needs.notes] == [
            (True, False)
        ] * count
    assert [r.levelname for r in caplog.records if "password_file" in r.message] == ["WARNING"]
    front, engine = open_one(options), open_one(options, "e")
    assert [d.finished for d in answer_one(front, engine)] == [True]
    engine.close()
    front.close()
    with pytest.raises(ConfigError, match="password must be of type str") as caught:
        read_options({"password": 1.5e300})
    assert "300" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"hots": "x"}, "did you mean 'host'"),
        ({"port": 0}, "port is 0; possible: 1 to 65535"),
        ({"port": "many"}, "port must be of type int"),
        ({"topic": "a{b"}, "no space or brace"),
        ({"listen_host": "10.0.0.1"}, "key_file"),
        ({"key_file": "/does/not/exist"}, "cannot be read"),
        ({"tls_ca_file": "x"}, "need tls true"),
        ({"password": "a", "password_file": "b"}, "not both"),
        ({"load_shards_num": 0}, "possible: 1 to 1024"),
    ],
)
def test_options_that_cannot_be_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_options(options)
