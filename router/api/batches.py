"""OpenAI's Files and Batch API: /v1/files and /v1/batches."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

from aiohttp import BodyPartReader, web
from aiohttp.http_exceptions import HttpProcessingError
from msgspec import Meta

from pdserve.errors import DeadlineExceeded, InvalidRequest, NotFound, RequestTooLarge
from router.api.bodies import Body, read
from router.api.routes import TENANT, json_response, read_body
from router.batch.store import OPEN, Status

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

    from router.api.routes import Handler
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


class CreateBatchRequest(Body):
    """`completion_window`: `24h`, or another number of s, m, h or d."""

    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"]
    completion_window: str
    metadata: Annotated[dict[str, str], Meta(max_length=16)] | None = None


class BatchApi:
    """Handlers. A tenant sees its own files and batches alone."""

    def __init__(self, store: BatchStore, max_file_bytes: int) -> None:
        self._store = store
        self._max_file_bytes = max_file_bytes
        self.handlers: dict[str, Handler] = {
            "POST /v1/files": self._upload,
            "GET /v1/files": self._list_files,
            "GET /v1/files/{file_id}": self._show_file,
            "DELETE /v1/files/{file_id}": self._delete_file,
            "GET /v1/files/{file_id}/content": self._content,
            "POST /v1/batches": self._create,
            "GET /v1/batches": self._list_batches,
            "GET /v1/batches/{batch_id}": self._show_batch,
            "POST /v1/batches/{batch_id}/cancel": self._cancel,
        }

    # Files.

    async def _upload(self, request: web.BaseRequest) -> web.Response:
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
            kept = await self._store.keep(upload, request[TENANT], filename[:255], purpose)
            upload = None
        except (ValueError, AssertionError, RuntimeError, HttpProcessingError) as error:
            text = f"the body is no multipart/form-data: {getattr(error, 'message', error)}"
            raise InvalidRequest(text[:300], field="file") from error
        finally:
            if upload is not None:
                upload.discard()
        return json_response(_file(kept))

    async def _receive(self, part: Any, upload: Upload) -> None:
        while data := await _within(part.read_chunk(_PART_BYTES)):
            if upload.size + len(data) > self._max_file_bytes:
                text = f"the file is larger than {self._max_file_bytes} bytes"
                raise RequestTooLarge(text, field="file")
            await asyncio.to_thread(upload.write, data)

    async def _list_files(self, request: web.BaseRequest) -> web.Response:
        purpose = request.query.get("purpose")
        files = [
            _file(file)
            for file in await self._store.files(request[TENANT])
            if purpose in (None, file.purpose)
        ]
        return _page(request, files)

    async def _show_file(self, request: web.BaseRequest, file_id: str) -> web.Response:
        return json_response(_file(await self._file(file_id, request[TENANT])))

    async def _delete_file(self, request: web.BaseRequest, file_id: str) -> web.Response:
        file = await self._file(file_id, request[TENANT])
        await self._store.delete(file)
        return json_response({"id": file.id, "object": "file", "deleted": True})

    async def _content(self, request: web.BaseRequest, file_id: str) -> web.StreamResponse:
        file = await self._file(file_id, request[TENANT])
        return web.FileResponse(
            self._store.path(file), headers={"content-type": "application/octet-stream"}
        )

    async def _file(self, file_id: str, tenant: str, field: str = "") -> StoredFile:
        found = await self._store.file(file_id, tenant)
        if found is None:
            raise NotFound(f"there is no file {file_id!r}", field=field)
        return found

    # Batches.

    async def _create(self, request: web.BaseRequest) -> web.Response:
        wanted = read(CreateBatchRequest, await read_body(request))
        window = _WINDOW.fullmatch(wanted.completion_window)
        window_s = int(window[1]) * _SECONDS[window[2]] if window else 0
        if not 0 < window_s <= _LONGEST_S:
            text = "'completion_window' must be a number of s, m, h or d, at most 30d"
            raise InvalidRequest(text, field="completion_window")
        file = await self._file(wanted.input_file_id, request[TENANT], "input_file_id")
        batch = await self._store.create(
            file, wanted.endpoint, wanted.completion_window, window_s, wanted.metadata or {}
        )
        return json_response(_batch(batch))

    async def _list_batches(self, request: web.BaseRequest) -> web.Response:
        return _page(
            request, [_batch(batch) for batch in await self._store.batches(request[TENANT])]
        )

    async def _show_batch(self, request: web.BaseRequest, batch_id: str) -> web.Response:
        return json_response(_batch(await self._find(batch_id, request[TENANT])))

    async def _cancel(self, request: web.BaseRequest, batch_id: str) -> web.Response:
        batch = await self._find(batch_id, request[TENANT])
        if batch.status not in OPEN:
            raise InvalidRequest(f"the batch is {batch.status} already", field="batch_id")
        await self._store.cancel(batch)
        return json_response(_batch(await self._find(batch_id, request[TENANT])))

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
    return json_response(
        {
            "object": "list",
            "data": shown,
            "first_id": shown[0]["id"] if shown else None,
            "last_id": shown[-1]["id"] if shown else None,
            "has_more": start + len(shown) < len(items),
        }
    )
