"""Answers to requests with an idempotency key, kept so that the same request gets the same answer
again, also while it is still generated."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from typing import TYPE_CHECKING, Any

from aiohttp import web

from pdserve.errors import InternalError, KeyReused, PdserveError, Unavailable
from router.api.sinks import EVENT_STREAM

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping

    from router.answer import AnswerDelta
    from router.api.sinks import Writer

logger = logging.getLogger(__name__)

LIFETIME_S = 3600.0
MAX_BYTES = 64 << 20  # of complete answers, of all tenants
# For a client to take what was sent to it.
_WRITE_TIMEOUT_S = 15.0


class Recorded:
    """The answer to one request, as a sink that any number of connections read. It is generated to
    its end though nobody reads it."""

    def __init__(self, digest: bytes, request_id: str) -> None:
        self.digest = digest
        self.request_id = request_id
        self.error: PdserveError | None = None  # of an answer that has not begun
        self.is_good = False
        self._writer: Writer
        self._chunks: list[bytes] = []
        self._is_done = False
        self._changed = asyncio.Event()

    @property
    def size(self) -> int:
        return sum(map(len, self._chunks))

    @property
    def has_begun(self) -> bool:
        return bool(self._chunks)

    def open(self, writer: Writer) -> Recorded:
        self._writer = writer
        return self

    def write(self, delta: AnswerDelta) -> bool:
        self._append(self._writer.write(delta))
        return True

    def end(self) -> None:
        self._append(self._writer.end())
        self.is_good = True

    def fail(self, error: PdserveError) -> None:
        self._append(self._writer.fail(error))

    def close(self) -> None:
        """Nothing more comes."""
        self._is_done = True
        self._wake()

    def _append(self, chunk: bytes) -> None:
        if chunk:
            self._chunks.append(chunk)
            self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def send(
        self, request: web.BaseRequest, headers: Mapping[str, str], *, is_stream: bool
    ) -> web.StreamResponse:
        """Send the answer from its beginning, as far as it goes and as it goes on."""
        while not self._is_done and not (is_stream and self._chunks):
            await self._changed.wait()
        if self.error is not None:
            raise self.error
        if not is_stream:
            return web.Response(body=b"".join(self._chunks), content_type="application/json")
        response = web.StreamResponse(headers={**EVENT_STREAM, **headers})
        await response.prepare(request)
        sent = 0
        while sent < len(self._chunks) or not self._is_done:
            if sent == len(self._chunks):
                await self._changed.wait()
                continue
            chunk, sent = b"".join(self._chunks[sent:]), len(self._chunks)
            try:
                async with asyncio.timeout(_WRITE_TIMEOUT_S):
                    await response.write(chunk)
            except TimeoutError:
                if request.transport is not None:
                    request.transport.abort()
                break
        return response


class StoredAnswers:
    """Answers by tenant and key. A complete one is dropped after LIFETIME_S, or earlier, the oldest
    first, when all take more than `max_bytes`. One that failed is dropped at once."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._answers: dict[tuple[str, str], Recorded] = {}
        self._complete: dict[tuple[str, str], tuple[float, int]] = {}  # end and size, oldest first
        self._bytes = 0
        self._tasks: set[asyncio.Task[None]] = set()

    @staticmethod
    def digest(path: str, body: bytes) -> bytes:
        """Return what tells requests apart."""
        return hashlib.blake2b(path.encode() + b"\0" + body, digest_size=16).digest()

    def find(self, tenant: str, key: str, digest: bytes) -> Recorded | None:
        """Return the answer to the same request. Raises KeyReused if the key is of another."""
        self._drop_old()
        recorded = self._answers.get((tenant, key))
        if recorded is not None and recorded.digest != digest:
            raise KeyReused(
                f"the idempotency key {key!r} was used with another request",
                field="idempotency-key",
            )
        return recorded

    def record(
        self, tenant: str, key: str, recorded: Recorded, answer: Coroutine[Any, Any, Recorded]
    ) -> None:
        """Run `answer`, which generates into `recorded`, in a task of its own."""
        self._answers[tenant, key] = recorded
        task = asyncio.create_task(self._run((tenant, key), recorded, answer), name="idempotent")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(
        self, name: tuple[str, str], recorded: Recorded, answer: Coroutine[Any, Any, Recorded]
    ) -> None:
        try:
            await answer
        except PdserveError as error:
            recorded.error = error
        except asyncio.CancelledError:
            recorded.error = Unavailable("the router is stopping")
            raise
        except Exception:
            logger.exception("request %s", recorded.request_id)
            recorded.error = InternalError("internal error; see the router's log")
        finally:
            recorded.close()
            if recorded.is_good:
                now = asyncio.get_running_loop().time()
                self._complete[name] = now, recorded.size
                self._bytes += recorded.size
                self._drop_old()
            else:
                del self._answers[name]

    def _drop_old(self) -> None:
        now = asyncio.get_running_loop().time()
        while self._complete:
            name = next(iter(self._complete))
            ended, size = self._complete[name]
            if ended + LIFETIME_S > now and self._bytes <= self._max_bytes:
                return
            del self._complete[name], self._answers[name]
            self._bytes -= size
