"""Processes batches: claims a batch, checks its input, answers its lines, and writes its files."""

from __future__ import annotations

import asyncio
import codecs
import logging
import secrets
from collections import Counter, deque
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import IO, TYPE_CHECKING, Any, TypeVar

import msgspec

from pdserve.errors import NotFound, PdserveError, wait_s
from pdserve.net.backoff import backoff
from router.store.batches import ClaimLost, Line, Status
from router.store.contents import disk_errors
from router.store.database import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    from router.api.answer_sinks import AnsweredLine
    from router.store.batches import BatchStore, StoredBatch
    from router.store.files import FileStore

    # Called with (endpoint, body, tenant, timeout in seconds). Raises PdserveError.
    Answer = Callable[[str, bytes, str, float], Awaitable[AnsweredLine]]

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_LINES = 50_000
# Limits of concurrent batches of a tenant in one router, and of concurrent lines of a batch.
_BATCHES, _LINES = 4, 64
_MOST_ERRORS = 100
_MOST_FAILURES = 5


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """`look_s`: interval between looks for new batches, and at the state of one under way.
    `retry_min_s`, `retry_max_s`: pauses before a retry. `lines`: most concurrent lines of all
    batches."""

    look_s: float = 1.0
    retry_min_s: float = 1.0
    retry_max_s: float = 30.0
    # Admission decides how many of them run; the others wait in its queue, behind all interactive
    # requests.
    lines: int = 256


_LIMITS = BatchLimits()


class _Row(msgspec.Struct, forbid_unknown_fields=True):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class LinePlaces:
    """Places for concurrent lines, shared between tenants: a free place goes to the waiting tenant
    that holds the fewest."""

    def __init__(self, places: int) -> None:
        self._free = places
        self._held = Counter[str]()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @asynccontextmanager
    async def place(self, tenant: str) -> AsyncIterator[None]:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        self._give()
        try:
            await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():
                self._free += 1
                self._held[tenant] -= 1
            else:
                turn.cancel()
            self._give()

    def _give(self) -> None:
        while self._free and self._waiting:
            tenant = min(self._waiting, key=lambda name: self._held[name])
            turns = self._waiting[tenant]
            turn = turns.popleft()
            if not turns:
                del self._waiting[tenant]
            if not turn.done():
                turn.set_result(None)
                self._free -= 1
                self._held[tenant] += 1


