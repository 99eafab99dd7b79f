"""The benchmark's client keeps its connections and reports unexpected answers."""

from __future__ import annotations

import asyncio

import pytest
from fd_bench import worker
from fd_bench.client import BenchClient, Call, Measured

EVENT = b'data: {"choices": [{"text": "a", "token_ids": [1, 2]}]}\n\n'
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}\n\n'
DONE = b"data: [DONE]\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


STREAM = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"".join(
    map(chunk, (EVENT, USAGE + DONE, b""))
)
REFUSAL = b'{"error": {"message": "too long"}}'
REFUSED = b"HTTP/1.1 400 Bad Request\r\ncontent-length: %d\r\n\r\n%b" % (len(REFUSAL), REFUSAL)


def ask(
    answers: list[bytes | None], num_calls: int, path: str = ""
) -> tuple[list[Measured], list[int]]:
    """Send calls, one after the other, to a server that gives these answers (None: it closes the
    connection). Returns their measurements, and which connection each answer came on."""
    used: list[int] = []
    num_connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        number = num_connections
        while True:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.startswith(b"POST /v1/completions HTTP")
            except asyncio.IncompleteReadError:
                break
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
            answer = answers[len(used)]
            used.append(number)
            if answer is None:
                break
            writer.write(answer)
        writer.close()

    async def main() -> list[Measured]:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        client = BenchClient(f"http://127.0.0.1:{port}{path}", "")
        found = [await client.measure("/v1/completions", {"prompt": "x"}) for _ in range(num_calls)]
        client.close()
        server.close()
        await server.wait_closed()
        return found

    return asyncio.run(main()), used


def test_calls_follow_each_other_on_one_connection() -> None:
    found, used = ask([STREAM] * 3, 3)
    assert used == [1, 1, 1]
    assert [(m.error, m.output_tokens, m.prompt_tokens) for m in found] == [("", 2, 3)] * 3


def test_a_call_whose_kept_connection_was_closed_takes_another() -> None:
    found, used = ask([STREAM, None, STREAM], 2)
    assert used == [1, 1, 2]
    assert [m.error for m in found] == ["", ""]


def test_a_server_that_closes_a_fresh_connection_gives_no_answer() -> None:
    ((measured,), used) = ask([None], 1)
    assert used == [1]
    assert measured.error == "no answer"


def test_errors_are_told_and_the_next_call_is_not_harmed() -> None:
    found, used = ask([REFUSED, STREAM], 2)
    assert "too long" in found[0].error and found[0].error.startswith("400")
    assert found[1].error == "" and used == [1, 2]


def test_an_address_with_and_without_v1_is_the_same() -> None:
    for path in ("", "/", "/v1", "/v1/"):
        found, _ = ask([STREAM], 1, path)
        assert not found[0].error and found[0].output_tokens == 2


def test_a_call_that_is_cancelled_closes_its_connection() -> None:
    asked, left = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(STREAM[:60])
        asked.set()
        await reader.read()  # what is left of the body, and then the end
        left.set()
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        client = BenchClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "")
        call = asyncio.create_task(client.measure("/v1/completions", {"prompt": "x"}))
        await asked.wait()
        call.cancel()
        await asyncio.wait_for(left.wait(), 10)
        server.close()

    asyncio.run(main())


def test_client_processes_send_all_calls_and_count_their_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker, "START_DELAY_S", 0.0)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}")
        writer.write(STREAM)
        writer.close()

    async def main() -> tuple[list[Measured], float, float]:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        calls = [Call(0.0, "/v1/completions", {"prompt": "x"})] * 3
        async with server:
            return await asyncio.to_thread(worker.run_in_processes, url, "", calls, 2, 2)

    measured, started, busy_s = asyncio.run(main())
    assert [(m.error, m.output_tokens) for m in measured] == [("", 2)] * 3
    assert all(m.started_at > started for m in measured)
    assert busy_s > 0
