"""The answer as its reader meets it: merging, bounds, errors, release."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from pdserve.errors import Unavailable, WorkerFailed
from pdserve.types import FinishReason, PositionLogprobs, Receipt, TokenLogprob, Usage
from router.answer import AnswerBuffer, AnswerDelta, AnswerStream, BufferLimits

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from router.releases import Releases


def logprobs(token: int) -> tuple[PositionLogprobs, ...]:
    return (PositionLogprobs(TokenLogprob(token, str(token), -0.5, 1)),)


async def test_what_waits_is_read_as_one() -> None:
    buffer = AnswerBuffer(BufferLimits())
    buffer.push(AnswerDelta((1, 2), "ab", logprobs(1)))
    buffer.push(AnswerDelta((3,), "c", logprobs(3)))
    last = AnswerDelta(
        (4,),
        "d",
        finish_reason=FinishReason.STOP,
        stop_reason="x",
        usage=Usage(1, 4),
        receipt=Receipt(),
    )
    buffer.push(last)
    buffer.end()
    assert not buffer.is_read
    assert await buffer.get() == AnswerDelta(
        (1, 2, 3, 4),
        "abcd",
        (*logprobs(1), *logprobs(3)),
        FinishReason.STOP,
        "x",
        Usage(1, 4),
        Receipt(),
    )
    assert buffer.is_read
    assert await buffer.get() is None


async def test_an_answer_that_broke_off_is_not_over_before_its_error_was_raised() -> None:
    buffer = AnswerBuffer(BufferLimits())
    buffer.push(AnswerDelta((1,)))
    buffer.fail(WorkerFailed("gone"))
    assert await buffer.get() == AnswerDelta((1,))
    assert not buffer.is_read
    with pytest.raises(WorkerFailed):
        await buffer.get()


async def test_a_reader_that_keeps_up_reads_each_delta() -> None:
    buffer = AnswerBuffer(BufferLimits())
    for token in range(3):
        reading = asyncio.create_task(buffer.get())
        await asyncio.sleep(0)
        buffer.push(AnswerDelta((token,)))
        assert await reading == AnswerDelta((token,))


async def test_a_token_passes_a_reader_that_waits_and_no_other() -> None:
    buffer, written = AnswerBuffer(BufferLimits()), ""

    def write(text: str) -> bool:
        nonlocal written
        if text == "stop":
            return False
        written += text
        return True

    buffer.write_with(write)
    buffer.push_token(1, "nobody waits: ")
    assert await buffer.get() == AnswerDelta((1,), "nobody waits: ")
    reading = asyncio.create_task(buffer.get())
    await asyncio.sleep(0)
    assert buffer.push_token(2, "a")
    assert buffer.push_token(3, "b")
    assert written == "ab"
    # The first that is not taken wakes the reader; what follows stays behind it.
    buffer.push_token(4, "stop")
    buffer.push_token(5, "c")
    assert await reading == AnswerDelta((4, 5), "stopc")
    assert written == "ab"


async def test_answers_of_different_index_are_not_merged() -> None:
    buffer = AnswerBuffer(BufferLimits())
    for index, token in ((0, 1), (0, 2), (1, 3), (0, 4)):
        buffer.push(AnswerDelta((token,), index=index))
    read = [await buffer.get() for _ in range(2)]
    assert read == [AnswerDelta((1, 2, 4), index=0), AnswerDelta((3,), index=1)]


async def test_the_usage_of_all_answers_is_read_last() -> None:
    buffer = AnswerBuffer(BufferLimits())
    for index, usage in ((0, None), (1, None), (2, None), (1, None), (0, Usage(1, 9))):
        buffer.push(AnswerDelta((index,), index=index, usage=usage))
    buffer.end()
    read = [delta async for delta in _deltas(buffer)]
    assert [(x.index, x.token_ids) for x in read] == [(1, (1, 1)), (2, (2,)), (0, (0, 0))]
    assert read[-1].usage == Usage(1, 9)


async def _deltas(buffer: AnswerBuffer) -> AsyncIterator[AnswerDelta]:
    while (delta := await buffer.get()) is not None:
        yield delta


@pytest.mark.parametrize(
    ("limits", "delta"),
    [
        (BufferLimits(tokens=4), AnswerDelta((1, 2))),
        (BufferLimits(characters=4), AnswerDelta((), "ab")),
    ],
)
async def test_the_bound_is_on_what_waits_and_not_on_what_was_read(
    limits: BufferLimits, delta: AnswerDelta
) -> None:
    buffer = AnswerBuffer(limits)
    for _ in range(5):
        assert buffer.push(delta)
        assert buffer.push(delta)
        await buffer.get()
    assert [buffer.push(delta) for _ in range(3)] == [True, True, False]


@pytest.mark.parametrize("drop", [False, True])
async def test_an_error_comes_after_what_waits_or_instead_of_it(drop: bool) -> None:
    buffer = AnswerBuffer(BufferLimits())
    buffer.push(AnswerDelta((1,)))
    buffer.fail(WorkerFailed("dead"), drop=drop)
    buffer.fail(WorkerFailed("a later error changes nothing"))
    if not drop:
        assert await buffer.get() == AnswerDelta((1,))
    for _ in range(2):
        with pytest.raises(WorkerFailed, match="dead"):
            await buffer.get()


async def test_an_error_wakes_the_reader() -> None:
    buffer = AnswerBuffer(BufferLimits())
    reading = asyncio.create_task(buffer.get())
    await asyncio.sleep(0)
    buffer.fail(WorkerFailed("dead"))
    with pytest.raises(WorkerFailed):
        await reading


async def test_leaving_releases_in_reverse_order() -> None:
    released: list[str] = []

    async def open_answer(buffer: AnswerBuffer, stack: Releases) -> None:
        stack.callback(released.append, "first")
        stack.callback(released.append, "second")
        buffer.push(AnswerDelta((1,)))
        buffer.end()

    async with AnswerStream(open_answer) as answer:
        assert [delta async for delta in answer] == [AnswerDelta((1,))]
        assert released == []
    assert released == ["second", "first"]


async def test_an_answer_that_cannot_be_opened_releases_what_was_taken() -> None:
    released: list[str] = []

    async def open_answer(buffer: AnswerBuffer, stack: Releases) -> None:
        stack.callback(released.append, "seat")
        raise Unavailable("nobody")

    with pytest.raises(Unavailable):
        async with AnswerStream(open_answer):
            raise AssertionError("it was entered")
    assert released == ["seat"]
