"""Answers to requests with an idempotency key. A repeated request gets the same answer, also while
that is still being generated."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter, defaultdict
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from aiohttp import web

from pdserve.errors import (
    DeadlineExceeded,
    InternalError,
    KeyReused,
    Overloaded,
    PdserveError,
    Unavailable,
)
from router.api.answer_sinks import EVENT_STREAM
from router.store.database import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterator

    from router.api.open_requests import OpenRequests
    from router.store.keys import IdempotencyKeys

    Generate = Callable[["Recorded"], Coroutine[Any, Any, object]]
    Name = tuple[str, str]  # tenant and key

logger = logging.getLogger(__name__)

LIFETIME_S = 3600.0
MAX_BYTES = 64 << 20  # of complete answers of all tenants, and of open answers of each tenant
_ENTRY_BYTES = 2048  # overhead of an answer, in addition to its text
# An answer without connections is generated for this long, since clients that retry come earlier;
# and at most this many per tenant.
ABANDONED_S = 300.0
MAX_ABANDONED = 16
_RETRY_S = 5.0
_LOOK_S = 1.0
# Attempts to write an answer while the store is unavailable, one every _RETRY_S.
_FINISH_TRIES = 60
# Deadline of one write to a client.
_WRITE_TIMEOUT_S = 15.0


class Recorded:
    """The answer to one request: a sink from which any number of connections read. Its bytes are
    counted in `open_bytes` until it is closed."""

    def __init__(
        self, name: Name, digest: bytes, request_id: str, open_bytes: Counter[str]
    ) -> None:
        self.name = name
        self.digest = digest
        self.request_id = request_id
        self.error: PdserveError | None = None  # raised before the answer began
        self.is_good = False
        self.is_done = False
        self.is_elsewhere = False  # another router generates it
        self.body: bytes | bytearray = bytearray()
        self.connections = 0  # reading it now
        self.was_asked = False
        self._open_bytes = open_bytes
        self._changed = asyncio.Event()

    @property
    def has_begun(self) -> bool:
        return bool(self.body)

    def send(self, events: bytes) -> bool:
        self._append(events)
        return True

    def end(self, last: bytes, *, is_good: bool) -> None:
        self._append(last)
        self.is_good = is_good

    def replay(self, request_id: str, body: bytes) -> None:
        """Store the answer that another router generated."""
        self.request_id = request_id
        self.end(body, is_good=True)

    def close(self) -> None:
        """Mark the answer complete, and wake the connections that wait for more."""
        self.is_done = True
        self._open_bytes[self.name[0]] -= len(self.body)
        self.body = bytes(self.body)
        self._changed.set()

    def _append(self, chunk: bytes) -> None:
        if chunk:
            self.body += chunk
            self._open_bytes[self.name[0]] += len(chunk)
            self._changed.set()
            self._changed = asyncio.Event()

    async def replay_to(
        self, request: web.BaseRequest, headers: dict[str, str], *, is_stream: bool
    ) -> web.StreamResponse:
        """Send the answer so far, then follow it live. Adds response headers to `headers`."""
        is_first, self.was_asked = not self.was_asked, True
        while not self.is_done and not (is_stream and self.body):
            await self._changed.wait()
        if self.error is not None:
            raise self.error
        headers["x-request-id"] = self.request_id
        if not is_first or self.is_elsewhere:
            headers["idempotent-replayed"] = "true"
        if not is_stream:
            return web.Response(body=self.body, content_type="application/json")
        response = web.StreamResponse(headers={**EVENT_STREAM, **headers})
        await response.prepare(request)
        sent = 0
        while sent < len(self.body) or not self.is_done:
            if sent == len(self.body):
                await self._changed.wait()
                continue
            chunk, sent = bytes(self.body[sent:]), len(self.body)
            try:
                async with asyncio.timeout(_WRITE_TIMEOUT_S):
                    await response.write(chunk)
            except TimeoutError:
                if request.transport is not None:
                    request.transport.abort()
                break
        return response


class StoredAnswers:
    """Answers by tenant and key.

    A complete answer is kept for LIFETIME_S. If all answers exceed `max_bytes`, the oldest answer
    of the largest tenant is dropped. A failed answer is dropped at once. An answer without
    connections is still generated, within ABANDONED_S and MAX_ABANDONED.

    With `shared`, routers share answers: one router generates, the others wait for its answer.
    While the store is unavailable, keys apply to this router only.
    """

    def __init__(
        self,
        shared: IdempotencyKeys | None = None,
        max_bytes: int = MAX_BYTES,
        *,
        look_s: float = _LOOK_S,
    ) -> None:
        """`look_s`: interval between looks at answers that other routers generate, and at keys that
        they have taken over."""
        self._shared = shared
        self._claims: dict[str, Name] = {}  # this router's claims in `shared`
        self._max_bytes = max_bytes
        self._look_s = look_s
        self._answers: dict[Name, Recorded] = {}
        # End times of complete answers by tenant and key, oldest first.
        self._ended: defaultdict[str, dict[str, float]] = defaultdict(dict)
        self._kept_bytes = Counter[str]()
        self._open_bytes = Counter[str]()
        self._tasks: dict[Recorded, asyncio.Task[None]] = {}
        self._abandoned: dict[Recorded, asyncio.TimerHandle] = {}

    @staticmethod
    def digest(path: str, body: bytes) -> bytes:
        """Return a digest of a request, to detect a key that is reused with another request."""
        return hashlib.blake2b(path.encode() + b"\0" + body, digest_size=16).digest()

    def answer(self, name: Name, digest: bytes, request_id: str, generate: Generate) -> Recorded:
        """Return the recorded answer to the same request, or start to `generate` it in a separate
        task, which outlives the connection.

        Raises KeyReused if the key belongs to another request, and Overloaded if this tenant's open
        answers are too large.
        """
        self._make_room()
        recorded = self._answers.get(name)
        if recorded is None:
            if self._open_bytes[name[0]] > self._max_bytes:
                text = "the answers under way to idempotency keys take more than"
                raise Overloaded(f"{text} {self._max_bytes} bytes", retry_after_s=_RETRY_S)
            recorded = Recorded(name, digest, request_id, self._open_bytes)
            self._answers[name] = recorded
            task = asyncio.create_task(self._run(recorded, generate), name="idempotent")
            self._tasks[recorded] = task
        elif recorded.digest != digest:
            raise KeyReused(
                f"the idempotency key {name[1]!r} was used with another request",
                field="idempotency-key",
            )
        return recorded

    @contextmanager
    def reading(self, recorded: Recorded) -> Iterator[None]:
        """Count a connection that reads the answer. Without one, the answer ends after
        ABANDONED_S."""
        recorded.connections += 1
        if (timer := self._abandoned.pop(recorded, None)) is not None:
            timer.cancel()
        try:
            yield
        finally:
            recorded.connections -= 1
            if not recorded.connections and not recorded.is_done:
                self._abandon(recorded)

    def _abandon(self, recorded: Recorded) -> None:
        # Ends only this router's wait: the other router continues to generate.
        if recorded.is_elsewhere:
            self._end(recorded)
            return
        loop = asyncio.get_running_loop()
        self._abandoned[recorded] = loop.call_later(ABANDONED_S, self._end, recorded)
        of_tenant = [x for x in self._abandoned if x.name[0] == recorded.name[0]]
        if len(of_tenant) > MAX_ABANDONED:
            self._end(of_tenant[0])

    def _end(self, recorded: Recorded) -> None:
        """Cancel an answer without connections. The next request with its key starts again."""
        if (timer := self._abandoned.pop(recorded, None)) is not None:
            timer.cancel()
        del self._answers[recorded.name]
        self._tasks[recorded].cancel()

    async def _run(self, recorded: Recorded, generate: Generate) -> None:
        claim = ""
        try:
            claim = await self._claim(recorded)
            if not recorded.is_good:
                await generate(recorded)
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
            if (timer := self._abandoned.pop(recorded, None)) is not None:
                timer.cancel()
            if self._answers.get(recorded.name) is recorded:
                self._keep(recorded)
            if claim:
                await self._finish(claim, recorded)
            del self._tasks[recorded]

    async def _claim(self, recorded: Recorded) -> str:
        """Return this router's claim to generate the answer. Return "" if another router's answer
        was copied to `recorded`, or if keys apply to this router only."""
        if self._shared is None:
            return ""
        for _ in range(int(LIFETIME_S / self._look_s)):
            try:
                state = await self._shared.claim(
                    *recorded.name, recorded.digest, recorded.request_id
                )
            except StoreUnavailable as error:
                logger.warning("idempotency keys hold at this router alone: %s", error)
                return ""
            recorded.is_elsewhere = not state.claim
            if state.claim:
                self._claims[state.claim] = recorded.name
                return state.claim
            if state.answer is not None:
                recorded.replay(state.request_id, state.answer)
                return ""
            await asyncio.sleep(self._look_s)
        raise DeadlineExceeded(f"another router has not answered within {LIFETIME_S:g} s")

    async def _finish(self, claim: str, recorded: Recorded) -> None:
        """Store a good answer for the other routers; otherwise release the key to them."""
        assert self._shared is not None
        # Stop watching: another request of this router may have taken over the key by now.
        self._claims.pop(claim, None)
        for _ in range(_FINISH_TRIES):
            with suppress(StoreUnavailable):
                if recorded.is_good:
                    await self._shared.finish(claim, bytes(recorded.body), LIFETIME_S)
                else:
                    await self._shared.release(claim)
                break
            await asyncio.sleep(_RETRY_S)

    @asynccontextmanager
    async def taken_over(self, name: Name, digest: bytes, request_id: str) -> AsyncIterator[None]:
        """Hold the key of a request that its client resumes here, in place of the router that
        holds it now. Does nothing if keys apply to this router only."""
        if self._shared is None:
            yield
            return
        claim = ""
        with suppress(StoreUnavailable):
            state = await self._shared.claim(*name, digest, request_id, take_over=True)
            claim = state.claim
            self._claims[claim] = name
        try:
            yield
        finally:
            if claim:
                self._claims.pop(claim, None)
                with suppress(StoreUnavailable):
                    await self._shared.release(claim)

    async def end_taken_over(self, open_requests: OpenRequests) -> None:
        """End requests whose key another router has taken over. Runs until cancelled."""
        while self._shared is not None:
            await asyncio.sleep(self._look_s)
            claims = dict(self._claims)
            with suppress(StoreUnavailable):
                for claim in claims.keys() - (await self._shared.held(claims) if claims else ()):
                    if self._claims.pop(claim, None) is not None:
                        open_requests.end_claimed(claims[claim])

    def _keep(self, recorded: Recorded) -> None:
        """Keep a closed answer if it is good, and drop it otherwise."""
        tenant, key = recorded.name
        if not recorded.is_good:
            del self._answers[recorded.name]
            return
        self._ended[tenant][key] = asyncio.get_running_loop().time()
        self._kept_bytes[tenant] += _ENTRY_BYTES + len(recorded.body)
        self._make_room()

    def _make_room(self) -> None:
        now = asyncio.get_running_loop().time()
        for tenant, ended in [*self._ended.items()]:
            while ended and next(iter(ended.values())) + LIFETIME_S <= now:
                self._drop_oldest(tenant)
        while self._kept_bytes.total() > self._max_bytes:
            self._drop_oldest(max(self._ended, key=self._kept_bytes.__getitem__))

    def _drop_oldest(self, tenant: str) -> None:
        ended = self._ended[tenant]
        key = next(iter(ended))
        recorded = self._answers.pop((tenant, key))
        self._kept_bytes[tenant] -= _ENTRY_BYTES + len(recorded.body)
        del ended[key]
        if not ended:
            del self._ended[tenant], self._kept_bytes[tenant]
