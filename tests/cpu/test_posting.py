"""What a device writes into the host's memory by itself: when it is there, and when it never will
be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fastdeploy_core.errors import WorkerError
from fastdeploy_core.memory.postbox import NUM_PAGES, PATIENCE, Arrival, Postbox


class Event:
    """Of everything that a device has been told to do."""

    def __init__(self, device: Writer) -> None:
        self._device = device

    def query(self) -> bool:
        if self._device.is_lost:
            raise RuntimeError("the device is lost")
        return self._device.has_ended


class Box(np.ndarray):
    """A device's tensor, as far as a Postbox asks."""

    def view(self, *shape: Any) -> Any:
        return self.reshape(*shape) if isinstance(shape[0], list) else super().view(*shape)


class Writer:
    """A device that writes what a test says, when it says so."""

    def __init__(self) -> None:
        self.is_lost = self.has_ended = False
        self.turn = np.zeros(1, dtype=np.int64)
        self.num_events = 0

    def host_box(self, num_words: int) -> tuple[Any, np.ndarray]:
        host = np.zeros(num_words, dtype=np.int64)
        return host.view(Box), host

    def to_host(self, x: np.ndarray) -> np.ndarray:
        return x

    def record_event(self) -> Event:
        self.num_events += 1
        return Event(self)

    def write(self, box: Any, values: list[list[int]], turn: int) -> None:
        page = box[turn % NUM_PAGES]
        for row, numbers in enumerate(values):
            for column, value in enumerate(numbers):
                page[row, column] = turn * 2**32 + value % 2**32


@pytest.fixture
def device() -> Writer:
    return Writer()


def make(device: Writer, turn: int = 0) -> Postbox:
    device.turn[0] = turn
    postbox: Any = Postbox
    return postbox(device, device.turn, 3, 2)


@pytest.mark.parametrize("turn", [0, 5, 2**31 - 2, 2**31 - 1])
def test_values_are_there_once_all_of_them_are_of_the_turn(device: Writer, turn: int) -> None:
    postbox = make(device, turn)
    results, drafts = postbox.results[0], postbox.drafts[0]
    for number in range(turn + 1, turn + 7):
        postbox.begin()
        posted = postbox.expect(2, 2, 1)
        assert not posted.results.query(), "what is there is of another turn"
        tag = (number + 2**31) % 2**32 - 2**31
        device.write(results, [[7, -1, 1, 0]], tag)
        assert not posted.results.query(), "the second row is missing"
        device.write(results, [[7, -1, 1, 0], [number % 1000, -2, 1]], tag)
        assert not posted.results.query(), "its last number is missing"
        device.write(results, [[7, -1, 1, 0], [number % 1000, -2, 1, 1]], tag)
        assert posted.results.query()
        assert posted.results.values.tolist() == [[7, -1, 1, 0], [number % 1000, -2, 1, 1]]
        assert not posted.drafts.query()
        device.write(drafts, [[3], [-1]], tag)
        assert posted.drafts.query() and posted.drafts.values.tolist() == [[3], [-1]]
    assert not device.num_events, "nothing is queued for what arrives"


def test_what_was_read_stays_when_the_page_is_written_again(device: Writer) -> None:
    postbox = make(device)
    postbox.begin()
    posted = postbox.expect(1, 1, 0)
    device.write(postbox.results[0], [[9, 0, 0]], 1)
    assert posted.results.query()
    device.write(postbox.results[0], [[8, 0, 0]], 1 + NUM_PAGES)
    assert posted.results.query() and posted.results.values.tolist() == [[9, 0, 0]]


def test_a_step_without_drafts_has_nothing_to_wait_for(device: Writer) -> None:
    postbox = make(device)
    postbox.begin()
    assert postbox.expect(3, 1, 0).drafts.query()


def test_behind_a_step_that_failed_the_device_is_asked_for_its_count(device: Writer) -> None:
    postbox = make(device)
    postbox.begin()
    postbox.forget()
    device.turn[0] = 1 + NUM_PAGES  # more steps than the host knows of
    postbox.begin()
    device.write(postbox.results[0], [[4, 0, 0]], 2 + NUM_PAGES)
    assert postbox.expect(1, 1, 0).results.query()


def wait(arrival: Arrival) -> None:
    for _ in range(2 * PATIENCE):
        if arrival.query():
            return
    raise TimeoutError


def test_a_lost_device_is_noticed(device: Writer) -> None:
    postbox = make(device)
    postbox.begin()
    arrival = postbox.expect(1, 1, 0).results
    with pytest.raises(TimeoutError):
        wait(arrival)
    assert device.num_events == 1
    device.is_lost = True
    with pytest.raises(RuntimeError, match="lost"):
        wait(arrival)


def test_a_device_that_has_ended_without_a_word_is_an_error(device: Writer) -> None:
    postbox = make(device)
    postbox.begin()
    arrival = postbox.expect(1, 1, 0).results
    device.has_ended = True
    with pytest.raises(WorkerError, match="not in the host's memory"):
        wait(arrival)
