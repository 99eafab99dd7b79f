"""The trainer's side of source `shared`: weights in memory that engines of this host read.

    with WeightServer("/run/trainer/weights") as server:
        server.publish("7", model.state_dict())
        httpx.post(url + "/update_weights", json={
            "source": "shared", "version": "7", "options": {"socket": "/run/trainer/weights"}})

It needs neither FastDeploy's core nor a device, and may be imported by any process.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self


class WeightServer:
    """Listens at a Unix socket, which this user alone may use, and hands out the version that was
    published last."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._lock = threading.Lock()
        self._version = ""
        self._memory: int | None = None
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self._path))
        self._path.chmod(0o600)
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve, name="weights", daemon=True)
        self._thread.start()

    def publish(self, version: str, tensors: Mapping[str, Any]) -> None:
        """torch tensors, of any device, under their names in a checkpoint. They are copied, so that
        training may go on at once; what was published before is let go."""
        from safetensors.torch import save

        own = {name: t.detach().to("cpu", copy=True).contiguous() for name, t in tensors.items()}
        data = save(own)
        memory = os.memfd_create(f"weights-{version}")
        with open(memory, "wb", closefd=False) as file:
            file.write(data)
        with self._lock:
            before, self._memory, self._version = self._memory, memory, version
        if before is not None:
            os.close(before)

    def close(self) -> None:
        """Nothing is handed out any more; engines that read go on. Idempotent."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        self._path.unlink(missing_ok=True)
        with self._lock:
            if self._memory is not None:
                os.close(self._memory)
            self._memory = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self) -> None:
        while True:
            try:
                link, _ = self._listener.accept()
            except OSError:
                return
            with link, contextlib.suppress(OSError):
                link.settimeout(10.0)
                self._answer(link)

    def _answer(self, link: socket.socket) -> None:
        asked = link.recv(4096).decode("utf-8", "replace").strip()
        with self._lock:
            if self._memory is None or asked != self._version:
                link.sendall(f"there is version {self._version!r}\n".encode())
                return
            numbers = array.array("i", [self._memory])
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, numbers)
            link.sendmsg([b"here\n"], [rights])
