"""The other side of a KV transport test: a real process that obeys JSON lines.

    python -m fastdeploy_testing.peer DRIVER

The kit's RemotePeer starts and controls it. It must be a process of its own, because the tests kill
and freeze it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from typing import Any

import numpy as np

from fastdeploy_core.contracts.kv_transport import Region, TransferPlan, TransportOptions

from .conformance.kv_memory import place


def pattern(seed: int, num_blocks: int, block_bytes: int) -> np.ndarray:
    """The bytes of a source region: [num_blocks, block_bytes], no two blocks alike."""
    data = np.random.default_rng(seed).integers(0, 256, (num_blocks, block_bytes), np.uint8)
    data[:, :4] = np.arange(num_blocks, dtype="<u4").view(np.uint8).reshape(-1, 4)[:, :4]
    return data


class RemotePeer:
    """A transport in a child process, with its region filled by `pattern(seed)`."""

    def __init__(
        self,
        driver: str,
        options: TransportOptions,
        *,
        num_blocks: int,
        block_bytes: int,
        layout_hash: str = "layout",
        region_id: int = 1,
        seed: int = 1,
    ) -> None:
        # A killed process cannot remove its folder, so the parent removes it.
        self._folder = tempfile.TemporaryDirectory(prefix="fastdeploy-peer-")
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        self.process = subprocess.Popen(  # noqa: S603 - our own interpreter
            [sys.executable, "-P", "-m", "fastdeploy_testing.peer", driver],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        started = self.ask(
            secret=options.secret.hex(),
            folder=self._folder.name,
            model_revision=options.model_revision,
            progress_timeout_s=options.progress_timeout_s,
            num_blocks=num_blocks,
            block_bytes=block_bytes,
            layout_hash=layout_hash,
            region_id=region_id,
            seed=seed,
        )
        self.descriptor = bytes.fromhex(started["descriptor"])

    def ask(self, **command: Any) -> dict[str, Any]:
        """One command, one answer."""
        if self.process.stdin is None or self.process.stdout is None:
            raise RuntimeError("the peer has no pipes")
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the peer process ended with code {self.process.wait(30)}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def events(self) -> list[dict[str, Any]]:
        """The events of the peer's poll()."""
        found: list[dict[str, Any]] = self.ask(do="poll")["events"]
        return found

    def freeze(self) -> None:
        """Stop the process without ending it; returns once it stands still."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def thaw(self) -> None:
        """Let it go on."""
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it without warning."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """End the process in any state."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        self._folder.cleanup()


def main() -> int:
    """Serve commands until stdin ends."""
    from fastdeploy_core.plugins.drivers import lookup

    order = json.loads(sys.stdin.readline())
    options = TransportOptions(
        secret=bytes.fromhex(order["secret"]),
        model_revision=order["model_revision"],
        progress_timeout_s=order["progress_timeout_s"],
        folder=order["folder"],
    )
    content = pattern(order["seed"], order["num_blocks"], order["block_bytes"])
    driver = lookup("kv_transport", sys.argv[1])
    memory, buffer, file = place(driver, content)
    transport = driver(options)
    transport.register(
        [Region(order["region_id"], buffer, order["block_bytes"], order["layout_hash"], file)]
    )
    _say(descriptor=transport.descriptor().hex())
    for line in sys.stdin:
        command = json.loads(line)
        try:
            _obey(transport, memory, command)
        except Exception as error:
            _say(error=type(error).__name__, text=str(error))
    transport.close()
    return 0


def _obey(transport: Any, memory: Any, command: dict[str, Any]) -> None:
    what = command["do"]
    if what == "poll":
        _say(
            events=[
                {"kind": e.kind.value, "peer": e.peer, "note": e.note.hex(), "reason": e.reason}
                for e in transport.poll()
            ]
        )
    elif what == "connect":
        _say(peer=transport.connect(bytes.fromhex(command["descriptor"])))
    elif what == "note":
        transport.note(command["peer"], bytes.fromhex(command["data"]))
        _say()
    elif what == "submit":
        transport.submit(command["peer"], TransferPlan(**command["plan"]))
        _say()
    elif what == "fill":
        memory[:] = command["value"]
        _say()
    elif what == "memory":
        _say(memory=memory.reshape(-1)[: command["num_bytes"]].tobytes().hex())
    elif what == "close":
        transport.close()
        _say()


def _say(**answer: Any) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
