"""Logits processors: each row as if it were alone, drafts leave no trace, wrong arguments are the
client's error."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

from fastdeploy_core.contracts.small import ProcessorContext
from fastdeploy_core.errors import InvalidRequest
from fastdeploy_core.types import SamplingParams

from .base import OnDevice, option_value, values

VOCAB = 96
PROMPT = np.array([5, 6, 7, 5], dtype=np.int64)
# What each of four sequences has answered so far.
HISTORIES = [[], [3], [9, 9, 4], [1, 2, 3, 4, 5, 6, 7, 8]]
# In the place of any argument: InvalidRequest, or taken; never another exception.
ODD = [
    *(-1, 2**70, 0.5, float("nan"), True, "x", "", [], {}, [-1], [VOCAB], ["x"], [[1]]),
    *([1.5], {"x": "y"}, {"-1": 1.0}, {"1": "x"}, [None], [2**70]),
]
Arguments = dict[str, Any]


class LogitsProcessorConformance(OnDevice):
    """`arguments`: logits_processors_args of requests that switch the processor on. Override
    `expected` to have rows compared with what they should be."""

    kind = "logits_processor"
    arguments: ClassVar[tuple[Arguments, ...]] = ()

    def expected(
        self, logits: np.ndarray, history: Sequence[int], asked: Arguments
    ) -> np.ndarray | None:
        """What a row becomes, [vocab_size] float32, in plain numpy; None: only the author knows."""
        return None

    @pytest.fixture
    def requests(self, fd_options: dict[str, str]) -> list[Arguments]:
        """What four requests ask for: in turn what `arguments`, or --option KEY=VALUE, says."""
        given = self.arguments or ({key: option_value(text) for key, text in fd_options.items()},)
        return [given[number % len(given)] for number in range(len(HISTORIES))]

    @pytest.fixture
    def make(self, driver: Any, device: Any) -> Callable[[], Any]:
        """Makes processors as a worker does."""
        context = ProcessorContext(device.xp, device.device, VOCAB, 64)
        return lambda: driver(context)

    def entered(self, processor: Any, seq_ids: Sequence[int], requests: list[Arguments]) -> Any:
        """The processor, which knows these sequences; skips where it does not take them."""
        for seq_id, asked in zip(seq_ids, requests, strict=True):
            params = self.params(asked)
            processor.validate(params)
            taken = processor.add(seq_id, params, PROMPT.copy())
            assert isinstance(taken, bool | np.bool_), f"add() returns {taken!r}, not a bool"
            if not taken:
                pytest.skip("name arguments that switch it on: `arguments`, or --option KEY=VALUE")
        return processor

    def params(self, asked: Arguments) -> SamplingParams:
        """Of a request with these arguments."""
        return SamplingParams(logits_processors_args=dict(asked))

    def logits(self, seed: int, rows: int) -> np.ndarray:
        """Scores of every token, different in every row."""
        return values(seed, rows, VOCAB)

    def applied(
        self,
        device: Any,
        processor: Any,
        logits: np.ndarray,
        seq_ids: Sequence[int],
        histories: Sequence[Sequence[int]],
    ) -> np.ndarray:
        """What it makes of them. Histories must stay as they are."""
        given = [np.array(tokens, dtype=np.int64) for tokens in histories]
        kept = [tokens.copy() for tokens in given]
        result = processor.apply(self.to_device(device, logits), list(seq_ids), given)
        assert all(map(np.array_equal, given, kept)), "apply() changed output_token_ids"
        assert tuple(result.shape) == logits.shape, f"shape {tuple(result.shape)}"
        self.assert_dtype(device, result, "float32")
        return np.array(device.to_host(result))

    def test_it_changes_something(self, make: Any, device: Any, requests: list[Arguments]) -> None:
        ids, logits = [11, 12, 13, 14], self.logits(0, 4)
        processor = self.entered(make(), ids, requests)
        result = self.applied(device, processor, logits, ids, HISTORIES)
        assert not np.array_equal(result, logits), "no row of four is changed"
        assert not np.isnan(result).any()
        assert np.isfinite(result).any(axis=1).all(), "a row in which no token is possible"

    def test_rows_are_as_expected(self, make: Any, device: Any, requests: list[Arguments]) -> None:
        ids, logits = [11, 12, 13, 14], self.logits(7, 4)
        rows = zip(logits, HISTORIES, requests, strict=True)
        expected = [self.expected(row.copy(), history, asked) for row, history, asked in rows]
        if any(row is None for row in expected):
            pytest.skip("override expected(), which says what a row becomes")
        result = self.applied(device, self.entered(make(), ids, requests), logits, ids, HISTORIES)
        np.testing.assert_allclose(result, np.array(expected), rtol=1e-5, atol=1e-5)

    def test_each_row_is_as_if_it_were_alone(
        self, make: Any, device: Any, requests: list[Arguments]
    ) -> None:
        ids, logits = [70, 3, 2**40, 0], self.logits(1, 4)
        together = self.applied(device, self.entered(make(), ids, requests), logits, ids, HISTORIES)
        for row, seq_id in enumerate(ids):
            alone = self.entered(make(), [seq_id], requests[row : row + 1])
            got = self.applied(
                device, alone, logits[row : row + 1], [seq_id], HISTORIES[row : row + 1]
            )
            assert np.array_equal(got[0], together[row]), f"row {row} depends on its batch"

    def test_rows_may_come_in_any_order_and_number(
        self, make: Any, device: Any, requests: list[Arguments]
    ) -> None:
        ids, logits = [1, 2, 3, 4], self.logits(2, 4)
        processor = self.entered(make(), ids, requests)
        whole = self.applied(device, processor, logits, ids, HISTORIES)
        for order in ([3, 1, 0, 2], [2], [0, 3]):
            fresh = self.entered(make(), ids, requests)
            got = self.applied(
                device, fresh, logits[order], [ids[i] for i in order],
                [HISTORIES[i] for i in order],
            )  # fmt: skip
            assert np.array_equal(got, whole[order]), f"rows {order} differ"

    def test_drafts_leave_no_trace(self, make: Any, device: Any, requests: list[Arguments]) -> None:
        """Rows of a sequence after its first stand after drafts, which may be wrong."""
        ids, logits = [1, 2, 3, 4], self.logits(3, 4)
        plain = self.entered(make(), ids, requests)
        drafted = self.entered(make(), ids, requests)
        for step in range(4):
            histories = [[*tokens, *range(20, 20 + step)] for tokens in HISTORIES]
            expected = self.applied(device, plain, logits, ids, histories)
            wide = np.repeat(logits, 3, axis=0)
            tried = [[*tokens, *[30 + step, 31][:n]] for tokens in histories for n in range(3)]
            got = self.applied(device, drafted, wide, np.repeat(ids, 3).tolist(), tried)
            assert np.array_equal(got[::3], expected), f"step {step} depends on earlier drafts"

    def test_the_same_call_gives_the_same(
        self, make: Any, device: Any, requests: list[Arguments]
    ) -> None:
        """A step may be done again, and another processor's state is another's."""
        ids, logits = [1, 2, 3, 4], self.logits(4, 4)
        first, second = (self.entered(make(), ids, requests) for _ in range(2))
        results = [
            self.applied(device, processor, logits, ids, HISTORIES)
            for processor in (first, first, second)
        ]
        assert all(np.array_equal(results[0], other) for other in results[1:])

    def test_a_sequence_that_left_leaves_nothing(
        self, make: Any, device: Any, requests: list[Arguments]
    ) -> None:
        ids, logits = [1, 2, 3, 4], self.logits(5, 4)
        used = self.entered(make(), ids, requests)
        self.applied(device, used, logits, ids, [[40, 41, 42, n] for n in range(4)])
        for seq_id in ids:
            used.remove(seq_id)
        # Their numbers come again, for other requests.
        again, others = [*ids[1:], ids[0]], [*requests[1:], requests[0]]
        results = [
            self.applied(device, self.entered(one, again, others), logits, again, HISTORIES)
            for one in (used, make())
        ]
        assert np.array_equal(results[0], results[1]), (
            "what sequences of the same numbers did is remembered"
        )

    def test_sequences_that_left_leave_no_memory(
        self, make: Any, requests: list[Arguments]
    ) -> None:
        processor, params = make(), self.params(requests[0])

        def pass_by(first: int) -> int:
            before = tracemalloc.get_traced_memory()[0]
            for seq_id in range(first, first + 1000):
                processor.add(seq_id, params, PROMPT.copy())
                processor.remove(seq_id)
            gc.collect()
            return tracemalloc.get_traced_memory()[0] - before

        tracemalloc.start()
        try:
            pass_by(0)
            grown = pass_by(1000)
        finally:
            tracemalloc.stop()
        assert grown < 50_000, f"{grown} bytes more after 1000 sequences have come and gone"

    def test_one_that_leaves_takes_no_other_along(
        self, make: Any, device: Any, requests: list[Arguments]
    ) -> None:
        ids, logits = [1, 2, 3, 4], self.logits(6, 4)
        whole = self.entered(make(), ids, requests)
        expected = self.applied(device, whole, logits, ids, HISTORIES)
        whole.remove(2)
        left = [0, 2, 3]
        got = self.applied(
            device, whole, logits[left], [ids[i] for i in left], [HISTORIES[i] for i in left]
        )
        assert np.array_equal(got, expected[left])

    def test_requests_without_its_arguments_are_valid(self, make: Any) -> None:
        processor = make()
        for asked in (None, {}, {"of_another_processor": [1]}):
            params = SamplingParams(logits_processors_args=asked)
            processor.validate(params)
            assert isinstance(processor.add(5, params, PROMPT.copy()), bool | np.bool_)
            processor.remove(5)

    def test_each_sequence_is_asked_about_itself(
        self, make: Any, requests: list[Arguments]
    ) -> None:
        with_them, without = self.params(requests[0]), SamplingParams()
        wanted = [make().add(1, params, PROMPT.copy()) for params in (with_them, without)]
        processor = make()
        for seq_id, number in enumerate([0, 1, 0, 1, 1, 0]):
            got = processor.add(seq_id, (with_them, without)[number], PROMPT.copy())
            assert got == wanted[number], "add() depends on the sequences before"

    def test_odd_arguments_are_the_clients_error(
        self, make: Any, requests: list[Arguments]
    ) -> None:
        processor = make()
        for asked in requests:
            for key in asked:
                for odd in ODD:
                    try:
                        processor.validate(self.params({**asked, key: odd}))
                    except InvalidRequest as error:
                        assert str(error), "the message is empty"
                    except Exception as error:
                        raise AssertionError(
                            f"{key}={odd!r:.60}: {type(error).__name__}, not InvalidRequest"
                        ) from error
                    else:
                        accepted = make()
                        accepted.add(1, self.params({**asked, key: odd}), PROMPT.copy())
                        accepted.remove(1)


class TestLogitsProcessor(LogitsProcessorConformance):
    """Run by `fastdeploy plugins check`."""
