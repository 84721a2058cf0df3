"""Calls of the HTTP and gRPC APIs: the open requests, for which a stop waits before it ends them,
and the log of ended calls."""

from __future__ import annotations

import asyncio
import os
import re
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

import msgspec
from msgspec import Struct

from pdserve.errors import (
    Cancelled,
    Conflict,
    InternalError,
    InvalidRequest,
    Overloaded,
    Unavailable,
)
from pdserve.observe.logs import time_text
from pdserve.types import ServiceClass
from router.walk import RECORDS, RequestRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pdserve.errors import PdserveError
    from pdserve.observe.logs import LineLog
    from router.admission.memory import MemoryGuard
    from router.metrics import RouterMetrics
    from router.steps.log import RequestLog

# Time for an ended request to send its error to the client.
END_S = 1.0
_MAX_CHARS = 200  # limit of a client's text in the access log
_CLIENT_LEFT = "499"
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")


def new_request_id(prefix: str) -> str:
    return f"{prefix}{os.urandom(16).hex()}"


def check_request_id(request_id: str, *, field: str) -> str:
    """Return the client's id. Raises InvalidRequest if it is not safe in logs and headers."""
    if not _REQUEST_ID.fullmatch(request_id):
        raise InvalidRequest(
            f"'{field}' must be 1 to 128 letters, digits or ._:/+=- characters", field=field
        )
    return request_id


class OpenRequest:
    """One request, open while its task is in this context. `error`: set if another task ended it.
    `claimed`: tenant and idempotency key, if it has one."""

    def __init__(self, requests: OpenRequests, task: asyncio.Task[Any]) -> None:
        self._requests, self._task = requests, task
        self._cancelling = task.cancelling()
        self.claimed: tuple[str, str] | None = None
        self.error: PdserveError | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, raised: BaseException | None, *__: object) -> None:
        self._requests.leave(self)
        # As in asyncio.timeout, a cancellation that `end` did not cause propagates.
        is_cancelled = isinstance(raised, asyncio.CancelledError) and self.error is not None
        if is_cancelled and self._task.uncancel() <= self._cancelling:
            assert self.error is not None
            raise self.error from None

    def end(self, error: PdserveError) -> None:
        """Cancel the task; leaving the context turns the cancellation into `error`."""
        if self.error is None:
            self.error = error
            self._task.cancel()


class OpenRequests:
    """State: all open requests, the ones with an idempotency key, and whether the router is
    stopping. `memory` refuses new requests if memory is nearly full."""

    def __init__(self, memory: MemoryGuard | None = None) -> None:
        self._memory = memory
        self._open: set[OpenRequest] = set()
        self._claimed: dict[tuple[str, str], OpenRequest] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._stopping = False

    @property
    def is_stopping(self) -> bool:
        return self._stopping

    @property
    def count(self) -> int:
        return len(self._open)

    def check_open(self) -> None:
        """Raise Unavailable once the router is stopping."""
        if self._stopping:
            raise _stopping()

    def enter(self) -> OpenRequest:
        """Open a request that the current task answers. Raises as `check_new` does."""
        self.check_new()
        task = asyncio.current_task()
        assert task is not None
        request = OpenRequest(self, task)
        self._open.add(request)
        self._idle.clear()
        return request

    def leave(self, request: OpenRequest) -> None:
        if request.claimed and self._claimed.get(request.claimed) is request:
            del self._claimed[request.claimed]
        self._open.discard(request)
        if not self._open:
            self._idle.set()

    def claim(self, request: OpenRequest, tenant: str, key: str, resumes: bool) -> None:
        """Claim the idempotency key `key` for a request; "" is no key.

        If another open request of the tenant has the key, a resuming request ends it, and any other
        one raises Conflict.
        """
        if not key:
            return
        other = self._claimed.get((tenant, key))
        if other is not None:
            if not resumes:
                raise Conflict(f"request {key!r} is being answered", retry_after_s=1.0)
            self.end_claimed((tenant, key))
        request.claimed = (tenant, key)
        self._claimed[request.claimed] = request

    def check_new(self) -> None:
        """Raise Unavailable as `check_open` does, and Overloaded if memory is nearly full."""
        self.check_open()
        if self._memory is not None and self._memory.used > self._memory.shed_above:
            raise self._memory.refusal()

    def end_claimed(self, name: tuple[str, str]) -> None:
        """End the open request with this tenant and key, if any: its client has resumed it on
        another connection."""
        if (request := self._claimed.get(name)) is not None:
            request.end(Conflict(f"request {name[1]!r} is resumed by another connection"))

    async def drain(self, grace_s: float) -> None:
        """Refuse new requests, wait `grace_s` for open ones, then end them with an error."""
        self._stopping = True
        if await self._is_idle_within(grace_s):
            return
        for request in list(self._open):
            request.end(_stopping())
        await self._is_idle_within(END_S)

    async def _is_idle_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True


