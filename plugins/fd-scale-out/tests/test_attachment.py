"""What an API server makes of what it is told about its engine."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import zmq
from fd_scale_out.attachment import Attachment
from fd_scale_out.paths import front_end_address
from null_engine import make_core

from fastdeploy_core.engine.processes import child, wire
from fastdeploy_core.engine.processes.egress import connect
from fastdeploy_core.engine.processes.progress import Progress
from fastdeploy_core.engine.processes.supervisor import Listener
from fastdeploy_core.errors import FastDeployError, WorkerError
from fastdeploy_core.types.engine import EngineInfo

WAIT_S = 20


class Heard(Listener):
    """Keeps what it hears, in order."""

    def __init__(self) -> None:
        self.words: queue.SimpleQueue[str] = queue.SimpleQueue()

    def on_ready(self, info: EngineInfo) -> None:
        self.words.put("ready")

    def on_down(self, reason: str) -> None:
        self.words.put(f"down: {reason}")

    def on_dead(self, error: FastDeployError) -> None:
        self.words.put(f"dead: {error}")

    def next(self) -> str:
        return self.words.get(timeout=WAIT_S)


class Told:
    """An attachment that starts after it was told something, as a process does that was started
    again."""

    def __init__(self, stack: ExitStack, listener: Listener) -> None:
        self.stack, self.listener = stack, listener
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        stack.callback(self.context.destroy, linger=0)
        self.folder = self.make_folder()
        self._supervisor = connect(self.context, front_end_address(self.folder, 0))
        self.info = make_core().info

    def make_folder(self) -> Path:
        folder = child.PrivateFolder("test")
        self.stack.callback(folder.remove)
        return folder.path

    def tell(self, message: wire.ToFrontEnd) -> None:
        self._supervisor.send(wire.encode(message))

    def attached(self, folder: Path) -> wire.Attached:
        return wire.Attached(str(folder), self.info, 0)

    def engine(self) -> Path:
        """The folder of an engine that lives."""
        folder = self.make_folder()
        self.stack.callback(Progress(folder, create=True).close)
        return folder

    def start(self) -> Attachment:
        link = Attachment(str(self.folder), 0, 0.0, self.listener, lambda: None)
        link.start()
        self.stack.callback(link.stop)
        return link


@contextmanager
def told(listener: Listener) -> Iterator[Told]:
    with ExitStack() as stack:
        yield Told(stack, listener)


def test_an_engine_that_ended_before_its_api_server_heard_of_it() -> None:
    heard = Heard()
    with told(heard) as world:
        gone, living = world.engine(), world.engine()
        (gone / "progress").unlink()
        world.tell(world.attached(gone))
        world.tell(wire.Detached("it was killed"))
        link = world.start()
        assert heard.next() == "down: it was killed"
        with pytest.raises(WorkerError, match="not ready"):
            link.send(wire.Drain())
        assert (link.health().ready, link.health().reason) == (False, "it was killed")
        world.tell(world.attached(living))
        assert heard.next() == "ready"
        assert link.health().ready
        engine = world.context.socket(zmq.PULL)
        engine.bind(wire.request_address(living))
        link.send(wire.Drain())
        assert engine.poll(1000 * WAIT_S)
        assert wire.decoder(wire.ToEngine).decode(engine.recv()) == wire.Drain()


def test_one_that_is_gone_and_not_yet_told_so_is_not_ready() -> None:
    heard = Heard()
    with told(heard) as world:
        gone, living = world.engine(), world.engine()
        (gone / "progress").unlink()
        world.tell(world.attached(living))
        link = world.start()
        assert heard.next() == "ready"
        world.tell(world.attached(gone))
        world.tell(world.attached(living))
        assert heard.next() == "ready"
        assert link.health().ready
        world.tell(wire.Detached("it was stopped"))
        assert heard.next() == "down: it was stopped", "the one that is gone was never ready"


def test_a_connection_that_fails_ends_its_api_server() -> None:
    class Broken(Heard):
        def on_ready(self, info: EngineInfo) -> None:
            raise ValueError("a mistake")

    heard = Broken()
    with told(heard) as world:
        world.tell(world.attached(world.engine()))
        world.start()
        assert heard.next() == "dead: the connection to the engine failed: a mistake"
