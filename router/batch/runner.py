"""Works on batches: claims one, checks its input, has its lines answered, and writes its files."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from pdserve.errors import PdserveError, wait_s
from router.batch.store import LeaseLost, Line, Status

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from pathlib import Path

    from router.batch.store import BatchStore, StoredBatch

    # Answers a body at an endpoint for a tenant within some seconds. Raises PdserveError.
    Answer = Callable[[str, bytes, str, float], Awaitable["Answered"]]

logger = logging.getLogger(__name__)

MAX_LINES = 50_000
LEASE_S = 6.0
_RENEW_S = 1.0
_LOOK_S = 1.0
# Batches that a router works on at a time, and lines of one: admission decides how many of them
# run. The rest wait in its queue behind all interactive requests.
_BATCHES, _LINES = 4, 64
_MOST_ERRORS = 100
_RETRY_S = (1.0, 30.0)


class Answered(NamedTuple):
    request_id: str
    body: bytes


class _Row(msgspec.Struct, forbid_unknown_fields=True):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class BatchRunner:
    """Runs in a router for as long as it lives. What it has begun when it ends goes on elsewhere,
    or at its next start: the lines without an answer are asked again."""

    def __init__(self, store: BatchStore, answer: Answer) -> None:
        self._store = store
        self._answer = answer

    async def run(self) -> None:
        """Claim batches and work on them until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            places = asyncio.Semaphore(_BATCHES)
            while True:
                async with places:
                    batch = await self._store.claim(LEASE_S)
                if batch is None:
                    await asyncio.sleep(_LOOK_S)
                    continue
                await places.acquire()
                task = tasks.create_task(self._work(batch))
                task.add_done_callback(lambda _: places.release())

    async def _work(self, batch: StoredBatch) -> None:
        """Take a batch as far as it goes. Never raises, except when cancelled."""
        lines = asyncio.create_task(self._advance(batch))
        try:
            # Ends when the lines have, or when the batch must end before.
            while not (await asyncio.wait([lines], timeout=_RENEW_S))[0]:
                batch = await self._store.renew(batch.id, LEASE_S)
                if batch.status is Status.CANCELLING or time.time() > batch.expires_at:
                    break
            if lines.done() and lines.result():
                return
            lines.cancel()
            await asyncio.wait([lines])
            await self._end(await self._store.renew(batch.id, LEASE_S))
        except LeaseLost:
            logger.warning("another router has taken over batch %s", batch.id)
        except Exception:
            # The lease runs out, and then it is tried again.
            logger.exception("batch %s", batch.id)
        finally:
            lines.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.wait([lines])

    async def _end(self, batch: StoredBatch) -> None:
        """Write the files. Lines without an answer are in the error file, with the reason."""
        status, code, why = Status.COMPLETED, "", ""
        if batch.status is Status.CANCELLING:
            status, code, why = Status.CANCELLED, "batch_cancelled", "the batch was cancelled"
        elif time.time() > batch.expires_at:
            status, code = Status.EXPIRED, "batch_expired"
            why = "the batch was not complete within its window"
        await self._store.finish(
            batch.id,
            status,
            lambda custom_id: _result(custom_id, None, {"code": code, "message": why}),
        )
        logger.info("batch %s is %s", batch.id, status)

    async def _advance(self, batch: StoredBatch) -> bool:
        """Check the input and have every line answered. Return True if the batch has ended."""
        store = self._store
        if batch.status is Status.VALIDATING:
            file = await store.file(batch.input_file_id, batch.tenant)
            if file is None:
                await store.fail(batch.id, [_problem("the input file was deleted", None)])
                return True
            rows, problems = await asyncio.to_thread(_check, store.path(file), batch.endpoint)
            if problems:
                await store.fail(batch.id, problems)
                return True
            await store.start(batch.id, rows)
        places, after = asyncio.Semaphore(_LINES), 0
        async with asyncio.TaskGroup() as tasks:
            while page := await store.pending(batch.id, after, _LINES):
                after = page[-1].number
                for line in page:
                    await places.acquire()
                    task = tasks.create_task(self._line(batch, line))
                    task.add_done_callback(lambda _: places.release())
        return False

    async def _line(self, batch: StoredBatch, line: Line) -> None:
        """Have a line answered, again after errors of the service until the batch expires."""
        pause_s, longest_s = _RETRY_S
        while True:
            left_s = max(1.0, batch.expires_at - time.time())
            try:
                found = await self._answer(batch.endpoint, line.body, batch.tenant, left_s)
            except PdserveError as error:
                if error.http_status >= 429:
                    await asyncio.sleep(max(wait_s(error), pause_s))
                    pause_s = min(2 * pause_s, longest_s)
                    continue
                details = {
                    "message": error.message,
                    "type": "invalid_request_error",
                    "param": error.field or None,
                    "code": error.code,
                }
                refused = {"error": details}
                response = {"status_code": error.http_status, "request_id": "", "body": refused}
                result, succeeded = _result(line.custom_id, response, None), False
            else:
                body = msgspec.Raw(found.body)
                response = {"status_code": 200, "request_id": found.request_id, "body": body}
                result, succeeded = _result(line.custom_id, response, None), True
            await self._store.answer(batch.id, line.number, result, succeeded=succeeded)
            return


def _result(custom_id: str, response: dict[str, Any] | None, error: dict[str, str] | None) -> bytes:
    return msgspec.json.encode(
        {
            "id": f"batch_req_{secrets.token_hex(12)}",
            "custom_id": custom_id,
            "response": response,
            "error": error,
        }
    )


def _problem(message: str, line: int | None, param: str | None = None) -> dict[str, Any]:
    return {"code": "invalid_input", "message": message, "line": line, "param": param}


def _check(path: Path, endpoint: str) -> tuple[list[Line], list[dict[str, Any]]]:
    """Return the lines of an input file, and what is wrong with it."""
    lines: list[Line] = []
    problems: list[dict[str, Any]] = []
    seen: set[str] = set()
    for number, text in _numbered(path):
        if number > MAX_LINES:
            problems.append(_problem(f"the file has more than {MAX_LINES} lines", None))
            break
        try:
            row = msgspec.json.decode(text, type=_Row)
            if not isinstance(json.loads(bytes(row.body)), dict):
                raise ValueError("'body' must be an object")
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            problems.append(_problem(str(error), number))
        else:
            if row.custom_id in seen:
                twice = f"custom_id {row.custom_id!r} is there twice"
                problems.append(_problem(twice, number, "custom_id"))
            elif not 0 < len(row.custom_id) <= 512:
                problems.append(_problem("it must have 1 to 512 characters", number, "custom_id"))
            elif row.method != "POST":
                problems.append(_problem("'method' must be POST", number, "method"))
            elif row.url != endpoint:
                problems.append(_problem(f"'url' must be {endpoint}", number, "url"))
            seen.add(row.custom_id)
            lines.append(Line(number, row.custom_id, bytes(row.body)))
        if len(problems) >= _MOST_ERRORS:
            break
    if not lines and not problems:
        problems.append(_problem("the file has no lines", None))
    return lines, problems


def _numbered(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not empty, numbered from 1."""
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            if text.strip():
                yield number, text
