"""The conformance kit, the folder's size, and what a folder may hold that is not the store's."""

from __future__ import annotations

import os
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fd_kv_disk.disk import UNFINISHED, UNFINISHED_S, DiskStore

from fastdeploy_core.errors import ConfigError
from fastdeploy_testing.conformance.test_hygiene import HygieneConformance
from fastdeploy_testing.conformance.test_kv_store import (
    KVStoreConformance,
    name_of,
    parts_of,
)

MIB = 2**20


class TestDiskStore(KVStoreConformance):
    driver_name = "disk"


class TestHygiene(HygieneConformance):
    kind = "kv_store"
    driver_name = "disk"


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def used(folder: Path) -> int:
    return sum(path.stat().st_size for path in files(folder))


def test_the_folder_keeps_its_size_and_what_was_read_last(tmp_path: Path) -> None:
    store = DiskStore({"path": str(tmp_path), "max_gib": 1 / 1024})
    names = [name_of() for _ in range(40)]
    for number, name in enumerate(names):
        store.put(name, parts_of(number, (65536,)))
        if number:
            assert store.get(names[0], parts_of(0, (65536,))), "it was read a moment ago"
        os.utime(store._path(name), (number, number))  # as if they were hours apart
        os.utime(store._path(names[0]), (number + 0.5, number + 0.5))
        assert used(tmp_path) <= MIB
    left = [store.find([name]) for name in names]
    assert left == [1] + [0] * (40 - sum(left)) + [1] * (sum(left) - 1)
    assert 10 < sum(left) <= 16


def test_two_engines_keep_the_size_together(tmp_path: Path) -> None:
    stores = [DiskStore({"path": str(tmp_path), "max_gib": 1 / 1024}) for _ in range(2)]
    for number in range(60):
        stores[number % 2].put(name_of(), parts_of(number, (16384,)))
        # each may miss what the other has written since it last looked
        assert used(tmp_path) <= MIB * (1 + 2 / 16)


def test_a_dead_engines_unfinished_files_go_and_foreign_ones_stay(tmp_path: Path) -> None:
    DiskStore({"path": str(tmp_path)}).put("ab" * 32, parts_of(1))
    block = files(tmp_path)[0]
    old, new = (block.with_name(f"{block.name}.{n}{UNFINISHED}") for n in (1, 2))
    foreign = [tmp_path / "notes.txt", block.parent / "README"]
    for path in (old, new, *foreign):
        path.write_bytes(b"x")
    for path in (old, *foreign):
        os.utime(path, (path.stat().st_mtime - UNFINISHED_S - 5,) * 2)
    DiskStore({"path": str(tmp_path)}).put(name_of(), parts_of(2))
    assert not old.exists() and new.exists() and all(path.exists() for path in foreign)
    assert block.exists()


def test_blocks_that_are_being_written_are_waited_for(tmp_path: Path) -> None:
    writer = DiskStore({"path": str(tmp_path)})
    reader = DiskStore({"path": str(tmp_path), "wait_s": 60})
    names = [name_of() for _ in range(5)]
    with ThreadPoolExecutor(1) as threads:
        found = threads.submit(reader.find, names)
        for name in names:
            assert not found.done()
            writer.put(name, parts_of(1))
        assert found.result(60) == 5
    impatient = DiskStore({"path": str(tmp_path), "wait_s": 0.1})
    started = time.monotonic()
    assert impatient.find([*names, name_of(), name_of()]) == 5
    assert 0.1 <= time.monotonic() - started < 30


def test_files_are_their_users_alone(tmp_path: Path) -> None:
    store = DiskStore({"path": str(tmp_path / "kv")})
    store.put(name_of(), parts_of(1))
    for path in (tmp_path / "kv").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
    assert stat.S_IMODE((tmp_path / "kv").stat().st_mode) == 0o700


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DiskStore({"path": str(tmp_path)})
    store.put(name_of(), parts_of(1))

    def full(file: int, parts: Any) -> int:
        raise OSError(28, "No space left on device")

    before = files(tmp_path)
    monkeypatch.setattr(os, "writev", full)
    with pytest.raises(OSError, match="No space left"):
        store.put(name_of(), parts_of(2))
    assert files(tmp_path) == before


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "--kv-store-config.path"),
        ({"path": 3}, "--kv-store-config.path"),
        ({"path": "/proc/no/such"}, "cannot use the folder"),
        ({"max_gib": 0}, "above 0, got 0"),
        ({"max_gib": "many"}, "above 0, got 'many'"),
        ({"max_gib": True}, "above 0, got True"),
        ({"size": 3}, "no option 'size'; possible: path, max_gib"),
        ({"wait_s": -1}, "0 to 60 seconds, got -1"),
        ({"wait_s": "long"}, "0 to 60 seconds, got 'long'"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], says: str, tmp_path: Path) -> None:
    path = {} if not options or "path" in options else {"path": str(tmp_path)}
    with pytest.raises(ConfigError, match=says):
        DiskStore({**path, **options})


def test_a_folder_that_everybody_may_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match="chmod o-w"):
        DiskStore({"path": str(tmp_path)})
