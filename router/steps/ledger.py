"""Writes where the data of each request was: a line for each transfer."""

from __future__ import annotations

import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple

from pdserve.observe.logs import LineLog, time_text
from router.attempt.handoff import Side

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping

    from pdserve.config import RouterConfig
    from pdserve.types import GenerateRequest, MediaItem
    from router.attempt.streams import Answer, WorkerStream
    from router.walk import Answered, Proceed, Walk

ROUTER, STORE = "router", "store"
Owner = tuple[str, str]
"""Tenant and request id."""
TOKEN_BYTES = 4


class DataTransfer(NamedTuple):
    """Data of a request that went from one process to another. `size`: in bytes, None if the
    receiver did not report it, so up to all of it may have arrived."""

    kind: str
    source: str
    target: str
    size: int | None


class ResidencyLedger:
    """Appends a line for each transfer and for what is stored. `region`: label of this router.
    Without a file it writes nothing."""

    def __init__(self, file: LineLog | None = None, region: str = "") -> None:
        self.file, self.region = file, region

    def moved(
        self, tenant: str, request_id: str, transfer: DataTransfer, regions: Mapping[str, str]
    ) -> None:
        """Write a transfer. `regions`: those of the processes, by id."""
        if self.file is not None:
            kind, source, target, size = transfer
            line = {
                "time": time_text(time.time()),
                "tenant": tenant,
                "request_id": request_id,
                "data": kind,
                "from": source,
                "from_region": regions.get(source, ""),
                "to": target,
                "to_region": regions.get(target, ""),
                "bytes": size,
            }
            self.file.write(line)

    def stored(self, tenant: str, name: str, kind: str, size: int) -> None:
        """Write that the store of this router keeps `size` bytes, which are called `name`."""
        if not size:
            return
        regions = {ROUTER: self.region, STORE: self.region}
        self.moved(tenant, name, DataTransfer(kind, ROUTER, STORE, size), regions)


NO_LEDGER = ResidencyLedger()


@asynccontextmanager
async def open_ledger(config: RouterConfig) -> AsyncIterator[ResidencyLedger]:
    """Open the ledger for the context. Raises ConfigError if its file cannot be written."""
    path, region = config.residency.ledger, config.topology.region
    file = LineLog(path, "residency.ledger") if path else None
    try:
        yield ResidencyLedger(file, region)
    finally:
        if file is not None:
            file.close()


class LedgerStep:
    """Writes the transfers of each request, in all its attempts, also if it fails."""

    def __init__(self, ledger: ResidencyLedger) -> None:
        self._ledger = ledger

    async def __call__(self, walk: Walk, proceed: Proceed) -> Answered:
        try:
            return await proceed(walk)
        finally:
            for answer in walk.record.answers:
                write_transfers(self._ledger, walk.request, answer)


def write_transfers(ledger: ResidencyLedger, request: GenerateRequest, answer: Answer) -> None:
    """Write the transfers of an answer."""
    regions = {ROUTER: ledger.region}
    for stream in (*answer.copies, *answer.streams):
        regions[stream.worker_id] = stream.member.info.topology.get("region", "")
    for transfer in transfers(answer, request):
        ledger.moved(request.tenant, request.request_id, transfer, regions)


def transfers(answer: Answer, request: GenerateRequest) -> Iterator[DataTransfer]:
    """Yield the transfers of an answer, in all its attempts. Tokens count as 4 bytes each."""
    prompt_tokens = len(request.prompt_token_ids)
    image_bytes = 0 if request.pixels is None else request.pixels.size
    worker, encoder = "", None
    for stream in (*answer.copies, *answer.streams):
        if stream.stream_id is None:
            continue  # nothing was sent
        worker = stream.worker_id
        if stream.side is Side.ENCODE:
            encoder = stream
        else:
            yield DataTransfer("prompt", ROUTER, worker, TOKEN_BYTES * prompt_tokens)
        if image_bytes and _takes_images(stream):
            yield DataTransfer("images", ROUTER, worker, image_bytes)
        if stream.side is Side.PREFILL and encoder is not None:
            if (size := _feature_bytes(encoder, stream, request)) != 0:
                yield DataTransfer("image_features", encoder.worker_id, worker, size)
            encoder = None
        if stream.pair is not None and stream.side is Side.DECODE:
            report = stream.report
            moved = None if report is None or report.transfer is None else report.transfer.bytes
            yield DataTransfer("kv", stream.pair[0], worker, moved)
    if answer.tokens and worker:
        yield DataTransfer("answer", worker, ROUTER, TOKEN_BYTES * len(answer.tokens))


def _feature_bytes(
    encode: WorkerStream, prefill: WorkerStream, request: GenerateRequest
) -> int | None:
    """Return the size of the image features that an encode worker sent to a prefill worker."""
    kv, report = encode.member.info.kv, prefill.report
    if report is not None and not report.wanted_images:
        return 0
    if kv is None or report is None or report.fetched_images != len(request.media):
        return None
    return kv.embedding_bytes * sum(map(_rows, request.media))


def _rows(item: MediaItem) -> int:
    return int.from_bytes(item.is_embed).bit_count() if item.is_embed else item.length


def _takes_images(stream: WorkerStream) -> bool:
    """Return True if the images' data goes to this stream: a decode worker gets KV in their
    place."""
    return stream.side is not Side.DECODE or stream.pair is None
