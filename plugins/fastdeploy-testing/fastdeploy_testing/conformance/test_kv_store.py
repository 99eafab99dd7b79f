"""KV stores: what `get` gives is what `put` got, whole, whoever reads and writes meanwhile."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fastdeploy_core.errors import ConfigError

from .base import Conformance, option_value

Maker = Callable[[], Any]
SIZES = (16, 333, 1 << 16)  # bytes of a block's parts: one alone is no multiple of anything


def name_of() -> str:
    """A name that nothing has yet."""
    return secrets.token_hex(32)


def parts_of(fill: int, sizes: Sequence[int] = SIZES) -> list[memoryview]:
    """The parts of a block, each byte of which says which block it is."""
    return [memoryview(bytearray([fill]) * size) for size in sizes]


class KVStoreConformance(Conformance):
    """Two objects of the driver with the same options stand for two engines."""

    kind = "kv_store"

    @pytest.fixture
    def options(self, fd_options: dict[str, str], tmp_path: Path) -> dict[str, Any]:
        """--kv-store-config: a folder as `path`, unless --fd-option says otherwise. Override it for
        a store that has none."""
        given = {key: option_value(text) for key, text in fd_options.items()}
        return given or {"path": str(tmp_path / "store")}

    @pytest.fixture
    def make(self, driver: Any, options: dict[str, Any]) -> Iterator[Maker]:
        """Makes stores that are closed afterwards."""
        made: list[Any] = []

        def maker() -> Any:
            made.append(driver(options))
            return made[-1]

        yield maker
        for store in made:
            store.close()
            store.close()

    def test_parts_come_back_in_order_and_in_other_cuts(self, make: Maker) -> None:
        store, name = make(), name_of()
        store.put(name, parts_of(7, (16,)) + parts_of(8, (333,)))
        first, second = parts_of(0, (15,)) + parts_of(0, (334,))
        assert store.get(name, [first, second])
        assert bytes(first) + bytes(second) == bytes([7]) * 16 + bytes([8]) * 333

    def test_another_object_finds_it(self, make: Maker) -> None:
        name, found = name_of(), parts_of(0)
        make().put(name, parts_of(5))
        assert make().get(name, found)
        assert b"".join(found) == bytes([5]) * sum(SIZES)

    def test_what_is_not_there_is_not_found(self, make: Maker) -> None:
        store = make()
        assert not store.get(name_of(), parts_of(0))
        name = name_of()
        store.put(name, parts_of(4))
        assert [store.get(n, parts_of(0)) for n in (name, name_of(), name)] == [True, False, True]
        assert store.find([name_of(), name_of()]) == 0
        assert store.find([]) == 0

    def test_find_counts_leading_names(self, make: Maker) -> None:
        store, names = make(), [name_of() for _ in range(4)]
        for name in (names[0], names[1], names[3]):
            store.put(name, parts_of(1))
        assert store.find(names) == 2
        assert store.find(names[:1]) == 1
        assert store.find(names[2:]) == 0

    @pytest.mark.parametrize("change", [-1, 1])
    def test_another_size_is_refused(self, make: Maker, change: int) -> None:
        store, name = make(), name_of()
        store.put(name, parts_of(3))
        assert not store.get(name, parts_of(0, (*SIZES[:2], SIZES[2] + change)))

    def test_the_newest_content_counts(self, make: Maker) -> None:
        store, name, found = make(), name_of(), parts_of(0, (20,))
        store.put(name, parts_of(1))
        store.put(name, parts_of(2, (20,)))
        assert store.get(name, found) and bytes(found[0]) == bytes([2]) * 20

    def test_readers_never_see_a_half_written_block(self, make: Maker) -> None:
        """Two objects write one name again and again while two read it."""
        name, end = name_of(), threading.Event()
        make().put(name, parts_of(1))

        def write(store: Any, fill: int) -> None:
            while not end.is_set():
                store.put(name, parts_of(fill))

        def read(store: Any) -> list[set[int]]:
            seen = []
            while not end.is_set():
                found = parts_of(0)
                if store.get(name, found):
                    seen.append(set(b"".join(found)))
            return seen

        with ThreadPoolExecutor(4) as threads:
            writes = [threads.submit(write, make(), fill) for fill in (1, 2)]
            reads = [threads.submit(read, make()) for _ in range(2)]
            end.wait(0.5)
            end.set()
        for future in writes:
            future.result()
        seen = [fills for future in reads for fills in future.result()]
        assert seen and all(len(fills) == 1 for fills in seen)

    def test_an_unknown_option_is_named(self, driver: Any, options: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match="no_such_option"):
            driver({**options, "no_such_option": 1})


class TestKVStore(KVStoreConformance):
    """Run by `fastdeploy plugins check`."""
