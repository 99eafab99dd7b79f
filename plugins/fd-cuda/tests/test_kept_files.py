"""What this plugin keeps in its cache folder and finds there, and peers that it refuses; on any
machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fastdeploy_core.errors import ResourceError

from fd_cuda.kernels import native
from fd_cuda.peer_memory import PeerMemory


def test_machine_code_that_a_disk_has_changed_is_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, code = tmp_path / "some.cubin", b"machine code" * 9
    monkeypatch.setattr(native, "_nvrtc", lambda: Compiler(code))
    assert not native._kept(path)
    assert native._compile_now("some", "", [], path) == code
    assert native._kept(path) == code
    held = path.read_bytes()
    for broken in (held[:-1], held[:40] + b"x" + held[41:], held[:32], b"", code):
        path.write_bytes(broken)
        assert not native._kept(path)


class Compiler:
    """NVRTC's calls, of which every one succeeds."""

    def __init__(self, code: bytes) -> None:
        self._code = code

    def __getattr__(self, name: str) -> object:
        return lambda *_: 0

    def nvrtcGetCUBINSize(self, program: object, size: object) -> int:
        size._obj.value = len(self._code)  # type: ignore[attr-defined]
        return 0

    def nvrtcGetCUBIN(self, program: object, buffer: object) -> int:
        buffer[: len(self._code)] = self._code  # type: ignore[index]
        return 0


class Driver:
    """The two questions of the check; addresses are numbers of GPUs."""

    def __init__(self, linked: set[tuple[int, int]]) -> None:
        self._linked = linked

    def call(self, function: str, result: Any, *given: Any) -> None:
        if function == "cuPointerGetAttribute":
            result._obj.value = given[1].value
        else:
            result._obj.value = (given[1].value, given[2].value) in self._linked


def test_peers_without_native_atomics_are_refused() -> None:
    memory = PeerMemory.__new__(PeerMemory)
    memory._driver, memory._own = Driver({(1, 2)}), 1  # type: ignore[assignment]
    memory._check_atomics(0, 1)
    memory._check_atomics(1, 2)
    with pytest.raises(ResourceError, match="rank 2 carries no native atomics"):
        memory._check_atomics(2, 3)
