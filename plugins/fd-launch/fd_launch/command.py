"""`fastdeploy launch`: several servers, kept running, and a router in front of them."""

from __future__ import annotations

import argparse
import logging
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import NoReturn

from fastdeploy_core.contracts.small import InstanceSpec, Launcher
from fastdeploy_core.errors import ConfigError, WorkerError
from fastdeploy_core.plugins import lookup

from .processes import end_all, start

logger = logging.getLogger(__name__)

FASTDEPLOY = ("-m", "fastdeploy_core.cli.main")
LOOK_EVERY_S = 0.5
ROUTER_ENDS_S = 5.0  # what a router needs beyond the time that answers get
RESTARTS, RESTARTS_WITHIN_S = 3, 600.0  # of all servers together
CANNOT_START = 2  # exit code of `fastdeploy serve` for what a restart does not mend


def main(arguments: Sequence[str]) -> int:
    """`fastdeploy launch`."""
    given, serve = _parser().parse_known_args(arguments)
    if not serve:
        raise ConfigError("no model given; name a folder: `fastdeploy launch DIR`")
    if "--uds" in serve:
        raise ConfigError("--uds: where servers listen is for the launcher to say")
    if given.instances < 1:
        raise ConfigError(f"--instances {given.instances} is below 1")
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    launcher: Launcher = lookup("launcher", given.launcher)(_options(given))
    command = (*FASTDEPLOY, "serve", *serve, "--host", "{host}", "--port", "{port}")
    first = given.instance_port
    specs = [
        InstanceSpec(f"server{number}", command, first + number, given.devices)
        for number in range(given.instances)
    ]
    return _Launch(launcher, specs, given).run()


class _Launch:
    """The servers and the router of one command."""

    def __init__(
        self, launcher: Launcher, specs: Sequence[InstanceSpec], given: argparse.Namespace
    ) -> None:
        self._launcher = launcher
        self._specs = specs
        self._given = given
        self._stopping = threading.Event()
        self._restarts: deque[float] = deque(maxlen=RESTARTS + 1)
        self._addresses: dict[str, str] = {}
        self._router: subprocess.Popen[bytes] | None = None
        self._failed = 1  # exit code of a launch that fails

    def run(self) -> int:
        """Until SIGTERM, SIGINT or SIGHUP, or until something does not stay alive."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                signal.signal(number, self._stop)
        try:
            addresses = self._launcher.start(self._specs)
            names = [spec.name for spec in self._specs]
            self._addresses = dict(zip(names, addresses, strict=True))
            logger.info("servers: %s", ", ".join(addresses))
            self._start_router()
            while not self._stopping.wait(LOOK_EVERY_S):
                self._look()
        except WorkerError as error:
            logger.error("%s", error)
            return self._failed
        finally:
            # The router first: it lets running answers end, which servers still have to give.
            if self._router is not None:
                end_all([self._router], self._given.grace + ROUTER_ENDS_S)
            self._launcher.stop(self._given.grace)
        return 0

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._stopping.set()

    def _start_router(self) -> None:
        if not self._launcher.is_head:
            return
        given = self._given
        urls = ",".join(f"http://{address}" for address in self._addresses.values())
        words = ["router", "--instances", urls, "--host", given.host, "--port", str(given.port)]
        words += ["--policy", given.policy, "--drain-timeout", str(given.grace)]
        self._router = start([sys.executable, "-P", *FASTDEPLOY, *words])

    def _look(self) -> None:
        """Starts again what ended."""
        if self._router is not None and (code := self._router.poll()) is not None:
            raise WorkerError(f"the router ended with {code}; see above")
        for name, address in self._addresses.items():
            code = self._launcher.exit_code(name)
            if code is None:
                continue
            if code == CANNOT_START and not self._restarts:
                self._failed = code
                raise WorkerError(f"{name} cannot start as it was asked to; see its error above")
            self._restarts.append(time.monotonic())
            if len(self._restarts) > RESTARTS and (
                self._restarts[-1] - self._restarts[0] < RESTARTS_WITHIN_S
            ):
                raise WorkerError(
                    f"{name} at {address} ended with {code}, and servers were started again "
                    f"{RESTARTS} times within {RESTARTS_WITHIN_S:g} s; see above"
                )
            logger.warning("%s at %s ended with %d; starting it again", name, address, code)
            try:
                moved = self._launcher.restart(name)
            except WorkerError as error:
                if len(self._addresses) == 1:
                    raise
                logger.error("%s; it is tried again", error)
                self._restarts.pop()  # there is no room for it, which says nothing of the server
                continue
            if moved != address:
                self._addresses[name] = moved
                logger.info("%s is at %s now; the router starts anew", name, moved)
                if self._router is not None:
                    end_all([self._router], self._given.grace + ROUTER_ENDS_S)
                    self._start_router()
                return


def _options(given: argparse.Namespace) -> Mapping[str, str]:
    options: dict[str, str] = {}
    for word in given.launcher_config:
        key, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"--launcher-config {word!r}: give KEY=VALUE")
        options[key] = value
    for key in ("ips", "node_rank"):
        if getattr(given, key) is not None:
            options[key] = getattr(given, key)
    return options


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see `{self.prog} --help`")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="fastdeploy launch",
        usage="%(prog)s MODEL [options]",
        description="Several servers of one model, kept running, and a router in front of them.",
        epilog="MODEL, at the same place on every host, and all other options are those of "
        "`fastdeploy serve`, for every server.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--instances", "-n", type=int, default=1, help="servers; default: %(default)s")
    add("--launcher", default="local", help="driver that starts them; default: %(default)s")
    add(
        "--launcher-config",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="options of the launcher",
    )
    add("--ips", help="addresses of all hosts, with commas, for --launcher static")
    add("--node-rank", help="place of this host in --ips")
    add("--devices", type=int, default=0, help="accelerators of a server; default: none")
    add("--host", default="127.0.0.1", help="of the router; default: %(default)s")
    add("--port", type=int, default=8100, help="of the router; default: %(default)s")
    add("--instance-port", type=int, default=8180, help="of the first server, the others count on")
    add("--policy", default="estimated-ttft", help="of the router; default: %(default)s")
    add("--grace", type=float, default=30.0, help="seconds that running answers have after SIGTERM")
    return parser
