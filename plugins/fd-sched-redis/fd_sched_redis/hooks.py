"""What the schedulers need, asked at start-up: options that can work, and a Redis that answers."""

from __future__ import annotations

import logging
import socket
from typing import TYPE_CHECKING

from fastdeploy_core.contracts.base import Requirements
from fastdeploy_core.contracts.hookspecs import hookimpl
from fastdeploy_core.errors import ConfigError

if TYPE_CHECKING:
    from fastdeploy_core.contracts.scheduler import SchedulerQuestion

    from .options import Server

logger = logging.getLogger(__name__)

ANSWER_S = 0.3  # hooks have a second in all


@hookimpl
def fd_scheduler_requirements(question: SchedulerQuestion) -> Requirements | None:
    """Refuse options that cannot be, and a server that does not answer."""
    if question.config.name not in ("global", "splitwise"):
        return None
    from .options import read_options

    try:
        server = read_options(question.config.options).server
        refusal = _ask(server)
    except ConfigError as error:
        return Requirements(refusals=(str(error),))
    if refusal:
        return Requirements(refusals=(refusal,))
    note = _advice(server)
    if note:
        logger.warning("%s", note)
    return Requirements(notes=(note,) if note else ())


def _advice(server: Server) -> str:
    """What the operator should know of the login; one line for the start-up log, or nothing."""
    if server.password:
        return (
            f"the password of {server} is given as text, and process lists show command lines; "
            "write it into a file for --scheduler-config.password_file"
        )
    if not server.secret and not _is_local(server.host):
        return f"{server} takes commands without a password: whoever reaches it reads all prompts"
    return ""


def _ask(server: Server) -> str:
    """Why this server cannot be used; empty if it can. Over TLS only whether it is there."""
    try:
        with socket.create_connection((server.host, server.port), ANSWER_S) as connection:
            if server.tls:
                return ""
            login = [word for word in (server.username, server.secret) if word]
            if login:
                connection.sendall(_command("AUTH", *login))
            connection.sendall(_command("PING"))
            answer = connection.recv(4096).decode(errors="replace").splitlines()
    except OSError as error:
        return (
            f"{server} does not answer: {error}; start it (redis-server or valkey-server, 6.2 or "
            "newer) or give --scheduler-config.host and --scheduler-config.port"
        )
    refusals = [line[1:] for line in answer if line.startswith("-")]
    return f"{server} refuses the login: {refusals[0]}" if refusals else ""


def _command(*words: str) -> bytes:
    parts = [f"*{len(words)}"]
    for word in words:
        parts += [f"${len(word.encode())}", word]
    return "\r\n".join([*parts, ""]).encode()


def _is_local(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")