def _stopping() -> PdserveError:
    return Unavailable("the router is stopping", retry_after_s=1.0)


class ApiCall(Struct, kw_only=True):
    """One call. `route`: path with the names of its variables, "" without a route. `status`: HTTP
    status, or name of gRPC's. `code`, `field`, `reason`, `message`: of the error. `is_counted`: the
    refusal is counted already. `tenant`: None before the caller is known. `generates`: it requests
    an answer, which the console shows. `is_quiet`: left out of the access log unless it fails.
    `records`: of its served requests."""

    route: str
    client: str = ""
    user_agent: str = ""
    request_id: str = ""
    model: str = ""
    tenant: str | None = None
    generates: bool = False
    is_quiet: bool = False
    status: str = _CLIENT_LEFT
    code: str = ""
    field: str = ""
    reason: str = ""
    message: str = ""
    is_counted: bool = False
    records: list[RequestRecord] = []
    began: float = msgspec.field(default_factory=time.monotonic)

    def fail(self, error: PdserveError) -> None:
        """Keep the logged fields of an error, not the error, whose traceback would keep it and this
        call until a garbage collection."""
        self.code, self.field, self.reason = error.code, error.field, error.reason
        self.message = error.message[:_MAX_CHARS]
        # Parts that limit load count their refusals.
        self.is_counted = isinstance(error, Overloaded | InternalError)


class CallLog:
    """Counts each call of the APIs at its end and writes it to the access log. A call that was
    refused before it was served is added to the log of requests. `clock`: of the log's records."""

    def __init__(
        self,
        metrics: RouterMetrics,
        log: RequestLog,
        clock: Callable[[], float],
        file: LineLog | None = None,
    ) -> None:
        self._metrics, self._log, self._now, self._file = metrics, log, clock, file

    @contextmanager
    def logged(self, call: ApiCall) -> Iterator[None]:
        """Log a call at the end of the context. Its status and error are set there."""
        token = RECORDS.set(call.records)
        try:
            yield
        finally:
            RECORDS.reset(token)
            self._end(call, time.monotonic() - call.began)

    def _end(self, call: ApiCall, seconds: float) -> None:
        if call.code and call.generates and call.tenant is not None and not call.records:
            self._refused(call, seconds)
        if call.status == _CLIENT_LEFT:
            call.code = Cancelled.code
        elif not call.code:  # an error after the first byte is in the answer
            call.code = next((x.outcome for x in call.records if x.message), "")
        self._metrics.count("api_responses", call.route, call.status, call.code)
        if self._file is not None and not (call.is_quiet and not call.message):
            self._file.write(_line(call, seconds))

    def _refused(self, call: ApiCall, seconds: float) -> None:
        """Add a request that was never served to the console's log."""
        if not call.is_counted:
            self._metrics.refused("", call.tenant or "", call.code, call.reason)
        now = self._now()
        record = RequestRecord(
            request_id=call.request_id,
            model=call.model,
            tenant=call.tenant or "",
            session="",
            service_class=ServiceClass.INTERACTIVE,
            prompt_tokens=0,
            arrived=now - seconds,
            outcome=call.code,
            reason=call.reason,
            message=call.message,
        )
        self._log.begin(record)
        self._log.end(record, now)


def _line(call: ApiCall, seconds: float) -> dict[str, Any]:
    records = call.records
    first = records[0] if records else None
    usages = [x.usage for x in records if x.usage is not None]
    texts = {
        "id": first.request_id if first else call.request_id,
        "route": call.route,
        "status": call.status,
        "code": call.code,
        "field": call.field,
        "tenant": call.tenant or "",
        "model": first.model if first else call.model,
        "client": call.client,
        "user_agent": call.user_agent,
    }
    line: dict[str, Any] = {"time": time_text(time.time() - seconds)}
    line |= {name: text[:_MAX_CHARS] for name, text in texts.items()}
    line["prompt_tokens"] = sum(x.prompt_tokens for x in records)
    line["cached_tokens"] = sum(x.cached_tokens for x in usages)
    line["completion_tokens"] = sum(x.completion_tokens for x in usages)
    line["ttft_s"] = round(min((x.ttft_s for x in records if x.ttft_s), default=0.0), 4)
    line["duration_s"] = round(seconds, 4)
    return line
