"""How answers end when they do not end well: errors, clients that leave, a router that stops."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import openai
import pytest
from scripted import ANSWER, CHAT, COMPLETIONS, TIMEOUT_S, Hold, chat, completion, events

from pdserve.errors import InternalError, TransferFailed
from router.answer import AnswerDelta
from router.open_requests import CUT_S
from tests.patience import skip

if TYPE_CHECKING:
    from scripted import Faces


async def test_error_before_the_first_delta_is_a_status(faces: Faces) -> None:
    faces.generator.script = (TransferFailed("no KV came"),)
    status, answer = await faces.post(CHAT, chat(stream=True))
    assert (status, answer["error"]["code"]) == (502, "transfer_failed")
    assert answer["error"]["type"] == "server_error"


async def test_error_after_the_first_delta_is_an_event_without_done(faces: Faces) -> None:
    faces.generator.script = (ANSWER[0], TransferFailed("no KV came"))
    chunks = events(await faces.stream(CHAT, chat(stream=True)))
    assert chunks[0]["choices"][0]["delta"]["content"] == "Leaves"
    assert [chunk["error"]["code"] for chunk in chunks[1:]] == ["transfer_failed"]


async def test_official_client_raises_an_error_out_of_the_stream(
    faces: Faces, official: openai.AsyncOpenAI
) -> None:
    faces.generator.script = (ANSWER[0], TransferFailed("no KV came"))
    stream = await official.completions.create(model="demo", prompt="hi", stream=True)
    with pytest.raises(openai.APIError, match="no KV came"):
        _ = [chunk async for chunk in stream]


@pytest.mark.parametrize("script", [(), ANSWER[:2]])
@pytest.mark.parametrize("stream", [False, True])
async def test_answer_that_breaks_off_in_silence_is_an_error(
    faces: Faces, script: tuple[AnswerDelta, ...], stream: bool
) -> None:
    faces.generator.script = script
    data = json.dumps(chat(stream=stream))
    async with faces.session.post(faces.url + CHAT, data=data) as response:
        text = (await response.read()).decode()
    assert InternalError.code in text
    assert "[DONE]" not in text


@pytest.mark.parametrize("script", [(Hold.FOR_EVER,), (ANSWER[0], Hold.FOR_EVER)])
@pytest.mark.parametrize("stream", [False, True])
async def test_disconnect_leaves_the_answer(
    faces: Faces, script: tuple[Any, ...], stream: bool
) -> None:
    faces.generator.script = script
    body = json.dumps(chat(stream=stream)).encode()
    _, writer = await asyncio.open_connection(faces.host, faces.port)
    writer.write(b"POST %b HTTP/1.1\r\nhost: x\r\n" % CHAT.encode())
    writer.write(b"content-length: %d\r\n\r\n%b" % (len(body), body))
    await faces.generator.waiting.wait()
    assert not faces.generator.left.is_set()
    writer.close()
    await faces.generator.left.wait()
    await writer.wait_closed()


async def test_client_that_does_not_read_is_cut_at_the_deadline(faces: Faces) -> None:
    go_on = asyncio.Event()
    faces.generator.script = (go_on, *(AnswerDelta((1,), "x" * 1_000_000),) * 1000)
    body = json.dumps(chat(stream=True)).encode()
    _, writer = await asyncio.open_connection(faces.host, faces.port, limit=1024)
    writer.write(b"POST %b HTTP/1.1\r\nhost: x\r\n" % CHAT.encode())
    writer.write(b"content-length: %d\r\n\r\n%b" % (len(body), body))
    await faces.generator.waiting.wait()
    go_on.set()
    for _ in range(100):  # so that it stands in a write
        await asyncio.sleep(0)
    skip(TIMEOUT_S + CUT_S)
    await faces.generator.left.wait()
    writer.transport.abort()


async def test_drain_lets_an_answer_end_and_refuses_new_ones(faces: Faces) -> None:
    go_on = asyncio.Event()
    faces.generator.script = (ANSWER[0], go_on, *ANSWER[1:])
    running = asyncio.create_task(faces.stream(CHAT, chat(stream=True)))
    await faces.generator.waiting.wait()
    draining = asyncio.create_task(faces.open_requests.drain(30.0))
    await asyncio.sleep(0)
    status, answer = await faces.post(COMPLETIONS, completion())
    assert (status, answer["error"]["code"]) == (503, "unavailable")
    async with faces.session.get(f"{faces.url}/ready") as response:
        assert response.status == 503
    assert not draining.done()
    go_on.set()
    assert events(await running)[-1] == "[DONE]"
    await draining


async def test_drain_cuts_what_outlives_its_grace_with_an_error_event(faces: Faces) -> None:
    faces.generator.script = (ANSWER[0], Hold.FOR_EVER)
    running = asyncio.create_task(faces.stream(CHAT, chat(stream=True)))
    await faces.generator.waiting.wait()
    await faces.open_requests.drain(0.0)
    assert events(await running)[-1]["error"]["code"] == "unavailable"
    assert faces.generator.left.is_set()
