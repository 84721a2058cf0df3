"""OpenAI's Files and Batch API: /v1/files and /v1/batches."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

from aiohttp import BodyPartReader, web
from aiohttp.http_exceptions import HttpProcessingError
from msgspec import Meta

from pdserve.errors import DeadlineExceeded, InvalidRequest, NotFound, RequestTooLarge
from router.api.bodies import Body as JsonBody
from router.api.bodies import encode, read
from router.batch.store import OPEN, Status

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from router.batch.store import BatchStore, StoredBatch, StoredFile, Upload

# For each part of an upload.
_PART_TIMEOUT_S = 30.0
_PART_BYTES = 1 << 20
_MAX_PURPOSE_BYTES = 256
_PLAIN = ("binary", "8bit", "7bit")
_PAGE, _MOST = 20, 10_000
_WINDOW = re.compile(r"([1-9]\d{0,6})([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_LONGEST_S = 30 * 86_400


class CreateBatchRequest(JsonBody):
    """`completion_window`: `24h`, or another number of s, m, h or d."""

    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"]
    completion_window: str
    metadata: Annotated[dict[str, str], Meta(max_length=16)] | None = None


class BatchApi:
    """Handlers. A tenant sees its own files and batches alone."""

    def __init__(self, store: BatchStore, max_file_bytes: int) -> None:
        self._store = store
        self._max_file_bytes = max_file_bytes
        self._routes: tuple[tuple[str, re.Pattern[str], Handler], ...] = (
            ("POST", re.compile("/v1/files"), self._upload),
            ("GET", re.compile("/v1/files"), self._list_files),
            ("GET", re.compile("/v1/files/([^/]+)"), self._show_file),
            ("DELETE", re.compile("/v1/files/([^/]+)"), self._delete_file),
            ("GET", re.compile("/v1/files/([^/]+)/content"), self._content),
            ("POST", re.compile("/v1/batches"), self._create),
            ("GET", re.compile("/v1/batches"), self._list_batches),
            ("GET", re.compile("/v1/batches/([^/]+)"), self._show_batch),
            ("POST", re.compile("/v1/batches/([^/]+)/cancel"), self._cancel),
        )

    def methods(self, path: str) -> list[str]:
        """Return what `path` supports; empty if there is no such path."""
        return [method for method, pattern, _ in self._routes if pattern.fullmatch(path)]

    async def handle(
        self, request: web.BaseRequest, tenant: str, body: Callable[[], Awaitable[bytes]]
    ) -> web.StreamResponse:
        """Answer a request whose path and method are supported. `body` reads a small body."""
        method = "GET" if request.method == "HEAD" else request.method
        for supported, pattern, handler in self._routes:
            found = pattern.fullmatch(request.path)
            if found is not None and supported == method:
                return await handler(request, tenant, body, *found.groups())
        raise NotFound(f"no such path: {request.path}")

    # Files.

    async def _upload(self, request: web.BaseRequest, tenant: str, _: Body) -> web.Response:
        if not request.content_type.startswith("multipart/"):
            raise InvalidRequest("the body must be multipart/form-data", field="content-type")
        upload: Upload | None = None
        filename = purpose = ""
        try:
            reader = await request.multipart()
            while (part := await _within(reader.next())) is not None:
                _check_part(part)
                if part.name == "purpose":
                    purpose = ""
                    while data := await _within(part.read_chunk(_MAX_PURPOSE_BYTES)):
                        purpose += data.decode("utf-8", "replace")
                        if len(purpose) > _MAX_PURPOSE_BYTES:
                            break
                elif upload is None:
                    filename = (part.filename or "file.jsonl").encode(errors="replace").decode()
                    upload = await asyncio.to_thread(self._store.upload)
                    await self._receive(part, upload)
                else:
                    raise InvalidRequest("'file' is there twice", field="file")
            if purpose != "batch":
                raise InvalidRequest("'purpose' must be batch", field="purpose")
            if upload is None:
                raise InvalidRequest("'file' is required", field="file")
            kept = await self._store.keep(upload, tenant, filename[:255], purpose)
            upload = None
        except (ValueError, AssertionError, RuntimeError, HttpProcessingError) as error:
            text = f"the body is no multipart/form-data: {getattr(error, 'message', error)}"
            raise InvalidRequest(text[:300], field="file") from error
        finally:
            if upload is not None:
                upload.discard()
        return _json(_file(kept))

    async def _receive(self, part: Any, upload: Upload) -> None:
        while data := await _within(part.read_chunk(_PART_BYTES)):
            if upload.size + len(data) > self._max_file_bytes:
                text = f"the file is larger than {self._max_file_bytes} bytes"
                raise RequestTooLarge(text, field="file")
            await asyncio.to_thread(upload.write, data)

    async def _list_files(self, request: web.BaseRequest, tenant: str, _: Body) -> web.Response:
        purpose = request.query.get("purpose")
        files = [
            _file(file)
            for file in await self._store.files(tenant)
            if purpose in (None, file.purpose)
        ]
        return _page(request, files)

    async def _show_file(
        self, _: web.BaseRequest, tenant: str, __: Body, file_id: str
    ) -> web.Response:
        return _json(_file(await self._file(file_id, tenant)))

    async def _delete_file(
        self, _: web.BaseRequest, tenant: str, __: Body, file_id: str
    ) -> web.Response:
        file = await self._file(file_id, tenant)
        await self._store.delete(file)
        return _json({"id": file.id, "object": "file", "deleted": True})

    async def _content(
        self, _: web.BaseRequest, tenant: str, __: Body, file_id: str
    ) -> web.StreamResponse:
        file = await self._file(file_id, tenant)
        return web.FileResponse(
            self._store.path(file), headers={"content-type": "application/octet-stream"}
        )

    async def _file(self, file_id: str, tenant: str, field: str = "") -> StoredFile:
        found = await self._store.file(file_id, tenant)
        if found is None:
            raise NotFound(f"there is no file {file_id!r}", field=field)
        return found

    # Batches.

    async def _create(self, _: web.BaseRequest, tenant: str, body: Body) -> web.Response:
        wanted = read(CreateBatchRequest, await body())
        window = _WINDOW.fullmatch(wanted.completion_window)
        window_s = int(window[1]) * _SECONDS[window[2]] if window else 0
        if not 0 < window_s <= _LONGEST_S:
            text = "'completion_window' must be a number of s, m, h or d, at most 30d"
            raise InvalidRequest(text, field="completion_window")
        file = await self._file(wanted.input_file_id, tenant, "input_file_id")
        batch = await self._store.create(
            file, wanted.endpoint, wanted.completion_window, window_s, wanted.metadata or {}
        )
        return _json(_batch(batch))

    async def _list_batches(self, request: web.BaseRequest, tenant: str, _: Body) -> web.Response:
        return _page(request, [_batch(batch) for batch in await self._store.batches(tenant)])

    async def _show_batch(
        self, _: web.BaseRequest, tenant: str, __: Body, batch_id: str
    ) -> web.Response:
        return _json(_batch(await self._find(batch_id, tenant)))

    async def _cancel(
        self, _: web.BaseRequest, tenant: str, __: Body, batch_id: str
    ) -> web.Response:
        batch = await self._find(batch_id, tenant)
        if batch.status not in OPEN:
            raise InvalidRequest(f"the batch is {batch.status} already", field="batch_id")
        await self._store.cancel(batch)
        return _json(_batch(await self._find(batch_id, tenant)))

    async def _find(self, batch_id: str, tenant: str) -> StoredBatch:
        found = await self._store.batch(batch_id, tenant)
        if found is None:
            raise NotFound(f"there is no batch {batch_id!r}")
        return found


def _check_part(part: Any) -> None:
    """Raise InvalidRequest if `part` is none of those that an upload may have."""
    if not isinstance(part, BodyPartReader):
        raise InvalidRequest("a part must not have parts", field="content-type")
    name = part.name or ""
    if name not in ("file", "purpose"):
        text = f"{name!r} is not supported" if name else "a part has no name"
        field = name if name and name.isprintable() else "content-disposition"
        raise InvalidRequest(text, field=field)
    encoding = part.headers.get("content-transfer-encoding", "binary")
    if encoding.lower() not in _PLAIN:
        text = f"'{name}' must be sent as it is, not as {encoding!r}"
        raise InvalidRequest(text, field=name)


async def _within(reading: Awaitable[Any]) -> Any:
    try:
        async with asyncio.timeout(_PART_TIMEOUT_S):
            return await reading
    except TimeoutError:
        text = f"no part of the body arrived within {_PART_TIMEOUT_S:g} s"
        raise DeadlineExceeded(text) from None


def _file(file: StoredFile) -> dict[str, Any]:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": file.created_at,
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


def _page(request: web.BaseRequest, items: Sequence[dict[str, Any]]) -> web.Response:
    """Return the items after `after`, `limit` of them, as OpenAI pages its lists."""
    limit, after = request.query.get("limit", str(_PAGE)), request.query.get("after")
    if not limit.isdecimal() or not 1 <= int(limit) <= _MOST:
        raise InvalidRequest(f"'limit' must be from 1 to {_MOST}", field="limit")
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise InvalidRequest(f"there is no {after!r}", field="after")
    start = 0 if after is None else ids.index(after) + 1
    shown = list(items[start : start + int(limit)])
    return _json(
        {
            "object": "list",
            "data": shown,
            "first_id": shown[0]["id"] if shown else None,
            "last_id": shown[-1]["id"] if shown else None,
            "has_more": start + len(shown) < len(items),
        }
    )


def _json(value: object) -> web.Response:
    return web.Response(body=encode(value), content_type="application/json")


if TYPE_CHECKING:
    Body = Callable[[], Awaitable[bytes]]
    Handler = Callable[..., Awaitable[web.StreamResponse]]
