"""OpenAI's Files and Batch API: /v1/files and /v1/batches."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from aiohttp import BodyPartReader, web
from aiohttp.http_exceptions import HttpProcessingError
from msgspec import Meta

from pdserve.errors import (
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    Overloaded,
    RequestTooLarge,
)
from pdserve.net.http_server import MIN_BYTES_PER_S, FileDownload, send_chunks
from router.api.http_request import TENANT, json_response, read_body
from router.dialects.fields import Body, read
from router.placement.residency import ANYWHERE
from router.steps.ledger import NO_LEDGER
from router.store.batches import OPEN, Status

if TYPE_CHECKING:
    from collections.abc import Awaitable, Collection, Iterator, Sequence

    from router.placement.residency import Residency
    from router.steps.ledger import ResidencyLedger
    from router.store.batches import BatchStore, StoredBatch
    from router.store.contents import Upload
    from router.store.files import FileStore, StoredFile

# Total time that an upload may pause, in addition to the time of its bytes at MIN_BYTES_PER_S.
UPLOAD_PAUSE_S = 30.0
# Each upload holds a connection, and a part of its file in memory.
MAX_UPLOADS, MAX_UPLOADS_OF_TENANT = 64, 16
_UPLOAD_RETRY_S = 10.0
_PART_BYTES = 1 << 20
_MAX_FIELD_BYTES = 256
# Form fields that set the lifetime of an uploaded file.
_ANCHOR, _LIFETIME = "expires_after[anchor]", "expires_after[seconds]"
_LIFETIMES_S = range(3600, 30 * 86_400 + 1)
_PLAIN = ("binary", "8bit", "7bit")
_PAGE, _MOST = 20, 10_000
_WINDOW = re.compile(r"([1-9]\d{0,6})([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_LONGEST_S = 30 * 86_400
T = TypeVar("T")


class CreateBatchRequest(Body):
    """`completion_window`: `24h`, or another number of s, m, h or d, at most 30 days."""

    input_file_id: str
    endpoint: Annotated[str, Meta(description="An endpoint that answers lines of batches.")]
    completion_window: str
    metadata: Annotated[dict[str, str], Meta(max_length=16)] | None = None


class Pace:
    """Time budget of one upload. Starts at `pause_s`, shrinks while the router waits for the
    client, and grows again with each byte received."""

    def __init__(self, pause_s: float) -> None:
        self._pause_s = self._left_s = pause_s

    async def within(self, reading: Awaitable[T]) -> T:
        """Wait for a part of the body. Raises DeadlineExceeded if the budget is used up."""
        now = asyncio.get_running_loop().time
        began = now()
        try:
            async with asyncio.timeout(self._left_s):
                part = await reading
        except TimeoutError:
            text = f"the body came slower than {MIN_BYTES_PER_S} bytes a second"
            raise DeadlineExceeded(text) from None
        self._left_s -= now() - began
        if isinstance(part, bytes | bytearray):
            self._left_s = min(self._pause_s, self._left_s + len(part) / MIN_BYTES_PER_S)
        return part


class BatchApi:
    """Handlers. A tenant sees only its own files and batches. `endpoints`: those that answer lines
    of a batch."""

    def __init__(
        self,
        files: FileStore,
        batches: BatchStore,
        *,
        max_file_bytes: int,
        endpoints: Collection[str],
        upload_pause_s: float = UPLOAD_PAUSE_S,
        residency: Residency = ANYWHERE,
        ledger: ResidencyLedger = NO_LEDGER,
    ) -> None:
        self._files, self._batches = files, batches
        self._residency, self._ledger = residency, ledger
        self._max_file_bytes = max_file_bytes
        self._endpoints = endpoints
        self._upload_pause_s = upload_pause_s
        self._uploads = Counter[str]()  # open uploads by tenant

    # Files.

    async def upload(self, request: web.BaseRequest) -> web.Response:
        if not request.content_type.startswith("multipart/"):
            raise InvalidRequest("the body must be multipart/form-data", field="content-type")
        self._residency.check_store(request[TENANT], "file")
        with self._entered(request[TENANT]):
            file = await self._receive_form(request)
            self._ledger.stored(request[TENANT], file.id, "file", file.bytes)
            return json_response(_file(file))

    @contextmanager
    def _entered(self, tenant: str) -> Iterator[None]:
        """Count an open upload. Raises Overloaded if there are too many."""
        if self._uploads[tenant] >= MAX_UPLOADS_OF_TENANT or self._uploads.total() >= MAX_UPLOADS:
            raise Overloaded(
                f"{self._uploads[tenant]} uploads are open, the limit is {MAX_UPLOADS_OF_TENANT} "
                f"of a tenant and {MAX_UPLOADS} of all",
                retry_after_s=_UPLOAD_RETRY_S,
            )
        self._uploads[tenant] += 1
        try:
            yield
        finally:
            self._uploads[tenant] -= 1

    async def _receive_form(self, request: web.BaseRequest) -> StoredFile:
        upload: Upload | None = None
        pace, tenant = Pace(self._upload_pause_s), request[TENANT]
        filename = ""
        fields = {"purpose": "", _ANCHOR: "", _LIFETIME: ""}
        try:
            reader = await request.multipart()
            while (found := await pace.within(reader.next())) is not None:
                part = _check_part(found)
                if part.name in fields:
                    text = ""
                    while data := await pace.within(part.read_chunk(_MAX_FIELD_BYTES)):
                        text += data.decode("utf-8", "replace")
                        if len(text) > _MAX_FIELD_BYTES:
                            break
                    fields[part.name] = text
                elif upload is None:
                    filename = (part.filename or "file.jsonl").encode(errors="replace").decode()
                    upload = await self._files.upload(tenant)
                    await self._receive(part, upload, pace)
                else:
                    raise InvalidRequest("'file' is there twice", field="file")
            if fields["purpose"] != "batch":
                raise InvalidRequest("'purpose' must be batch", field="purpose")
            if upload is None:
                raise InvalidRequest("'file' is required", field="file")
            lifetime_s = _lifetime_s(fields[_ANCHOR], fields[_LIFETIME])
            complete, upload = upload, None
            return await self._files.keep(complete, tenant, filename[:255], lifetime_s)
        # aiohttp's multipart reader raises all of these for a malformed body.
        except (ValueError, AssertionError, RuntimeError, HttpProcessingError) as error:
            text = f"the body is no multipart/form-data: {getattr(error, 'message', error)}"
            raise InvalidRequest(text[:300], field="file") from error
        finally:
            if upload is not None:
                upload.discard()

    async def _receive(self, part: BodyPartReader, upload: Upload, pace: Pace) -> None:
        while data := await pace.within(part.read_chunk(_PART_BYTES)):
            if upload.size + len(data) > self._max_file_bytes:
                text = f"the file is larger than {self._max_file_bytes} bytes"
                raise RequestTooLarge(text, field="file")
            await upload.write(data)

    async def list_files(self, request: web.BaseRequest) -> web.Response:
        after, limit = _page_of(request)
        purpose = request.query.get("purpose")
        files, has_more = await self._files.files(request[TENANT], after, limit, purpose)
        return _page([_file(file) for file in files], has_more=has_more)

    async def show_file(self, request: web.BaseRequest, file_id: str) -> web.Response:
        return json_response(_file(await self._file(file_id, request[TENANT])))

    async def delete_file(self, request: web.BaseRequest, file_id: str) -> web.Response:
        file = await self._file(file_id, request[TENANT])
        await self._files.delete(file)
        return json_response({"id": file.id, "object": "file", "deleted": True})

    async def content(self, request: web.BaseRequest, file_id: str) -> web.StreamResponse:
        file = await self._file(file_id, request[TENANT])
        path = self._files.path(file)
        if path is not None:
            return FileDownload(path, file.bytes)
        response = web.StreamResponse(headers={"content-type": "application/octet-stream"})
        response.content_length = file.bytes
        await send_chunks(request, response, self._files.chunks(file), file.bytes)
        return response

    async def _file(self, file_id: str, tenant: str, field: str = "") -> StoredFile:
        found = await self._files.file(file_id, tenant)
        if found is None:
            raise NotFound(f"there is no file {file_id!r}", field=field)
        return found

    # Batches.

    async def create(self, request: web.BaseRequest) -> web.Response:
        self._residency.check_store(request[TENANT], "input_file_id")
        wanted = read(CreateBatchRequest, await read_body(request))
        if wanted.endpoint not in self._endpoints:
            text = f"'endpoint' must be one of {', '.join(self._endpoints)}"
            raise InvalidRequest(text, field="endpoint")
        window = _WINDOW.fullmatch(wanted.completion_window)
        window_s = int(window[1]) * _SECONDS[window[2]] if window else 0
        if not 0 < window_s <= _LONGEST_S:
            text = "'completion_window' must be a number of s, m, h or d, at most 30d"
            raise InvalidRequest(text, field="completion_window")
        file = await self._file(wanted.input_file_id, request[TENANT], "input_file_id")
        batch = await self._batches.create(
            file, wanted.endpoint, wanted.completion_window, window_s, wanted.metadata or {}
        )
        return json_response(_batch(batch))

    async def list(self, request: web.BaseRequest) -> web.Response:
        batches, has_more = await self._batches.batches(request[TENANT], *_page_of(request))
        return _page([_batch(batch) for batch in batches], has_more=has_more)

    async def show(self, request: web.BaseRequest, batch_id: str) -> web.Response:
        return json_response(_batch(await self._find(batch_id, request[TENANT])))

    async def cancel(self, request: web.BaseRequest, batch_id: str) -> web.Response:
        batch = await self._find(batch_id, request[TENANT])
        if batch.status not in OPEN:
            raise InvalidRequest(f"the batch is {batch.status} already", field="batch_id")
        await self._batches.cancel(batch)
        return json_response(_batch(await self._find(batch_id, request[TENANT])))

    async def _find(self, batch_id: str, tenant: str) -> StoredBatch:
        found = await self._batches.batch(batch_id, tenant)
        if found is None:
            raise NotFound(f"there is no batch {batch_id!r}")
        return found


def _check_part(part: object) -> BodyPartReader:
    """Return `part`. Raises InvalidRequest if an upload may not have such a part."""
    if not isinstance(part, BodyPartReader):
        raise InvalidRequest("a part must not have parts", field="content-type")
    name = part.name or ""
    if name not in ("file", "purpose", _ANCHOR, _LIFETIME):
        text = f"{name!r} is not supported" if name else "a part has no name"
        field = name if name and name.isprintable() else "content-disposition"
        raise InvalidRequest(text, field=field)
    encoding = part.headers.get("content-transfer-encoding", "binary")
    if encoding.lower() not in _PLAIN:
        text = f"'{name}' must be sent as it is, not as {encoding!r}"
        raise InvalidRequest(text, field=name)
    return part


def _file(file: StoredFile) -> dict[str, Any]:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": file.created_at,
        "expires_at": file.expires_at,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
    }


def _batch(batch: StoredBatch) -> dict[str, Any]:
    times = {f"{status}_at": batch.times.get(status) for status in Status}
    del times["validating_at"]
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": {"object": "list", "data": batch.errors} if batch.errors else None,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": batch.status,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "created_at": batch.created_at,
        "expires_at": batch.expires_at,
        **times,
        "request_counts": {
            "total": batch.total,
            "completed": batch.completed,
            "failed": batch.failed,
        },
        "metadata": batch.metadata or None,
    }


def _lifetime_s(anchor: str, seconds: str) -> int | None:
    """Return the file's lifetime in seconds, or None if `expires_after` is not set. Raises
    InvalidRequest."""
    if not anchor and not seconds:
        return None
    if anchor != "created_at":
        raise InvalidRequest("'expires_after[anchor]' must be created_at", field=_ANCHOR)
    if not seconds.isdecimal() or int(seconds) not in _LIFETIMES_S:
        text = f"'{_LIFETIME}' must be from {_LIFETIMES_S[0]} to {_LIFETIMES_S[-1]}"
        raise InvalidRequest(text, field=_LIFETIME)
    return int(seconds)


def _page_of(request: web.BaseRequest) -> tuple[str | None, int]:
    """Return the item after which the page begins, and the page's maximum length."""
    limit = request.query.get("limit", str(_PAGE))
    if not limit.isdecimal() or not 1 <= int(limit) <= _MOST:
        raise InvalidRequest(f"'limit' must be from 1 to {_MOST}", field="limit")
    return request.query.get("after"), int(limit)


def _page(shown: Sequence[dict[str, Any]], *, has_more: bool) -> web.Response:
    """Return a page of a list in OpenAI's format."""
    return json_response(
        {
            "object": "list",
            "data": shown,
            "first_id": shown[0]["id"] if shown else None,
            "last_id": shown[-1]["id"] if shown else None,
            "has_more": has_more,
        }
    )
