"""Reading a body: bounded in size and time, whatever the client sends."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.errors import Cancelled, DeadlineExceeded, RequestTooLarge
from router.http import exchange as exchange_module
from router.http.exchange import Exchange

if TYPE_CHECKING:
    from collections.abc import Iterable

PIECE = b"x" * 1000


class Client:
    """An ASGI peer: `pieces` of a body that has more to come, then nothing or a disconnect."""

    def __init__(self, pieces: Iterable[bytes], *, leaves: bool = False) -> None:
        self._pieces = iter(pieces)
        self._leaves = leaves
        self.taken = 0
        self.sent: list[Any] = []

    async def receive(self) -> dict[str, Any]:
        for piece in self._pieces:
            self.taken += 1
            return {"type": "http.request", "body": piece, "more_body": True}
        if not self._leaves:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    def exchange(self, *headers: tuple[bytes, bytes]) -> Exchange:
        scope = {"method": "POST", "path": "/", "headers": list(headers)}
        return Exchange(scope, self.receive, self.send)


async def test_endless_body_is_refused_after_one_piece_too_many() -> None:
    client = Client(PIECE for _ in range(10**9))
    with pytest.raises(RequestTooLarge):
        await client.exchange().read_body(10 * len(PIECE))
    assert client.taken == 11


async def test_declared_length_over_the_limit_is_refused_unread() -> None:
    client = Client([PIECE])
    with pytest.raises(RequestTooLarge):
        await client.exchange((b"content-length", b"1001")).read_body(1000)
    assert client.taken == 0


async def test_body_that_trickles_in_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_module, "BODY_TIMEOUT_S", 0.0)
    with pytest.raises(DeadlineExceeded):
        await Client([PIECE]).exchange().read_body(10_000)


async def test_client_that_leaves_while_sending_has_cancelled() -> None:
    with pytest.raises(Cancelled):
        await Client([PIECE], leaves=True).exchange().read_body(10_000)


@pytest.mark.parametrize("expects", [False, True])
async def test_rest_of_a_refused_body_is_thrown_away_in_bounded_time(
    monkeypatch: pytest.MonkeyPatch, expects: bool
) -> None:
    monkeypatch.setattr(exchange_module, "LINGER_S", 0.0)
    client = Client([PIECE] * 3)
    # A client that waits for 100 Continue has not sent anything that could be in the way.
    headers = [(b"expect", b"100-continue")] if expects else []
    await client.exchange(*headers).fail(RequestTooLarge("too large"))
    start, body, end = client.sent
    assert start["status"] == 413
    assert (b"connection", b"close") in start["headers"]
    assert body["more_body"]
    assert not end.get("more_body")
    assert client.taken == (0 if expects else 3)


async def test_error_after_a_complete_response_says_nothing_more() -> None:
    client = Client([])
    exchange = client.exchange()
    await exchange.respond(200, b"{}")
    said = len(client.sent)
    await exchange.fail(Cancelled("the client went away"))
    assert len(client.sent) == said
