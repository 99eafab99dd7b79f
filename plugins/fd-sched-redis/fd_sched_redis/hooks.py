"""What the schedulers need, asked at start-up: options that can work, and a Redis that answers."""

from __future__ import annotations

from fastdeploy_core.contracts.base import Requirements
from fastdeploy_core.contracts.hookspecs import hookimpl
from fastdeploy_core.contracts.scheduler import SchedulerQuestion
from fastdeploy_core.errors import ConfigError

MIN_VERSION = (6, 2)


@hookimpl
def fd_scheduler_requirements(question: SchedulerQuestion) -> Requirements | None:
    """Refuse options that cannot be, and a server that does not answer or is too old."""
    if question.config.name not in ("global", "splitwise"):
        return None
    from .options import read_options

    try:
        server = read_options(question.config.options).server
    except ConfigError as error:
        return Requirements(refusals=(str(error),))
    import redis

    client = server.connect()
    try:
        client.ping()
        if not server.password and not server.password_file and not _is_local(server.host):
            note = f"{server} takes commands without a password: set one, or whoever reaches it"
            return Requirements(notes=(f"{note} reads all prompts",))
    except redis.AuthenticationError as error:
        return Requirements(refusals=(f"{server} refuses the login: {error}",))
    except redis.RedisError as error:
        return Requirements(
            refusals=(
                f"{server} does not answer: {error}; start it (redis-server or valkey-server, "
                f"{'.'.join(map(str, MIN_VERSION))} or newer) or give --scheduler-config.host "
                "and --scheduler-config.port",
            )
        )
    finally:
        client.close()
    return Requirements()


def _is_local(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")
