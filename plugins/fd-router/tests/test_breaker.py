"""The circuit breaker, by a clock of the test's."""

from __future__ import annotations

from fd_router.breaker import FAILURES, FIRST_PAUSE_S, LONGEST_PAUSE_S, Breaker


def _opened() -> Breaker:
    breaker = Breaker()
    for _ in range(FAILURES):
        assert breaker.allows(0.0)
        breaker.begin(0.0)
        breaker.failed(0.0)
    return breaker


def test_failures_in_a_row_open_it() -> None:
    breaker = Breaker()
    for _ in range(5):
        for _ in range(FAILURES - 1):
            breaker.failed(0.0)
        breaker.succeeded()
    assert breaker.state(0.0) == "closed"
    assert _opened().state(0.0) == "open"
    assert not _opened().allows(FIRST_PAUSE_S - 0.01)


def test_half_open_lets_one_request_pass() -> None:
    breaker = _opened()
    assert breaker.state(FIRST_PAUSE_S) == "half-open"
    breaker.begin(FIRST_PAUSE_S)
    assert not breaker.allows(FIRST_PAUSE_S)
    breaker.succeeded()
    assert breaker.state(FIRST_PAUSE_S) == "closed"
    assert breaker.allows(FIRST_PAUSE_S)


def test_a_trial_whose_client_left_says_nothing() -> None:
    breaker = _opened()
    breaker.begin(FIRST_PAUSE_S)
    breaker.left()
    assert breaker.allows(FIRST_PAUSE_S)


def test_pause_doubles_up_to_a_limit() -> None:
    breaker, now, pauses = _opened(), 0.0, []
    for _ in range(8):
        began = now
        while not breaker.allows(now):
            now += 0.25
        pauses.append(now - began)
        breaker.begin(now)
        breaker.failed(now)
    assert pauses[:4] == [FIRST_PAUSE_S * 2**n for n in range(4)]
    assert pauses[-1] == LONGEST_PAUSE_S


def test_requests_from_before_it_opened_do_not_lengthen_the_pause() -> None:
    breaker = _opened()
    for _ in range(10):
        breaker.failed(0.5)
    assert breaker.allows(FIRST_PAUSE_S)