class BatchRunner:
    """Runs until the router stops. Another router, or this one after a restart, resumes a batch
    that is interrupted by the stop: it answers the lines that have no stored answer."""

    def __init__(
        self,
        files: FileStore,
        store: BatchStore,
        answer: Answer,
        *,
        max_line_bytes: int,
        limits: BatchLimits = _LIMITS,
    ) -> None:
        self._files, self._store = files, store
        self._answer = answer
        self._max_line_bytes = max_line_bytes
        self._limits = limits
        self._places = LinePlaces(limits.lines)
        self._under_way = Counter[str]()  # batches by tenant

    async def run(self) -> None:
        """Claim batches and work on them until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                try:
                    batch = await self._store.claim(self._under_way, _BATCHES)
                except StoreUnavailable as error:
                    logger.warning("no batch is claimed: %s", error)
                    batch = None
                if batch is None:
                    await asyncio.sleep(self._limits.look_s)
                    continue
                self._under_way[batch.tenant] += 1
                tasks.create_task(self._work(batch))

    async def _work(self, batch: StoredBatch) -> None:
        """Process a batch until it ends or another router takes it over. Never raises, except when
        cancelled."""
        lines = asyncio.create_task(self._advance(batch))
        try:
            # Until the lines are done, or the batch is cancelled or expires.
            while not (await asyncio.wait([lines], timeout=self._limits.look_s))[0]:
                with suppress(StoreUnavailable):
                    batch = await self._store.look(batch.id)
                if self._must_end(batch):
                    break
            if lines.done() and lines.result():
                return
            lines.cancel()
            await asyncio.wait([lines])
            await self._end(await self._patiently(partial(self._store.look, batch.id)))
        except ClaimLost:
            logger.warning("another router has taken over batch %s", batch.id)
        except Exception:
            # The batch is released below, claimed again and retried.
            logger.exception("batch %s", batch.id)
            await asyncio.sleep(self._limits.retry_min_s)
        finally:
            lines.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.wait([lines])
            self._under_way[batch.tenant] -= 1
            self._store.release(batch.id)

    def _must_end(self, batch: StoredBatch) -> bool:
        return batch.status is Status.CANCELLING or self._store.now() > batch.expires_at

    async def _end(self, batch: StoredBatch) -> None:
        """Write the files of a batch. The error file lists unanswered lines with the reason."""
        status, code, why = Status.COMPLETED, "", ""
        if batch.status is Status.CANCELLING:
            status, code, why = Status.CANCELLED, "batch_cancelled", "the batch was cancelled"
        elif self._store.now() > batch.expires_at:
            status, code = Status.EXPIRED, "batch_expired"
            why = "the batch was not complete within its window"

        def unanswered(custom_id: str) -> bytes:
            return _result(custom_id, None, {"code": code, "message": why})

        await self._patiently(partial(self._store.finish, batch.id, status, unanswered))
        logger.info("batch %s is %s", batch.id, status)

    async def _advance(self, batch: StoredBatch) -> bool:
        """Check the input and answer every line. Return True if the batch failed its check and has
        ended."""
        store = self._store
        if batch.status is Status.VALIDATING:
            rows, problems = await self._patiently(partial(self._read, batch))
            if problems:
                await self._patiently(partial(store.fail, batch.id, problems))
                return True
            await self._patiently(partial(store.start, batch.id, rows))
        places, after = asyncio.Semaphore(_LINES), 0
        try:
            async with asyncio.TaskGroup() as tasks:
                while page := await self._patiently(partial(store.pending, batch.id, after)):
                    after = page[-1].number
                    for line in page:
                        await places.acquire()
                        task = tasks.create_task(self._line(batch, line))
                        task.add_done_callback(lambda _: places.release())
        except ExceptionGroup as group:
            # All lines fail for the same reason, such as a lost claim.
            raise group.exceptions[0] from None
        return False

    async def _read(self, batch: StoredBatch) -> tuple[list[Line], list[dict[str, Any]]]:
        """Return the lines of the input, and its problems."""
        file = await self._files.file(batch.input_file_id, batch.tenant)
        if file is None:
            return [], [_problem("the input file was deleted", None)]
        try:
            opened = await self._files.open(file)
        except NotFound:
            return [], [_problem("the input file was deleted", None)]
        with closing(opened), disk_errors():
            return await asyncio.to_thread(_check, opened, batch.endpoint, self._max_line_bytes)

    async def _line(self, batch: StoredBatch, line: Line) -> None:
        """Answer one line. While the service is busy or has no worker, retry until the batch
        expires. Give up after `_MOST_FAILURES` other server errors: the line may cause them."""
        pauses, failures = self._pauses(), 0
        while True:
            left_s = max(1.0, batch.expires_at - self._store.now())
            try:
                async with self._places.place(batch.tenant):
                    found = await self._answer(batch.endpoint, line.body, batch.tenant, left_s)
            except PdserveError as error:
                is_busy = error.http_status in (429, 503)
                failures += error.http_status >= 500 and not is_busy
                if is_busy or (error.http_status >= 500 and failures < _MOST_FAILURES):
                    await asyncio.sleep(max(wait_s(error), next(pauses)))
                    continue
                details = {
                    "message": error.message,
                    "type": "server_error" if failures else "invalid_request_error",
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
            keep = partial(self._store.answer, batch.id, line.number, result, succeeded=succeeded)
            await self._patiently(keep)
            return

    async def _patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        """Repeat a call to the store while it is unavailable, so that no computed answer is
        lost."""
        pauses = self._pauses()
        while True:
            try:
                return await call()
            except StoreUnavailable as error:
                logger.warning("a batch waits for the store: %s", error)
                await asyncio.sleep(next(pauses))

    def _pauses(self) -> Iterator[float]:
        return backoff(self._limits.retry_min_s, self._limits.retry_max_s)


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


def _check(
    file: IO[bytes], endpoint: str, max_line_bytes: int
) -> tuple[list[Line], list[dict[str, Any]]]:
    """Return the lines of an input file, and its problems."""
    lines: list[Line] = []
    problems: list[dict[str, Any]] = []
    seen: set[str] = set()
    for number, text in _numbered(file, max_line_bytes):
        if number > MAX_LINES:
            problems.append(_problem(f"the file has more than {MAX_LINES} lines", None))
            break
        try:
            row = _read_row(text, max_line_bytes)
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


def _read_row(text: bytes, max_bytes: int) -> _Row:
    """Decode a line. Raises ValueError."""
    if len(text) > max_bytes:
        raise ValueError(f"the line is larger than {max_bytes} bytes")
    # msgspec.Raw checks the syntax of the body without building objects, which would take long and
    # block the event loop.
    row = msgspec.json.decode(text, type=_Row)
    if not bytes(row.body).startswith(b"{"):
        raise ValueError("'body' must be an object")
    return row


def _numbered(file: IO[bytes], most: int) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not empty, numbered from 1. A line longer than `most` bytes is cut
    after one byte more, so that its length still shows that it is too long."""
    for number in count(1):
        if not (text := file.readline(most + 1)):
            return
        if number == 1:
            text = text.removeprefix(codecs.BOM_UTF8)
        rest = text
        while len(rest) > most and not rest.endswith(b"\n"):
            rest = file.readline(most + 1)
        if text.strip():
            yield number, text
